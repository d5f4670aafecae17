"""A head behind noise: for each kind of error the way of asking that suffers least from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families.single_head import SingleHead
from keyhole.methods.base import BiasDetected, Estimate, Method, Steps, Unrecoverable
from keyhole.methods.options import check_positive, check_whole
from keyhole.methods.robust.bounded.method import bounded
from keyhole.methods.robust.gaussian.method import gaussian
from keyhole.methods.robust.quantised.method import by_null_queries, by_thresholds
from keyhole.methods.robust.quantised.pair_queries import SHORTEST
from keyhole.methods.robust.stored_bits import bit_exact
from keyhole.methods.single_head.method import single_head
from keyhole.noise import DIGITS, Noise
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Queries for every entry of the value that thresholds need before they pay; with fewer, roundings are averaged.
VALUE_QUERIES = 16


def robust(
    signature: Signature,
    rng: np.random.Generator,
    *,
    budget: float = math.inf,
    target_error: float | None = None,
    rank: int | None = None,
    copies: int | None = None,
    bits: str | None = None,
    cover_biases: bool = False,
) -> Steps[Estimate[SingleHead]]:
    """Score and value from answers that err, as accurate as the errors and the queries allow.

    *Provably Learning Attention with Queries* (arXiv 2601.16873) learns ε-accurate parameters from answers within an
    additive tolerance, under norm and margin conditions. Here normal errors are averaged near the statistical limit,
    bounded ones are carried through in intervals that hold whatever the errors are, answers rounded to decimals are
    steered to thresholds, and answers rounded to a dtype to zero, where relative errors vanish. Where tokens may have
    any norm, long ones drown errors that do not grow with them. `bits` reads stored weights to the last bit.
    """
    _check(signature, target_error, rank, copies, bits, cover_biases)
    limits: dict[str, Any] = {"target_error": target_error, "budget": budget}
    sequences: dict[str, Any] = {} if copies is None else {"copies": copies}
    if bits is not None:
        return (yield from bit_exact(signature, rng, dtype=bits))
    if signature.noise.kind == "bounded":
        return (yield from ask_bounded(signature, rng, cover_biases=cover_biases, **sequences))
    try:
        quantised = _ask_quantised(signature, rng, limits)
        if quantised is not None:
            return (yield from quantised)
        biased = False
    except BiasDetected:  # beside which those methods do not read
        biased = True
    except Unrecoverable as error:
        if not (signature.noise.is_cut and error.outcome is Outcome.WRONG_FAMILY):
            raise
        biased = False  # answers are not rounded to the nearest
    if signature.noise.is_cut and signature.max_norm is not None:
        return (yield from _ask_cut(signature, rng, sequences))
    if signature.max_norm is None:
        try:
            return (yield from single_head(signature.as_coarse(), rng))
        except Unrecoverable as error:
            if biased and error.outcome is Outcome.WRONG_FAMILY:
                raise Unrecoverable(
                    Outcome.TOO_NOISY,
                    f"the box has a bias, beside which answers {signature.noise} say too little, or is no single head",
                ) from error
            raise
    estimate = yield from gaussian(signature.as_coarse(), rng, rank=rank, **sequences, **limits)
    return _with_equal_errors(estimate, signature) if signature.noise.kind == "rounded" else estimate


def _with_equal_errors(estimate: Estimate[SingleHead], signature: Signature) -> Estimate[SingleHead]:
    """Radii of value and output bias that hold where errors agree: of equal numbers, or all rounded one way."""
    radius, error = estimate.radius, signature.noise.radius
    wide = replace(radius, value=radius.value + error / signature.norm_limit)
    if wide.output_bias is not None:
        wide = replace(wide, output_bias=wide.output_bias + error)
    return replace(estimate, radius=wide)


def ask_bounded(
    signature: Signature, rng: np.random.Generator, *, cover_biases: bool = False, **options: Any
) -> Steps[Estimate[SingleHead]]:
    """Worst-case radii of a head without biases; beside biases long tokens drown the errors, where they may."""
    try:
        return (yield from bounded(signature, rng, cover_biases=cover_biases, **options))
    except BiasDetected as error:
        if signature.max_norm is not None:
            remedy = "allow tokens of any norm"
            raise Unrecoverable(Outcome.TOO_NOISY, f"{error}, or is no single head: {remedy}") from error
    # Errors that conspire add up to more than their quadrature, which radii of long tokens are made of.
    stretched = Noise.bounded(signature.noise.scale * signature.width**0.5)
    return (yield from single_head(signature.with_changes(noise=stretched), rng))


def _ask_cut(signature: Signature, rng: np.random.Generator, sequences: dict[str, Any]) -> Steps[Estimate[SingleHead]]:
    """Answers rounded in a direction that is not known: as errors below one unit.

    Beside a bias everything is asked once, as if errors were normal ones of that size: their mean may be half a unit
    and follow the sign of the answer, so that repeats would gain nothing.
    """
    tolerance = signature.with_changes(noise=Noise.bounded(signature.noise.radius))
    try:
        return (yield from bounded(tolerance, rng, **sequences))
    except Unrecoverable as error:
        if error.outcome is not Outcome.WRONG_FAMILY:
            raise
        refused = error
    try:
        estimate = yield from gaussian(signature.with_changes(noise=signature.noise.as_wide()), rng, **sequences)
    except Unrecoverable as error:
        if error.outcome is not Outcome.WRONG_FAMILY:
            raise
        raise Unrecoverable(
            Outcome.TOO_NOISY, f"beside answers {signature.noise} nothing is read ({error}; {refused}): allow any norm"
        ) from error
    # Errors are not random: their mean goes into the output bias, however many answers that is the mean of.
    return _with_equal_errors(replace(estimate, standard_error=None), signature)


def _ask_quantised(
    signature: Signature, rng: np.random.Generator, limits: dict[str, Any]
) -> Steps[Estimate[SingleHead]] | None:
    """The method for answers on a grid, where there is one: rounding to decimals vanishes beside long tokens."""
    if (signature.max_length or math.inf) < SHORTEST:
        return None
    if signature.noise.kind == "dtype":
        return by_null_queries(signature, rng, **limits)
    least = signature.width**2 + VALUE_QUERIES * signature.width
    if signature.noise.kind == "rounded" and signature.max_norm is not None and limits["budget"] >= least:
        return by_thresholds(signature, rng, **limits)
    return None


def _check(signature: Signature, target_error: Any, rank: Any, copies: Any, bits: Any, cover_biases: Any) -> None:
    check_positive("target_error", target_error)
    for name, number, most in (("rank", rank, signature.width), ("copies", copies, 10**6)):
        check_whole(name, number, 1, most)
    if target_error is not None and (bits is not None or signature.noise.kind == "bounded"):
        raise UsageError("target_error decides how often to ask, which changes nothing for bounded errors or bits")
    if rank is not None and (signature.noise.kind not in ("exact", "gaussian") or signature.max_norm is None):
        raise UsageError("rank serves normal errors under a norm bound only: leave it out, or use method low-rank")
    if not isinstance(cover_biases, bool):
        raise UsageError(f"cover_biases must be true or false, not {cover_biases!r}")
    if bits is not None and bits not in DIGITS:
        raise UsageError(f"bits must be one of {', '.join(DIGITS)}, not {bits!r}")


ROBUST = Method(
    name="robust",
    last_only=True,
    summary="one softmax head behind noise, near the limit of what its answers reveal, with error bars",
    run=robust,
    families=("single-head",),
    takes_noise=("exact", "gaussian", "bounded", "rounded", "dtype"),
    options={
        "target_error": "wanted error of a score entry, root mean square; decides how often to ask",
        "rank": "largest rank the score matrix can have, where that is known: fewer questions, smaller errors",
        "copies": "copies of each token of a pair; sequences have twice as many tokens and one more",
        "bits": "dtype the weights are stored in (float32, bfloat16, float16): every bit is read and proven",
        "cover_biases": "bounded errors: radii that also hold for biases too small to be seen, 3 to 6 times as wide",
    },
)
