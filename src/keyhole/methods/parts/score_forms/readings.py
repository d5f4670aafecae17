"""Logits between two tokens, kept on a tape, so that what is solved from them can be solved again with errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import Booleans, Floats, floats
from keyhole.families import FormHead
from keyhole.families.forms import Form
from keyhole.families.parts import SOFTMAX, Attention
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
# What is said of a logit of which nothing can be said.
LOST = 1e3
# Replays behind the radii: their root mean square is known to a fifth or so ...
REPLAYS = 12
# ... which this makes up for.
SPREAD = 1.5
# One-token queries and last tokens are of this norm: what a norm adds to a sum of squares is nothing beside it.
LONG = 2.0**60

Names = Mapping[str, str]  # kind of a part of attention -> its name
Tokens = Callable[[Any], Floats]  # from a choice: (n, width)


@dataclass(frozen=True)
class Reading:
    """Logits that were read, and what the tokens were chosen by."""

    choice: Any
    anchored: Booleans  # (n,): whether the last token's opposite stood between the two
    signs: Floats  # (n,): −1 where the first token was turned round
    logits: Floats  # (n,): log ω/(1 − ω) of the weight ω of the first token
    radius: Floats  # (n,)

    def with_errors(self, rng: np.random.Generator) -> Reading:
        """The same with random errors of the size of the radii."""
        return replace(self, logits=self.logits + self.radius * rng.standard_normal(self.logits.shape))

    def above(self, own: Floats) -> Floats:  # (n,) -> (n,)
        """Logits of the first tokens themselves, not turned round, given those of the last ones of themselves."""
        anchors = np.where(self.anchored, np.logaddexp(own, -own), own)
        return np.asarray(self.signs * (self.logits + anchors))

    def of_itself(self) -> tuple[Floats, Floats]:  # (n,), (n,)
        """Logits of last tokens of themselves, first tokens being their opposites: twice, as `above` wants them."""
        # [−g; g] has the odds e^(−2s), [g; −g; g] e^(2s)/(1 + e^(2s)).
        inside = np.minimum(self.logits, -np.finfo(np.float64).eps)
        with np.errstate(divide="ignore"):
            turned = np.where(self.anchored, inside - np.log(-np.expm1(inside)), 0.0) / 2
        found = np.asarray(np.where(self.anchored, turned, -self.logits / 2))
        return found, found


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
            self.tape.append(Reading(choice, nothing > 0, nothing, nothing, nothing))
            return choice
        return self._replay().choice

    def read_any(self, stage: str, choice: Any, first: Tokens, last: Tokens) -> Steps[Reading]:
        """Queries as `read` asks them; a logit that is too large to be told is as large as no other."""
        if self.errors is not None:
            return self._replay()
        tokens = first(choice)
        none = np.full(len(tokens), np.nan)
        signs, logits, radius = yield from _ask_turned(partial(self._ask, stage), tokens, last(choice), none)
        lost = ~np.isfinite(radius)
        logits, radius = np.where(lost, LOST, logits), np.where(lost, 0.0, radius)
        return self._keep(Reading(choice, ~np.isnan(none), signs, logits, radius))

    def read(
        self,
        stage: str,
        choice: Any,
        first: Tokens,
        last: Tokens,
        own: Floats | None = None,
        between: int = 0,
    ) -> Steps[Reading]:
        """Queries [first; last] of tokens (n, width) that the choice determines.

        A first token that takes nearly all the weight is turned round. `own` (n,) are logits of last tokens of
        themselves where they are known: where these are low, the opposite of the last token stands between the two.
        """
        if self.errors is not None:
            return self._replay()
        assert between == 0  # for readers that know zero tokens
        tokens, ends = first(choice), last(choice)
        shares = np.full(len(tokens), np.nan)
        if own is not None and self._takes_three:
            with np.errstate(over="ignore"):
                shares = np.where(own < LOW, 1 / (1 + np.exp(2 * own)), np.nan)
        ask = partial(self._ask, stage)
        return self._keep(Reading(choice, ~np.isnan(shares), *(yield from _ask_turned(ask, tokens, ends, shares))))

    def read_own(self, stage: str, tokens: Floats, ends: Floats) -> Steps[Reading]:
        """Queries [−token; end] of tokens (n, width) of one direction, or [token; −end; end] where that is low."""
        if self.errors is not None:
            return self._replay()
        none = np.full(len(tokens), np.nan)
        logits, radius = yield from self._ask(stage, -tokens, ends, none)
        anchored = ((logits > LARGEST) | ~np.isfinite(radius)) & self._takes_three
        (high,) = np.nonzero(anchored)
        if high.size:
            with np.errstate(over="ignore"):
                shares = 1 / (1 + np.exp(-np.where(np.isfinite(logits), logits, np.inf)[high]))
            logits[high], radius[high] = yield from self._ask(stage, tokens[high], ends[high], shares)
        return self._keep(Reading(None, anchored, np.ones(len(logits)), logits, radius))

    def _keep(self, reading: Reading) -> Reading:
        if not np.all(np.isfinite(reading.radius)):
            if self.signature.noise.kind != "exact":
                raise Unrecoverable(Outcome.TOO_NOISY, "errors of answers hide the weights of two tokens")
            raise Unrecoverable(Outcome.SATURATED, "attention weights stay at 0 or 1 whatever the directions of tokens")
        self.tape.append(reading)
        return reading

    def _replay(self) -> Reading:
        assert self.errors is not None
        kept = self.tape[self.place]
        self.place += 1
        return kept.with_errors(self.errors)

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

    def ask_pairs(self, stage: str, first: Floats, last: Floats) -> Steps[tuple[Floats, Floats]]:
        """Logits and radii of queries [first; last], which are not kept."""
        return (yield from self._ask(stage, first, last, np.full(len(first), np.nan)))

    def _ask_alike(
        self, stage: str, first: Floats, last: Floats, shares: Floats, anchored: bool
    ) -> Steps[tuple[Floats, Floats]]:
        places = [first, -last, last] if anchored else [first, last]
        return (yield from self._ask_places(stage, places, first, last, 1 - 2 * shares))

    @property
    def _takes_three(self) -> bool:
        return (self.signature.max_length or 3) > 2

    @property
    def _vector(self) -> Floats:
        return floats(self.value.vector)

    def _ask_places(
        self, stage: str, places: list[Floats], first: Floats, last: Floats, shares: Floats, unknown: float = 0.0
    ) -> Steps[tuple[Floats, Floats]]:
        """Logits and radii of first tokens; all others have `shares` of the value of last ones, within `unknown`."""
        space = self.signature.space
        values, vector = PairValues(self.signature, self.value), self._vector
        answers: Measurements = yield sequences(stage, space.asarray(np.stack(places, axis=1)))
        sizes = [values.error * np.linalg.norm(each, axis=1) for each in (first, last)]
        sizes[1] = sizes[1] + unknown
        high, low = first @ vector, shares * (last @ vector)
        found = floats(answers.values) - float(self.value.bias)
        seen, lowest, highest, low_radius, high_radius = map(space.asarray, (found, low, high, sizes[1], sizes[0]))
        noise = values.noise(answers.radius)
        logits, radius = logit_with_radius(space, seen, lowest, highest, low_radius, high_radius, noise)
        return np.array(floats(logits)), np.array(floats(radius))

    @property
    def typical(self) -> float:
        """The root mean square of all radii that were read."""
        squares = np.concatenate([each.radius**2 for each in self.tape])
        return float(np.sqrt(np.mean(squares))) if squares.size else 0.0

    def replayed(self, rng: np.random.Generator) -> PairLogits:
        """A reader that gives what was read once more, with errors of the size of its radii."""
        return replace(self, errors=rng, place=0)


def always(tokens: Floats) -> Tokens:
    """Tokens that no choice changes."""
    return lambda _: tokens


def _ask_turned(
    ask: Callable[[Floats, Floats, Floats], Steps[tuple[Floats, Floats]]], first: Floats, last: Floats, shares: Floats
) -> Steps[tuple[Floats, Floats, Floats]]:
    """Signs, logits and radii: first tokens that take nearly all the weight are turned round."""
    logits, radius = yield from ask(first, last, shares)
    signs = np.ones(len(logits))
    (high,) = np.nonzero((logits > LARGEST) | ~np.isfinite(radius))
    if high.size:
        other, other_radius = yield from ask(-first[high], last[high], shares[high])
        better = other_radius < radius[high]
        some = high[better]
        logits[some], radius[some], signs[some] = other[better], other_radius[better], -1.0
    return signs, logits, radius


@dataclass(frozen=True)
class PaddedReading(Reading):
    """Logits that were read beside zero tokens, whose logits are zero."""

    zeros: int = 1
    turned: Floats | None = None  # (n,): the same of first tokens turned round

    def with_errors(self, rng: np.random.Generator) -> Reading:
        """The same with random errors of the size of the radii."""
        if self.turned is None:
            return super().with_errors(rng)
        one, two = (self.radius * rng.standard_normal(self.radius.shape) for _ in range(2))
        return replace(self, logits=self.logits + one, turned=self.turned + two)

    def above(self, own: Floats) -> Floats:  # (n,) -> (n,)
        """Logits of the first tokens, given the masses of the last ones."""
        return np.asarray(self.signs * (self.logits + np.log(self.zeros + own)))

    def of_itself(self) -> tuple[Floats, Floats]:  # (n,), (n,)
        """Logits of first tokens, and the masses of the last ones."""
        assert self.turned is not None
        return (self.logits - self.turned) / 2, np.exp(-(self.logits + self.turned) / 2) - self.zeros


@dataclass
class PaddedLogits(PairLogits):
    """Reads logits where they depend on distances: a zero token before the two, or several between them.

    Beside a zero token no first token has all the weight because the last one has none.
    """

    def read(
        self,
        stage: str,
        choice: Any,
        first: Tokens,
        last: Tokens,
        own: Floats | None = None,  # noqa: ARG002
        between: int = 0,
    ) -> Steps[Reading]:
        """Queries [0; first; last], or [first; 0; …; 0; last] of tokens (n, width) that the choice determines."""
        if self.errors is not None:
            return self._replay()
        tokens, ends = first(choice), last(choice)
        none = np.zeros(len(tokens), dtype=bool)
        ask = partial(self._ask_padded, stage, between)
        signs, logits, radius = yield from _ask_turned(ask, tokens, ends, np.zeros(len(tokens)))
        return self._keep(PaddedReading(choice, none, signs, logits, radius, max(1, between)))

    def read_own(self, stage: str, tokens: Floats, ends: Floats) -> Steps[Reading]:
        """Queries [0; token; end] and [0; −token; end] of tokens (n, width)."""
        if self.errors is not None:
            return self._replay()
        count, shares = len(tokens), np.zeros(2 * len(tokens))
        both, last = np.concatenate([tokens, -tokens]), np.concatenate([ends, ends])
        logits, radius = yield from self._ask_padded(stage, 0, both, last, shares)
        none, ones = np.zeros(count, dtype=bool), np.ones(count)
        # Errors of either sign are those of both.
        radius = np.hypot(radius[:count], radius[count:])
        return self._keep(PaddedReading(None, none, ones, logits[:count], radius, 1, logits[count:]))

    def _ask_padded(
        self, stage: str, between: int, first: Floats, last: Floats, shares: Floats
    ) -> Steps[tuple[Floats, Floats]]:
        nothing = [np.zeros_like(first)]
        places = [first, *(between * nothing), last] if between else [*nothing, first, last]
        # The last token and the zeros share the rest: its part of it is not known, but its value is next to nothing.
        return (
            yield from self._ask_places(stage, places, first, last, shares, float(np.max(np.abs(last @ self._vector))))
        )


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


def ask_values(signature: Signature, rng: np.random.Generator, norm: float = 2.0**20) -> Steps[Value]:
    """The value and the output bias from d + 1 one-token queries, none of the zero token, which may have no key."""
    check_length(signature)
    space, width = signature.space, signature.width
    if signature.max_norm is not None:
        norm = min(norm, floor_power(signature.norm_limit))
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
    noise = max(answers.radius, signature.noise.spread)
    if signature.noise.may_conspire:
        noise = answers.radius * np.sum(np.abs(basis), axis=0)[:, None]
    noise = noise + bias_radius * np.abs(np.sum(basis, axis=0))[:, None]  # off alike in all answers
    radius = space.rounding * (np.abs(vector) + sizes / width**0.5) + noise / norm
    plain = answers.values.ndim == 1
    vector, radius, bias, bias_radius = (
        space.asarray(each[..., 0] if plain else each) for each in (vector, radius, bias, bias_radius)
    )
    value = Value(vector, radius, bias, bias_radius)
    check_nonzero(signature, value)
    return value


def check_names(names: Names, **read: tuple[str, ...]) -> None:
    """Unrecoverable for parts beside which a form is not read: of every kind those of a softmax are, or those given."""
    usual = {"link": ("exp",), "normaliser": ("sum",), "position_bias": ("none",), "length_law": ("none",), **read}
    for kind, known in usual.items():
        if names.get(kind, known[0]) not in known:
            what = f"the {kind.replace('_', ' ')} {names[kind]!r}"
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, f"logits of this form are not read beside {what}")


def check_box(signature: Signature, *, tokens: int, free: bool = True) -> None:
    """Unrecoverable for a box that takes too few tokens, or only such within a norm where they must be `free`."""
    if (signature.max_length or tokens) < tokens:
        message = f"this form is read from sequences of {tokens} tokens: allow them (max_length)"
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, message)
    if free and signature.max_norm is not None:
        message = "this form is read from tokens of any length, and not within a norm: leave max_norm= out if it may be"
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, message)


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
    return radii_of_solutions(form, lambda errors: finish(solve(reader.replayed(errors))), rng)


def radii_of_solutions(
    form: Form, again: Callable[[np.random.Generator], Form], rng: np.random.Generator
) -> dict[str, Floats]:
    """How far the arrays of a form move when it is solved again with random errors; infinite where it cannot be."""
    return radii_of_arrays(form.arrays(), lambda errors: again(errors).aligned_to(form).arrays(), rng)


def radii_of_arrays(
    base: dict[str, Floats], again: Callable[[np.random.Generator], dict[str, Floats]], rng: np.random.Generator
) -> dict[str, Floats]:
    """How far arrays move when they are solved for again with random errors; infinite where they cannot be."""
    squares = {name: np.zeros(np.shape(array)) for name, array in base.items()}
    for _ in range(REPLAYS):
        try:
            moved = again(rng)
        except (Unrecoverable, np.linalg.LinAlgError):
            return {name: np.full(np.shape(array), np.inf) for name, array in base.items()}
        for name, array in base.items():
            squares[name] += (moved[name] - array) ** 2 / REPLAYS
    return {name: SPREAD * np.sqrt(square) for name, square in squares.items()}


def finish(steps: Steps[Found]) -> Found:
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
    attention: Attention = SOFTMAX,
    attention_radius: Attention = SOFTMAX,
    **details: Any,
) -> Estimate[FormHead]:
    """The head of a form and a value, without an output bias that was not detected."""
    space, known = signature.space, form.arrays()
    biased = bool(np.any(np.abs(floats(value.bias)) > floats(value.bias_radius)))
    params = FormHead(
        form.with_arrays({name: space.asarray(array) for name, array in known.items()}),
        value.vector,
        value.bias if biased else None,
        attention,
    )
    # Kept in the dtype of the oracle, numbers are rounded to it.
    kept = {name: np.asarray(radii[name]) + space.spacing * np.abs(known[name]) for name in known}
    made = form.with_arrays({name: space.asarray(array) for name, array in kept.items()})
    hidden = bool(np.any(floats(value.bias_radius) > 0))
    radius = FormHead(made, value.radius, value.bias_radius if hidden else None, attention_radius)
    details = {"form": form.name, "output_bias": biased, **details}
    return Estimate(params, radius, params.counting_bound, assumptions=assumptions, details=details)


def refuse(what: str) -> Unrecoverable:
    """The outcome of a box that does not answer as a form does."""
    return Unrecoverable(Outcome.WRONG_FAMILY, what)
