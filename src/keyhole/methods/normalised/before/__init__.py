"""Norms before attention."""
