"""From pieces to a net with radii, and its first test on new answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Booleans, Floats, floats, namespace
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.relu_net.exact.lattice import subset_with_sum
from keyhole.methods.relu_net.exact.queries import Pieces, TokenQueries

FAMILY = "the box computes one hidden layer of neurons, and perhaps an affine map beside it, from its last token alone"
ASSUMPTIONS = (
    FAMILY,
    "answers are right up to the rounding of their dtype and the declared noise",
    "neurons that cancel but in a strip much narrower than the cells around it, as those of a bump, may be unseen",
)
INSIDE = "nothing is said of tokens longer than max_norm, and kinks that cut off a twentieth of the ball may be unseen"
# Held-out answers that differ from predictions by more than this part of their size are another function's.
ANOTHER_FUNCTION = 1e-5
# Shells on which held-out queries lie, in units of the typical distance of a kink times √width.
SHELLS = (0.5, 1.0, 2.0, 4.0)
# Where functions are looked at closely, answers that differ by more than this many radii are: those of random nets stay
# below half a radius.
STRICT = 10.0
# Where new answers show that radii were too narrow, they become this much wider than what was seen.
WIDER = 3.0
# Residuals may be this many times their radius, which is itself several standard deviations.
MOST_RADII = 4.0
# Errors are expected to be this much smaller than that: each bit more makes the right choice of neurons easier to find.
EXPECTED = 16.0
# Lattice reduction of 256 neurons takes a minute; of more than this it is not tried.
MOST_FOR_LATTICE = 288
# A subset sum is unique beyond doubt when other subsets meet it with this probability (minus a power of 2).
DOUBT_BITS = 20.0


@dataclass(frozen=True)
class PieceErrors:
    """Radii of the entries of pieces."""

    slope: Floats  # (k,) of weight times normal
    level: Floats  # (k,) of weight times offset
    affine_slope: float
    affine_level: float

    def times(self, factor: float) -> PieceErrors:
        """Errors of `factor` times the size."""
        return PieceErrors(*(factor * radius for radius in vars(self).values()))


def estimate_net(
    queries: TokenQueries,
    pieces: Pieces,
    radii: PieceErrors,
    skip: bool | None,
    details: dict[str, Any],
    activation: str = "relu",
    sharpness: Floats | None = None,
) -> Estimate[ReluNet]:
    """The net of these pieces, without a skip term where the orientation of its neurons explains the affine map."""
    pieces, radii, sharpness = _without_nothings(queries, pieces, radii, sharpness)
    count, width = pieces.normal.shape
    outputs = pieces.weight.shape[1]
    jumps = (pieces.weight[:, :, None] * pieces.normal[:, None, :]).reshape(count, outputs * width)
    flat = pieces.affine[:, :-1].reshape(-1)
    away, word = None, "not identifiable"
    if skip is not True:
        away, word = solve_orientation(jumps, flat, radii.slope, radii.affine_slope)
    if count == 0 and away is None:
        word = "no neurons"
    turn = np.ones(count) if away is None else np.where(away, -1.0, 1.0)
    # w·act(−z) = w·act(z) − w·z: what the turned neurons leave to the affine map.
    constant = pieces.affine[:, -1] + 0.5 * (1 - turn) @ (pieces.weight * pieces.offset[:, None])
    size = np.ones(count) if sharpness is None else sharpness
    load = np.linalg.norm(pieces.weight, axis=1)
    # A neuron is read from sums with the affine map: their rounding may be the same in all cells.
    shared = queries.rounding * float(np.linalg.norm(pieces.affine[:, :-1]))
    slope = (radii.slope + shared) / np.where(load > 0, load, 1.0)
    level = radii.level / np.where(load > 0, load, 1.0) + np.abs(pieces.offset) * slope
    params = _net(
        queries,
        activation,
        (turn * size)[:, None] * pieces.normal,
        turn * size * pieces.offset,
        pieces.weight.T / size,
        constant,
        pieces.affine[:, :-1] if away is None else None,
    )
    radius = _net(
        queries,
        activation,
        np.broadcast_to((size * slope)[:, None], (count, width)),
        size * level,
        np.broadcast_to(radii.slope / size, (outputs, count)),
        np.full(outputs, radii.affine_level + float(np.sqrt(np.sum((0.5 * (1 - turn) * radii.level) ** 2)))),
        np.full((outputs, width), radii.affine_slope) if away is None else None,
    )
    numbers = count * (width + outputs + (activation != "relu")) + outputs * (1 if away is not None else width + 1)
    assumptions = ASSUMPTIONS if queries.signature.max_norm is None else (*ASSUMPTIONS, INSIDE)
    details = {"neurons": count, "orientation": word, "activation": activation, **details}
    return Estimate(
        *zero_biases_within(params, radius), -(-numbers // outputs), assumptions=assumptions, details=details
    )


def zero_biases_within(params: ReluNet, radius: ReluNet, radii: float = 1.0) -> tuple[ReluNet, ReluNet]:
    """The net with biases of zero where they are within so many radii of it, and radii wider by what they were.

    Where the kinks of a net lie decides how long tokens are that read what is in front of it, and in which cells they
    are: an error must not decide that.
    """
    centre, wider = {}, {}
    for name in ("bias_in", "bias_out"):
        bias, error = getattr(params, name), getattr(radius, name)
        xp = namespace(bias)
        centre[name] = xp.where(xp.abs(bias) > radii * error, bias, xp.zeros_like(bias))
        wider[name] = error + xp.abs(bias - centre[name])
    return replace(params, **centre), replace(radius, **wider)


def _without_nothings(
    queries: TokenQueries, pieces: Pieces, radii: PieceErrors, sharpness: Floats | None
) -> tuple[Pieces, PieceErrors, Floats | None]:
    """Without kinks that errors explain, and with radii no smaller than the rounding of the numbers themselves."""
    load, slope = np.linalg.norm(pieces.weight, axis=1), np.linalg.norm(pieces.affine[:, :-1])
    level = np.linalg.norm(pieces.affine[:, -1]) + slope * np.linalg.norm(load * pieces.offset) / max(
        float(np.linalg.norm(load)), np.finfo(float).tiny
    )
    kept = load > radii.slope
    lost = float(np.linalg.norm(radii.slope[~kept])), float(np.linalg.norm(radii.level[~kept]))
    radii = PieceErrors(
        (radii.slope + queries.rounding * load)[kept],
        (radii.level + queries.rounding * load * np.abs(pieces.offset))[kept],
        radii.affine_slope + queries.rounding * float(slope) + 2 * lost[0],
        radii.affine_level + queries.rounding * float(level) + 2 * lost[1],
    )
    pieces = Pieces(pieces.normal[kept], pieces.offset[kept], pieces.weight[kept], pieces.affine)
    return pieces, radii, None if sharpness is None else sharpness[kept]


def _net(queries: TokenQueries, activation: str, inner: Floats, bias: Floats, *outer: Floats | None) -> ReluNet:
    """A net in the space of the oracle; outer weights, constant and skip of plain numbers where its answers are."""
    asarray = queries.signature.space.asarray
    shown = (each if each is None else asarray(np.array(each[0] if queries.scalar else each)) for each in outer)
    weights, constant, skip = shown
    return ReluNet(asarray(np.array(inner)), asarray(np.array(bias)), weights, constant, skip, activation)


def solve_orientation(
    jumps: Floats, remainder: Floats, jump_errors: Floats, remainder_error: float, most: int = MOST_FOR_LATTICE
) -> tuple[Booleans | None, str]:  # (k, n), (n,), (k,) -> (k,)
    """Neurons that point the other way, w·max(0, −z) = w·max(0, z) − w·z, so that their jumps add up to −remainder.

    Jumps are the linear maps of neurons, flattened, the remainder that of no neuron; errors are radii of entries.
    The words: "found", "not identifiable" (nothing or too much fits) and "not found".
    """
    count, equations = jumps.shape
    radius = MOST_RADII * (np.sqrt(np.sum(jump_errors**2)) + remainder_error)
    size = float(np.max(np.abs(jumps), initial=0.0))
    if size == 0.0:
        return (np.zeros(0, dtype=bool), "found") if np.all(np.abs(remainder) <= radius) else (None, "not identifiable")
    _, values, basis = np.linalg.svd(jumps, full_matrices=False)
    rank = int(np.sum(values > MOST_RADII * max(radius, np.finfo(float).eps * values[0])))
    # In the span of the jumps: fewer equations, all of them telling.
    inside, wanted = jumps @ basis[:rank].T, -(basis[:rank] @ remainder)
    past = np.max(np.abs(remainder + basis[:rank].T @ wanted)) > radius * equations**0.5  # a way past the neurons
    bits = float(np.log2(size / max(radius, np.finfo(float).tiny)))
    if past or (rank < count and rank * bits < count + DOUBT_BITS):
        return None, "not identifiable"  # of many neurons: other choices add up to the same, as far as is known
    if rank == count:
        return _check_sum(np.rint(np.linalg.lstsq(inside.T, wanted, rcond=None)[0]), jumps, remainder, radius)
    chosen = subset_with_sum(inside, wanted, radius / EXPECTED) if count <= most else None
    return (None, "not found") if chosen is None else _check_sum(chosen.astype(np.float64), jumps, remainder, radius)


def _check_sum(share: Floats, jumps: Floats, remainder: Floats, radius: float) -> tuple[Booleans | None, str]:
    """A choice, if it is one and adds up."""
    adds_up = np.max(np.abs(share @ jumps + remainder)) <= radius
    if adds_up and np.all((share == 0) | (share == 1)):
        return np.asarray(share == 1), "found"
    return None, "not identifiable"


def heldout_tokens(
    queries: TokenQueries, scale: float, count: int, rng: np.random.Generator
) -> Floats:  # (count, width)
    """Random tokens on several shells."""
    x = rng.standard_normal((count, queries.width))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    lengths = np.resize(SHELLS, count) * scale * queries.width**0.5
    limit = queries.signature.norm_limit
    lengths = np.where(lengths > limit, rng.uniform(0.5, 0.999, count) * min(limit, 1e300), lengths)
    return np.asarray(x * lengths[:, None])


def ask_within_errors(
    queries: TokenQueries, estimate: Estimate[ReluNet], x: Floats, *, strict: bool = False
) -> Steps[tuple[Estimate[ReluNet], str, Floats | None]]:
    """Ask new tokens: the estimate, with wider radii where they were too narrow, and what is wrong with it, and where.

    `strict` leaves hardly any room beyond the radii: for tokens that are to show small differences of functions.
    """
    space = queries.signature.space
    answers = yield from queries.ask("checks", x)
    tokens = space.asarray(x)[:, None, :]
    errors = np.abs(answers - floats(estimate.params(tokens)).reshape(answers.shape))
    radii = floats(estimate.params.error_bar(estimate.radius, tokens, space.rounding)).reshape(answers.shape)
    radii = radii + queries.noise
    size = np.max(np.abs(answers), axis=0)
    wrong = ~np.all(errors <= (STRICT * radii if strict else ANOTHER_FUNCTION * size + radii), axis=1)
    if np.any(wrong):
        worst = f"fresh answers differ from predictions by {np.max(errors):.2g}, answers being {np.max(size):.2g}"
        return estimate, worst, x[wrong][np.argmin(np.linalg.norm(x[wrong], axis=1))]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.max(np.where(errors > 0, errors / radii, 0.0)))
    if ratio > 1 / WIDER:
        wider = {name: WIDER * ratio * array for name, array in estimate.radius.arrays().items()}
        estimate = replace(estimate, radius=ReluNet(**wider, activation=estimate.params.activation))
    return estimate, "", None
