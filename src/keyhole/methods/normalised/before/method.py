"""Heads behind a norm: it is undone, and what reads the heads alone reads them through that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.families import Family, MultiHead, NormAfter, NormBefore, Residual
from keyhole.families.norms.inside import Heads, turned, turned_radii
from keyhole.families.norms.normalise import mean_free
from keyhole.methods.arithmetic import partial_result
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.multi_head.method import multi_head
from keyhole.methods.normalised.before.ball import Ball
from keyhole.methods.normalised.before.probe import Before, ask_before
from keyhole.methods.normalised.before.standard_errors import with_standard_errors
from keyhole.methods.residual import without_last_token
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = {
    "layer": "tokens are normalised before attention (LayerNorm): their mean, and gain and bias of the norm beside the "
    "heads' own, show in no answer",
    "rms": "tokens are normalised before attention (RMSNorm): gain and bias of the norm beside the heads' own show in "
    "no answer",
}
WITH_RESIDUAL = "the box adds its last token, as it came, to what attention makes of the sequence"
# Vectors of the ball are shorter than its radius by this part: tokens for longer ones drown attention where they are
# added to it.
RIM = 2.0**-7
# Arrays that tokens are multiplied with.
SEEN = ("score", "score_bias", "value", "query", "key")
# What attention may be less of an answer than where epsilon was read.
LESS = 4.0


def ask_behind_norm(
    signature: Signature, rng: np.random.Generator, **parts: Any
) -> Steps[Estimate[NormBefore | Residual]]:
    """Heads behind f(X) = [x_N +] attention(n(x_1), …, n(x_N)), n a LayerNorm or RMSNorm with its ε.

    The token w·√(ε/(1 − |w|²/d)) is normalised to w, for every |w| < √d: through that map the learner of heads asks
    whatever it likes of a ball. Identifiable are, with Q a basis of the vectors that n sees, the heads of Qᵀw: gain and
    bias are part of their scores, values and biases. `multi-head` in d − 1 dimensions (d for RMSNorm), whose options
    name other parts than those of a softmax, and about 14 queries for norm, residual and ε.
    """
    before = yield from ask_before(signature, rng)
    _check_parts(parts)
    ball = Ball(mean_free(signature.width, before.norm), before.epsilon)
    inner = _inside(signature, before, ball)
    with partial_result(lambda known: _partial(known, ball, before)):
        steps: Steps[Estimate[MultiHead]] = ball.steps(multi_head(inner, rng, **parts))
        if before.outer is not None:
            steps = before.outer.steps(steps, signature)
        found = yield from (without_last_token(steps, signature) if before.residual else steps)
    params, radius = _through(found, ball, before)
    said = (*found.assumptions, ASSUMPTIONS[before.norm], *((WITH_RESIDUAL,) if before.residual else ()))
    details = {"norm": before.norm, "epsilon": before.epsilon, "residual": before.residual}
    if before.outer is not None:
        details["norm_behind"] = "rms"
    estimate = Estimate(
        _wrapped(params, before),
        _wrapped(radius, before, before.radius),
        found.counting_bound + 1,
        None,
        said,
        {**found.details, **details},
    )
    return (yield from with_standard_errors(estimate, signature, rng))


def _check_parts(parts: Mapping[str, Any]) -> None:
    """Unrecoverable for parts that are read from tokens of any norm only."""
    capped = parts.get("link", "exp") != "exp" or parts.get("normaliser", "sum") != "sum"
    if capped or "norm" in parts.get("form", ""):
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, "behind a norm heads are read without caps, sinks, and norms of keys and queries"
        )


def _inside(signature: Signature, before: Before, ball: Ball) -> Signature:
    """The oracle as the learner of heads sees it."""
    longest = (signature.width * (1 - RIM)) ** 0.5
    if signature.max_norm is not None:
        most = signature.norm_limit
        longest = min(longest, most / (most**2 / signature.width + before.epsilon) ** 0.5)
    space = signature.space
    if before.outer is not None:
        space = replace(space, coarse=min(1.0, LESS * space.eps * before.outer.loss))
    elif before.residual:
        space = replace(space, coarse=min(1.0, LESS * space.eps / before.share))
    return signature.with_changes(width=ball.width, max_norm=longest, space=space)


def _through(found: Estimate[MultiHead], ball: Ball, before: Before) -> tuple[Heads, Heads]:
    """Heads and radii for tokens as wide as the oracle's: they are off by what vectors of the ball are, too."""
    part = before.radius / before.epsilon
    own = found.params.arrays()
    wide = {
        name: array + part * abs(own[name]) if name.rpartition(".")[2] in SEEN and name in own else array
        for name, array in found.radius.arrays().items()
    }
    radius = found.radius.with_arrays(wide)
    return turned(found.params, ball.basis), turned_radii(radius, ball.basis)


def _partial(known: Family | None, ball: Ball, before: Before) -> NormBefore | Residual | None:
    """The layer of heads that were known when the learner of heads ended."""
    return _wrapped(turned(known, ball.basis), before) if isinstance(known, Heads) else None


def _wrapped(heads: Heads, before: Before, radius: float | None = None) -> NormBefore | Residual:
    """The layer of such heads, or its radii."""
    layer: Any = NormBefore(heads, np.asarray(before.epsilon if radius is None else radius), before.norm)
    outer = before.outer
    if outer is not None:
        gain, epsilon = (outer.gain, outer.epsilon) if radius is None else (outer.gain_radius, outer.epsilon_radius)
        layer = NormAfter(layer, gain, 0 * gain, np.asarray(epsilon), "rms")
    return Residual(layer) if before.residual else layer
