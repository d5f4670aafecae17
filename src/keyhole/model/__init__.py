"""What a black box can be: parameters and forward map, one family per file."""

from keyhole.model.families import load
from keyhole.model.gauge import distance
from keyhole.model.head import SingleHead

__all__ = ["SingleHead", "distance", "load"]
