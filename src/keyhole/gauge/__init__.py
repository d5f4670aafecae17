"""Changes of parameters that no query shows: the one place where parameters are compared."""

from keyhole.gauge.compare import canonical, distance, equivalent
from keyhole.gauge.witness import Witness, kinds, witness

__all__ = ["Witness", "canonical", "distance", "equivalent", "kinds", "witness"]
