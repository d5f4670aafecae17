"""Answers beside their predictions, allowing for one kind of errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, Floats, to_numpy
from keyhole.families import Family
from keyhole.families.base import Sensitivity
from keyhole.queries import Signature
from keyhole.verify.judge import AnswerRadii, changes, explain, has_scatter, radii_of, resolutions, sensitivity_of
from keyhole.verify.verdict import Difference

# Bars below this part of the largest in an answer are taken for so large when it comes to what they hide.
FINEST = 1e-12
# Errors over their bars are written down up to this: a bar may be nothing.
FARTHEST = 1e99


@dataclass(frozen=True)
class Comparison:
    """Errors of predictions, what explains them, and what would have been noticed."""

    seen: Sensitivity
    errors: Floats  # (queries, outputs)
    limits: AnswerRadii
    ratios: Floats  # (queries, outputs): errors over their radii
    wide: bool  # whether random errors are too large all together
    parts: dict[str, float]  # for each part the smallest change that is noticed
    mattering: list[str]  # parts that matter to some answer
    looked_at: Array  # numbers of the outputs that parts are of
    hidden: Floats  # (queries, outputs): what radii hide of each answer

    @property
    def worst_error(self) -> float:
        """Largest |prediction − answer|."""
        return float(np.max(np.abs(self.errors)))

    @property
    def worst_ratio(self) -> float:
        """The same over its radius."""
        return float(np.max(self.ratios))

    @property
    def agrees(self) -> bool:
        """Whether all answers were predicted within their radii; not so where one is nan."""
        return not self.wide and self.worst_ratio <= 1.0

    @property
    def figures(self) -> dict[str, Any]:
        """What a verdict says in numbers."""
        return {
            "worst_error": self.worst_error,
            "worst_ratio": self.worst_ratio,
            "false_alarm": self.limits.false_alarm,
            "resolution": max(self.parts.values(), default=float("nan")),
            "parts": self.parts,
            "ratios": tuple(np.minimum(np.nan_to_num(np.max(self.ratios, axis=1), nan=np.inf), FARTHEST).tolist()),
        }

    def differing(self) -> tuple[Difference, ...]:
        """Where the oracle differs, where that can be said."""
        with np.errstate(all="ignore"):
            return explain(self.seen, *self._of_parts())

    def changes(self) -> dict[str, float]:
        """About how much of each part has changed."""
        with np.errstate(all="ignore"):
            return changes(self.seen, *self._of_parts())

    def _of_parts(self) -> tuple[Floats, Floats]:  # (rows,), (rows,)
        """Errors, and what is allowed, of the outputs that parts are of."""
        rows = np.ix_(np.arange(len(self.errors)), self.looked_at)
        return self.errors[rows].ravel(), self.hidden[rows].ravel() / 2


@dataclass(frozen=True)
class AnsweredQueries:
    """Queries that parameters predict, and what an oracle answered."""

    params: Family
    batches: Sequence[Floats]  # (n, length, width) each
    answered: Floats  # (queries, outputs)
    looked_at: Array
    tolerance: float
    radius: Family | None  # of the parameters themselves

    def compare(self, signature: Signature) -> Comparison:
        """Errors of the predictions against what the signature's arithmetic and noise explain."""
        with np.errstate(all="ignore"):
            seen = sensitivity_of(self.params, self.batches, signature.space.eps, self.looked_at)
            limits = radii_of(seen, signature, self.tolerance)
            if self.radius is not None:
                own = np.concatenate([_own_radii(self.params, self.radius, each) for each in self.batches])
                limits = replace(limits, radii=limits.radii + own, known=limits.known + own)
            errors = self.answered - seen.answers
            ratios = np.where(errors == 0, 0.0, np.abs(errors) / limits.radii)
        noise = signature.noise
        wide = noise.kind == "gaussian" and has_scatter(errors, limits.known, noise.scale)
        largest = np.max(limits.radii, axis=1, keepdims=True)  # of a query; a number that is always zero has none
        hidden = 2 * np.maximum(limits.radii, np.where(largest > 0, FINEST * largest, 1.0))
        rows = np.ix_(np.arange(len(errors)), self.looked_at)
        parts, mattering = resolutions(seen, hidden[rows].ravel(), hidden)
        return Comparison(seen, errors, limits, ratios, wide, parts, mattering, self.looked_at, hidden)


def _own_radii(params: Family, radius: Family, tokens: Floats) -> Floats:  # -> (count, outputs)
    """How far predictions may be off because the parameters are."""
    radii = np.asarray(to_numpy(params.error_bar(radius, tokens, 0.0)), dtype=np.float64)
    return radii.reshape(tokens.shape[0], -1)
