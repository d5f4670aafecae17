"""How many heads there are, their gates W_h·g at one last token g and their values in its cell."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.forms.token_doubles import DOUBLES, check_token_doubles
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_weights, value_columns
from keyhole.methods.gated_sum.polish import polish
from keyhole.methods.gated_sum.search import SIZES, GatedFit, fit_unknown
from keyhole.methods.one_layer.several_heads.odds_pencil import solve_odds
from keyhole.methods.one_layer.several_heads.queries import CellQueries, PairDesign
from keyhole.methods.one_layer.several_heads.scale import Scale
from keyhole.numerics.svd import least_squares, singular_values, svd

STAGE = "heads"
# Outputs from which on the pencil of odds is tried.
FEWEST_OUTPUTS = 3
# Outputs from which on it is tried with several first tokens, and how many.
MANY_OUTPUTS, MOST_TOKENS = 12, 3
# Ratios of copies of the first token, and of the others beyond the number of heads.
RATIOS, MORE_RATIOS = 13, 2
# Other tokens are the first one and this part of its length in another direction.
ASIDE = 0.6
# Random steps besides, for every head and entry.
MIXED = 1.2
# Singular values count from so many times what errors make.
CLEAR = 8.0
# Queries for so many heads: per head and entry, and besides.
PER_ENTRY, BESIDES = 4.4, 20
CAPS = (2, 4, 8, 16)
# Numbers of heads that are looked for again before there are more queries, over those that these are for.
AGAIN = 1.25
# Outputs that the search for heads looks at, and that gates are fitted to for every head.
SEARCHED, FITTED = 2, 2
# Fits explain answers with residuals of up to so many errors.
EXPLAINED = 4.0


@dataclass(frozen=True)
class PointHeads:
    """Heads at one last token."""

    heads: GatedSum  # gates (heads, width), values (heads, width, outputs)
    queries: GatedQueries


def ask_heads(queries: CellQueries, scale: Scale) -> Steps[PointHeads | None]:
    """The fewest heads that explain the answers around a point; None where none were found that do."""
    # Logits of two heads may be near to each other for one token: with many outputs another is cheaper than a search.
    for _ in range(1 if scale.outputs < MANY_OUTPUTS else MOST_TOKENS):
        found = (yield from _ask_by_odds(queries, scale)) if scale.outputs >= FEWEST_OUTPUTS else None
        if found is not None:
            return found
    return (yield from _ask_by_search(queries, scale))


# --- many outputs -----------------------------------------------------------------------------------------------


def _ask_by_odds(queries: CellQueries, scale: Scale) -> Steps[PointHeads | None]:
    """A first token in many copies, then others beside it, each by an eigenproblem; all of them polished together."""
    width = queries.width
    basis = np.linalg.qr(queries.rng.standard_normal((width, width)))[0].T
    first = basis[0] * 1.5 * scale.size
    (own,) = yield from queries.ask(STAGE, scale.cell.points, _in_copies(queries, first[None], RATIOS))
    error = float(queries.error(scale.cell.points)[0])
    sizes = singular_values(own.answers)
    heads = int(np.sum(sizes > CLEAR * error * (own.answers.shape[0] ** 0.5 + own.answers.shape[1] ** 0.5)))
    if heads >= min(scale.outputs, len(own.answers) - 2):
        return None
    start = _solve_token(own, heads)
    if start is None:
        return None
    tokens = first + ASIDE * np.linalg.norm(first) * basis[1:]
    (rest,) = yield from queries.ask(STAGE, scale.cell.points, _in_copies(queries, tokens, heads + MORE_RATIOS))
    logits, values = [start[0]], [start[1]]
    for number in range(width - 1):
        each = rest.take(np.flatnonzero(np.all(np.isclose(np.abs(rest.rows), np.abs(tokens[number])), axis=1)))
        found = _solve_token(each, heads)
        if found is None:
            return None
        order = _match(start, found)
        logits.append(found[0][order])
        values.append(found[1][order])
    gates = np.linalg.solve(np.vstack([first, tokens]), np.stack(logits)).T  # (heads, width)
    # Copies of few tokens tell their values badly from each other, if well enough to begin with.
    design = _random(queries, int(np.ceil(MIXED * heads * width)), scale.size)
    (more,) = yield from queries.ask(STAGE, scale.cell.points, design)
    return fit_point(queries, scale, own.beside(rest).beside(more), gates)


def _random(queries: CellQueries, count: int, size: float) -> PairDesign:
    """Random steps in random copies around the first point."""
    return PairDesign(np.zeros(count, dtype=np.int64), queries.random_rows(count, size), queries.usual_copies(count))


def _in_copies(queries: CellQueries, tokens: Floats, count: int) -> PairDesign:
    """Each token in several ratios of copies, and its opposite once."""
    copies = np.vstack([queries.ratios_apart(count), [[1, 1]], [[1, 1]]])
    copies = copies[[*np.flatnonzero(np.any(copies[:-2] != 1, axis=1)), -2, -1]]
    signs = np.ones(len(copies))
    signs[-1] = -1.0
    rows = (signs[:, None] * tokens[:, None, :]).reshape(-1, tokens.shape[1])
    return PairDesign(np.zeros(len(rows), dtype=np.int64), rows, np.tile(copies, (len(tokens), 1)))


def _solve_token(own: GatedQueries, heads: int) -> tuple[Floats, Floats] | None:
    """Logits and values of one token; the last query is its opposite, the one before as many copies of both."""
    total = own.answers[-2] - own.answers[-1]
    return solve_odds(own.answers[:-1], own.offsets[:-1], total, heads)


def _match(first: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Floats:
    """The order in which heads of another token are nearest to those of the first."""
    sizes = np.linalg.norm(first[1], axis=1)[:, None]
    values = np.linalg.norm(first[1][:, None] - other[1][None], axis=2) / np.maximum(sizes, np.finfo(float).tiny)
    logits = np.abs(first[0][:, None] - other[0][None]) / 4
    return np.asarray(linear_sum_assignment(np.minimum(values, 4.0) + np.minimum(logits, 1.0))[1])


def fit_point(queries: CellQueries, scale: Scale, asked: GatedQueries, gates: Floats) -> PointHeads | None:
    """The best fit near gates, to as many combinations of outputs as tell heads apart; None if it explains nothing."""
    error = float(queries.error(scale.cell.points)[0])
    some = combine(asked, min(FITTED * len(gates), scale.outputs))
    fit, rms = polish(some, gates)
    free = some.answers.size - gates.size - gates.size * some.answers.shape[1]
    if free <= 0 or rms * np.sqrt(some.answers.size / free) > EXPLAINED * error:
        return None
    queries.note_error(scale.cell.points, rms * np.sqrt(some.answers.size / free))
    columns = value_columns(asked, gate_weights(asked, fit.gates))
    values = least_squares(columns, asked.answers).reshape(*fit.gates.shape, -1)
    return PointHeads(GatedSum(fit.gates, values), asked)


def combine(asked: GatedQueries, count: int) -> GatedQueries:
    """The queries with the combinations of outputs that say most; errors stay as large as they are."""
    if asked.answers.shape[1] <= count:
        return asked
    right = svd(asked.answers)[2][:count]
    return replace(asked, answers=asked.answers @ right.T)


# --- few outputs ------------------------------------------------------------------------------------------------


def _ask_by_search(queries: CellQueries, scale: Scale) -> Steps[PointHeads | None]:
    """Random steps, as many as ever more heads need, and a search for the fewest heads that explain them."""
    error, width, asked = float(queries.error(scale.cell.points)[0]), queries.width, None
    outputs = min(scale.outputs, SEARCHED)
    for cap in CAPS:
        wanted = int(np.ceil(PER_ENTRY * cap * width * (1 + outputs) / (2 * outputs))) + BESIDES
        count = wanted - (0 if asked is None else len(asked.rows))
        (more,) = yield from queries.ask(STAGE, scale.cell.points, _random(queries, count, scale.size))
        asked = more if asked is None else asked.beside(more)
        sizes = tuple(size for size in SIZES if cap < CAPS[1] or size > cap // 2)
        found = _search(queries, combine(asked, outputs), EXPLAINED * error, sizes, cap)
        if found.explains:
            return fit_point(queries, scale, asked, found.heads.gates)
        if cap == CAPS[0]:
            lasts = np.tile(scale.cell.points[0], (DOUBLES, 1))
            firsts = lasts + queries.random_rows(DOUBLES, scale.size)
            yield from check_token_doubles(queries.signature, STAGE, firsts, lasts, error)
    return None


def _search(queries: CellQueries, asked: GatedQueries, error: float, sizes: tuple[int, ...], cap: int) -> GatedFit:
    """Random starts, and once more for the numbers of heads that so many queries are meant for: starts are cheaper."""
    found = fit_unknown(asked, error, queries.rng, sizes)
    if found.explains:
        return found
    return fit_unknown(asked, error, queries.rng, tuple(size for size in sizes if size <= AGAIN * cap))
