"""Smaller parameters that answer almost alike: scores and values of low rank, heads merged or left out."""

from keyhole.compress.compress import compress
from keyhole.compress.result import Compressed, Point

__all__ = ["Compressed", "Point", "compress"]
