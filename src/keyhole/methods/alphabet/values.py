"""Value and output bias from single tokens of an alphabet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr

from keyhole.arrays import Floats, Integers, floats
from keyhole.gauge.identifiability import AlphabetSpan
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Single tokens beyond those that determine the values.
CHECKS = 3
# Values of the oracle are longer than what an alphabet shows of them, and answers are rounded at their size.
HIDDEN = 2.0


@dataclass(frozen=True)
class TokenValues:
    """What single tokens answer, all of them by the few that were asked."""

    chosen: Integers  # (r̃,) tokens that all others are affine combinations of
    answers: Floats  # (m, outputs)
    errors: Floats  # (m,) radius of one number of them
    rounding: Floats  # (m,) that of one answer in which a token may have all weight
    value: Floats  # (width, outputs)
    value_radius: Floats
    bias: Floats | None  # (outputs,)
    bias_radius: float
    plain: bool  # whether an answer is a plain number

    @property
    def rank(self) -> int:
        """Independent numbers among the answers, but for what is the same for all tokens."""
        moved = self.answers - self.answers[0]
        sizes = np.linalg.svd(moved, compute_uv=False)
        return int(np.sum(sizes > np.max(self.errors) * (len(moved) + moved.shape[1]) ** 0.5))


def combined(weights: Floats, errors: Floats, signature: Signature) -> Floats:  # (..., n), (n[, k])
    """Errors of weighted sums: quadrature, or the largest sums where errors are bounded and may be what they like."""
    if signature.noise.kind in ("bounded", "rounded"):
        return np.asarray(np.abs(weights) @ errors)
    return np.asarray(np.sqrt(weights**2 @ errors**2))


def pivots(rows: Floats, count: int) -> Integers:  # (m, n) -> (count,)
    """Rows that span all, the farthest from the span of those before it first."""
    return np.asarray(qr(rows.T, mode="r", pivoting=True)[1][:count], dtype=np.int64)


def letters_plan(stage: str, signature: Signature, letters: Integers) -> Plan:  # (count, length)
    """Sequences of tokens of the alphabet by number."""
    assert signature.alphabet is not None
    rows = TokenRows(signature.alphabet.rows)
    return Plan(stage, letters.shape[0], [[Term(rows, signature.space.indices(place))] for place in letters.T])


def ask_values(signature: Signature, span: AlphabetSpan, rng: np.random.Generator) -> Steps[TokenValues]:
    """As many single tokens as determine the others, and a few that say whether answers are affine."""
    rows = span.rows if span.unit is not None else np.column_stack([span.rows, np.ones(len(span.rows))])
    count = span.numbers[0] + (span.unit is None)
    chosen = pivots(rows, count)
    others = np.setdiff1d(np.arange(len(rows)), chosen)
    asked = np.concatenate([chosen, rng.permutation(others)[:CHECKS]])
    answers: Measurements = yield letters_plan("value", signature, asked[:, None])
    seen = answers.by_output
    inverse = np.asarray(np.linalg.pinv(rows[chosen]), dtype=np.float64)  # (width or one more, r̃)
    affine = inverse @ seen[:count]
    lengths = np.linalg.norm(span.rows, axis=1)
    columns = np.linalg.norm(affine[: span.rows.shape[1]], axis=0)
    largest = float(np.max(columns)) + float(np.max(np.abs(affine[span.rows.shape[1] :]), initial=0.0))
    rounding = signature.space.rounding * np.maximum(lengths * largest, np.max(np.abs(seen))) + answers.radius
    inside = rows @ inverse  # (m, r̃)
    solving = signature.space.rounding * float(np.linalg.cond(rows[chosen]))  # of what is solved for, relatively
    errors = combined(inside, rounding[chosen], signature) + solving * np.max(np.abs(seen))
    made = inside @ seen[:count]
    made[chosen], errors[chosen] = seen[:count], rounding[chosen]
    apart = np.max(np.abs(made[asked] - seen), axis=1)
    if not np.all(apart <= errors[asked] + rounding[asked]):
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            f"answers to single tokens are no affine function of them: {np.max(apart):.2g} off, so there is more in "
            "the box than a head, or noise that was not declared",
        )
    spread = combined(inverse, rounding[chosen], signature) + solving * np.max(np.abs(affine))
    return _values(signature, span, chosen, made, errors, rounding, spread, affine, answers.values.ndim == 1)


def _values(
    signature: Signature,
    span: AlphabetSpan,
    chosen: Integers,
    made: Floats,
    errors: Floats,
    rounding: Floats,
    spread: Floats,  # (width or one more,) radius of every number of the affine function
    affine: Floats,
    plain: bool,
) -> TokenValues:
    width = span.rows.shape[1]
    onto = span.span @ span.span.T
    radius = HIDDEN * combined(onto, spread[:width], signature)[:, None] + 0 * affine[:width]
    bias = affine[width] if span.unit is None else None
    sure = bias is not None and bool(np.any(np.abs(bias) > spread[width]))
    if np.max(np.ptp(made, axis=0)) <= 2 * np.max(errors):
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "all tokens of the alphabet have the same value, so that no answer depends on the score matrix",
        )
    return TokenValues(
        chosen,
        made,
        errors,
        rounding,
        onto @ affine[:width],
        radius,
        floats(bias) if bias is not None and sure else None,
        float(spread[width]) if bias is not None else 0.0,
        plain,
    )
