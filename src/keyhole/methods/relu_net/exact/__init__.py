"""Nets of one hidden layer from exact answers."""
