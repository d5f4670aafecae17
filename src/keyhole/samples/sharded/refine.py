"""From a fit to a part of the examples to one of all of them: Gauss–Newton steps, each one pass over the shards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.families import AttentionLayer
from keyhole.samples.evidence import PointEvidence, StandardErrors
from keyhole.samples.source import Source
from keyhole.samples.sums import MOST_ENTRIES, SummedFit
from keyhole.samples.variable_projection import LayerPoint

# Passes over the shards at most; a step that makes things worse is halved as often as there are passes left.
PASSES = 10
# Steps that promise less than this part of the variance of one residual are far below any radius.
IRRELEVANT = 1e-4


@dataclass(frozen=True)
class ShardEvidence:
    """The fit to all shards. Where it could not be refined on them, the parameters rest on the part in memory alone."""

    best: SummedFit
    part: LayerPoint
    refined: bool

    @property
    def layer(self) -> AttentionLayer:
        """The parameters."""
        return self.best.layer

    @property
    def examples(self) -> int:
        """Examples that the parameters rest on."""
        return self.best.examples if self.refined else PointEvidence(self.part).examples

    @property
    def numbers(self) -> int:
        """Numbers in the outputs that the residual was taken of."""
        return self.best.numbers

    @property
    def rss(self) -> float:
        """Residual sum of squares."""
        return self.best.rss

    @property
    def energy(self) -> float:
        """Sum of squares of the outputs."""
        return self.best.energy

    @property
    def scale(self) -> float:
        """Root mean square of what the heads add up to, without cancelling."""
        return self.best.scale

    def standard_errors(self, rng: np.random.Generator) -> StandardErrors:
        """Standard errors of the parameters for errors of standard deviation one."""
        return (self.best if self.refined else PointEvidence(self.part)).standard_errors(rng)


def refine(source: Source, point: LayerPoint, *, wanted: bool) -> tuple[ShardEvidence, int]:
    """The fit to all examples that is nearest to one of a part, and the passes over them that it took.

    Where that is not wanted, since outputs are exact or of a rank that steps would leave, or where the sums would be
    too large, all examples judge the fit to the part.
    """
    hidden = point.problem.shared
    full = wanted and point.scores.size <= MOST_ENTRIES
    best, passes, size = SummedFit.of(source, point.scores, point.projections, hidden, full=full), 1, 1.0
    if not full:
        return ShardEvidence(best, point, refined=False), passes
    while passes < PASSES:
        scores, projections, promised = best.step()
        if promised <= IRRELEVANT * best.rss / best.numbers or not np.all(np.isfinite(scores)):
            break
        moved = SummedFit.of(source, best.scores + size * scores, best.projections + size * projections, hidden)
        passes += 1
        if moved.rss < best.rss:
            best, size = moved, min(1.0, 2 * size)
        elif promised * size < np.finfo(float).eps * best.energy:
            break  # the rest is rounding
        else:
            size /= 4
    return ShardEvidence(best, point, refined=True), passes
