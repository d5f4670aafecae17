"""Attention whose masses are powers of bilinear logits: linear, squared, and positive ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.families import SingleHead
from keyhole.families.parts import PARTS, Attention
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.value import CLEAR, Value
from keyhole.methods.parts.score_forms.readings import (
    Names,
    ask_of_one_output,
    ask_values,
    check_box,
    check_names,
    even_rows,
    finish,
    radii_of_arrays,
    refuse,
)
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.numerics.svd import svd
from keyhole.queries import Measurements, Signature, sequences
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one attention head over its raw tokens, read at the last position, whose weights are in "
    "proportion to powers of bilinear logits",
    "answers are right up to the rounding of their dtype",
)
# Of squares, first tokens lean so far towards the last one that the sign of a logit shows; so many digits are lost.
LEAN = 1e3
# A last token that scores with itself this much less than another does is no unit for scores: another one is taken.
# Its column is known to as many times fewer digits; of squares the sign of a logit must still show.
FAINT, FAINT_SQUARED = 256.0, 32.0
# So many rows say so: one may score next to nothing with the same token.
PROBES = 2
# Where the first token has more than so many times the mass of the last one it is asked for again, with the second.
HEAVY, EVEN = 2 * FAINT, 0.7
MOST_TRIES = 32
# How long tokens are where lengths are powers in the answer, so that an output bias is nothing beside it.
LONG = 2.0**60
# Steps of Newton's method from the solution of a linear system.
NEWTON_STEPS = 4
NO_SCALE = "no token scores with itself as much as others do with it"


@dataclass
class Ratios:
    """Scores xᵀWg over gᵀWg, from queries [x; g] of normalised powers; all that is read is kept."""

    signature: Signature
    value: Value
    squared: bool
    tape: list[tuple[Any, Floats, Floats]] = field(default_factory=list)
    errors: np.random.Generator | None = None
    place: int = 0

    def read(self, stage: str, choice: Any, tokens: Callable[[Any], Asked]) -> Steps[Any]:
        """The choice, and ratios (n,) of rows and last tokens (n, width), the rows taken times factors (n,)."""
        if self.errors is not None:
            choice, ratios, radius = self.tape[self.place]
            self.place += 1
            return choice, ratios + radius * self.errors.standard_normal(ratios.shape)
        rows, lasts, factors = tokens(choice)
        factors = 2 / LEAN + 0 * factors if self.squared else factors
        ratios, radius = yield from self._ask(stage, rows, lasts, factors)
        heavy = np.abs(ratios * factors) > HEAVY
        if not self.squared and np.any(heavy):
            again = yield from self._ask(stage, rows[heavy], lasts[heavy], -EVEN / np.abs(ratios[heavy]))
            ratios[heavy], radius[heavy] = again
        self.tape.append((choice, ratios, radius))
        return choice, ratios

    @property
    def faint(self) -> float:
        """Above this a ratio says that its last token is no unit."""
        return FAINT_SQUARED if self.squared else FAINT

    def _ask(self, stage: str, rows: Floats, lasts: Floats, factors: Floats) -> Steps[tuple[Floats, Floats]]:
        lean = LEAN if self.squared else 0.0
        norm = CLEAR if self.value.has_bias else 1.0  # weights do not depend on it
        lasts = norm * lasts
        firsts = factors[:, None] * (norm * rows + lean * lasts)
        space, vector = self.signature.space, floats(self.value.vector)
        answers: Measurements = yield sequences(stage, space.asarray(np.stack([firsts, lasts], axis=1)))
        seen = floats(answers.values) - float(self.value.bias)
        high, low = firsts @ vector, lasts @ vector
        above, below = seen - low, high - seen
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = above / below
            sizes = np.linalg.norm(firsts, axis=1) + np.linalg.norm(lasts, axis=1)
            error = space.rounding * (np.abs(seen) + sizes * np.linalg.norm(vector)) + answers.radius
            error = error + sizes * float(np.linalg.norm(floats(self.value.radius))) + float(self.value.bias_radius)
            error = error + space.rounding * abs(float(self.value.bias))
            radius = error * (1 / np.abs(below) + np.abs(above) / below**2)
            if self.squared:
                radius = radius / (2 * np.sqrt(np.maximum(odds, 0.0)))
                odds = np.sqrt(odds)
        ratios, radius = odds / factors - lean, radius / np.abs(factors) + space.rounding * lean
        if not np.all(np.isfinite(ratios) & np.isfinite(radius)):
            raise refuse("answers to two tokens are no averages of their values by powers of logits")
        return ratios, radius

    def decide(self, choice: Any) -> Any:
        """A choice that no query is for."""
        if self.errors is None:
            nothing = np.zeros(0)
            self.tape.append((choice, nothing, nothing))
            return choice
        self.place += 1
        return self.tape[self.place - 1][0]

    def replayed(self, rng: np.random.Generator) -> Ratios:
        """The same once more, with errors."""
        return replace(self, errors=rng, place=0)


def ask_power(signature: Signature, rng: np.random.Generator, names: Names) -> Steps[Estimate[SingleHead]]:
    """Score and value of a head whose masses are powers of logits; the scale of the score is not told, or shared."""
    check_names(names, link=("linear", "squared", "relu"), normaliser=("sum", "none", "count"))
    if names["link"] == "relu" and names["normaliser"] == "sum":
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "positive logits over their sum are not read")
    attention = Attention(PARTS["link", names["link"]](), PARTS["normaliser", names["normaliser"]]())
    check_box(signature, tokens=2)
    if names["normaliser"] != "sum":
        return (yield from _ask_sums(signature, rng, attention))
    value = yield from ask_values(signature, rng)

    def ask(plain: Signature, along: Value) -> Steps[tuple[Floats, Floats]]:
        reader = Ratios(plain, along, names["link"] == "squared")
        solve = partial(_solve_ratios, even_rows(plain, along, rng))
        score = yield from solve(reader)

        def again(errors: np.random.Generator) -> dict[str, Floats]:
            other = finish(solve(reader.replayed(errors)))
            return {"score": other * float(np.sign(np.sum(other * score)))}

        radius = radii_of_arrays({"score": score}, again, rng)["score"]
        return score, radius + rotation_radius(plain.space.rounding, score)

    score, radius = yield from ask_of_one_output(signature, value, ask)
    biased = bool(np.any(np.abs(floats(value.bias)) > floats(value.bias_radius)))
    params = SingleHead(signature.space.asarray(score), value.vector, None, value.bias if biased else None, attention)
    wide = SingleHead(signature.space.asarray(radius), value.radius, None, value.bias_radius, attention)
    return _estimate(params, wide, score.shape[0] ** 2 - 1)


def rotation_radius(rounding: float, matrix: Floats) -> Floats:  # (m, n) -> (m, n)
    """What the rotation of rows and columns adds to the errors of entries: some digits of their row and column."""
    rows, columns = np.linalg.norm(matrix, axis=1), np.linalg.norm(matrix, axis=0)
    return np.asarray(rounding * (rows[:, None] + columns))


def _estimate(params: SingleHead, radius: SingleHead, numbers: int) -> Estimate[SingleHead]:
    shown = max(1, int(np.linalg.matrix_rank(floats(params.value_columns))))
    bound = -(-numbers // shown) + params.width + (0 if params.output_bias is None else 1)
    return Estimate(params, radius, bound, assumptions=ASSUMPTIONS, details={"link": params.attention.link.name})


Asked = tuple[Floats, Floats, Floats]  # rows, last tokens and factors


def always(rows: Floats, lasts: Floats, factors: Floats) -> Callable[[Any], Asked]:
    """What is asked for whatever is chosen."""
    return lambda _: (rows, lasts, factors)


def _probed(rows: Floats, lasts: Floats, choice: Integers) -> Asked:
    """Chosen rows beside last tokens."""
    return rows[choice], lasts, np.full(len(lasts), -2.0)


def _solve_ratios(rows: Floats, reader: Ratios) -> Steps[Floats]:
    """The score of norm one, from its columns over what their last tokens score with themselves."""
    width, every = len(rows), np.arange(len(rows))
    if width == 1:
        return np.ones((1, 1))
    lasts, probes, first = yield from _ask_lasts(rows, reader)
    ratios = np.zeros((width, width))
    ratios[probes, every] = first
    # Last tokens are mixtures of rows that score one with themselves: one row of each needs no query.
    mixtures = lasts @ rows.T  # (columns, rows)
    others = np.abs(mixtures)
    others[every, probes] = -1.0
    whole = np.argmax(others, axis=1)
    asked = np.ones((width, width), dtype=bool)
    asked[probes, every] = asked[whole, every] = False
    some, columns = np.nonzero(asked)
    # Negative, so that the values of the two tokens are far apart.
    factors = -2 / np.maximum(np.max(np.abs(first), axis=0), 1.0)[columns]
    if some.size:
        _, found = yield from reader.read("directions", None, always(rows[some], lasts[columns], factors))
        ratios[some, columns] = found
    ratios[whole, every] = (1 - np.sum(mixtures.T * ratios, axis=0)) / mixtures[every, whole]
    units = yield from _ask_units(rows, reader, lasts, ratios)
    score = rows.T @ (ratios * units) @ np.linalg.inv(lasts).T
    return np.asarray(score / np.linalg.norm(score) * (np.sign(np.trace(score)) or 1.0))


def _ask_lasts(rows: Floats, reader: Ratios) -> Steps[tuple[Floats, Integers, Floats]]:
    """Last tokens that score with themselves about as much as rows do with them: probed rows and ratios of these."""
    width, every = len(rows), np.arange(len(rows))
    count = min(PROBES, width - 1)
    probes = (
        np.arange(count)[:, None] + (every < count) * (1 + every)
    ) % width  # (count, columns): not the column's own
    lasts, ratios, open_ = rows, np.zeros((count, width)), every
    for tries in range(1, MOST_TRIES):
        asked, many = np.tile(open_, count), probes[:, open_].ravel()
        _, found = yield from reader.read(
            "directions", None, always(rows[many], lasts[asked], np.full(len(many), -2.0))
        )
        ratios[:, open_] = found.reshape(count, -1)
        open_ = reader.decide(np.flatnonzero(np.max(np.abs(ratios), axis=0) > reader.faint))
        if not open_.size:
            return lasts, probes, ratios
        lasts = lasts.copy()
        # Added, not taken away: rows share the value evenly, and a token without any would tell next to nothing.
        lasts[open_] = rows[open_] + (1 + tries) * rows[(open_ + 1 + tries) % width]
    raise Unrecoverable(Outcome.WRONG_FAMILY, NO_SCALE)


def _ask_units(rows: Floats, reader: Ratios, lasts: Floats, ratios: Floats) -> Steps[Floats]:
    """What last tokens score with themselves, that of the first being one, from sums of it and each of the others."""
    width = len(rows)
    units, others, open_ = np.ones(width), np.arange(1, width), np.arange(1, width)
    stretch = np.ones(width)
    for tries in range(1, MOST_TRIES):
        sums = lasts[:1] + stretch[others, None] * lasts[1:]
        # Of the sum g of two: ratio·(gᵀ·W·g) = xᵀ·W·g, with x the row for which the two sides differ most.
        own = (sums @ rows.T) @ ratios  # (others, columns): gᵀ·column
        one, two = own[:, 0], stretch[others] * own[others - 1, others]
        mine, theirs = ratios[:, :1], stretch[others] * ratios[:, others]  # of each row
        turning = np.abs(theirs * one - mine * two) / (1 + np.abs(theirs) + np.abs(mine))
        place, found = yield from reader.read(
            "lengths",
            np.argmax(turning, axis=0)[open_ - 1],
            partial(_probed, rows, sums[open_ - 1]),
        )
        some = open_ - 1
        units[open_] = (mine[place, 0] - found * one[some]) / (found * two[some] - theirs[place, some])
        open_ = reader.decide(open_[np.abs(found) > reader.faint])
        if not open_.size:
            return units
        stretch[open_] = 1 + tries / 2
    raise Unrecoverable(Outcome.WRONG_FAMILY, NO_SCALE)


# --- masses that nothing normalises ---------------------------------------------------------------------------------


@dataclass
class Products:
    """Products (x·v)·(xᵀWg) of rows x and last tokens g, from queries [x; −x; g]; all that is read is kept."""

    signature: Signature
    attention: Attention
    output_bias: Floats  # (outputs,)
    tape: list[tuple[Floats, Floats]] = field(default_factory=list)  # products (n, outputs) and radii
    errors: np.random.Generator | None = None
    place: int = 0

    def read(self, stage: str, rows: Floats, lasts: Floats) -> Steps[Floats]:
        """The products (n, outputs) of rows and last tokens, (n, width) each."""
        if self.errors is not None:
            products, radius = self.tape[self.place]
            self.place += 1
            return products + radius * self.errors.standard_normal(products.shape)
        space, long = self.signature.space, self.long
        tokens = np.stack([long * rows, -long * rows, lasts / long], axis=1)
        answers: Measurements = yield sequences(stage, space.asarray(tokens))
        seen = answers.by_output - self.output_bias
        factor = long / (3 if self.attention.normaliser.name == "count" else 1)
        factor = factor * (1 if self.attention.link.name == "relu" else 2)
        sizes = np.max(np.abs(seen), axis=1, keepdims=True) + np.sqrt(np.mean(seen**2))
        products = seen / factor
        radius = (4 * space.eps * sizes + answers.radius) / factor
        self.tape.append((products, radius))
        return products

    @property
    def long(self) -> float:
        """How long first tokens are: so that last ones and output biases are nothing beside them."""
        return float(min(LONG, self.signature.space.huge**0.2))

    def replayed(self, rng: np.random.Generator) -> Products:
        """The same once more, with errors."""
        return replace(self, errors=rng, place=0)


def _ask_sums(signature: Signature, rng: np.random.Generator, attention: Attention) -> Steps[Estimate[SingleHead]]:
    """Score and value where masses are weights: a factor of the one against the other is not told."""
    check_box(signature, tokens=3)
    if attention.link.name == "squared":
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "squared masses are not read without a normaliser")
    space, width = signature.space, signature.width
    answers: Measurements = yield sequences("value", space.zeros(1, 1, width))
    plain, bias = answers.values.ndim == 1, answers.by_output[0]
    reader = Products(signature, attention, bias)
    rows, lasts = (floats(random_orthogonal(space, rng, width)) for _ in range(2))
    way = rng.standard_normal(len(bias))
    solve = partial(_solve_products, signature, rows, lasts, way, int(rng.integers(2**32)))
    score, value = yield from solve(reader)
    sign = 1.0
    if attention.link.name == "relu":
        sign = yield from _ask_sign(signature, reader, score, value)

    def again(errors: np.random.Generator) -> dict[str, Floats]:
        one, two = finish(solve(reader.replayed(errors)))
        turn = float(np.sign(np.sum(one * score)))
        return {"score": turn * one, "value": turn * two}

    radii = radii_of_arrays({"score": score, "value": value}, again, rng)
    radii["score"] = radii["score"] + rotation_radius(space.rounding, score)
    radii["value"] = radii["value"] + space.rounding * np.linalg.norm(value, axis=0)
    arrays = [sign * score, sign * value, bias, radii["score"], radii["value"], 4 * space.eps * np.abs(bias)]
    if plain:
        for place in (1, 2, 4, 5):
            arrays[place] = arrays[place][..., 0]
    score, value, bias, *wide = (space.asarray(each) for each in arrays)
    params = SingleHead(score, value, None, bias if np.any(floats(bias)) else None, attention)
    return _estimate(params, SingleHead(wide[0], wide[1], None, wide[2], attention), width**2 - 1)


def _solve_products(
    signature: Signature, rows: Floats, lasts: Floats, way: Floats, seed: int, reader: Products
) -> Steps[tuple[Floats, Floats]]:
    """Score of norm one and value (width, outputs)."""
    width, two = len(rows), min(2, len(rows))
    both = yield from reader.read("directions", np.repeat(rows, two, axis=0), np.tile(lasts[:two], (width, 1)))
    both = both.reshape(width, two, -1)
    start = both @ way  # (width, 2)
    overlaps = np.ones(width)
    if width > 1:
        sums = yield from reader.read(
            "lengths", np.repeat(rows[:1] + rows[1:], 2, axis=0), np.tile(lasts[:2], (width - 1, 1))
        )
        rest = (sums @ way).reshape(-1, 2) - start[0] - start[1:]
        overlaps[1:] = _ratios_of_sums(start[0], start[1:], rest)
    vector = rows.T @ overlaps
    columns = np.zeros((width, width))
    columns[:, :two] = rows.T @ (start / overlaps[:, None])
    # For the other columns rows that share the value evenly.
    even = _even(signature, vector, seed)
    others = width - two
    if others:
        found = yield from reader.read("directions", np.repeat(even, others, axis=0), np.tile(lasts[two:], (width, 1)))
        shares = (found @ way).reshape(width, others) / (even @ vector)[:, None]
        columns[:, two:] = even.T @ shares
    score = columns @ lasts
    score = score / np.linalg.norm(score) * (np.sign(np.trace(score)) or 1.0)
    # All readings of a row are its value times its scores.
    with_lasts = rows @ score @ lasts[:two].T
    seen, weights = np.sum(with_lasts[:, :, None] * both, axis=1), np.sum(with_lasts**2, axis=1)
    value = rows.T @ (seen / weights[:, None])
    if others:
        with_lasts = even @ score @ lasts[two:].T
        seen = np.sum(with_lasts[:, :, None] * found.reshape(width, others, -1), axis=1)
        value = even.T @ (seen / np.sum(with_lasts**2, axis=1)[:, None])
    return score, np.asarray(value)


def _ratios_of_sums(first: Floats, others: Floats, rest: Floats) -> Floats:  # (2,), (n, 2), (n, 2) -> (n,)
    """The ratio ρ of the value of each other row to that of the first: others/ρ + first·ρ = rest, twice."""
    system = np.stack([others, np.broadcast_to(first, others.shape)], axis=-1)
    ratio = np.linalg.solve(system, rest[:, :, None])[:, 1, 0]
    for _ in range(NEWTON_STEPS):
        miss = others / ratio[:, None] + first * ratio[:, None] - rest
        slope = first - others / ratio[:, None] ** 2
        ratio = ratio - np.sum(slope * miss, axis=1) / np.sum(slope**2, axis=1)
    return np.asarray(ratio)


def _even(signature: Signature, vector: Floats, seed: int) -> Floats:
    value = Value(signature.space.asarray(vector), vector, vector[0], vector[0])
    return even_rows(signature, value, np.random.default_rng(seed))


def _ask_sign(signature: Signature, reader: Products, score: Floats, value: Floats) -> Steps[float]:
    """Whether score and value are both of the sign that they were taken to be, from one token alone."""
    bases, _, _ = svd(value)
    token = np.linalg.eigh((score + score.T) / 2)[1]
    places = np.abs(np.einsum("di,de,ei->i", token, score, token) * np.linalg.norm(token.T @ bases, axis=1))
    chosen = token[:, int(np.argmax(places))]
    logit = float(chosen @ score @ chosen)
    long = reader.long
    answers: Measurements = yield sequences("value", signature.space.asarray(long * chosen[None, None, :]))
    seen = float(np.max(np.abs(answers.by_output - reader.output_bias)))
    expected = float(np.max(np.abs(chosen @ value))) * abs(logit) * long**3
    return 1.0 if (seen > expected / 2) == (logit > 0) else -1.0
