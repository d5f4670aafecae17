"""Constants of links and normalisers, from weights at logits so large that they are as far as they go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keyhole.arrays import floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import longest_token
from keyhole.methods.parts.inverse import POWERS, QUOTIENTS, Inverse, Number
from keyhole.methods.parts.zero_scores import Probe
from keyhole.queries import Measurements, Plan, Term, TokenRows
from keyhole.recovery import Outcome

# The product of the two norms: a logit this large is as good as infinite, whatever the score, and does not overflow.
SATURATING = 2.0**332
# The first token is this long, and the last one no longer than that: neither its value nor its own score shows.
LONG, SHORT = 2.0**400, 2.0**-30
SILENT = (
    "answers are the same at the largest logits of either sign: the score is zero, so that constants do not show, or a "
    "score bias drowns it, which is not read beside other parts than a softmax's"
)
NO_END = "the weight of a token does not end where the parts that were named say"


def ask_ends(probe: Probe, rng: np.random.Generator) -> Steps[tuple[Number, Number]]:
    """The least and the largest weight of the first of two tokens, in units of the value."""
    signature, space = probe.signature, probe.signature.space
    longest = min(LONG, longest_token(space, float(space.xp.linalg.vector_norm(probe.value.vector))))
    last = min(SATURATING / longest, SHORT)
    column = space.asarray(rng.standard_normal(signature.width))
    column = column / space.xp.linalg.vector_norm(column)
    columns = TokenRows(space.xp.stack([column, -column]))
    both = space.indices([0, 0])
    answers: Measurements = yield Plan(
        "constants", 2, [[Term(probe.token, both, longest)], [Term(columns, None, last)]]
    )
    size = longest * float(space.xp.linalg.vector_norm(probe.value.vector))
    shares = floats(answers.values - probe.value.bias) / size
    error = float(space.xp.linalg.vector_norm(probe.value.radius)) * longest / size + space.rounding
    own = (answers.radius + float(probe.value.bias_radius)) / size + (last / longest) * 2
    radii = np.abs(shares) * error + own
    low, high = (int(place) for place in np.argsort(shares))
    return Number(float(shares[low]), float(radii[low])), Number(float(shares[high]), float(radii[high]))


def ask_ends_of_bias(probe: Probe) -> Steps[tuple[Number, Number, Number]]:
    """The same beside a zero token, where a score bias is what makes logits large, and the weight where they vanish.

    That is the mean of those of a token of the probe's norm and of its opposite, right to second order in its logit.
    """
    space, signs = probe.signature.space, np.array([1.0, -1.0])
    longest = longest_token(space, float(space.xp.linalg.vector_norm(probe.value.vector)))
    scales = np.stack([signs, 0 * signs], axis=1)
    far, far_radii = yield from replace(probe, norm=min(LONG, longest)).share("constants", scales)
    near, near_radii = yield from probe.share("constants", scales)
    ends = sorted(zip((far * signs).tolist(), far_radii.tolist(), strict=True))
    (low, low_radius), (high, high_radius) = ends
    middle = Number(float(np.mean(near * signs)), float(np.mean(near_radii)))
    return Number(low, low_radius), middle, Number(high, high_radius)


def find_constants(inverse: Inverse, least: Number, most: Number, rounding: float) -> Inverse:
    """The inverse with the constants that the least and the largest weight show, `rounding` being that of an oracle."""
    try:
        made = _find(inverse, least, most)
    except (ValueError, ZeroDivisionError, OverflowError) as error:  # the logarithm of a weight that cannot be
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_END) from error
    if "cap" in made.radii:  # energies as large as the cap are rounded at its size
        made.radii["cap"] += rounding * made.cap
    return made


def _find(inverse: Inverse, least: Number, most: Number) -> Inverse:
    if abs(most.value - least.value) <= 4 * (most.radius + least.radius):
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, SILENT)
    if inverse.link == "sigmoid":
        return _of_sigmoid(inverse, most)
    if inverse.link == "softcap":
        return _of_softcap(inverse, least, most)
    # The largest weight of an exponential is one: what a sink takes at zero shows.
    return _with(inverse, "zero", most.through(lambda share: 1 / share))


def _with(inverse: Inverse, name: str, found: Number) -> Inverse:
    possible = math.isfinite(found.value) and math.isfinite(found.radius)
    if name != "bias":
        possible = possible and found.value > 0
    if name == "zero" and inverse.normaliser in QUOTIENTS:
        possible = possible and found.value < 1
    if not possible:
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_END)
    return inverse.with_constant(name, found.value, found.radius)


def _of_sigmoid(inverse: Inverse, most: Number) -> Inverse:
    """The largest weight is one, that at zero σ(bias)."""
    if not most.value > 1 + 2 * most.radius:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, "the sigmoid is saturated at a logit of zero: its bias is too large to show"
        )
    return _with(inverse, "bias", most.through(lambda share: -math.log(share - 1)))


def _of_softcap(inverse: Inverse, least: Number, most: Number) -> Inverse:
    if not least.value > 4 * least.radius:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "a weight vanishes at the lowest logits: the cap is too large to show, or there is none",
        )
    if inverse.normaliser in POWERS:
        if not most.value < 1 - 4 * most.radius:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "the cap is beyond what sparse weights show")
        height = POWERS[inverse.normaliser]
        return _with(
            inverse,
            "cap",
            least.through(
                lambda share: (
                    height * ((1 - share) ** (1 / height) - share ** (1 / height))
                    - height * ((1 - inverse.zero) ** (1 / height) - inverse.zero ** (1 / height))
                )
            ),
        )
    if inverse.normaliser not in QUOTIENTS:
        # Masses are exponentials: the largest over that at zero is exp(cap).
        return _with(inverse, "cap", most.through(math.log))
    if inverse.normaliser == "sink":
        # 1/share − 1 is h·(exp(∓cap) − 1), with h = 1 − zero.
        below, above = 1 / most.value, 1 / least.value
        cap = math.log((above - 1) / (1 - below))
        rest = (1 - below) / -math.expm1(-cap)
        error = most.radius / most.value**2 / (1 - below) + least.radius / least.value**2 / (above - 1)
        inverse = _with(inverse, "cap", Number(cap, error))
        slack = most.radius / most.value**2 / -math.expm1(-cap) + rest * math.exp(-cap) * error / -math.expm1(-cap)
        return _with(inverse, "zero", Number(1 - rest, slack))

    def cap_of(zero: float) -> Callable[[float], float]:
        unit = zero / inverse.changed(zero=zero).unit  # of answers, one where they are measured in the weight at zero
        return lambda share: math.log1p((unit / share - 1) / (1 - zero))

    found = least.through(cap_of(inverse.zero))
    zero = Number(inverse.zero, inverse.radii.get("zero", 0.0)).through(lambda zero: cap_of(zero)(least.value))
    return _with(inverse, "cap", Number(found.value, found.radius + zero.radius))
