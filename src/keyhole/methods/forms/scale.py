"""At which scale to ask: forms are only as accurate as their logits are large, and unknown where those saturate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from keyhole.arrays import Array, namespace, numbers
from keyhole.methods.base import Unrecoverable
from keyhole.recovery import Outcome

# Logits are aimed at this size: large against their rounding, small against saturation.
AIM = 0.75
# After n forms the aim is n/(n + CAUTION) of that, since the scale is known from n samples only. With 10, one
# recovery in 200 has to ask for a form again; with more, the first forms would be too small to be accurate.
CAUTION = 10
# The first token is longer than the last by 2³² · √scale, so that whatever the last adds by itself is below 2⁻⁶⁴.
NORM_RATIO = 2.0**32
# The first probe. In float64 one probe shows the scale over about 13 decades, so that most oracles need one only.
FIRST_PROBE = 2.0**-20
# More probes than the whole range of floating-point numbers needs.
MOST_PROBES = 60

NO_RESPONSE = "the answers respond at no scale of the tokens as a softmax head's do: they saturate or are silent"


def floor_power(number: float) -> float:
    """The largest power of two that is at most `number`, never zero: scaling by it is exact."""
    return 2.0 ** max(-1000, math.floor(math.log2(max(number, 5e-324))))


@dataclass
class ScaleSearch:
    """Search for a scale at which logits can be told from zero and do not saturate.

    Iterating gives the scales to probe. After each, `raise_scale` or `lower_scale` says which way to go: by a step
    while the answer is on one side only, then by bisection in the logarithm.
    """

    scale: float
    smallest: float
    largest: float = math.inf
    failure: str = NO_RESPONSE
    _too_small: float = 0.0
    _saturated: float = math.inf

    def __iter__(self) -> Iterator[float]:
        for _ in range(MOST_PROBES):
            if not self.smallest <= self.scale <= self.largest:
                break
            yield self.scale
        raise Unrecoverable(Outcome.WRONG_FAMILY, self.failure)

    def lower_scale(self, step: float) -> None:
        """Go to a smaller scale: at this one the softmax saturates."""
        self._saturated = self.scale
        self.scale = self.scale / step if self._too_small == 0.0 else self._middle

    def raise_scale(self, step: float, most: float = math.inf) -> None:
        """Go to a larger scale, at most `most`: at this one no logit can be told from zero."""
        self._too_small = self.scale
        self.scale = min(self.scale * step, most) if math.isinf(self._saturated) else self._middle

    @property
    def _middle(self) -> float:
        return math.sqrt(self._too_small * self._saturated)


@dataclass
class ScaleEstimate:
    """How large forms are, from those measured so far, and at which scale to ask for the next."""

    caution: float = CAUTION
    target: float = AIM  # the size that logits are brought to
    count: int = 0
    size: float = 0.0  # root mean square of the forms
    first: float = 0.0  # scale of the first batch
    latest: float = 0.0  # scale of the last batch
    _batches: int = 0

    def expect(self, factor: float) -> None:
        """Expect forms of `factor` times the size from now on."""
        self.size *= factor

    def update(self, values: Array, scale: float) -> None:  # (n,)
        """Take note of forms measured at a scale."""
        if values.shape[0] == 0:
            return
        self.first, self.latest = self.first or scale, scale
        self._batches += 1
        count = self.count + values.shape[0]
        xp = namespace(values)
        most = xp.max(abs(values))
        unit = xp.where(most > 0, most, xp.ones_like(most))  # squares of values themselves may be out of range
        largest, squares = numbers(unit, xp.sum((values / unit) ** 2))
        added = largest * math.sqrt(squares / count)
        self.size = math.hypot(self.size * math.sqrt(self.count / count), added)
        self.count = count

    def next_scale(self, largest: float, longest: float | None = None, width: int = 1) -> float:
        """The scale, a power of two or `largest`, that brings logits to their aim.

        The form of the last token with itself grows with its norm squared, and may exceed the others √width times:
        it is kept at the aim too, where first tokens are at most `longest`. The second batch is not at the scale of the
        first, or it would ask the same; nor near it where last tokens do not matter, so that a score bias shows.
        """
        aim = self.aim
        if math.isinf(aim):
            return largest
        if longest is not None:
            aim = min(aim, longest * math.sqrt(aim / math.sqrt(width)))
        scale = min(floor_power(aim), largest)
        if self._batches != 1:
            return scale
        if longest is not None:
            return scale / 2 if scale == self.first else scale
        return self.first / 16 if self.first / 8 < scale < 8 * self.first else scale

    @property
    def aim(self) -> float:
        """The scale that brings logits to their aim; infinite when all forms were zero."""
        cautious = self.target * self.count / (self.count + self.caution)
        return cautious / self.size if self.size > 0 else math.inf
