"""Attention with normalisation before it or after it."""
