"""Score matrices from the gates W_h·g at as many last tokens of one cell as there are entries in one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.gated_sum.equal_values import equal_groups
from keyhole.methods.gated_sum.known_values import fit_known_values
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_columns, gate_weights, value_columns
from keyhole.methods.one_layer.several_heads.far_cells import FarNet
from keyhole.methods.one_layer.several_heads.heads_at_point import EXPLAINED, FITTED, PointHeads
from keyhole.methods.one_layer.several_heads.queries import CellQueries, PairDesign
from keyhole.methods.one_layer.several_heads.scale import Scale
from keyhole.numerics.svd import condition, least_squares, svd
from keyhole.recovery import Outcome

STAGE = "scores"
# Queries around each last token over the numbers that they tell, and besides.
SPARE, BESIDES = 1.3, 4
# A last token at which heads are lost is taken so much nearer to the first, so often.
NEARER, MOST_NEARER = 0.2, 3
# Steps without damping, once a fit is near.
LAST_STEPS = 6
# Steps by which is found out how many weights of heads an answer tells.
SAMPLE = 8
# Errors are followed by so many random draws of them.
DRAWS = 12
# Combinations of outputs with values below this part of the loudest do not count.
FAINT = 0.03
# Values of a token that are this dependent do not tell weights.
DEPENDENT = 1e3
# Weights this near to 0 or 1 say nothing of a logit.
LEAST = 1e-6

LOST = (
    "heads that explain the answers around one last token do not explain them around others: the box has no such heads"
)


class HeadsLost(Unrecoverable):
    """Heads of one last token are not those of others."""


@dataclass(frozen=True)
class Scores:
    """Score matrices, and errors that they may have together."""

    matrices: Floats  # (heads, width, width)
    draws: Floats  # (draws, heads, width, width)
    value_draws: Floats  # (draws, heads, width, outputs) and those of the values in the first cell
    biases: Floats | None = None  # (heads, width)
    bias_draws: Floats | None = None  # (draws, heads, width)

    def gates(self, point: Floats) -> Floats:  # (width,) -> (heads, width)
        """W_h·g + c_h."""
        return np.asarray(self.matrices @ point + (0.0 if self.biases is None else self.biases))

    def gate_draws(self, point: Floats) -> Floats:  # (width,) -> (draws, heads, width)
        """Errors that these may have."""
        return np.asarray(self.draws @ point + (0.0 if self.bias_draws is None else self.bias_draws))


@dataclass(frozen=True)
class _Gates:
    """Gates at several last tokens."""

    points: Floats  # (n, width)
    gates: Floats  # (n, heads, width)
    queries: list[GatedQueries]


@dataclass(frozen=True)
class _Values:
    """Values of heads at the first last token, and errors that they may have."""

    values: Floats  # (heads, width, outputs)
    draws: Floats  # (draws, heads, width, outputs)
    combined: Floats  # (outputs, combinations) of outputs that are looked at

    @property
    def combinations(self) -> Floats:  # (heads, width, combinations)
        """The values of these."""
        return np.asarray(self.values @ self.combined)

    def error_of(self, asked: GatedQueries, gates: Floats) -> float:
        """Root mean square of what errors of values make of answers, and no gates make up for."""
        weights = gate_weights(asked, gates)
        flat = (self.draws @ self.combined).reshape(len(self.draws), -1, self.combined.shape[1])
        off = np.moveaxis(value_columns(asked, weights) @ flat, 2, 0)  # (combinations, draws, n)
        columns = gate_columns(asked, weights, self.combinations).reshape(-1, gates.size)
        basis = svd(columns)[0]
        right = np.swapaxes(off, 1, 2).reshape(len(columns), -1)
        free = max(len(columns) - gates.size, 1)
        return float(np.sqrt(np.sum((right - basis @ (basis.T @ right)) ** 2) / (free * right.shape[1])))


def ask_scores(
    queries: CellQueries, far: FarNet, scale: Scale, first: PointHeads, *, biased: bool = False
) -> Steps[Scores]:
    """Gates at last tokens beside the first, all in one cell, and the linear maps from the tokens to them.

    With score biases the maps are affine, and one more last token, longer than the first, tells these.
    """
    point, width = scale.cell.points[0], queries.width
    aside = np.linalg.qr(np.column_stack([point, queries.rng.standard_normal((width, width - 1))]))[0].T[1:]
    aside = np.vstack([aside, point / np.linalg.norm(point)]) if biased else aside
    both = np.stack([far.steps_inside(scale.cell, sign * aside) for sign in (1.0, -1.0)])
    aside = aside * np.where(both[0] >= both[1], both[0], -both[1])[:, None]
    values, own = first.heads.values, first.heads.gates
    combined = _tell(values)
    start = np.broadcast_to(own, (len(aside), *own.shape))
    own_draws, value_draws = _draw_first(queries, point, first, combined)
    others = yield from _ask_gates(queries, scale, point + aside, values, value_draws, start)
    drawn = _draw_others(queries, others, values, value_draws, combined)
    drawn = np.concatenate([own_draws[:, None], drawn], axis=1)  # (draws, points, heads, width)
    gates = np.concatenate([own[None], others.gates])
    points = np.vstack([point, others.points])
    size = float(np.linalg.norm(point))
    points = np.column_stack([points, np.full(len(points), size)]) if biased else points

    def solve(gates: Floats) -> tuple[Floats, Floats | None]:  # (..., points, heads, width)
        maps = np.linalg.solve(points, np.swapaxes(gates, -3, -2))  # (..., heads, width + 1 or width, width)
        matrices = np.asarray(np.swapaxes(maps[..., :width, :], -1, -2))  # W_h·g = gate
        return matrices, np.asarray(maps[..., width, :] * size) if biased else None

    (matrices, biases), (draws, bias_draws) = solve(gates), solve(drawn)
    return Scores(matrices, draws, value_draws, biases, bias_draws)


def _tell(values: Floats) -> Floats:  # (heads, width, outputs) -> (outputs, n)
    """Combinations of outputs that say most of the values of heads, and are not faint beside each other."""
    _, sizes, right = svd(values.reshape(-1, values.shape[2]))
    count = min(FITTED * len(values), int(np.sum(sizes > FAINT * sizes[0])))
    return np.asarray(right[: max(count, 1)].T)


def _ask_gates(
    queries: CellQueries,
    scale: Scale,
    points: Floats,  # (n, width)
    values: Floats,  # (heads, width, outputs)
    value_draws: Floats,  # (draws, heads, width, outputs)
    start: Floats,  # (n, heads, width)
) -> Steps[_Gates]:
    """Gates at last tokens, values being known, from a start; nearer to the first token where heads are lost."""
    centre, combined = scale.cell.points[0], _tell(values)
    known = _Values(values, value_draws, combined)
    heads, width, _ = values.shape
    # Values of heads that depend on each other tell fewer weights.
    shares = np.einsum("nd,hdp->nhp", queries.random_rows(SAMPLE, scale.size), values)
    told = int(np.min(np.linalg.matrix_rank(shares, rtol=FAINT)))
    count = int(np.ceil(SPARE * heads * width / max(told, 1))) + BESIDES
    asked = yield from _ask_around(queries, scale, points, count)
    gates, good = _fit_all(queries, points, asked, known, start)
    # Which of two heads of one value is which shows near to the first token only.
    good = good & (np.max(equal_groups(values)) + 1 == heads)
    nearness = 1.0
    for _ in range(MOST_NEARER):
        if np.all(good):
            break
        (lost,) = np.nonzero(~good)
        nearness *= NEARER
        near = centre + nearness * (points[lost] - centre)
        more = yield from _ask_around(queries, scale, near, count)
        close, found = _fit_all(queries, near, more, known, start[lost])
        # Gates are linear in the last token.
        guess = start[lost] + (close - start[lost]) / nearness
        again, good_now = _fit_all(queries, points[lost], [asked[n] for n in lost], known, guess)
        good_now = good_now & found
        gates[lost[good_now]], good[lost[good_now]] = again[good_now], True
    if not np.all(good):
        raise HeadsLost(Outcome.WRONG_FAMILY, LOST)
    return _Gates(points, gates, asked)


def _nearest_twins(twins: Integers, gates: Floats, guess: Floats) -> Integers:  # (heads,)
    """The order in which the gates of twins are nearest to a guess."""
    order = np.arange(len(twins))
    for group in range(int(np.max(twins)) + 1):
        (own,) = np.nonzero(twins == group)
        costs = np.linalg.norm(guess[own][:, None] - gates[own][None], axis=2)
        order[own] = own[linear_sum_assignment(costs)[1]]
    return order


def _ask_around(queries: CellQueries, scale: Scale, points: Floats, count: int) -> Steps[list[GatedQueries]]:
    place: Integers = np.repeat(np.arange(len(points), dtype=np.int64), count)
    design = PairDesign(place, queries.random_rows(place.size, scale.size), queries.usual_copies(place.size))
    return (yield from queries.ask(STAGE, points, design))


def _fit_all(
    queries: CellQueries, points: Floats, asked: list[GatedQueries], known: _Values, start: Floats
) -> tuple[Floats, Booleans]:
    """Gates (n, heads, width) at each point, and where they explain the answers: up to errors of these and of values."""
    some, gates, seen, twins, allowed = known.combinations, [], [], equal_groups(known.values), []
    for error, own, guess in zip(queries.error(points), asked, start, strict=True):
        each = replace(own, answers=own.answers @ known.combined)
        fits = [fit_known_values(each, some, begin, EXPLAINED * error) for begin in _starts(each, some, guess)]
        found, rms = _to_the_last_digit(each, some, *min(fits, key=lambda fit: fit[1]))
        found = found[_nearest_twins(twins, found, guess)]
        free = max(each.answers.size - found.size, 1)
        gates.append(found)
        seen.append(rms * np.sqrt(each.answers.size / free) / error)
        allowed.append(EXPLAINED * np.hypot(1.0, known.error_of(each, found) / error))
    good = np.asarray(seen) <= np.asarray(allowed)
    if np.any(good):
        one, beyond = points[good][:1], np.asarray(seen)[good] / np.asarray(allowed)[good] * EXPLAINED
        queries.note_error(one, float(np.median(beyond) * queries.error(one)[0]))
    return np.stack(gates), good


def _to_the_last_digit(asked: GatedQueries, values: Floats, gates: Floats, rms: float) -> tuple[Floats, float]:
    """A few steps of Gauss and Newton: directions that answers hardly tell take these, and orthogonal factors."""
    for _ in range(LAST_STEPS):
        columns = gate_columns(asked, gate_weights(asked, gates), values).reshape(-1, gates.size)
        residual = (asked.answers - GatedSum(gates, values).predict(asked)).T.ravel()
        moved = gates + least_squares(columns, residual).reshape(gates.shape)
        left = GatedSum(moved, values).rms(asked)
        if not left < rms:
            break
        gates, rms = moved, left
    return gates, rms


def _starts(asked: GatedQueries, values: Floats, guess: Floats) -> list[Floats]:
    """Gates to start from: those of the weights that answers show, where outputs are as many as heads, or a guess."""
    heads, width, outputs = values.shape
    if outputs < heads or len(asked.rows) < width:
        return [guess]
    shares = np.einsum("nd,hdp->nph", asked.rows, values)
    if not np.median(condition(shares)) < DEPENDENT:
        return [guess]
    weights = np.clip(
        np.stack([least_squares(*each) for each in zip(shares, asked.answers, strict=True)]), LEAST, 1 - LEAST
    )
    logits = np.log(weights / (1 - weights)) - asked.offsets[:, None]
    trust = weights * (1 - weights) * np.linalg.norm(shares, axis=1)  # (n, heads)
    gates = [least_squares(asked.rows * trust[:, [h]], trust[:, h] * logits[:, h]) for h in range(heads)]
    return [np.stack(gates)]


# --- errors -----------------------------------------------------------------------------------------------------


def draw_errors(
    queries: CellQueries,
    point: Floats,  # (width,)
    asked: GatedQueries,
    heads: GatedSum,  # gates at the point, values in its cell
) -> Floats:  # (draws, n, outputs)
    """Errors of answers around a point: of their own and of the point's answer, and those of the logits of both."""
    rng, (count, outputs) = queries.rng, asked.answers.shape
    own = rng.standard_normal((DRAWS, count, outputs)) + rng.standard_normal((DRAWS, 1, outputs))
    weights = gate_weights(asked, heads.gates)
    slopes = (weights * (1 - weights))[:, :, None] * np.einsum("nd,hdp->nhp", asked.rows, heads.values)
    # Logits of tokens are differences of products that are rounded at their own size.
    rounding = queries.space.eps * np.linalg.norm(point) * np.linalg.norm(heads.gates, axis=1)
    logits = rng.standard_normal((DRAWS, count, len(rounding))) + rng.standard_normal((DRAWS, 1, len(rounding)))
    of_logits = np.einsum("enh,nhp->enp", rounding * logits, slopes, optimize=True)
    return np.asarray(queries.error(point[None])[0] * own + of_logits)


