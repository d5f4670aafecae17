"""Nets of one hidden layer."""
