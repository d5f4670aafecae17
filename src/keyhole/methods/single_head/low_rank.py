"""A score matrix of low rank, the rank unknown, at its own counting bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyhole.arrays import floats
from keyhole.errors import KeyholeError, UsageError
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Method, Steps, at_last_position
from keyhole.methods.forms.outputs import choose_outputs
from keyhole.methods.forms.score_matrix import Draft, Score
from keyhole.methods.forms.value import read_value, refuse_single_tokens, refuse_zero_value
from keyhole.methods.single_head.method import estimated, read_logits, read_logits_along
from keyhole.queries import Signature

# Singular values that fall by less than this from one to the next have no effective rank below their number.
SHARP_DROP = 1e-2


@at_last_position
def low_rank(signature: Signature, rng: np.random.Generator, *, tolerance: float = 0.0) -> Steps[Estimate[SingleHead]]:
    """The same head as `single-head` reads, always by directions, so that the rank is found whatever the outputs.

    *Provably Learning Attention with Queries* (arXiv 2601.16873) learns a score of rank r from O(rd) random queries;
    here r(2d − r) + d + 6 adaptive ones do, one for each number that determines it, and r is not given.
    With `tolerance`, singular values below that fraction of the whole are left out, and the radius says so.
    """
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise UsageError(f"tolerance must be at least 0 and below 1, not {tolerance!r}")
    refuse_single_tokens(signature)
    value = yield from read_value(signature)
    refuse_zero_value(signature, value)
    draft = Draft()
    details: dict[str, Any] = {}
    try:
        if value.vector.ndim == 1:
            bias, score = yield from read_logits(signature, value, rng, draft, tolerance=tolerance)
        else:
            outputs = choose_outputs(signature.space, value.vector, even=signature.noise.kind == "exact")
            details = {"output_rank": outputs.rank, "outputs_used": 1}
            bias, score = yield from read_logits_along(signature, value, rng, draft, outputs, tolerance=tolerance)
    except KeyholeError as error:
        partial = draft.matrix()
        if partial is not None:
            error.partial = SingleHead(partial, value.vector)
        raise
    return estimated(signature, value, bias, score, {**details, **_effective_rank(score)})


def _effective_rank(score: Score) -> dict[str, Any]:
    """Where the singular values drop most, and the first of those below, relative to the largest."""
    sizes = np.linalg.svd(floats(score.matrix), compute_uv=False)
    if score.rank == 0:
        return {"effective_rank": 0, "tail": 0.0}
    known = sizes[: score.rank]
    drops = known[1:] / known[:-1]
    cut = int(np.argmin(drops)) + 1 if drops.size and float(np.min(drops)) < SHARP_DROP else score.rank
    return {"effective_rank": cut, "tail": float(known[cut] / known[0]) if cut < score.rank else 0.0}


LOW_RANK = Method(
    name="low-rank",
    summary="one softmax head, score of low rank, the rank found on the way",
    run=low_rank,
    families=("single-head",),
    options={"tolerance": "leave out what is below this fraction of the score matrix; 0 leaves out nothing"},
)
