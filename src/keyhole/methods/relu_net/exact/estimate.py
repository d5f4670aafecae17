"""From pieces to a net with radii, and its first test on new answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, to_numpy
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.relu_net.exact.orientation import solve_orientation
from keyhole.methods.relu_net.exact.queries import Pieces, TokenQueries

ASSUMPTIONS = (
    "the box computes one hidden layer of neurons, and perhaps an affine map beside it, from its last token alone",
    "answers are right up to the rounding of their dtype and the declared noise",
)
INSIDE = "nothing is said of tokens longer than max_norm, and kinks that cut off a twentieth of the ball may be unseen"
# Fresh answers that differ from predictions by more than this part of their size are another function's.
ANOTHER_FUNCTION = 1e-5
# Shells on which fresh queries lie, in units of the typical distance of a kink times √width.
SHELLS = (0.5, 1.0, 2.0, 4.0)
# Where functions are looked at closely, answers that differ by more than this many bars are: those of random nets stay
# below half a bar.
STRICT = 10.0
# Where new answers show that bars were too narrow, they become this much wider than what was seen.
WIDER = 3.0


@dataclass(frozen=True)
class PieceErrors:
    """Bars on the entries of pieces."""

    slope: Floats  # (k,) of weight times normal
    level: Floats  # (k,) of weight times offset
    affine_slope: float
    affine_level: float

    def times(self, factor: float) -> PieceErrors:
        """Errors of `factor` times the size."""
        return PieceErrors(*(factor * bar for bar in vars(self).values()))


def estimate_net(
    queries: TokenQueries,
    pieces: Pieces,
    bars: PieceErrors,
    skip: bool | None,
    details: dict[str, Any],
    activation: str = "relu",
    sharpness: Floats | None = None,
) -> Estimate[ReluNet]:
    """The net of these pieces, without a skip term where the orientation of its neurons explains the affine map."""
    count, width = pieces.normal.shape
    outputs = pieces.weight.shape[1]
    jumps = (pieces.weight[:, :, None] * pieces.normal[:, None, :]).reshape(count, outputs * width)
    flat = pieces.affine[:, :-1].reshape(-1)
    away, word = None, "not identifiable"
    if skip is not True:
        away, word = solve_orientation(jumps, flat, bars.slope, bars.affine_slope)
    if count == 0 and away is None:
        word = "no neurons"
    turn = np.ones(count) if away is None else np.where(away, -1.0, 1.0)
    # w·act(−z) = w·act(z) − w·z: what the turned neurons leave to the affine map.
    constant = pieces.affine[:, -1] + 0.5 * (1 - turn) @ (pieces.weight * pieces.offset[:, None])
    size = np.ones(count) if sharpness is None else sharpness
    load = np.linalg.norm(pieces.weight, axis=1)
    slope = bars.slope / np.where(load > 0, load, 1.0)
    level = bars.level / np.where(load > 0, load, 1.0) + np.abs(pieces.offset) * slope
    none = np.zeros((outputs, width))
    params = _net(
        queries,
        (turn * size)[:, None] * pieces.normal,
        turn * size * pieces.offset,
        pieces.weight.T / size,
        constant,
        pieces.affine[:, :-1] if away is None else None,
        activation,
    )
    radius = _net(
        queries,
        np.broadcast_to((size * slope)[:, None], (count, width)),
        size * level,
        np.broadcast_to(bars.slope / size, (outputs, count)),
        np.full(outputs, bars.affine_level + float(np.sqrt(np.sum((0.5 * (1 - turn) * bars.level) ** 2)))),
        none + bars.affine_slope if away is None else None,
        activation,
    )
    numbers = count * (width + outputs + (activation != "relu")) + outputs * (1 if away is not None else width + 1)
    bounded = queries.signature.max_norm is not None
    return Estimate(
        params=params,
        radius=radius,
        counting_bound=-(-numbers // outputs),
        assumptions=(*ASSUMPTIONS, INSIDE) if bounded else ASSUMPTIONS,
        details={"neurons": count, "orientation": word, "activation": activation, **details},
    )


def _net(
    queries: TokenQueries,
    inner: Floats,
    bias: Floats,
    outer: Floats,
    constant: Floats,
    skip: Floats | None,
    activation: str,
) -> ReluNet:
    """A net in the space of the oracle, for plain numbers where its answers are."""
    space = queries.signature.space

    def place_tokens(array: Floats, plain: bool) -> Any:
        return space.asarray(np.array(array[0] if plain else array))

    return ReluNet(
        place_tokens(inner, False),
        place_tokens(bias, False),
        place_tokens(outer, queries.scalar),
        place_tokens(constant, queries.scalar),
        None if skip is None else place_tokens(skip, queries.scalar),
        activation,
    )


def heldout_tokens(
    queries: TokenQueries, scale: float, count: int, rng: np.random.Generator
) -> Floats:  # (count, width)
    """Random tokens on several shells."""
    x = rng.standard_normal((count, queries.width))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    lengths = np.resize(SHELLS, count) * scale * queries.width**0.5
    limit = queries.signature.norm_limit
    return np.asarray(
        x * np.where(lengths > limit, rng.uniform(0.5, 0.999, count) * min(limit, 1e300), lengths)[:, None]
    )


def ask_within_errors(
    queries: TokenQueries, estimate: Estimate[ReluNet], x: Floats, *, strict: bool = False
) -> Steps[tuple[Estimate[ReluNet], str]]:
    """Ask new tokens: the estimate, with wider radii where they were too narrow, and what is wrong with it, if so.

    `strict` leaves hardly any room beyond the bars: for tokens that are to show small differences of functions.
    """
    space = queries.signature.space
    answers = yield from queries.ask("checks", x)
    tokens = space.asarray(x)[:, None, :]
    predicted = np.asarray(to_numpy(estimate.params(tokens)), dtype=np.float64).reshape(answers.shape)
    bars = np.asarray(to_numpy(estimate.params.error_bar(estimate.radius, tokens, space.rounding))).reshape(
        answers.shape
    )
    bars = bars + queries.noise
    errors = np.abs(answers - predicted)
    size = np.max(np.abs(answers), axis=0)
    if not np.all(errors <= (STRICT * bars if strict else ANOTHER_FUNCTION * size + bars)):
        return (
            estimate,
            f"fresh answers differ from predictions by {np.max(errors):.2g}, answers being {np.max(size):.2g}",
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.max(np.where(errors > 0, errors / bars, 0.0)))
    if ratio > 1 / WIDER:
        wider = {name: WIDER * ratio * array for name, array in estimate.radius.arrays().items()}
        estimate = replace(estimate, radius=ReluNet(**wider, activation=estimate.params.activation))
    return estimate, ""
