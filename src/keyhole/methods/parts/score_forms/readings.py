"""Logits between two tokens, kept on a tape, so that what is solved from them can be solved again with errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keyhole.arrays import Booleans, Floats, floats
from keyhole.families import FormHead
from keyhole.families.forms import Form
from keyhole.methods.base import Estimate, Found, Steps, Unrecoverable
from keyhole.methods.forms.outputs import ask_along, choose_outputs, most_informative
from keyhole.methods.forms.reader import PairValues
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.forms.value import Value, check_length, check_nonzero
from keyhole.numerics.logit import logit_with_radius
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal
from keyhole.queries import Measurements, Signature, sequences
from keyhole.recovery import Outcome

# A logit above this is asked for again with the first token turned round, where that makes it small: a weight close to
# one shows e^logit times less of it.
LARGEST = 3.0
# A last token of a logit below this has its opposite before it, so that it does not leave all the weight to others.
LOW = -0.5
# Replays behind the radii: their root mean square is known to a fifth or so ...
REPLAYS = 12
# ... which this makes up for.
SPREAD = 1.5
# One-token queries and last tokens are of this norm: what a norm adds to a sum of squares is nothing beside it.
LONG = 2.0**60

Tokens = Callable[[Any], Floats]  # from a choice: (n, width)


@dataclass(frozen=True)
class Reading:
    """Logits that were read, and what the tokens were chosen by."""

    choice: Any
    signs: Floats  # (n,): −1 where the first token was turned round
    anchored: Booleans  # (n,): whether the last token's opposite stood between the two
    logits: Floats  # (n,): log ω/(1 − ω) of the weight ω of the first token
    radius: Floats  # (n,)

    def above(self, own: Floats) -> Floats:  # (n,) -> (n,)
        """Logits of the first tokens themselves, not turned round, given those of the last ones of themselves."""
        anchors = np.where(self.anchored, np.logaddexp(own, -own), own)
        return np.asarray(self.signs * (self.logits + anchors))

    def own(self) -> Floats:  # (n,)
        """Logits of last tokens of themselves, first tokens being their opposites, or themselves if turned round."""
        # [−g; g] has the odds e^(−2s), [g; −g; g] e^(2s)/(1 + e^(2s)).
        inside = np.minimum(self.logits, -np.finfo(np.float64).eps)
        with np.errstate(divide="ignore"):
            turned = np.where(self.anchored, inside - np.log(-np.expm1(inside)), 0.0) / 2
        return np.asarray(np.where(self.anchored, turned, -self.logits / 2))


@dataclass
class PairLogits:
    """Reads logits of first tokens beside last ones; all that is read is kept on a tape.

    `choice` is what tokens were chosen by: a replay returns that of the first run, since with other errors another
    choice would be made, whose answer is not known.
    """

    signature: Signature
    value: Value  # of one output
    tape: list[Reading] = field(default_factory=list)
    errors: np.random.Generator | None = None  # of a replay
    place: int = 0

    def decide(self, choice: Any) -> Any:
        """A choice that no query is for."""
        if self.errors is None:
            nothing = np.zeros(0)
            self.tape.append(Reading(choice, nothing, nothing > 0, nothing, nothing))
            return choice
        return self._replay().choice

    def read(self, stage: str, choice: Any, first: Tokens, last: Tokens, own: Floats | None = None) -> Steps[Reading]:
        """Queries [first; last] of tokens (n, width) that the choice determines.

        A first token that takes nearly all the weight is turned round. `own` (n,) are logits of last tokens of
        themselves where they are known: where these are low, the opposite of the last token stands between the two.
        """
        if self.errors is not None:
            return self._replay()
        tokens, ends = first(choice), last(choice)
        shares = np.full(len(tokens), np.nan)
        if own is not None:
            with np.errstate(over="ignore"):
                shares = np.where(own < LOW, 1 / (1 + np.exp(2 * own)), np.nan)
        logits, radius = yield from self._ask(stage, tokens, ends, shares)
        signs = np.ones(len(logits))
        (high,) = np.nonzero((logits > LARGEST) | ~np.isfinite(radius))
        if high.size:
            other, other_radius = yield from self._ask(stage, -tokens[high], ends[high], shares[high])
            better = other_radius < radius[high]
            some = high[better]
            logits[some], radius[some], signs[some] = other[better], other_radius[better], -1.0
        return self._keep(Reading(choice, signs, ~np.isnan(shares), logits, radius))

    def read_own(self, stage: str, tokens: Floats, ends: Floats) -> Steps[Reading]:
        """Queries [−token; end] of tokens (n, width) of one direction, or [token; −end; end] where that is low."""
        if self.errors is not None:
            return self._replay()
        none = np.full(len(tokens), np.nan)
        logits, radius = yield from self._ask(stage, -tokens, ends, none)
        anchored = (logits > LARGEST) | ~np.isfinite(radius)
        (high,) = np.nonzero(anchored)
        if high.size:
            with np.errstate(over="ignore"):
                shares = 1 / (1 + np.exp(-np.where(np.isfinite(logits), logits, np.inf)[high]))
            logits[high], radius[high] = yield from self._ask(stage, tokens[high], ends[high], shares)
        return self._keep(Reading(None, np.ones(len(logits)), anchored, logits, radius))

    def _keep(self, reading: Reading) -> Reading:
        if not np.all(np.isfinite(reading.radius)):
            raise Unrecoverable(Outcome.SATURATED, "attention weights stay at 0 or 1 whatever the directions of tokens")
        self.tape.append(reading)
        return reading

    def _replay(self) -> Reading:
        assert self.errors is not None
        kept = self.tape[self.place]
        self.place += 1
        return replace(kept, logits=kept.logits + kept.radius * self.errors.standard_normal(kept.logits.shape))

    def _ask(self, stage: str, first: Floats, last: Floats, shares: Floats) -> Steps[tuple[Floats, Floats]]:
        """Logits and radii; `shares` is nan, or of the weight of last tokens and their opposites that of the latter."""
        logits, radius = np.zeros(len(first)), np.zeros(len(first))
        for anchored in (False, True):
            (some,) = np.nonzero(~np.isnan(shares) if anchored else np.isnan(shares))
            if some.size:
                between = shares[some] if anchored else np.zeros(some.size)
                found = yield from self._ask_alike(stage, first[some], last[some], between, anchored)
                logits[some], radius[some] = found
        return logits, radius

    def _ask_alike(
        self, stage: str, first: Floats, last: Floats, shares: Floats, anchored: bool
    ) -> Steps[tuple[Floats, Floats]]:
        space = self.signature.space
        values, vector = PairValues(self.signature, self.value), floats(self.value.vector)
        places = [first, -last, last] if anchored else [first, last]
        answers: Measurements = yield sequences(stage, space.asarray(np.stack(places, axis=1)))
        sizes = [values.error * np.linalg.norm(each, axis=1) for each in (first, last)]
        high, low = first @ vector, (1 - 2 * shares) * (last @ vector)
        found = floats(answers.values) - float(self.value.bias)
        arrays = (space.asarray(each) for each in (found, low, high, sizes[1], sizes[0]))
        logits, radius = logit_with_radius(space, *arrays, values.noise(answers.radius))
        return np.array(floats(logits)), np.array(floats(radius))

    @property
    def typical(self) -> float:
        """The root mean square of all radii that were read."""
        squares = np.concatenate([each.radius**2 for each in self.tape])
        return float(np.sqrt(np.mean(squares))) if squares.size else 0.0

    def replayed(self, rng: np.random.Generator) -> PairLogits:
        """A reader that gives what was read once more, with errors of the size of its radii."""
        return replace(self, errors=rng, place=0)


@dataclass(frozen=True)
class Norms:
    """How long tokens are: first ones so that last ones add nothing, both within what the box takes."""

    first: float
    last: float

    @classmethod
    def of(cls, signature: Signature, value: Value) -> Norms:
        """The norms for a signature; a first token may be a sum of three times this norm."""
        size = float(np.linalg.norm(floats(value.vector)))
        longest = float(min(signature.space.huge**0.2, 2.0**-24 * signature.space.huge / max(1.0, size)))
        if signature.max_norm is not None:
            longest = min(longest, signature.norm_limit)
        first = floor_power(longest / 4)
        last = min(LONG, first**0.5) if first > 1 else first / 16
        return cls(first, last)


def ask_values(signature: Signature, rng: np.random.Generator) -> Steps[Value]:
    """The value and the output bias from d + 1 one-token queries, none of the zero token, which may have no key."""
    check_length(signature)
    space, width = signature.space, signature.width
    norm = 2.0**20 if signature.max_norm is None else floor_power(signature.norm_limit)
    basis = floats(random_orthogonal(space, rng, width))
    tokens = norm * np.concatenate([basis, -basis[:1]])
    answers: Measurements = yield sequences("value", space.asarray(tokens[:, None, :]))
    found = answers.by_output
    bias = (found[0] + found[-1]) / 2
    rounding = 4 * space.eps * (np.abs(found).max(axis=0) + np.abs(bias))
    bias_radius = rounding + answers.radius
    shows = np.abs(bias) > bias_radius
    bias_radius = np.where(shows, bias_radius, bias_radius + np.abs(bias))
    bias = np.where(shows, bias, 0.0)
    readings = (found[:-1] - bias) / norm
    vector = basis.T @ readings
    sizes = np.linalg.norm(vector, axis=0)
    radius = space.rounding * (np.abs(vector) + sizes / width**0.5) + (answers.radius + bias_radius) / norm
    plain = answers.values.ndim == 1
    vector, radius, bias, bias_radius = (
        space.asarray(each[..., 0] if plain else each) for each in (vector, radius, bias, bias_radius)
    )
    value = Value(vector, radius, bias, bias_radius)
    check_nonzero(signature, value)
    return value


def ask_of_one_output(
    signature: Signature, value: Value, ask: Callable[[Signature, Value], Steps[Found]]
) -> Steps[Found]:
    """Run a generator for heads of one output: on the most informative combination where there are several."""
    if value.vector.ndim == 1:
        return (yield from ask(signature, value))
    outputs = choose_outputs(signature.space, value.vector, even=True, radius=value.radius)
    return (yield from ask_along(signature, value, most_informative(outputs), ask))


def even_rows(signature: Signature, value: Value, rng: np.random.Generator) -> Floats:  # (width, width)
    """Orthonormal rows that share the value evenly."""
    space = signature.space
    return floats(equal_overlap(space, random_orthogonal(space, rng, signature.width), value.vector, rng))


def solved_again(
    form: Form, reader: PairLogits, solve: Callable[[PairLogits], Steps[Form]], rng: np.random.Generator
) -> dict[str, Floats]:
    """Radii of the arrays of a form: how far they move when it is solved again from readings with errors."""
    return radii_of_solutions(form, lambda errors: _finish(solve(reader.replayed(errors))), rng)


def radii_of_solutions(
    form: Form, again: Callable[[np.random.Generator], Form], rng: np.random.Generator
) -> dict[str, Floats]:
    """How far the arrays of a form move when it is solved again with random errors; infinite where it cannot be."""
    base = form.arrays()
    squares = {name: np.zeros(np.shape(array)) for name, array in base.items()}
    for _ in range(REPLAYS):
        try:
            moved = again(rng).aligned_to(form).arrays()
        except (Unrecoverable, np.linalg.LinAlgError):
            return {name: np.full(np.shape(array), np.inf) for name, array in base.items()}
        for name, array in base.items():
            squares[name] += (moved[name] - array) ** 2 / REPLAYS
    return {name: SPREAD * np.sqrt(square) for name, square in squares.items()}


def _finish(steps: Steps[Found]) -> Found:
    """The result of a generator that asks nothing."""
    try:
        next(steps)
    except StopIteration as stop:
        found: Found = stop.value
        return found
    raise AssertionError  # a replay has all answers


def form_estimate(
    signature: Signature,
    value: Value,
    form: Form,
    radii: dict[str, Floats],
    assumptions: tuple[str, ...],
    **details: Any,
) -> Estimate[FormHead]:
    """The head of a form and a value, without an output bias that was not detected."""
    space, known = signature.space, form.arrays()
    biased = bool(np.any(np.abs(floats(value.bias)) > floats(value.bias_radius)))
    params = FormHead(
        form.with_arrays({name: space.asarray(array) for name, array in known.items()}),
        value.vector,
        value.bias if biased else None,
    )
    # Kept in the dtype of the oracle, numbers are rounded to it.
    kept = {name: np.asarray(radii[name]) + space.spacing * np.abs(known[name]) for name in known}
    made = form.with_arrays({name: space.asarray(array) for name, array in kept.items()})
    hidden = bool(np.any(floats(value.bias_radius) > 0))
    radius = FormHead(made, value.radius, value.bias_radius if hidden else None)
    details = {"form": form.name, "output_bias": biased, **details}
    return Estimate(params, radius, params.counting_bound, assumptions=assumptions, details=details)


def refuse(what: str) -> Unrecoverable:
    """The outcome of a box that does not answer as a form does."""
    return Unrecoverable(Outcome.WRONG_FAMILY, what)
