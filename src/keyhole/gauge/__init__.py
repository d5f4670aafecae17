"""Changes of parameters that no query shows: the one place where parameters are compared."""

from keyhole.gauge import table  # noqa: F401 - registers the gauges of all families
from keyhole.gauge.compare import Gauge, align, canonical, distance, equivalent, register
from keyhole.gauge.identifiability import on_alphabet
from keyhole.gauge.witness import Witness, kinds, witness

__all__ = [
    "Gauge",
    "Witness",
    "align",
    "canonical",
    "distance",
    "equivalent",
    "kinds",
    "on_alphabet",
    "register",
    "witness",
]
