"""One head of any parts from tokens of bounded norm: rough forms first, then least squares on all answers at once.

Where tokens may not be long, the last one counts too, with its value and its own score, and nothing saturates. So
what is read of single queries is rough, and the head's own forward map takes it from there.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import SingleHead
from keyhole.families.parts import PARTS, Attention
from keyhole.methods.base import Found, Steps, Unrecoverable, adapt
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.inverse import AT_ZERO, COMPLETE, QUOTIENTS, Inverse, Number
from keyhole.methods.parts.padded import SHORT as PADDED_SHORT
from keyhole.methods.parts.padded import PaddedPair, ask_factors, ask_most_kept
from keyhole.methods.parts.saturation import ask_ends_of_bias, find_constants
from keyhole.methods.parts.zero_scores import (
    Probe,
    ask_table,
    ask_values,
    ask_window,
    ask_zero_weight,
    bias_of_weight,
    lone_weight,
)
from keyhole.numerics.domain import LONGEST
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal
from keyhole.numerics.svd import svd
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# The last token is shorter than the bound by between these, so that logits are about AIM and its own score less.
SHORT, LONG = 2.0**-12, 2.0**-2
FIRST_SHORT, AIM = 2.0**-8, 0.1
# Queries at the bound, for every constant and besides: constants show in how logits bend.
FULL_LENGTH, FULL_LENGTH_EACH = 12, 4
SHORTEST_LAST = 4.0
# Where the search for constants starts that only show in how logits bend; it goes on from the best.
STARTS: dict[str, tuple[float, ...]] = {
    "link.cap": (0.5, 1.5, 5.0, 20.0, 80.0),
    "link.bias": (-3.0, -1.0, 1.0, 3.0),
    "normaliser.energy": (-1.5, 0.0, 1.5),
}
MOST_STEPS, MOST_DAMPING = 150, 1e8
# Least squares takes the cube of the number of unknowns; wider heads would take minutes.
WIDEST = 40
# A token this much shorter than the bound has no score of its own that is worth mentioning.
LONE = 2.0**-12
# Behind noise it shall be seen, and the fit takes it from there.
LONE_BEHIND_NOISE = 2.0**-4
# Beside a score bias forms are read of tokens shorter than the bound by this, so that they are nearly linear in it;
# those shorter by the other have no score.
SMALL, FAINT = 2.0**-4, 2.0**-20
# So far below the bound weights are linear in logits, and answers still differ from an output bias.
NEARLY_LINEAR = 2.0**-16
SMALLEST = 1e-300
STEP = 1e-4  # of logits, for slopes
FAR_ABOVE = 2.0  # a mean square of residuals this many times as large as errors are is none of a head
BEYOND = "logits of tokens of this norm are beyond what weights show"
CONVERGED = 1e-3  # of a radius: a step shorter than that changes nothing that is told


@final
@dataclass
class Record:
    """All answers so far, beside their tokens."""

    signature: Signature
    tokens: list[Floats] = field(default_factory=list)  # each (count, length, width)
    answers: list[Floats] = field(default_factory=list)

    @property
    def so_far(self) -> Record:
        """A copy that later answers are not added to."""
        return Record(self.signature, list(self.tokens), list(self.answers))

    def keep(self, steps: Steps[Found]) -> Steps[Found]:
        """Run a generator and keep its answers."""
        return adapt(steps, incoming=self._note)

    def _note(self, plan: Plan, measured: Measurements) -> Measurements:
        tokens = plan.tokens(0, plan.count, self.signature.space, self.signature.width)
        self.tokens.append(floats(tokens) + 0.0)
        self.answers.append(floats(measured.values) + 0.0)
        return measured


@dataclass(frozen=True)
class Fit:
    """A head, how well it explains the answers, and radii of its arrays."""

    head: SingleHead
    cost: float  # mean square of residuals over what answers are uncertain by
    radius: SingleHead


def ask_bounded(
    signature: Signature, rng: np.random.Generator, names: dict[str, str], biased: bool = False
) -> Steps[tuple[Fit, Value, dict[str, int | str]]]:
    """The head, and what was found of its parts besides; with a score bias where there is one."""
    record, paired = Record(signature), names["normaliser"] not in COMPLETE
    faint = signature.with_changes(max_norm=signature.norm_limit * SMALL * FAINT) if biased and paired else signature
    value = yield from record.keep(ask_values(faint, paired))
    if value.vector.ndim == 2:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "several outputs beside a norm bound are not read of other parts than a softmax's: ask one output",
        )
    if signature.width > WIDEST:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            f"heads of other parts than a softmax's are read beside a norm bound up to width {WIDEST}",
        )
    _check_lengths(names)
    reading = _Bounded(signature, rng, dict(names), value, record, biased)
    yield from record.keep(reading.ask_positions())
    yield from record.keep(reading.ask_forms())
    yield from record.keep(reading.ask_lengths())
    if biased:
        yield from reading.ask_constants()
    rough = record.so_far
    yield from record.keep(reading.ask_full_length())
    return reading.best(rough), value, reading.words


def _check_lengths(names: dict[str, str]) -> None:
    """Unrecoverable for parts beside which lengths and ranks are not read."""
    plain = {"link": ("exp",), "position_bias": ("none",), "length_law": ("none",), "normaliser": ("sum", "plus-one")}
    for kind, name in (("length_law", "table"), ("normaliser", "top-k")):
        others = {each: known for each, known in plain.items() if each != kind}
        if names[kind] == name and any(names[each] not in known for each, known in others.items()):
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                f"the {kind.replace('_', ' ')} {name!r} beside a norm bound is read of softmax attention otherwise: "
                "leave out max_norm",
            )


class _Bounded:
    def __init__(
        self,
        signature: Signature,
        rng: np.random.Generator,
        names: dict[str, str],
        value: Value,
        record: Record,
        biased: bool,
    ) -> None:
        self.signature, self.rng, self.names, self.value, self.record = signature, rng, names, value, record
        self.space, self.width, self.biased = signature.space, signature.width, biased
        self.bound = signature.norm_limit * (SMALL if biased else 1.0)
        self.no_score = self.bound * FAINT if biased else self.bound  # norm of tokens without scores beside a zero one
        rows = random_orthogonal(self.space, rng, self.width)
        self.rows = TokenRows(equal_overlap(self.space, rows, value.vector))
        self.columns = TokenRows(random_orthogonal(self.space, rng, self.width))
        self.words: dict[str, int | str] = {}
        self.known: dict[str, Floats] = {}  # constants that were read, by path
        self.held: tuple[
            str, ...
        ] = ()  # constants that fits keep first: read elsewhere, and hardly seen in small logits
        self.last_size = 1.0  # of last tokens, over that of others
        self.zero = 0.5  # weight of the first of two tokens of score zero, where it is known
        self.shares, self.answers = np.zeros((2, self.width, self.width))
        self.units = np.ones(self.width)  # norms of last tokens by column
        self.beside_zero = np.zeros(self.width)  # shares beside a zero token, where there is a score bias

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask_positions(self) -> Steps[None]:
        """The window, and what distances add, as far as it shows in the values of tokens of score zero."""
        position, normaliser = self.names["position_bias"], self.names["normaliser"]
        if position == "window":
            width = yield from ask_window(Probe(self.signature, self.value, self.no_score / LONGEST), LONGEST)
            self.words["position_bias"] = "none" if width is None else width
        probe = Probe(self.signature, self.value, self.no_score)
        sink = Number(1.0 if normaliser == "plus-one" else 0.0, 0.0)
        # Behind noise a token so short says nothing: then the energy of a sink is searched for.
        if normaliser == "sink" and (self.signature.noise.kind == "exact" or position in ("alibi", "table")):
            sink = yield from self._ask_sink(probe, position in ("alibi", "table"))
            self.known["normaliser.energy"] = np.asarray(math.log(sink.value))
        if position not in ("alibi", "table"):
            return
        if normaliser in COMPLETE:
            weight = yield from ask_zero_weight(probe)
            self.zero, unit = weight.value, 1.0
            first = bias_of_weight(weight, normaliser, [Number(0.0, 0.0)], sink)
        elif normaliser in QUOTIENTS:
            if normaliser == "plus-one":
                self.zero = yield from self._ask_first_weight(probe)
            unit = self.zero
            first = bias_of_weight(Number(unit, 0.0), normaliser, [Number(0.0, 0.0)], sink)
        else:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                f"what distances add beside the normaliser {normaliser!r} and a norm bound is not read: leave out "
                "max_norm",
            )
        if position == "alibi":
            self.known["position_bias.slope"] = np.asarray(-first.value)
        else:
            table = yield from ask_table(probe, normaliser, first, sink, unit)
            self.known["position_bias.table"] = np.array([each.value for each in table])

    def _ask_first_weight(self, probe: Probe) -> Steps[float]:
        """The weight of the first of two tokens of score zero, beside a sink, from both of three.

        In its unit they are B₁ and B₂: a third token of mass m₂ makes of a sum M of masses M + m₂ = M/B₁, while
        B₂/B₁ is m₂ over the mass of the first of two.
        """
        shares, _ = yield from probe.share("positions", np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
        weight = float((1 - shares[0]) / shares[1]) if shares[1] != 0 else 0.0
        if not 0 < weight < 1:
            raise Unrecoverable(Outcome.WRONG_FAMILY, "weights of tokens of score zero are none beside a sink")
        return weight

    def _ask_sink(self, probe: Probe, distances: bool) -> Steps[Number]:
        """The mass of a sink, from a token alone that is too short to have a score: over that of two it is seen."""
        self.zero = (yield from self._ask_first_weight(probe)) if distances else 0.0
        exact = self.signature.noise.kind == "exact"
        lone = (yield from lone_weight(probe, self.bound * (LONE if exact else LONE_BEHIND_NOISE))).value
        if not distances:
            # (2 + sink)/(1 + sink)
            mass = (2 - lone) / (lone - 1) if 1 < lone < 2 else 0.0
            self.zero = 1 / (2 + mass)
        else:
            mass = 1 / (lone * self.zero) - 1 if lone * self.zero > 0 else 0.0
        if not mass > 0:
            raise Unrecoverable(Outcome.WRONG_FAMILY, "a token alone weighs more than all of one: there is no sink")
        return Number(mass, 0.0)

    def ask_constants(self) -> Steps[None]:
        """Constants of the link, to start from, where a score bias makes logits as large as they can be."""
        if self.names["link"] == "exp":
            return
        zero = (AT_ZERO if self.names["position_bias"] in ("none", "window") else {}).get(self.names["normaliser"])
        norm = self.signature.norm_limit * NEARLY_LINEAR
        least, middle, most = yield from ask_ends_of_bias(Probe(self.signature, self.value, norm))
        inverse = Inverse(self.names["link"], self.names["normaliser"])
        # The value was read of tokens that have some logit: where it is in units of a weight, that is off by as much.
        unit = middle.value if inverse.paired else 1.0
        inverse = inverse.changed(zero=zero or self.zero if inverse.paired else middle.value)
        try:
            least, most = (Number(each.value / unit, each.radius / unit) for each in (least, most))
            found = find_constants(inverse, least, most, self.space.rounding)
        except (
            Unrecoverable,
            ZeroDivisionError,
        ):  # the value's own direction has hardly any bias: constants are searched for
            return
        for name, path in (("cap", "link.cap"), ("bias", "link.bias")):
            if name in found.radii:
                self.known[path] = np.asarray(getattr(found, name))
                self.held = (path,)

    def ask_lengths(self) -> Steps[None]:
        """What lengths multiply logits by, or how many tokens a top-k keeps."""
        probe, normaliser = Probe(self.signature, self.value, self.bound), self.names["normaliser"]
        if self.names["length_law"] == "table":
            self.known["length_law.table"] = np.ones(1)
            pair = PaddedPair.of(probe, self._rough(), self.bound)
            unit = 1 / 3 if normaliser == "plus-one" else 1.0
            self.known["length_law.table"] = yield from ask_factors(pair, unit)
        elif normaliser == "top-k":
            self.names["normaliser"] = "sum"
            head = self._rough()
            biased = head.score_bias is not None
            pair = PaddedPair.of(probe, head, self.bound * PADDED_SHORT)
            kept = yield from ask_most_kept(PaddedPair.of_bias(probe, floats(head.score_bias)) if biased else pair)
            self.names["normaliser"] = normaliser
            self.words["normaliser"] = "sum" if kept is None else kept

    def _rough(self) -> SingleHead:
        """The head that is known so far."""
        head = self._start({})
        if head is None:
            raise Unrecoverable(Outcome.SATURATED, BEYOND)
        return head

    def ask_forms(self) -> Steps[None]:
        """Shares of the first token in answers, for all rows and columns."""
        if self.biased:
            first = Term(self.rows, self.space.indices(np.arange(self.width)), self.bound)
            answers: Measurements = yield Plan("forms", self.width, [[first], []])
            high = self.bound * (floats(self.rows.vectors) @ floats(self.value.vector))
            self.beside_zero = floats(answers.values - self.value.bias) / high
        yield from self._ask_columns([0], FIRST_SHORT)
        moved = self.shares[:, 0] - self.beside_zero
        size = float(np.sqrt(np.mean((moved - np.mean(moved)) ** 2)))
        wanted = FIRST_SHORT * AIM * self.zero / max(size, 1e-300)
        if self.width > 1:
            yield from self._ask_columns(list(range(1, self.width)), float(np.clip(wanted, SHORT, LONG)))

    def _ask_columns(self, columns: list[int], short: float) -> Steps[None]:
        rows, numbers = np.tile(np.arange(self.width), len(columns)), np.repeat(columns, self.width)
        first = Term(self.rows, self.space.indices(rows), self.bound)
        last = Term(self.columns, self.space.indices(numbers), self.bound * short)
        answers: Measurements = yield Plan("forms", rows.size, [[first], [last]])
        vector = floats(self.value.vector)
        high, low = floats(self.rows.vectors) @ vector, short * (floats(self.columns.vectors) @ vector)
        made = floats(answers.values - self.value.bias) / self.bound
        rest = 1.0 if self.names["normaliser"] not in COMPLETE else 1 - self.zero
        self.answers[rows, numbers] = floats(answers.values)
        self.shares[rows, numbers] = (made - rest * low[numbers]) / high[rows]
        self.units[columns] = self.bound**2 * short

    def ask_full_length(self) -> Steps[None]:
        """Sequences of one to three tokens as long as may be; behind noise as many as there are unknowns besides."""
        count = FULL_LENGTH + FULL_LENGTH_EACH * len(self._paths())
        rough = self._start({path: np.asarray(STARTS[path][-2]) for path in self._paths()}) if self.biased else None
        if rough is not None:  # the bound keeps logits small beside short tokens only
            logit = float(np.linalg.norm(rough.score)) / self.width * self.signature.norm_limit**2
            self.last_size = min(1.0, 1 / logit) if logit > 0 else 1.0
        lengths = (1, 2, 3) if (self.signature.max_length or 3) >= 3 else (1, 2)
        for length in lengths:
            yield self._random_plan(length, count, 0.0)
        if self.signature.noise.kind != "exact":
            each = -(-self.width * (self.width + 1) // (len(lengths) - 1))
            for length in lengths[1:]:
                yield self._random_plan(length, each, SHORTEST_LAST)

    def _random_plan(self, length: int, count: int, halvings: float) -> Plan:
        """Random tokens at the bound, the last one halved up to so often, as logits may be large or small."""
        tokens = self.rng.standard_normal((length, count, self.width))
        tokens *= self.signature.norm_limit / np.linalg.norm(tokens, axis=-1, keepdims=True)
        tokens[-1] *= self.last_size * 2.0 ** -(halvings * self.rng.random((count, 1)))
        rows = [TokenRows(self.space.asarray(each)) for each in tokens]
        return Plan("full length", count, [[Term(each)] for each in rows])

    # --- fitting ----------------------------------------------------------------------------------------------------

    def _paths(self) -> list[str]:
        """Constants that are searched for."""
        kinds = {kind: name for kind, name in self.names.items() if kind != "form"}
        own = {f"{kind}.{each}" for kind, name in kinds.items() for each in _constants(PARTS[kind, name])}
        return sorted(own - set(self.known))

    def best(self, rough: Record) -> Fit:
        """The fit of least residuals, from every start: first of the answers that were asked of short tokens."""
        paths, found = self._paths(), list[Fit]()
        noise = self.signature.noise
        expected = (noise.deviation / noise.spread) ** 2 if noise.spread > 0 else 1.0
        for numbers in itertools.product(*(STARTS[path] for path in paths)):
            head = self._start(dict(zip(paths, map(np.asarray, numbers), strict=True)))
            if head is not None:
                start = fit(head, self.record, self.held) if self.held else fit(head, rough)
                found.append(fit(start.head, self.record))
                if found[-1].cost < FAR_ABOVE * expected:
                    break
        if not found:
            raise Unrecoverable(Outcome.SATURATED, BEYOND)
        return min(found, key=lambda each: each.cost if math.isfinite(each.cost) else math.inf)

    def attention(self, constants: dict[str, Floats]) -> Attention:
        """The parts with these constants."""
        made = {}
        for kind, name in self.names.items():
            if kind == "form":
                continue
            own = {path.partition(".")[2]: array for path, array in constants.items() if path.startswith(f"{kind}.")}
            word = self.words.get(kind)
            if isinstance(word, str):
                made[kind] = PARTS[kind, word]()
            else:
                whole = {"k" if kind == "normaliser" else "width": word} if word is not None else {}
                made[kind] = PARTS[kind, name](**own, **whole)
        return Attention(**made)

    def _start(self, constants: dict[str, Floats]) -> SingleHead | None:
        """The head that shares say to first order, for these constants."""
        attention = self.attention({**self.known, **constants})
        two = attention.weights(np.zeros((1, 2)))[0, 0]
        inverse = Inverse(
            self.names["link"],
            self.names["normaliser"],
            cap=float(attention.arrays().get("link.cap", np.inf)),
            bias=float(attention.arrays().get("link.bias", 0.0)),
        ).changed(zero=float(two))
        slope = float(np.broadcast_to(attention.length_law.slopes(np.zeros((1, 2))), (1, 2))[0, 0])
        logits, seen = _logits(inverse, self.shares)
        if not seen > 0.5:
            return None
        score_bias = None
        if self.biased:
            beside_zero, _ = _logits(inverse, self.beside_zero)
            score_bias = floats(self.rows.vectors).T @ beside_zero / self.bound / slope
            logits = 0 * logits
        value = floats(self.value.vector) / inverse.unit
        # One that errors hide would move all else.
        fitted = self.value.has_bias or self.signature.noise.kind != "exact"
        bias = floats(self.value.bias) if fitted else None
        head = SingleHead(self._score(logits / self.units / slope), value, score_bias, bias, attention)
        return self._to_first_order(head) if self.biased else head

    def _score(self, forms: Floats) -> Floats:  # (rows, columns)
        return np.asarray(floats(self.rows.vectors).T @ forms @ floats(self.columns.vectors))

    def _to_first_order(self, head: SingleHead) -> SingleHead:
        """The head, its score one step nearer to what the answers to pairs say beside its bias."""
        rows, columns = np.divmod(np.arange(self.width**2), self.width)
        last = floats(self.columns.vectors)[columns] * (self.units / self.bound)[columns, None]
        tokens = np.stack([self.bound * floats(self.rows.vectors)[rows], last], axis=1)
        moved = replace(head, score=head.score + self._score(STEP / self.units + 0 * self.answers))
        before, after = (floats(each(tokens)).reshape(self.answers.shape) for each in (head, moved))
        with np.errstate(divide="ignore", invalid="ignore"):
            forms = (self.answers - before) * STEP / (after - before) / self.units
        return replace(head, score=head.score + self._score(np.where(np.isfinite(forms), forms, 0.0)))


def _logits(inverse: Inverse, shares: Floats) -> tuple[Floats, float]:
    """The logits of these shares, and of how many there are some; the others are ±1."""
    flat, steep = inverse.logits(shares.reshape(-1))
    seen = np.isfinite(steep)
    logits = np.where(seen, flat, np.sign(shares.reshape(-1) - inverse.at_zero))
    return logits.reshape(shares.shape), float(np.mean(seen))


def _constants(part: type) -> list[str]:
    return [name for name, each in getattr(part, "__dataclass_fields__", {}).items() if each.type == "Array"]


def fit(start: SingleHead, record: Record, held: tuple[str, ...] = ()) -> Fit:
    """Damped least squares in all arrays of a head but those `held` on all answers; radii from how sure these are."""
    # Arrays of nothing but zeros have no derivatives.
    head, damping = _stepped(start, np.where(_as_vector(start) == 0, SMALLEST, 0.0)), 1e-3
    residuals, matrix = _linearised(head, record, held)
    cost = float(np.mean(residuals**2))
    for _ in range(MOST_STEPS):
        sizes = np.linalg.norm(matrix, axis=0)
        seen, sizes = sizes > 0, np.where(sizes > 0, sizes, 1.0)
        left, singular, right = svd(matrix / sizes)
        along, moved = left.T @ residuals, False
        while damping < MOST_DAMPING:
            step = right.T @ (along * singular / (singular**2 + damping**2)) * seen / sizes
            other = _stepped(head, step)
            with np.errstate(all="ignore"):
                others, next_matrix = _linearised(other, record, held)
                reached = float(np.mean(others**2))
            if reached < cost:
                moved = True
                break
            damping = max(10 * damping, 1e-9)
        if not moved:
            break
        small = np.linalg.norm(step * sizes) < CONVERGED * math.sqrt(step.size)
        head, residuals, matrix, cost, damping = other, others, next_matrix, reached, damping / 30
        if small:
            break
    radius = _radius(head, matrix, residuals, conspire=record.signature.noise.may_conspire)
    cap = head.attention.arrays().get("link.cap")
    if cap is not None and cap < 0:  # c·tanh(z/c) is the same for −c
        head = head.with_arrays({**head.arrays(), "link.cap": -cap})
    return Fit(head, cost, radius)


def _radius(head: SingleHead, matrix: Floats, residuals: Floats, *, conspire: bool) -> SingleHead:
    """Radii of all arrays: the quadrature of what single answers do, or their sum where errors may conspire."""
    sizes = np.linalg.norm(matrix, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        left, singular, right = svd(matrix / np.where(sizes > 0, sizes, 1.0))
        inverse = right.T / singular
        spread = np.sum(np.abs(inverse @ left.T), axis=1) if conspire else np.sqrt(np.sum(inverse**2, axis=1))
        spread = spread / np.where(sizes > 0, sizes, 0.0)
    spread = np.where(np.isfinite(spread), spread, np.inf)
    # What is left of the residuals where the fit has ended may still be a step away.
    rest = np.abs(right.T @ (left.T @ residuals / singular)) / np.where(sizes > 0, sizes, 1.0)
    return _as_head(head, spread + rest + 4 * np.finfo(float).eps * np.abs(_as_vector(head)))


def _as_vector(head: SingleHead) -> Floats:
    return np.concatenate([floats(array).reshape(-1) for array in head.arrays().values()])


def _as_head(head: SingleHead, numbers: Floats) -> SingleHead:
    named, start = {}, 0
    for name, array in head.arrays().items():
        stop = start + floats(array).size
        named[name] = numbers[start:stop].reshape(floats(array).shape)
        start = stop
    return head.with_arrays(named)


def _stepped(head: SingleHead, step: Floats) -> SingleHead:
    return _as_head(head, _as_vector(head) + step)


def _linearised(head: SingleHead, record: Record, held: tuple[str, ...]) -> tuple[Floats, Floats]:
    """Residuals (n,) of all answers over what they are uncertain by, and their derivatives (n, numbers)."""
    unit, noise = record.signature.space.rounding, record.signature.noise
    residuals, rows = [], []
    names = list(head.arrays())
    for tokens, answers in zip(record.tokens, record.answers, strict=True):
        found = head.sensitivity(tokens, unit, np.array([0]))
        sigma = found.rounding[:, 0] + noise.spread + 2 * record.signature.space.eps * np.abs(answers) + 1e-300
        parts = {part.name.replace(" ", "."): part for part in found.parts}
        blocks = []
        for name in names:
            size = floats(head.arrays()[name]).size
            part = None if name in held else parts.get(name)
            if part is None:
                blocks.append(np.zeros((len(answers), size)))
            else:
                made = part.left[:, :, None] * part.right[:, None, :]
                blocks.append(made.reshape(len(answers), -1)[:, :size])
        residuals.append((answers - found.answers[:, 0]) / sigma)
        rows.append(np.concatenate(blocks, axis=1) / sigma[:, None])
    return np.concatenate(residuals), np.concatenate(rows)
