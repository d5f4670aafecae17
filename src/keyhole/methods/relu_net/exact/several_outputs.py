"""Networks of several outputs: an answer is p numbers, so few cells are measured."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.methods.base import Steps
from keyhole.methods.relu_net.exact.cells import typical_distance
from keyhole.methods.relu_net.exact.estimate import PieceErrors
from keyhole.methods.relu_net.exact.kink_search import Kinked, NotPiecewiseLinear
from keyhole.methods.relu_net.exact.line import ask_cells
from keyhole.methods.relu_net.exact.queries import Pieces, QueryLine, TokenQueries
from keyhole.methods.relu_net.exact.refit import NetArrays, Refit, refit
from keyhole.methods.relu_net.exact.token_design import move_beside, telling_rows, wide_tokens

# Between two measured cells lie at most this part of as many kinks as outputs are independent: then their slopes are.
KINKS_PER_CELL = 0.7
# Slopes whose combinations are smaller than this, in parts of the largest, do not tell neurons apart.
DEPENDENT = 1e-3
# Fresh equations per unknown.
EQUATIONS = 2.0
# Tokens to choose each fresh one from; those nearer to a kink than this part of the typical distance are left out.
CANDIDATES, FLAT = 5, 1e-4
# Tokens on either side of every kink, for each number of its normal and offset: fewer would leave some of them open.
BOTH_SIDES = 1.3
# Variance of what is not known yet, that of a measurement being one.
VAGUE = 1e4


def ask_several_outputs(
    queries: TokenQueries, line: QueryLine, kinked: Kinked, rng: np.random.Generator, polish: bool
) -> Steps[tuple[Pieces, PieceErrors, float]]:
    """Pieces, their radii and the typical distance of a kink, from slopes along the line and a few cells.

    The slopes along the line are the weights of neurons.
    Two cells differ by the neurons whose kinks lie between them, Σ weight_i ⊗ normal_i: p·d equations, for the normals
    of up to p neurons at once. Then all parameters are fitted together to new answers in wide cells.
    """
    count = kinked.kinks.size
    steps = np.diff(kinked.slope, axis=0)  # (k, outputs): weight · (normal·direction)
    unit = np.where(kinked.level > 0, kinked.level, 1.0)
    scaled = steps / unit
    chosen = _choose_cells(kinked, scaled)
    cells = yield from ask_cells(queries, line, kinked, chosen, rng)
    normal, radius = np.zeros((count, queries.width)), np.zeros(count)
    for number in range(chosen.size - 1):
        group = np.arange(chosen[number], chosen[number + 1])
        change = (cells.gradient[number + 1] - cells.gradient[number]) / unit[:, None]
        normal[group] = np.linalg.lstsq(scaled[group].T, change, rcond=None)[0]
        smallest = np.linalg.svd(scaled[group], compute_uv=False)[-1]
        radius[group] = (
            (cells.error[number + 1] + cells.error[number]) * np.linalg.norm(scaled[group], axis=1) / smallest
        )
    length = np.linalg.norm(normal, axis=1)
    if not np.all(length > 0):
        raise NotPiecewiseLinear("slopes on both sides of a kink do not belong to one neuron")
    normal /= length[:, None]
    offset = -np.einsum("kd,kd->k", normal, line.at(kinked.kinks))
    gradient = cells.gradient[0]
    affine = np.column_stack([gradient, cells.value[0] - gradient @ cells.centre[0]])
    pieces = Pieces(normal, offset, steps * length[:, None], affine)
    # Of a neuron between narrow cells of the line the weight is known less well than its direction.
    radius = radius + (kinked.slope_error[1:] + kinked.slope_error[:-1]) * length
    level = float(np.max(kinked.level))
    scale = typical_distance(pieces, level * radius * line.unit, line.unit)
    base = level * float(cells.error[0])
    far = scale * queries.width**0.5
    # The affine map is read in the first cell, whose centre may lie much farther out than the kinks.
    away = far + float(np.linalg.norm(cells.centre[0]))
    radii = PieceErrors(level * radius, level * radius * (far + line.unit), base, base * away)
    if not polish:
        return pieces, radii, scale
    x = new_wide_tokens(queries, pieces, scale, rng)
    answers = yield from queries.ask("polish", x)
    errors = queries.rounding * pieces.size(np.linalg.norm(x, axis=1)) + queries.noise
    start = NetArrays(pieces.normal, pieces.offset, pieces.weight, pieces.affine)
    fit = refit(start, x, answers, errors, "relu", rng, _radius_of(pieces, radii))
    return *pieces_of_fit(fit), scale


def _radius_of(pieces: Pieces, radii: PieceErrors) -> NetArrays:
    """Radii of the entries of pieces, each by itself."""
    load = np.maximum(np.linalg.norm(pieces.weight, axis=1), np.finfo(float).tiny)
    tilt = radii.slope / load
    affine = np.full(pieces.affine.shape, radii.affine_slope)
    affine[:, -1] = radii.affine_level
    level = radii.level / load + np.abs(pieces.offset) * tilt
    return NetArrays(tilt[:, None] + 0 * pieces.normal, level, radii.slope[:, None] + 0 * pieces.weight, affine)


def pieces_of_fit(fit: Refit) -> tuple[Pieces, PieceErrors]:
    """Normals of unit length, and radii: random errors of the answers, spread over the entries of each neuron."""
    length = np.linalg.norm(fit.net.inner, axis=1)
    weight = fit.net.outer * length[:, None]
    load = np.linalg.norm(fit.net.outer, axis=1)
    pieces = Pieces(fit.net.inner / length[:, None], fit.net.bias / length, weight, fit.net.affine)
    slope = load * fit.inner_radius + length * fit.outer_radius
    level = load * fit.bias_radius + np.abs(fit.net.bias) * fit.outer_radius
    wider = max(1.0, fit.worst)
    return pieces, PieceErrors(slope, level, fit.affine_slope_radius, fit.affine_level_radius).times(wider)


def _choose_cells(kinked: Kinked, scaled: Floats) -> Integers:
    """The first and the last cell, and between them wide ones with not too many kinks from one to the next."""
    count = kinked.kinks.size
    if count == 0:
        return np.zeros(1, dtype=np.int64)
    values = _sizes(scaled)
    rank = int(np.sum(values > DEPENDENT * values[0]))
    low, high = kinked.ends
    gap = (high - low) / kinked.growth(0.5 * (low + high))
    chosen, most = [0], max(1, int(KINKS_PER_CELL * rank))
    while chosen[-1] < count:
        here, size = chosen[-1], most
        while size > 1 and not _is_independent(scaled[here : here + size]):
            size = -(-size // 2)
        window = np.arange(here + max(1, size // 2), min(here + size, count) + 1)
        chosen.append(count if window.size == 0 or here + size >= count else int(window[np.argmax(gap[window])]))
    return np.asarray(chosen, dtype=np.int64)


def _sizes(slopes: Floats) -> Floats:
    """Singular values of slopes, each of unit length."""
    return np.asarray(np.linalg.svd(slopes / np.linalg.norm(slopes, axis=1, keepdims=True), compute_uv=False))


def _is_independent(slopes: Floats) -> bool:
    """Whether no combination of slopes, each of unit length, nearly vanishes."""
    values = _sizes(slopes)
    return bool(values.size == slopes.shape[0] and values[-1] > DEPENDENT * values[0])


def new_wide_tokens(
    queries: TokenQueries, pieces: Pieces, scale: float, rng: np.random.Generator
) -> Floats:  # (n, width)
    """Tokens far from kinks, whose answers are enough equations for all parameters."""
    outputs, width = pieces.weight.shape[1], queries.width
    unknowns = pieces.count * (width + outputs) + outputs * (width + 1)
    count = int(np.ceil(EQUATIONS * unknowns / outputs)) + 2
    limit = min(queries.signature.norm_limit, np.finfo(float).max ** 0.25)
    x, margin = wide_tokens(pieces.normal, pieces.offset, scale, limit, CANDIDATES * count, rng)
    # Patterns as different as possible; about their widths nothing is said but that they must have one.
    x = x[margin > FLAT * scale]
    active = np.column_stack([pieces.heights(x) > 0, np.ones(x.shape[0])]).astype(np.float64)
    chosen = telling_rows(VAGUE * np.eye(pieces.count + 1), active, np.ones(x.shape[0]), count)
    need = int(np.ceil(BOTH_SIDES * (width + 1)))
    more = _beside_kinks(pieces, x[chosen], scale, limit, need, rng)
    x = np.concatenate([x, more])
    return np.asarray(x[_on_both_sides(pieces.heights(x) > 0, chosen, need)])


def _beside_kinks(
    pieces: Pieces, x: Floats, scale: float, limit: float, need: int, rng: np.random.Generator
) -> Floats:  # (n, width)
    """Tokens on the sides of kinks where less than `need` are, some to choose from."""
    on = np.sum(pieces.heights(x) > 0, axis=0)
    short = CANDIDATES * np.concatenate([np.maximum(need - on, 0), np.maximum(need - (x.shape[0] - on), 0)])
    kink = np.repeat(np.tile(np.arange(pieces.count), 2), short)
    side = np.repeat(np.repeat([1.0, -1.0], pieces.count), short)
    more = scale * rng.standard_normal((kink.size, x.shape[1]))
    more = move_beside(more, pieces.normal[kink], pieces.offset[kink], scale * side, rng)
    clear = np.min(np.abs(pieces.heights(more)), axis=1, initial=np.inf) > FLAT * scale
    return np.asarray(more[clear & (np.linalg.norm(more, axis=1) < limit)])


def _on_both_sides(active: Booleans, chosen: Integers, need: int) -> Integers:  # (n, k)
    """More tokens, until so many lie on either side of every kink, as far as there are such."""
    free = np.ones(active.shape[0], dtype=bool)
    free[chosen] = False
    short_on = need - np.sum(active[chosen], axis=0)
    short_off = need - np.sum(~active[chosen], axis=0)
    more: list[int] = []
    for _ in range(int(np.sum(free))):
        serves = active @ (short_on > 0).astype(np.int64) + ~active @ (short_off > 0).astype(np.int64)
        best = int(np.argmax(np.where(free, serves, -1)))
        if serves[best] == 0:
            break
        free[best] = False
        more.append(best)
        short_on, short_off = short_on - active[best], short_off - ~active[best]
    return np.concatenate([chosen, np.asarray(more, dtype=np.int64)])
