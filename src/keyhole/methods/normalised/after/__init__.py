"""Norms after attention and its residual."""
