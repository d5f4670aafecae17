"""Whether an oracle is the net that was read from it: new tokens, and tokens beside its kinks far out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import ReluNet
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.relu_net.exact.estimate import ask_within_errors, heldout_tokens
from keyhole.methods.relu_net.exact.queries import TokenQueries

# New tokens near the kinks.
CHECKS = 6
# Tokens of any length, in units of the typical distance of a kink: the shortest and the longest. Every other one lies
# where kinks do: of neurons that cancel but in a strip each of these meets the more.
ANY_LENGTH, NEAR_KINKS = (1e-2, 4e3), (0.5, 2.0)
# With a norm bound rings have this part of it as their radius.
OUTERMOST = 0.99
# How far beside a kink tokens of a ring lie, as a part of the way to the next one on the circle.
BESIDE = 0.02


@dataclass(frozen=True)
class Depth:
    """How thoroughly a result is tested."""

    # Radii of circles beside all kinks, in units of the typical distance of a kink: kinks elsewhere than on
    # the line that was asked, as deeper nets have, mostly show far out. A nearer one sees kinks that end and begin.
    rings: tuple[float, ...]
    arcs: int  # of a circle that are looked at from both ends, not one
    heldout: int  # tokens of any length
    at_least: int  # of those and of the tokens beside kinks together
    strips: bool = False  # whether strips are looked for that the rounding of answers shows


WITHOUT_HELDOUT = Depth((1000.0,), 0, 0, 0)  # for callers that ask new tokens themselves
LEAN = Depth((1000.0,), 20, 0, 24)
FULL = Depth((1000.0, 3.0), 1_000_000, 30, 0, True)


def ask_checks(
    queries: TokenQueries, estimate: Estimate[ReluNet], scale: float, rng: np.random.Generator, depth: Depth
) -> Steps[tuple[Estimate[ReluNet], str, Floats | None]]:
    """The estimate, with wider radii where they were too narrow, and what is wrong with it and where, if anything is.

    Six tokens, and 2k beside the kinks of k neurons; LEAN: up to 20 more, at least 24; FULL: 8k, or 4k with several
    outputs, and 30 fresh ones; `ask_strip` asks 18 more.
    """
    new = heldout_tokens(queries, scale, CHECKS, rng)
    estimate, reason, place = yield from ask_within_errors(queries, estimate, new)
    if reason:
        return estimate, reason, place
    unit = scale * queries.width**0.5
    # A kink that ends would have to end in every output at once: of several one circle is enough.
    radii = depth.rings if estimate.params.outputs is None else depth.rings[:1]
    rings = np.concatenate([_ring_of(queries, estimate, far * unit, depth.arcs, rng) for far in radii])
    count = max(depth.heldout, depth.at_least - rings.shape[0])
    new = rng.standard_normal((count, queries.width))
    # Where kinks lie far beyond usual tokens, `unit` is that of these.
    kinks = max(unit, estimate.params.token_norm(1.0))
    any_length, near = unit * np.array(ANY_LENGTH), kinks * np.array(NEAR_KINKS)
    shortest, longest = np.log([any_length, near])[np.arange(count) % 2].T
    lengths = np.exp(rng.uniform(shortest, longest))
    lengths = np.minimum(lengths, OUTERMOST * queries.signature.norm_limit)
    tokens = np.concatenate([rings, new * (lengths / np.linalg.norm(new, axis=1))[:, None]])
    if tokens.shape[0] == 0:
        return estimate, "", None
    return (yield from ask_within_errors(queries, estimate, tokens, strict=True))


def _ring_of(
    queries: TokenQueries, estimate: Estimate[ReluNet], radius: float, arcs: int, rng: np.random.Generator
) -> Floats:
    """Tokens beside all kinks that a circle of this radius, or what the oracle allows of it, crosses."""
    weights = floats(estimate.params.weights_in)
    length = np.linalg.norm(weights, axis=1)
    used = length > 0
    offset = floats(estimate.params.bias_in)[used] / length[used]
    radius = min(radius, OUTERMOST * queries.signature.norm_limit)
    return ring_tokens(weights[used] / length[used, None], offset, radius, arcs, rng)


def ring_tokens(
    normal: Floats, offset: Floats, radius: float, both_ends: int, rng: np.random.Generator
) -> Floats:  # (k, width), (k,) -> (n, width)
    """Tokens on a random circle around the origin, beside the places where it crosses kinks: 2k, and up to 2k more.

    Of `both_ends` arcs tokens lie at both ends, of the others at one of them by chance.
    Between two neighbouring kinks a net of one hidden layer is affine. Of a function that kinks once more in between,
    or less, at least one of the two tokens of that arc tells, however narrow it is; of two kinks more it may not.
    """
    width = normal.shape[1]
    if width == 1 or offset.size == 0:
        return np.zeros((0, width))
    plane, _ = np.linalg.qr(rng.standard_normal((width, 2)))
    across = normal @ plane  # (k, 2)
    size = radius * np.linalg.norm(across, axis=1)
    meets = size > np.abs(offset)
    towards = np.arctan2(across[meets, 1], across[meets, 0])
    half = np.arccos(-offset[meets] / size[meets])
    at = np.sort(np.concatenate([towards - half, towards + half]) % (2 * np.pi))
    if at.size == 0:
        return np.zeros((0, width))
    arc = np.diff(at, append=at[0] + 2 * np.pi)
    begin, end = at + BESIDE * arc, at + (1 - BESIDE) * arc
    order = rng.permutation(at.size)
    both, one = order[:both_ends], order[both_ends:]
    angle = np.concatenate([begin[both], end[both], np.where(rng.random(one.size) < 0.5, begin[one], end[one])])
    return np.asarray(radius * np.stack([np.cos(angle), np.sin(angle)], axis=1) @ plane.T)
