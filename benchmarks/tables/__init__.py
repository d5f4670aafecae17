"""One module per table that `python -m benchmarks NAME` prints."""
