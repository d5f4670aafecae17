"""Nets of one hidden layer from answers that err."""
