"""Words and pictures: what is said of results."""
