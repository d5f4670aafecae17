"""Normalisation before attention and after it, with the heads inside."""
