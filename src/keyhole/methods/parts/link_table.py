"""An unknown link that was learned: from energies back to logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from keyhole.arrays import Array, Floats, floats, like
from keyhole.families.parts import Tabulated

# The largest of a few thousand normal logits is some four times their root mean square; those beyond are asked again.
LARGEST_OVER_TYPICAL = 4.0
# Halvings of the interval that a logit is in, then Newton's steps, each of which doubles the digits.
HALVINGS, NEWTON_STEPS = 12, 4


@final
@dataclass(frozen=True)
class LinkTable:
    """A monotone link of slope one at zero, and how well it is known."""

    link: Tabulated
    radius: Floats  # of the coefficients
    energy_error: float  # what energies are off by
    unit_error: float  # what the unit of logits is off by, relatively

    @property
    def typical(self) -> float:
        """The root mean square that logits should have."""
        return self.link.reach / LARGEST_OVER_TYPICAL

    def logits(self, energies: Array) -> tuple[Array, Array, Array]:
        """Logits of energies, the slopes of the link there, and whether they are within reach."""
        wanted, reach = floats(energies), self.link.reach
        ends = floats(self.link(np.array([-reach, reach])))
        known = (wanted > ends[0]) & (wanted < ends[1])
        wanted = np.where(known, wanted, 0.0)
        low, high = np.full(wanted.shape, -reach), np.full(wanted.shape, reach)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            below = floats(self.link(middle)) < wanted
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        found = (low + high) / 2
        for _ in range(NEWTON_STEPS):
            step = (floats(self.link(found)) - wanted) / floats(self.link.slopes(found))
            found = np.clip(found - step, -reach, reach)
        slopes = floats(self.link.slopes(found))
        return like(found, energies), like(slopes, energies), like(known * 1.0, energies) > 0

    def errors(self, logits: Array) -> Array:
        """How far logits are off because the link is."""
        return self.energy_error / self.link.slopes(logits) + self.unit_error * abs(logits)
