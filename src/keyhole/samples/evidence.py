"""A fit and what the examples say of it, whether they were in memory or added up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from keyhole.families import AttentionLayer
from keyhole.samples.standard_errors import StandardErrors, standard_errors
from keyhole.samples.variable_projection import LayerPoint


class Evidence(Protocol):
    """A fitted layer with what it leaves over."""

    @property
    def layer(self) -> AttentionLayer:
        """The parameters."""

    @property
    def examples(self) -> int:
        """Examples that the parameters rest on."""

    @property
    def numbers(self) -> int:
        """Numbers in the outputs that the residual was taken of."""

    @property
    def rss(self) -> float:
        """Residual sum of squares."""

    @property
    def energy(self) -> float:
        """Sum of squares of the outputs."""

    @property
    def scale(self) -> float:
        """Root mean square of what the heads add up to, without cancelling."""

    def standard_errors(self, rng: np.random.Generator) -> StandardErrors:
        """Standard errors of the parameters for errors of standard deviation one."""


@dataclass(frozen=True)
class PointEvidence:
    """The fit to examples in memory."""

    point: LayerPoint

    @cached_property
    def layer(self) -> AttentionLayer:
        """The parameters."""
        return AttentionLayer(self.point.scores, self.point.projections)

    @property
    def examples(self) -> int:
        """Examples that the parameters rest on."""
        return int(self.point.problem.inputs.shape[0])

    @property
    def numbers(self) -> int:
        """Numbers in the outputs that the residual was taken of."""
        return self.point.residual.size

    @property
    def rss(self) -> float:
        """Residual sum of squares."""
        return self.point.rss

    @property
    def energy(self) -> float:
        """Sum of squares of the outputs."""
        return self.point.problem.energy

    @property
    def scale(self) -> float:
        """Root mean square of what the heads add up to, without cancelling."""
        sizes = np.abs(self.point.mixed) @ np.abs(self.point.stacked)
        return float(np.sqrt(np.mean(sizes**2)))

    def standard_errors(self, rng: np.random.Generator) -> StandardErrors:
        """Standard errors of the parameters for errors of standard deviation one."""
        return standard_errors(self.point, rng)
