"""How answers err, found out by asking: repeats, digits and neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.measure import Noise, Signature
from keyhole.methods.base import Steps


@dataclass(frozen=True)
class FoundNoise:
    """What was found, and in words what it rests on."""

    noise: Noise
    evidence: str


def measure_noise(signature: Signature, rng: np.random.Generator) -> Steps[FoundNoise]:
    """The kind and scale of an oracle's errors."""
    raise NotImplementedError
