"""At which scale to read: forms are only as accurate as their logits are large, and unreadable where they saturate."""

from __future__ import annotations

import math

from keyhole.arrays import Array
from keyhole.queries import Signature

# Logits are aimed at this size: large against their rounding, small against saturation.
AIM = 0.75
# After n readings the aim is n/(n + CAUTION) of that, since the scale is known from n samples only. With 10, one
# recovery in 200 has to read a form again; with more, the first readings would be too timid to be accurate.
CAUTION = 10
# The first token is longer than the last by 2³² · √scale, so that whatever the last adds by itself is below 2⁻⁶⁴.
LEVER = 2.0**32
# The first probe. In float64 one probe reads the scale over about 13 decades, so that most boxes need one only.
FIRST_PROBE = 2.0**-20
# More probes than the whole range of floating-point numbers needs.
MOST_PROBES = 60

NO_RESPONSE = "the answers respond at no scale of the tokens as a softmax head's do: they saturate or are silent"


def floor_power(number: float) -> float:
    """The largest power of two that is at most `number`, never zero: scaling by it is exact."""
    return 2.0 ** max(-1000, math.floor(math.log2(max(number, 5e-324))))


class ScaleKeeper:
    """Knows how large forms are from those read so far, and at which scale to read the next."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.caution = CAUTION
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self._count = 0
        self._mean_square = 0.0
        self._readings = 0
        self._probed = 0.0  # the scale of the first of them
        self._latest = 0.0  # and of the last

    @property
    def size(self) -> float:
        """Root mean square of the forms read so far."""
        return math.sqrt(self._mean_square)

    def rescale(self, factor: float) -> None:
        """Expect forms of `factor` times the size from now on."""
        self._mean_square *= factor**2

    def learn(self, values: Array, scale: float) -> None:  # (n,)
        """Take note of forms read at a scale."""
        if values.shape[0] == 0:
            return
        self._probed, self._latest = self._probed or scale, scale
        self._readings += 1
        count = self._count + values.shape[0]
        added = float(self.signature.space.xp.sum((values / count**0.5) ** 2))
        self._mean_square = self._mean_square * (self._count / count) + added
        self._count = count

    @property
    def aim(self) -> float:
        """The scale that brings logits to their aim; infinite when all forms were zero."""
        cautious = AIM * self._count / (self._count + self.caution)
        return cautious / self.size if self.size > 0 else math.inf

    def other_scale(self, scale: float) -> float:
        """For the second reading a scale that is not near that of the first, so that a score bias shows."""
        near = self._readings == 1 and self._probed / 8 < scale < 8 * self._probed
        return self._probed / 16 if near else scale
