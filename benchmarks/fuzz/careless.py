"""Boxes written without care: reused memory, other types, exceptions, nan, answers of odd size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Kinds, Random, decades
from benchmarks.fuzz.maps import Floats
from benchmarks.fuzz.members import draw_head, draw_heads, draw_layer_box, draw_net_box

CARELESS = Kinds("careless")
MUST = Kinds("member")  # careless, and yet to be recovered


def _draw(rng: Random) -> Box:
    draws: list[Callable[[Random], Box]] = [
        draw_head,
        lambda rng: draw_heads(rng, bool(rng.integers(2)), most_width=5),
        lambda rng: draw_net_box(rng, most=5),
        lambda rng: draw_layer_box(rng, residual=False),
    ]
    return draws[int(rng.integers(4))](rng)


def careless(family: Kinds, name: str) -> Callable[[Callable[[Random, Box], Callable[[Floats], object]]], object]:
    """Adds boxes that answer by a function of (rng, box)."""

    def keep(wrap: Callable[[Random, Box], Callable[[Floats], object]]) -> object:
        def drawn(rng: Random) -> Box:
            box = _draw(rng)
            return replace(box, answer=wrap(rng, replace(box)))

        family.add("careless", name, drawn)
        return wrap

    return keep


@careless(MUST, "reused memory")
def _reused(rng: Random, box: Box) -> Callable[[Floats], object]:
    memory: dict[tuple[int, ...], Floats] = {}

    def answer(tokens: Floats) -> Floats:
        answers = np.asarray(box(tokens))
        kept = memory.setdefault(answers.shape, answers)
        kept[...] = answers
        return kept

    return answer


@careless(MUST, "slow")
def _slow(rng: Random, box: Box) -> Callable[[Floats], object]:
    def answer(tokens: Floats) -> object:
        time.sleep(1e-3)
        return box(tokens)

    return answer


@careless(MUST, "changes its input")
def _changes(rng: Random, box: Box) -> Callable[[Floats], object]:
    def answer(tokens: Floats) -> object:
        answers = box(tokens)
        if tokens.flags.writeable:
            tokens[...] = 7.0
        return answers

    return answer


@careless(MUST, "answers in Fortran order")
def _fortran(rng: Random, box: Box) -> Callable[[Floats], object]:
    return lambda tokens: np.asfortranarray(box(tokens))


@careless(CARELESS, "lists")
def _lists(rng: Random, box: Box) -> Callable[[Floats], object]:
    return lambda tokens: np.asarray(box(tokens)).tolist()


@careless(CARELESS, "integers")
def _integers(rng: Random, box: Box) -> Callable[[Floats], object]:
    return lambda tokens: np.round(np.clip(np.asarray(box(tokens)), -1e15, 1e15)).astype(int)


@careless(CARELESS, "complex numbers")
def _complex(rng: Random, box: Box) -> Callable[[Floats], object]:
    return lambda tokens: np.asarray(box(tokens)).astype(complex)


@careless(CARELESS, "objects")
def _objects(rng: Random, box: Box) -> Callable[[Floats], object]:
    return lambda tokens: np.asarray(box(tokens)).astype(object)


def _at_times(rng: Random, box: Box, other: Callable[[Floats, object], object]) -> Callable[[Floats], object]:
    """Every so often, from some query on."""
    period, calls = int(decades(rng, 0, 2.5)), [0]

    def answer(tokens: Floats) -> object:
        calls[0] += 1
        answers = box(tokens)
        return other(tokens, answers) if calls[0] % period == 0 else answers

    return answer


def _raise(tokens: Floats, answers: object) -> object:
    raise RuntimeError("out of memory")


def _spoilt(number: float) -> Callable[[Floats, object], object]:
    def change(tokens: Floats, answers: object) -> object:
        spoilt = np.array(answers)
        spoilt.flat[0] = number
        return spoilt

    return change


AT_TIMES: dict[str, Callable[[Floats, object], object]] = {
    "wrong shape at times": lambda tokens, answers: np.asarray(answers)[:-1],
    "another number of axes at times": lambda tokens, answers: np.asarray(answers)[..., None],
    "nan at times": _spoilt(float("nan")),
    "inf at times": _spoilt(float("inf")),
    "raises at times": _raise,
    "None at times": lambda tokens, answers: None,
    "a single number at times": lambda tokens, answers: 1.0,
    "text at times": lambda tokens, answers: "answer",
    "zero at times": lambda tokens, answers: 0 * np.asarray(answers),
    "huge at times": lambda tokens, answers: 1e200 * np.asarray(answers),
}


def _add_at_times() -> None:
    for name, other in AT_TIMES.items():
        careless(CARELESS, name)(lambda rng, box, other=other: _at_times(rng, box, other))


_add_at_times()


@careless(CARELESS, "nan for long tokens")
def _nan_for_long(rng: Random, box: Box) -> Callable[[Floats], object]:
    most = box.size * box.width**0.5 * decades(rng, 0, 6)

    def answer(tokens: Floats) -> object:
        answers = np.array(box(tokens))
        answers[np.any(np.linalg.norm(tokens, axis=-1) > most, axis=1)] = np.nan
        return answers

    return answer


@careless(CARELESS, "raises for long sequences")
def _raises_for_long(rng: Random, box: Box) -> Callable[[Floats], object]:
    most = int(rng.integers(1, 40))

    def answer(tokens: Floats) -> object:
        if tokens.shape[1] > most:
            raise ValueError(f"at most {most} tokens")
        return box(tokens)

    return answer


@careless(CARELESS, "random numbers")
def _random(rng: Random, box: Box) -> Callable[[Floats], object]:
    own = np.random.default_rng(rng.integers(2**62))
    return lambda tokens: own.standard_normal(np.shape(box(tokens)))


@CARELESS.kind("careless", "dropout")
def _dropout(rng: Random) -> Box:
    """What is judged is what it answers, for which entries are dropped anew: nothing else is its function."""
    box, share = _draw(rng), decades(rng, -2, -0.5)
    own = np.random.default_rng(rng.integers(2**62))

    def truth(tokens: Floats) -> Floats:
        kept = own.random(tokens.shape) > share
        return box.truth(tokens * kept / (1 - share))

    return replace(box, truth=truth)


@careless(CARELESS, "drifts")
def _drifts(rng: Random, box: Box) -> Callable[[Floats], object]:
    step, calls = decades(rng, -9, -2), [0]

    def answer(tokens: Floats) -> object:
        calls[0] += 1
        return np.asarray(box(tokens)) * (1 + step * calls[0])

    return answer


@careless(CARELESS, "answers depend on the batch")
def _batch(rng: Random, box: Box) -> Callable[[Floats], object]:
    share = decades(rng, -8, -1)

    def answer(tokens: Floats) -> object:
        answers = np.asarray(box(tokens))
        return answers - share * np.mean(answers, axis=0)

    return answer


def _overflow(rng: Random) -> Box:
    box, factor = _draw(rng), decades(rng, 20, 38)
    own = box.truth
    scaled = replace(box, params=None, truth=lambda x: own(x) * factor)
    return replace(scaled, answer=lambda tokens: np.asarray(scaled(tokens)).astype(np.float32))


CARELESS.add("careless", "float32 that overflows", _overflow)


def _constant(number: float) -> Callable[[Random], Box]:
    def draw(rng: Random) -> Box:
        box = _draw(rng)
        outputs = 1 if box.scalar else int(rng.integers(1, 4))
        constant = np.full(outputs, number) * (1.0 if rng.random() < 0.5 else rng.standard_normal(outputs))
        return Box(lambda x: np.zeros((len(x), outputs)) + constant, box.width, box.scalar)

    return draw


CARELESS.add("careless", "constant", _constant(1.0))
CARELESS.add("careless", "zero", _constant(0.0))
CARELESS.add("careless", "a tiny constant", _constant(1e-310))
CARELESS.add("careless", "a huge constant", _constant(1e300))


def _scaled(low: float, high: float) -> Callable[[Random], Box]:
    """Answers of the family at the ends of what numbers can be."""

    def draw(rng: Random) -> Box:
        box, factor = _draw(rng), decades(rng, low, high)
        own = box.truth
        return replace(box, params=None, truth=lambda x: own(x) * factor)

    return draw


CARELESS.add("careless", "subnormal answers", _scaled(-318, -300))
CARELESS.add("careless", "huge answers", _scaled(290, 305))
