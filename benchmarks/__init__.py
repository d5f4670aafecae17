"""Measurements that take longer than a test may. `python -m benchmarks` lists them."""
