"""One head from answers with normal errors."""
