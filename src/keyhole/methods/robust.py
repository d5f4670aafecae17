"""A head behind noise: for each kind of error the way of asking that suffers least from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.measure import Signature
from keyhole.methods.base import Estimate, Method, Steps
from keyhole.methods.gaussian import gaussian
from keyhole.methods.positions import last_only
from keyhole.methods.single_head import single_head


def robust(
    signature: Signature,
    rng: np.random.Generator,
    *,
    budget: float = math.inf,
    target_error: float | None = None,
    rank: int | None = None,
    copies: int = 32,
) -> Steps[Estimate]:
    """Score, value and biases from answers that err, as accurate as the queries allow.

    *Provably Learning Attention with Queries* (arXiv 2601.16873) learns ε-accurate parameters from answers within an
    additive tolerance, under norm and margin conditions. Here normal errors are averaged near the statistical limit.
    """
    _check(signature, target_error, rank, copies)
    options: dict[str, Any] = {"target_error": target_error, "rank": rank, "copies": copies}
    if signature.positions == "all":
        return (yield from last_only(robust(signature.but(positions="last"), rng, budget=budget, **options)))
    if signature.max_norm is None:  # long tokens drown noise of any size
        return (yield from single_head(signature.as_coarse(), rng))
    return (yield from gaussian(signature, rng, budget=budget, **options))


def _check(signature: Signature, target_error: float | None, rank: int | None, copies: int) -> None:
    if target_error is not None and not (isinstance(target_error, int | float) and 0 < target_error < math.inf):
        raise UsageError(f"target_error must be a positive number, not {target_error!r}")
    for name, number, most in (("rank", rank, signature.width), ("copies", copies, 10**6)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most):
            raise UsageError(f"{name} must be a whole number from 1 to {most}, not {number!r}")


ROBUST = Method(
    name="robust",
    summary="one softmax head behind noise, near the statistical limit, with error bars",
    run=robust,
    options={
        "target_error": "wanted standard error of a score entry, root mean square; decides how often to ask",
        "rank": "largest rank the score matrix can have, where that is known: fewer questions, smaller errors",
        "copies": "copies of each token of a pair, 32 if left out; sequences have twice as many tokens and one more",
    },
    robust=True,
)
