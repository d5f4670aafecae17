"""Attention of other kinds: what a mixture of tokens may be instead of softmax attention over all of them.

Every entry of `VARIANTS` draws a function of tokens, score matrix and score bias, given the size of tokens at which
logits are of order one, and the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.fuzz.boxes import Random, decades, one_of
from benchmarks.fuzz.maps import Floats, Mixture, attention, logits, mix, softmax

Variant = Callable[[Random, float, int], Mixture]
VARIANTS: dict[str, Variant] = {}
HIDDEN = -1e300  # the logit of a token that is not attended to


def variant(name: str) -> Callable[[Variant], Variant]:
    def keep(draw: Variant) -> Variant:
        VARIANTS[name] = draw
        return draw

    return keep


def _of_logits(change: Callable[[Floats, Floats], Floats]) -> Mixture:
    """Attention with changed logits."""
    return lambda tokens, score, bias: mix(softmax(change(logits(tokens, score, bias), tokens)), tokens)


def _of_weights(change: Callable[[Floats, Floats], Floats]) -> Mixture:
    """Attention with changed weights."""
    return lambda tokens, score, bias: mix(change(softmax(logits(tokens, score, bias)), tokens), tokens)


def _of_tokens(change: Callable[[Floats], Floats]) -> Mixture:
    """Attention over changed tokens."""
    return lambda tokens, score, bias: attention(change(tokens), score, bias)


def _last(tokens: Floats) -> Floats:  # (N,) bool
    return np.arange(tokens.shape[1]) == tokens.shape[1] - 1


# --- lengths --------------------------------------------------------------------------------------------------------


@variant("temperature by length")
def _temperature(rng: Random, size: float, width: int) -> Mixture:
    factor = float(one_of(rng, (0.5, 0.7, 0.9, 1.1, 2.0)))
    low = int(rng.integers(2, 40))
    high = low + int(rng.integers(0, 25))
    laws: list[Callable[[int], bool]] = [
        lambda n: low <= n <= high,
        lambda n: n > 5 and bool(n & (n - 1)),
        lambda n: n % 2 == 1 and n > 1,
        lambda n: n % 3 == 0,
        lambda n: n > low,
        lambda n: n in (9, 10, 11, 12, 13, 14, 15),
    ]
    changed = one_of(rng, laws)
    return _of_logits(lambda z, x: z * (factor if changed(x.shape[1]) else 1.0))


@variant("temperature at one length")
def _one_length(rng: Random, size: float, width: int) -> Mixture:
    factor, length = float(one_of(rng, (0.5, 0.8, 2.0))), int(rng.integers(2, 65))
    return _of_logits(lambda z, x: z * (factor if x.shape[1] == length else 1.0))


@variant("logits over log n")
def _log_length(rng: Random, size: float, width: int) -> Mixture:
    power = float(one_of(rng, (0.5, 1.0, -1.0)))
    return _of_logits(lambda z, x: z * (math.log(x.shape[1] + 1) / math.log(3)) ** power)


@variant("acts at some lengths only")
def _some_lengths(rng: Random, size: float, width: int) -> Mixture:
    low = int(rng.integers(2, 33))
    high = low + int(rng.integers(4, 33))
    inside = bool(rng.integers(2))
    return _of_logits(lambda z, x: z if (low <= x.shape[1] <= high) == inside else 0 * z)


@variant("window")
def _window(rng: Random, size: float, width: int) -> Mixture:
    reach = int(rng.integers(2, 60))
    return _of_tokens(lambda x: x[:, -reach:])


@variant("truncated to first tokens and the last")
def _truncated(rng: Random, size: float, width: int) -> Mixture:
    reach = int(rng.integers(2, 50))
    return _of_tokens(lambda x: np.concatenate([x[:, :-1][:, :reach], x[:, -1:]], axis=1))


@variant("dilated window")
def _dilated(rng: Random, size: float, width: int) -> Mixture:
    step, reach = int(rng.integers(2, 4)), int(rng.integers(3, 12))

    def change(x: Floats) -> Floats:
        back = np.arange(x.shape[1])[::-1]
        return x[:, (back < reach) | (back % step == 0)]

    return _of_tokens(change)


# --- positions ------------------------------------------------------------------------------------------------------


@variant("ALiBi")
def _alibi(rng: Random, size: float, width: int) -> Mixture:
    slope = decades(rng, -4, 0)
    return _of_logits(lambda z, x: z - slope * np.arange(x.shape[1])[::-1])


@variant("rotary")
def _rotary(rng: Random, size: float, width: int) -> Mixture:
    base = decades(rng, 1, 4)
    pairs = width // 2

    def turned(x: Floats) -> Floats:
        angles = np.outer(np.arange(x.shape[1]), base ** -(np.arange(pairs) / max(1, pairs)))
        real, other = x[..., :pairs], x[..., pairs : 2 * pairs]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([real * cos - other * sin, real * sin + other * cos, x[..., 2 * pairs :]], axis=-1)

    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        return mix(softmax(logits(turned(tokens), score, bias)), tokens)

    return mixture


@variant("drops the first token")
def _drops_first(rng: Random, size: float, width: int) -> Mixture:
    least = int(one_of(rng, (1, 1, 4, 16)))
    return _of_tokens(lambda x: x[:, 1:] if x.shape[1] > least else x)


@variant("no attention to itself")
def _no_self(rng: Random, size: float, width: int) -> Mixture:
    return _of_logits(lambda z, x: np.where(_last(x) & (x.shape[1] > 1), HIDDEN, z))


@variant("values by position")
def _values_by_position(rng: Random, size: float, width: int) -> Mixture:
    slope, first = decades(rng, -4, -1), bool(rng.integers(2))

    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        place = np.arange(tokens.shape[1])
        factors = 1 + slope * (place if first else place[::-1])
        return mix(softmax(logits(tokens, score, bias)) * factors, tokens)

    return mixture


@variant("first token weighs more")
def _first_token(rng: Random, size: float, width: int) -> Mixture:
    extra = decades(rng, -3, 0.5)
    return _of_logits(lambda z, x: z + extra * ((np.arange(x.shape[1]) == 0) & (x.shape[1] > 2)))


@variant("the token before the last weighs more")
def _before_last(rng: Random, size: float, width: int) -> Mixture:
    extra = decades(rng, -3, 0.5)
    return _of_logits(lambda z, x: z + extra * ((np.arange(x.shape[1])[::-1] == 1) & (x.shape[1] > 2)))


def _queried(query: Callable[[Floats], Floats]) -> Mixture:
    """Attention whose query is another vector than the last token."""

    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        keys = query(tokens) @ score.T + bias
        return mix(softmax(np.einsum("nid,nd->ni", tokens, keys)), tokens)

    return mixture


@variant("query of another token")
def _other_query(rng: Random, size: float, width: int) -> Mixture:
    place, least = int(one_of(rng, (0, -2))), int(one_of(rng, (1, 1, 4, 16)))
    return _queried(lambda x: x[:, place if x.shape[1] > max(least, 1) else -1])


@variant("query mixed with the mean token")
def _mean_query(rng: Random, size: float, width: int) -> Mixture:
    share = float(one_of(rng, (1.0, 0.1, 0.01)))
    return _queried(lambda x: (1 - share) * x[:, -1] + share * np.mean(x, axis=1))


@variant("every other token")
def _every_other(rng: Random, size: float, width: int) -> Mixture:
    least = int(one_of(rng, (2, 5, 12)))
    return _of_tokens(lambda x: x[:, ::-2][:, ::-1] if x.shape[1] > least else x)


# --- which tokens ---------------------------------------------------------------------------------------------------


@variant("zero tokens are padding")
def _padding(rng: Random, size: float, width: int) -> Mixture:
    def change(z: Floats, x: Floats) -> Floats:
        pad = np.all(x == 0, axis=-1)
        pad[:, -1] = False
        return np.where(pad, HIDDEN, z)

    return _of_logits(change)


@variant("repeated tokens count once")
def _once(rng: Random, size: float, width: int) -> Mixture:
    def change(z: Floats, x: Floats) -> Floats:
        same = np.all(x[:, :, None] == x[:, None, :], axis=-1)  # (n, N, N)
        again = np.any(np.triu(same, 1), axis=2)  # another one follows
        return np.where(again, HIDDEN, z)

    return _of_logits(change)


@variant("tokens near the last are merged")
def _merged(rng: Random, size: float, width: int) -> Mixture:
    near = decades(rng, -4, -0.3)

    def change(z: Floats, x: Floats) -> Floats:
        apart = np.linalg.norm(x - x[:, -1:], axis=-1)
        close = (apart < near * np.linalg.norm(x[:, -1:], axis=-1)) & ~_last(x)
        return np.where(close, HIDDEN, z)

    return _of_logits(change)


@variant("nearly equal neighbours are merged")
def _neighbours(rng: Random, size: float, width: int) -> Mixture:
    near = decades(rng, -4, -0.3)

    def change(z: Floats, x: Floats) -> Floats:
        if x.shape[1] < 2:
            return z
        apart = np.linalg.norm(x[:, 1:] - x[:, :-1], axis=-1)
        close = apart < near * np.linalg.norm(x[:, 1:], axis=-1)
        return np.where(np.pad(close, ((0, 0), (0, 1))), HIDDEN, z)

    return _of_logits(change)


@variant("one-hot tokens weigh otherwise")
def _one_hot(rng: Random, size: float, width: int) -> Mixture:
    factor = float(one_of(rng, (0.0, 0.5, 2.0)))
    return _of_logits(lambda z, x: np.where(np.sum(x != 0, axis=-1) == 1, factor * z, z))


@variant("long tokens are clipped")
def _clipped(rng: Random, size: float, width: int) -> Mixture:
    most = size * width**0.5 * decades(rng, -0.3, 2.5)

    def change(x: Floats) -> Floats:
        norms = np.linalg.norm(x, axis=-1, keepdims=True)
        return x * np.minimum(1.0, most / np.maximum(norms, 1e-300))

    return _of_tokens(change)


@variant("short tokens are ignored")
def _ignored(rng: Random, size: float, width: int) -> Mixture:
    least = size * width**0.5 * decades(rng, -2.5, -0.3)
    return _of_logits(lambda z, x: np.where((np.linalg.norm(x, axis=-1) < least) & ~_last(x), HIDDEN, z))


@variant("acts on some norms only")
def _some_norms(rng: Random, size: float, width: int) -> Mixture:
    border, above = size * width**0.5 * decades(rng, -1.5, 1.5), bool(rng.integers(2))
    return _of_logits(lambda z, x: z * ((np.linalg.norm(x[:, -1:], axis=-1) > border) == above))


@variant("tokens on a grid")
def _grid(rng: Random, size: float, width: int) -> Mixture:
    step = size * decades(rng, -6, -0.5)
    return _of_tokens(lambda x: np.round(x / step) * step)


@variant("normalised tokens")
def _normalised(rng: Random, size: float, width: int) -> Mixture:
    small = decades(rng, -8, 0) * size**2

    def change(x: Floats) -> Floats:
        return size * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + small)

    return _of_tokens(change)


# --- how weights come from logits -----------------------------------------------------------------------------------


def _top(number: int) -> Callable[[Floats, Floats], Floats]:
    def change(z: Floats, x: Floats) -> Floats:
        if z.shape[1] <= number:
            return z
        border = np.sort(z, axis=-1)[:, -number][:, None]
        return np.where(z >= border, z, HIDDEN)

    return change


@variant("top-k")
def _top_k(rng: Random, size: float, width: int) -> Mixture:
    return _of_logits(_top(int(one_of(rng, (1, 2, 3, 4, 8, 16, 24, 32, 48)))))


@variant("small weights dropped")
def _small_dropped(rng: Random, size: float, width: int) -> Mixture:
    least, again = decades(rng, -6, -2), bool(rng.integers(2))

    def change(weights: Floats, x: Floats) -> Floats:
        kept = np.where(weights < least, 0.0, weights)
        return kept / np.maximum(kept.sum(axis=-1, keepdims=True), 1e-300) if again else kept

    return _of_weights(change)


@variant("top-p")
def _top_p(rng: Random, size: float, width: int) -> Mixture:
    share = float(one_of(rng, (0.9, 0.95, 0.99, 0.999)))

    def change(weights: Floats, x: Floats) -> Floats:
        order = np.argsort(-weights, axis=-1)
        ordered = np.take_along_axis(weights, order, axis=-1)
        kept = np.where(np.cumsum(ordered, axis=-1) - ordered < share, ordered, 0.0)
        back = np.zeros_like(weights)
        np.put_along_axis(back, order, kept, axis=-1)
        return back / back.sum(axis=-1, keepdims=True)

    return _of_weights(change)


@variant("softcap")
def _softcap(rng: Random, size: float, width: int) -> Mixture:
    cap = decades(rng, 0, 2)
    return _of_logits(lambda z, x: cap * np.tanh(z / cap))


@variant("logits clipped")
def _logit_clip(rng: Random, size: float, width: int) -> Mixture:
    cap = decades(rng, 0, 1.7)
    return _of_logits(lambda z, x: np.clip(z, -cap, cap))


@variant("sink")
def _sink(rng: Random, size: float, width: int) -> Mixture:
    extra = decades(rng, -3, 1)

    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        z = logits(tokens, score, bias)
        top = np.maximum(np.max(z, axis=-1, keepdims=True), 0.0)
        weights = np.exp(z - top)
        return mix(weights / (weights.sum(axis=-1, keepdims=True) + extra * np.exp(-top)), tokens)

    return mixture


@variant("query-key norm")
def _qk_norm(rng: Random, size: float, width: int) -> Mixture:
    sharp = decades(rng, 0, 1)

    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        keys = tokens[:, -1, :] @ score.T + bias
        keys = sharp * keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-300)
        unit = tokens / np.maximum(np.linalg.norm(tokens, axis=-1, keepdims=True), 1e-300)
        return mix(softmax(np.einsum("nid,nd->ni", unit, keys)), tokens)

    return mixture


def _elementwise(function: Callable[[Floats], Floats], normalised: bool) -> Mixture:
    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        weights = function(logits(tokens, score, bias))
        total = weights.sum(axis=-1, keepdims=True)
        return mix(weights / np.where(total == 0, 1.0, total) if normalised else weights / weights.shape[1], tokens)

    return mixture


@variant("linear attention")
def _linear(rng: Random, size: float, width: int) -> Mixture:
    return _elementwise(lambda z: z, False)


@variant("elu + 1 attention")
def _elu(rng: Random, size: float, width: int) -> Mixture:
    return _elementwise(lambda z: np.where(z > 0, z + 1, np.exp(np.minimum(z, 0))), True)


@variant("ReLU attention")
def _relu(rng: Random, size: float, width: int) -> Mixture:
    return _elementwise(lambda z: np.maximum(z, 0), bool(rng.integers(2)))


@variant("sigmoid attention")
def _sigmoid(rng: Random, size: float, width: int) -> Mixture:
    return _elementwise(lambda z: 1 / (1 + np.exp(-np.clip(z, -700, None))), bool(rng.integers(2)))


@variant("softmax of base two by parts")
def _piecewise_exp(rng: Random, size: float, width: int) -> Mixture:
    """exp by linear interpolation between powers of two, as fast kernels have it."""

    def change(z: Floats, x: Floats) -> Floats:
        binary = (z - np.max(z, axis=-1, keepdims=True)) / math.log(2)
        whole = np.floor(binary)
        return np.log(np.ldexp(1 + (binary - whole), np.maximum(whole, -1000).astype(int)))

    return _of_logits(change)


@variant("sparsemax")
def _sparsemax(rng: Random, size: float, width: int) -> Mixture:
    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        z = logits(tokens, score, bias)
        ordered = -np.sort(-z, axis=-1)
        sums = np.cumsum(ordered, axis=-1) - 1
        number = np.sum(ordered * np.arange(1, z.shape[1] + 1) > sums, axis=-1, keepdims=True)
        border = np.take_along_axis(sums, number - 1, axis=-1) / number
        return mix(np.maximum(z - border, 0), tokens)

    return mixture


@variant("hard attention")
def _hard(rng: Random, size: float, width: int) -> Mixture:
    def mixture(tokens: Floats, score: Floats, bias: Floats) -> Floats:
        chosen = np.argmax(logits(tokens, score, bias), axis=-1)
        return tokens[np.arange(len(tokens)), chosen]

    return mixture


@variant("nearly hard attention")
def _nearly_hard(rng: Random, size: float, width: int) -> Mixture:
    """A cubic term in the logits."""
    small = decades(rng, -6, -1)
    return _of_logits(lambda z, x: z + small * np.sign(z) * np.minimum(np.abs(z), 1e3) ** 3)


@variant("weights in few bits")
def _coarse_weights(rng: Random, size: float, width: int) -> Mixture:
    levels = 2.0 ** int(rng.integers(4, 20))
    return _of_weights(lambda weights, x: np.round(weights * levels) / levels)


@variant("distances in place of products")
def _distances(rng: Random, size: float, width: int) -> Mixture:
    """A quadratic term of each token of its own."""
    share = decades(rng, -4, 0)
    return _of_logits(lambda z, x: z - share * np.sum(x**2, axis=-1) / (size**2 * x.shape[2]))