def _draw_first(queries: CellQueries, point: Floats, first: PointHeads, combined: Floats) -> tuple[Floats, Floats]:
    """Errors of the gates (draws, heads, width) and values (draws, heads, width, outputs) at the first point."""
    asked, heads = first.queries, first.heads
    weights = gate_weights(asked, heads.gates)
    columns = value_columns(asked, weights)  # (n, heads · width)
    errors = draw_errors(queries, point, asked, heads)
    of_gates = gate_columns(asked, weights, heads.values @ combined)  # (combinations, n, heads · width)
    basis = np.linalg.qr(columns)[0]
    across = of_gates - basis @ (basis.T @ of_gates)
    wanted = np.moveaxis(errors @ combined, 0, 2)  # (n, combinations, draws)
    right = np.swapaxes(wanted, 0, 1).reshape(-1, DRAWS)
    moved = least_squares(across.reshape(right.shape[0], -1), right).T.reshape(DRAWS, *heads.gates.shape)
    shares = np.einsum("nd,hdp->nhp", asked.rows, heads.values)
    bent = np.einsum("nh,ehn,nhp->enp", weights * (1 - weights), moved @ asked.rows.T, shares, optimize=True)
    left = np.moveaxis(errors - bent, 0, 2).reshape(len(asked.rows), -1)
    values = least_squares(columns, left).reshape(*heads.values.shape, DRAWS)
    return moved, np.moveaxis(values, -1, 0)


def _draw_others(queries: CellQueries, others: _Gates, values: Floats, moved: Floats, combined: Floats) -> Floats:
    """Errors of gates at the other points, (draws, n, heads, width), values being off by what was drawn."""
    found, some = [], values @ combined
    for point, gates, asked in zip(others.points, others.gates, others.queries, strict=True):
        weights = gate_weights(asked, gates)
        errors = draw_errors(queries, point, asked, GatedSum(gates, values))
        off = value_columns(asked, weights) @ moved.reshape(DRAWS, -1, values.shape[2])
        right = np.moveaxis((errors - off) @ combined, 0, 2)  # (n, combinations, draws)
        columns = gate_columns(asked, weights, some)
        solved = least_squares(columns.reshape(-1, gates.size), np.swapaxes(right, 0, 1).reshape(-1, DRAWS))
        found.append(solved.T.reshape(DRAWS, *gates.shape))
    return np.stack(found, axis=1)
