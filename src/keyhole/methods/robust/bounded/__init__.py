"""One head from answers within a tolerance."""
