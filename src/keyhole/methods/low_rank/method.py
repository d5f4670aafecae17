"""One attention head whose score matrix has low rank, from about as many queries as that has numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keyhole.arrays import floats
from keyhole.errors import UsageError
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.forms.columns import Score
from keyhole.methods.robust.bounded.method import bounded
from keyhole.methods.robust.method import ask_bounded
from keyhole.methods.single_head.method import ask_head, head_estimate
from keyhole.numerics.svd import product_singular_values, singular_values
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Singular values that fall by less than this from one to the next have no effective rank below their number.
SHARP_DROP = 1e-2


def low_rank(
    signature: Signature, rng: np.random.Generator, *, budget: float = math.inf, tolerance: float = 0.0
) -> Steps[Estimate[SingleHead]]:
    """A head as `single_head` recovers it, always by directions, so that the rank is found whatever the outputs.

    *Provably Learning Attention with Queries* (arXiv 2601.16873) learns a score of rank r from O(rd) random queries;
    here r(2d − r) + d + 6 adaptive ones do, one for each number that determines it, and r is not given.
    With `tolerance`, singular values below that fraction of the whole are left out, and the radius says so.
    Behind a tolerance, or other errors and a norm bound, intervals are read: of a random sketch of the score, which
    tells its rank, and of r columns, in some (2r + 10)·d queries, and up to 10·d more where radii would be too wide.
    `budget` changes nothing.
    """
    del budget  # every reading is wanted
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise UsageError(f"tolerance must be at least 0 and below 1, not {tolerance!r}")
    if signature.noise.kind == "dtype":
        signature = signature.as_coarse()
    kind = signature.noise.kind
    if kind == "bounded" and tolerance == 0:
        return (yield from ask_bounded(signature, rng, low_rank=True))
    # Long tokens drown other errors, which then add up in squares.
    if kind != "exact" and signature.max_norm is not None and tolerance == 0:
        try:
            return (yield from bounded(signature, rng, low_rank=True))
        except Unrecoverable as error:
            if error.outcome is not Outcome.WRONG_FAMILY:  # else there may be a bias, beside which only this way reads
                raise
    value, bias, score, details = yield from ask_head(signature, rng, windows=False, tolerance=tolerance)
    return head_estimate(signature, value, bias, score, {**details, **_effective_rank(score)})


def _effective_rank(score: Score) -> dict[str, Any]:
    """Where the singular values drop most, and the first of those below, relative to the largest."""
    if score.rank == 0:
        return {"effective_rank": 0, "tail": 0.0}
    factors = score.factors
    sizes = singular_values(floats(score.matrix)) if factors is None else product_singular_values(*factors)
    known = sizes[: score.rank]
    drops = known[1:] / known[:-1]
    cut = int(np.argmin(drops)) + 1 if drops.size and float(np.min(drops)) < SHARP_DROP else score.rank
    return {"effective_rank": cut, "tail": float(known[cut] / known[0]) if cut < score.rank else 0.0}


LOW_RANK = Method(
    name="low-rank",
    summary="one softmax head, score of low rank, the rank found on the way",
    run=low_rank,
    families=("single-head",),
    takes_noise=("exact", "bounded"),
    last_only=True,
    options={"tolerance": "leave out what is below this fraction of the score matrix; 0 leaves out nothing"},
)
