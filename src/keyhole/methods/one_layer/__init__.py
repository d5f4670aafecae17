"""Attention with a net behind it."""
