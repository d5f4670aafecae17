"""One head from exact answers."""
