"""How outputs of examples err, as a fit needs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.noise import Noise
from keyhole.samples.examples import Examples

# Normal errors that are as wide as errors of another kind, over their half-width.
UNIFORM = 3**-0.5


@dataclass(frozen=True)
class LabelErrors:
    """Standard deviation of the errors, or the tolerance that they stay within."""

    deviation: float | None  # 0 for exact outputs, None where it is unknown; of a tolerance, as much as it can be
    tolerance: float = 0.0  # errors are at most this, where it is positive, and nothing else is known of them
    repeats: bool = False  # outputs of equal inputs err alike: they are rounded

    @classmethod
    def of(cls, noise: Noise | str | float | None, examples: Examples) -> LabelErrors:
        """As declared; a number is a standard deviation."""
        if isinstance(noise, int | float) and not isinstance(noise, bool):
            return cls(Noise.gaussian(float(noise)).scale if noise != 0 else 0.0)
        kind = Noise.of(noise)  # type: ignore[arg-type]  # which says what it is not
        if kind.kind == "measure":
            return cls(None)
        if kind.kind == "bounded":
            return cls(kind.scale, tolerance=kind.scale)
        if kind.kind == "dtype":
            return cls(UNIFORM * kind.scale * float(np.sqrt(np.mean(examples.outputs**2))), repeats=True)
        if kind.kind == "rounded":
            return cls(UNIFORM * kind.scale, repeats=True)
        return cls(kind.scale)
