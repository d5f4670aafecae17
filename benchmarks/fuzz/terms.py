"""Members beside a small term, attention that bends in rare places, digits by case, and boxes with a memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.attentions import HIDDEN, Variant
from benchmarks.fuzz.boxes import Box, Kinds, Random, decades, one_of
from benchmarks.fuzz.foreign import HOSTS, with_attention
from benchmarks.fuzz.maps import Floats, Map, attention, logits, mix, softmax
from benchmarks.fuzz.unusual import draw_host, typical_of

TERMS = Kinds("foreign")
STATE = Kinds("careless")

# --- small terms beside a member --------------------------------------------------------------------------------------

Term = Callable[[Floats], Floats]  # (n, length, width) -> (n,), of order one at natural tokens


def _unit(rng: Random, box: Box) -> Floats:
    """A direction along which natural tokens are of order one."""
    return rng.standard_normal(box.width) / (box.size * box.width**0.5)


def _squashed(x: Floats) -> Floats:  # so that long tokens do not make a term of any size
    return np.tanh(x)


def _product_of_forms(rng: Random, box: Box) -> Term:
    one, two = _unit(rng, box), _unit(rng, box)
    return lambda x: (x[:, -1] @ one) * (x[:, -1] @ two)


def _product_of_tokens(rng: Random, box: Box) -> Term:
    one, two = _unit(rng, box), _unit(rng, box)
    return lambda x: _squashed(x[:, 0] @ one) * _squashed(x[:, -1] @ two) * (x.shape[1] > 1)


def _mean(rng: Random, box: Box) -> Term:
    one = _unit(rng, box)
    return lambda x: np.mean(x @ one, axis=1)


def _mean_bent(rng: Random, box: Box) -> Term:
    one = _unit(rng, box)
    return lambda x: np.mean(_squashed(x @ one), axis=1)


def _before_last(rng: Random, box: Box) -> Term:
    one, least = _unit(rng, box), int(one_of(rng, (2, 3, 5, 9, 17)))
    return lambda x: x[:, -2] @ one if x.shape[1] >= least else np.zeros(len(x))


def _last(rng: Random, box: Box) -> Term:
    one = _unit(rng, box)
    return lambda x: _squashed(x[:, -1] @ one)


def _length(rng: Random, box: Box) -> Term:
    least = int(one_of(rng, (1, 4, 9, 17, 33)))
    return lambda x: np.full(len(x), np.log(max(1.0, x.shape[1] / least)))


def _spread(rng: Random, box: Box) -> Term:
    one = _unit(rng, box)
    return lambda x: np.std(_squashed(x @ one), axis=1)


def _norm(rng: Random, box: Box) -> Term:
    return lambda x: np.linalg.norm(x[:, -1], axis=1) / (box.size * box.width**0.5)


def _neighbours(rng: Random, box: Box) -> Term:
    one = _unit(rng, box)
    return lambda x: np.mean(_squashed(x[:, 1:] @ one) * _squashed(x[:, :-1] @ one), axis=1) if x.shape[1] > 1 else 0.0


def _step(rng: Random, box: Box) -> Term:
    one, border = _unit(rng, box), float(rng.uniform(0, 1.5))
    return lambda x: (x[:, -1] @ one > border).astype(float)


def _wave(rng: Random, box: Box) -> Term:
    one = _unit(rng, box) * decades(rng, 0, 1.5)
    return lambda x: np.sin(x[:, -1] @ one)


def _head_of_another_kind(rng: Random, box: Box) -> Term:
    """A head of ReLU weights."""
    score, value = rng.standard_normal((box.width, box.width)) / (box.size**2 * box.width), _unit(rng, box)

    def term(x: Floats) -> Floats:
        weights = np.maximum(logits(x, score, np.zeros(box.width)), 0)
        total = np.sum(weights, axis=1, keepdims=True)
        return mix(weights / np.where(total > 0, total, 1.0), x) @ value

    return term


def _second_layer(rng: Random, box: Box) -> Term:
    """A head over what another head makes of every token and those before it."""
    scores = rng.standard_normal((2, box.width, box.width)) / (box.size**2 * box.width)
    turn = rng.standard_normal((box.width, box.width)) / box.width**0.5
    value, none = _unit(rng, box), np.zeros(box.width)

    def term(x: Floats) -> Floats:
        within = [attention(x[:, : n + 1], scores[0], none) @ turn for n in range(x.shape[1])]
        return attention(x + np.stack(within, axis=1), scores[1], none) @ value

    return term


SMALL: dict[str, Callable[[Random, Box], Term]] = {
    "product of two forms of the last token": _product_of_forms,
    "product of first and last token": _product_of_tokens,
    "mean token": _mean,
    "mean of bent tokens": _mean_bent,
    "token before the last": _before_last,
    "bent last token": _last,
    "length": _length,
    "spread of tokens": _spread,
    "norm of the last token": _norm,
    "products of neighbours": _neighbours,
    "step": _step,
    "wave": _wave,
    "head of ReLU weights": _head_of_another_kind,
    "head over a head": _second_layer,
}


def _beside(rng: Random, make: Callable[[Random, Box], Term]) -> Box:
    box = draw_host(rng)
    own, term = box.truth, make(rng, box)
    outputs = own(np.ones((1, 1, box.width))).shape[1]
    share = typical_of(box) * decades(rng, -8, -1) * rng.standard_normal(outputs)
    return replace(box, params=None, truth=lambda x: own(x) + np.outer(term(x) * np.ones(len(x)), share))


# --- attention that bends in rare places ------------------------------------------------------------------------------


def _far_positions(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    slope, near = decades(rng, -4, 0), int(one_of(rng, (4, 8, 16, 32)))
    return lambda z, x: z - slope * np.maximum(0, np.arange(x.shape[1])[::-1] - near)


def _warm_by_last_norm(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    power = decades(rng, -5, -0.5)
    return lambda z, x: z * np.clip(np.linalg.norm(x[:, -1:], axis=-1) / size, 1e-8, 1e8) ** power


def _warm_by_length_of_keys(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    small = decades(rng, -8, -1) * size**2 * width
    return lambda z, x: z / np.sqrt(1 + small / np.maximum(np.sum(x**2, axis=-1), 1e-300) * (np.sum(x**2, -1) > 0))


def _late_sink(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    extra, least = decades(rng, -3, 1), int(one_of(rng, (5, 9, 17, 33)))
    return lambda z, x: z + extra * ((np.arange(x.shape[1]) == 0) & (x.shape[1] >= least))


def _ties_broken(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    """Among tokens that are exactly equal the later one weighs less."""
    less = decades(rng, -3, 0)

    def change(z: Floats, x: Floats) -> Floats:
        same = np.all(x[:, :, None] == x[:, None, :], axis=-1)
        return z - less * (np.sum(np.tril(same), axis=2) - 1)

    return change


def _opposite_hidden(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    """Tokens of negative logits are hidden where one is large."""
    border = decades(rng, -0.5, 1.2)
    return lambda z, x: np.where((z < 0) & (np.max(z, axis=1, keepdims=True) > border), HIDDEN, z)


def _centred_logits_bent(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    small = decades(rng, -6, -1)
    return lambda z, x: z + small * np.tanh(z - np.mean(z, axis=1, keepdims=True))


def _by_rank(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    """The strongest token is made a little stronger where there are several."""
    extra, least = decades(rng, -3, 0), int(one_of(rng, (3, 6, 12)))
    return lambda z, x: z + extra * ((z == np.max(z, axis=1, keepdims=True)) & (x.shape[1] >= least))


def _few_lengths(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    factor, number = float(one_of(rng, (0.5, 0.8, 1.25, 2.0))), int(rng.integers(4, 7))
    first = int(rng.integers(2, 65 - number))
    chosen = range(first, first + number) if rng.integers(2) else rng.choice(np.arange(2, 65), number, replace=False)
    return lambda z, x: z * (factor if x.shape[1] in chosen else 1.0)


def _one_axis(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    """A last token along one axis is another kind of token."""
    axis, factor = int(rng.integers(width)), float(one_of(rng, (0.0, 0.5, 2.0)))
    return lambda z, x: np.where((np.sum(x[:, -1:] != 0, -1) == 1) & (x[:, -1:, axis] != 0), factor * z, z)


def _short_last(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    least = size * width**0.5 * decades(rng, -3, -1)
    return lambda z, x: np.where(np.linalg.norm(x[:, -1:], axis=-1) < least, 0 * z, z)


def _negative_last(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    return lambda z, x: np.where(np.max(x[:, -1:], axis=-1) < 0, 0.5 * z, z)


def _outliers_hidden(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    """Tokens many times as long as the median one."""
    most = float(one_of(rng, (3, 10, 30, 100)))

    def change(z: Floats, x: Floats) -> Floats:
        norms = np.linalg.norm(x, axis=-1)
        middle = np.median(norms, axis=1, keepdims=True)
        return np.where((norms > most * middle) & (middle > 0) & (np.arange(x.shape[1]) < x.shape[1] - 1), HIDDEN, z)

    return change


def _runs_hidden(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    """The third of three equal tokens in a row, and more."""

    def change(z: Floats, x: Floats) -> Floats:
        if x.shape[1] < 4:
            return z
        same = np.all(x[:, 1:] == x[:, :-1], axis=-1)
        again = np.pad(same[:, 1:] & same[:, :-1], ((0, 0), (2, 0)))
        again[:, -1] = False
        return np.where(again, HIDDEN, z)

    return change


BENT: dict[str, Callable[[Random, float, int], Callable[[Floats, Floats], Floats]]] = {
    "positions beyond a distance": _far_positions,
    "temperature by the norm of the last token": _warm_by_last_norm,
    "short keys are made shorter": _warm_by_length_of_keys,
    "first token weighs more in long sequences": _late_sink,
    "equal tokens weigh less": _ties_broken,
    "negative logits hidden beside a large one": _opposite_hidden,
    "logits bent around their mean": _centred_logits_bent,
    "the strongest token made stronger": _by_rank,
    "temperature at a few lengths": _few_lengths,
    "one axis is another kind of last token": _one_axis,
    "short last tokens do not choose": _short_last,
    "negative last tokens choose less": _negative_last,
    "tokens longer than others are hidden": _outliers_hidden,
    "runs of equal tokens are cut": _runs_hidden,
}


def _mixed_with_mean(rng: Random, size: float, width: int) -> Callable[..., Floats]:
    share = decades(rng, -8, -1)
    return lambda tokens, score, bias: (1 - share) * attention(tokens, score, bias) + share * np.mean(tokens, axis=1)


def _variant_of(make: Callable[[Random, float, int], Callable[[Floats, Floats], Floats]]) -> Variant:
    def drawn(rng: Random, size: float, width: int) -> Callable[..., Floats]:
        change = make(rng, size, width)
        return lambda tokens, score, bias: mix(softmax(change(logits(tokens, score, bias), tokens)), tokens)

    return drawn


# --- digits and sizes by case -----------------------------------------------------------------------------------------

Bend = Callable[[Floats, Floats], Floats]  # of answers and tokens


def _saturates(rng: Random, box: Box) -> Bend:
    gain = decades(rng, -5, 0) / typical_of(box)
    return lambda y, x: np.tanh(gain * y) / gain


def _clipped_far(rng: Random, box: Box) -> Bend:
    most = typical_of(box) * decades(rng, 0, 4)
    return lambda y, x: np.clip(y, -most, most)


def _float32_beyond(rng: Random, box: Box) -> Bend:
    most = typical_of(box) * decades(rng, -1, 3)
    return lambda y, x: np.where(np.abs(y) > most, y.astype(np.float32).astype(float), y)


def _float16_beyond(rng: Random, box: Box) -> Bend:
    most = typical_of(box) * decades(rng, -1, 1.5)
    return lambda y, x: np.where(np.abs(y) > most, y.astype(np.float16).astype(float), y)


def _float32_of_long(rng: Random, box: Box) -> Bend:
    least = int(one_of(rng, (5, 9, 17, 33)))
    return lambda y, x: y.astype(np.float32).astype(float) if x.shape[1] >= least else y


def _short_lost(rng: Random, box: Box) -> Bend:
    least = typical_of(box) * decades(rng, -6, -1)
    return lambda y, x: np.where(np.abs(y) < least, 0.0, y)


def _by_batch_of_signs(rng: Random, box: Box) -> Bend:
    share = decades(rng, -6, -1)
    return lambda y, x: np.where(y < 0, (1 - share) * y, y)


DIGITS: dict[str, Callable[[Random, Box], Bend]] = {
    "saturate far out": _saturates,
    "clipped far out": _clipped_far,
    "float32 where large": _float32_beyond,
    "float16 where large": _float16_beyond,
    "float32 of long sequences": _float32_of_long,
    "small ones are zero": _short_lost,
    "negative ones a little smaller": _by_batch_of_signs,
}


def _bent(rng: Random, make: Callable[[Random, Box], Bend]) -> Box:
    box = draw_host(rng)
    own, bend = box.truth, make(rng, box)
    return replace(box, params=None, truth=lambda x: bend(own(x), x))


# --- boxes with a memory ----------------------------------------------------------------------------------------------

Answer = Callable[[Floats], Floats]  # (n, length, width) -> (n, outputs)


def _stale(rng: Random, own: Map) -> Answer:
    """A cache whose keys are tokens of few digits: the first of them is answered for all."""
    kept: dict[bytes, Floats] = {}
    digits = int(rng.integers(2, 6))

    def answer(tokens: Floats) -> Floats:
        exact, answers = own(tokens), []
        for each, fresh in zip(tokens, exact, strict=True):
            with np.errstate(all="ignore"):
                unit = 10.0 ** (np.floor(np.log10(np.maximum(np.max(np.abs(each)), 1e-300))) - digits)
                key = np.round(each / unit).tobytes() + np.float64(unit).tobytes()
            answers.append(kept.setdefault(key, fresh))
        return np.array(answers)

    return answer


def _drifts(rng: Random, own: Map) -> Answer:
    """Every answer a little larger than those before it."""
    step, count = decades(rng, -10, -3), [0]

    def answer(tokens: Floats) -> Floats:
        before = count[0]
        count[0] += len(tokens)
        return own(tokens) * (1 + step * (before + np.arange(len(tokens))))[:, None]

    return answer


def _warms_up(rng: Random, own: Map) -> Answer:
    """The first answers are of few digits."""
    first, count = int(decades(rng, 0, 3)), [0]

    def answer(tokens: Floats) -> Floats:
        before = count[0]
        count[0] += len(tokens)
        exact = own(tokens)
        early = before + np.arange(len(tokens)) < first
        return np.where(early[:, None], exact.astype(np.float16).astype(float), exact)

    return answer


def _later(rng: Random, own: Map) -> Answer:
    """Another function from some query on."""
    first, count, share = int(decades(rng, 1, 4)), [0], decades(rng, -6, -1)

    def answer(tokens: Floats) -> Floats:
        before = count[0]
        count[0] += len(tokens)
        exact = own(tokens)
        late = before + np.arange(len(tokens)) >= first
        return np.where(late[:, None], (1 + share) * exact, exact)

    return answer


def _big_batches(rng: Random, own: Map) -> Answer:
    most = int(decades(rng, 0, 2))
    return lambda tokens: own(tokens).astype(np.float16).astype(float) if len(tokens) > most else own(tokens)


def _neighbours_leak(rng: Random, own: Map) -> Answer:
    share = decades(rng, -8, -1)

    def answer(tokens: Floats) -> Floats:
        exact = own(tokens)
        return exact + share * (np.roll(exact, 1, axis=0) - exact)

    return answer


def _repeating_errors(rng: Random, own: Map) -> Answer:
    """Errors that a hash of the tokens draws."""
    share = decades(rng, -9, -2)

    def answer(tokens: Floats) -> Floats:
        exact = own(tokens)
        seeds = np.abs(np.sum(tokens * np.sin(np.arange(tokens[0].size)).reshape(tokens[0].shape), axis=(1, 2)))
        return exact * (1 + share * np.sin(1e7 * seeds))[:, None]

    return answer


MEMORY: dict[str, Callable[[Random, Map], Answer]] = {
    "stale answers": _stale,
    "every answer larger": _drifts,
    "first answers of few digits": _warms_up,
    "another function later": _later,
    "few digits in big batches": _big_batches,
    "neighbours in a batch leak": _neighbours_leak,
    "errors that repeat": _repeating_errors,
}


def _remembers(rng: Random, make: Callable[[Random, Map], Answer]) -> Box:
    box = draw_host(rng)
    drawn = make(rng, box.truth)

    def answer(tokens: Floats) -> Floats:
        answers = drawn(tokens)
        return answers[:, 0] if box.scalar else answers

    return replace(box, params=None, answer=answer)


def _add_terms() -> None:
    for name, term in SMALL.items():
        TERMS.add("a term besides", name, lambda rng, make=term: _beside(rng, make))
    variants = {name: _variant_of(make) for name, make in BENT.items()} | {"mixed with the mean": _mixed_with_mean}
    for name, variant in variants.items():

        def attended(rng: Random, drawn: Variant = variant) -> Box:
            return with_attention(rng, one_of(rng, HOSTS.values())(rng), drawn)

        TERMS.add("attention that bends", name, attended)
    for name, bend in DIGITS.items():
        TERMS.add("answers by size", name, lambda rng, make=bend: _bent(rng, make))
    for name, memory in MEMORY.items():
        STATE.add("memory", name, lambda rng, make=memory: _remembers(rng, make))


_add_terms()
