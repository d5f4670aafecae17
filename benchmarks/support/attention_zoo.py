"""One head of attention of many kinds, in NumPy alone: what the naming of parts is measured on.

Every entry of `KINDS` draws a head and says what its parts are called; every entry of `OTHERS` draws what no name fits.
A box maps (batch, length, width) to (batch,). Scales of score and value are drawn from 1e-2 to 1e2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Random = np.random.Generator
Box = Callable[[Floats], Floats]
# (tokens, score matrix) -> logits (batch, length)
Logits = Callable[[Floats, Floats], Floats]
Weights = Callable[[Floats], Floats]
PARTS = ("form", "link", "normaliser", "position_bias", "length_law")
PLAIN = dict(zip(PARTS, ("bilinear", "exp", "sum", "none", "none"), strict=True))
WIDTHS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Kind:
    """How to draw a head, and the names of its parts; None: no name fits."""

    draw: Callable[[Random, int], Box]
    parts: dict[str, str] | None


@dataclass(frozen=True)
class Bilinear:
    """Attention of a bilinear score: each part is a function."""

    link: Weights = lambda z: z
    bias: Callable[[Floats], Floats] = lambda distance: 0.0 * distance
    law: Callable[[int], float] = lambda _: 1.0
    weigh: Weights = field(default_factory=lambda: softmax)

    def __call__(self, scores: Floats) -> Floats:  # (batch, n)
        """Weights from scores."""
        n = scores.shape[1]
        return self.weigh(self.link(self.law(n) * scores) + self.bias(np.arange(n)[::-1]))


def softmax(e: Floats, sink: float = -np.inf) -> Floats:
    """exp(e) over its sum and exp(sink)."""
    top = np.maximum(np.max(e, axis=1, keepdims=True), sink)
    weights = np.exp(e - top)
    return np.asarray(weights / (weights.sum(axis=1, keepdims=True) + np.exp(sink - top)))


def sparsemax(e: Floats) -> Floats:
    """The nearest point of the simplex."""
    e = e - e.max(axis=1, keepdims=True)
    ordered = -np.sort(-e, axis=1)
    sums = np.cumsum(ordered, axis=1) - 1
    number = np.sum(ordered * np.arange(1, e.shape[1] + 1) > sums, axis=1, keepdims=True)
    return np.asarray(np.maximum(e - np.take_along_axis(sums, number - 1, axis=1) / number, 0.0))


def entmax(alpha: float) -> Weights:
    """Entmax by bisection and a last division."""

    def weigh(e: Floats) -> Floats:
        z = (alpha - 1) * (e - e.max(axis=1, keepdims=True))
        low, high = np.full((len(z), 1), -1.0), np.full((len(z), 1), 0.0)
        for _ in range(100):
            middle = 0.5 * (low + high)
            many = np.sum(np.maximum(z - middle, 0) ** (1 / (alpha - 1)), axis=1, keepdims=True) >= 1
            low, high = np.where(many, middle, low), np.where(many, high, middle)
        weights = np.maximum(z - low, 0) ** (1 / (alpha - 1))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    return weigh


def top(k: int) -> Weights:
    """Softmax over the k largest."""

    def weigh(e: Floats) -> Floats:
        if e.shape[1] <= k:
            return softmax(e)
        order = np.argsort(-e, axis=1, kind="stable")[:, :k]
        kept = np.full_like(e, -np.inf)
        np.put_along_axis(kept, order, np.take_along_axis(e, order, axis=1), axis=1)
        return softmax(kept)

    return weigh


def cap(size: float) -> Weights:
    """Softcap."""
    return lambda z: size * np.tanh(z / size)


def _sigmoid(z: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0.0, -z)))


def _normalised(masses: Floats) -> Floats:
    total = masses.sum(axis=1, keepdims=True)
    return np.asarray(masses / np.where(total == 0, 1.0, total))


def _decades(rng: Random, low: float, high: float) -> float:
    return float(10 ** rng.uniform(low, high))


def _matrix(rng: Random, width: int) -> Floats:
    return np.asarray(_decades(rng, -2, 2) * rng.standard_normal((width, width)) / width)


def _value(rng: Random, width: int) -> Floats:
    return np.asarray(_decades(rng, -2, 2) * rng.standard_normal(width))


def _mixed(weights: Floats, x: Floats, value: Floats) -> Floats:
    return np.asarray(np.einsum("nt,nt->n", weights, x @ value))


def _products(x: Floats, score: Floats) -> Floats:
    return np.asarray(np.einsum("ntd,nd->nt", x, x[:, -1] @ score.T))


KINDS: dict[str, Kind] = {}
OTHERS: dict[str, Kind] = {}


def _bilinear(name: str, draw: Callable[[Random], Bilinear], **parts: str) -> None:
    def box(rng: Random, width: int) -> Box:
        attention, score, value = draw(rng), _matrix(rng, width), _value(rng, width)
        return lambda x: _mixed(attention(_products(x, score)), x, value)

    KINDS[name] = Kind(box, {**PLAIN, **parts})


def _kind(name: str, **parts: str) -> Callable[[Callable[[Random, int], Box]], None]:
    def keep(draw: Callable[[Random, int], Box]) -> None:
        KINDS[name] = Kind(draw, {**PLAIN, **parts})

    return keep


def _other(name: str) -> Callable[[Callable[[Random, int], Box]], None]:
    def keep(draw: Callable[[Random, int], Box]) -> None:
        OTHERS[name] = Kind(draw, None)

    return keep


# --- bilinear scores ------------------------------------------------------------------------------------------------


def _cap(rng: Random) -> Weights:
    return cap(_decades(rng, 0.3, 1.9))


def _sink(rng: Random) -> Weights:
    energy = float(rng.uniform(-3, 4))
    return lambda e: softmax(e, energy)


def _alibi(rng: Random) -> Weights:
    slope = _decades(rng, -2.5, 0)
    return lambda distance: -slope * distance


def _table(rng: Random) -> Weights:
    table = rng.standard_normal(int(rng.integers(4, 33)))
    return lambda distance: table[np.minimum(distance, table.size - 1)]


def _window(rng: Random) -> Weights:
    reach = int(rng.integers(4, 200))
    return lambda distance: np.where(distance < reach, 0.0, -np.inf)


def _log(n: int) -> float:
    return float(np.log(n))


def _root(n: int) -> float:
    return float(n**-0.5)


def _top_k(rng: Random) -> Weights:
    return top(int(rng.integers(2, 49)))


def _gate(rng: Random, *, count: bool = False) -> Weights:
    bias = float(rng.uniform(-3, 2))

    def weigh(e: Floats) -> Floats:
        return _sigmoid(e + bias) / (e.shape[1] if count else 1)

    return weigh


_bilinear("softmax", lambda _: Bilinear())
_bilinear("softcap", lambda rng: Bilinear(link=_cap(rng)), link="softcap")
_bilinear("sink", lambda rng: Bilinear(weigh=_sink(rng)), normaliser="sink")
_bilinear("softmax plus one", lambda _: Bilinear(weigh=lambda e: softmax(e, 0.0)), normaliser="plus-one")
_bilinear("sigmoid", lambda rng: Bilinear(weigh=_gate(rng)), link="sigmoid", normaliser="none")
_bilinear("sigmoid/n", lambda rng: Bilinear(weigh=_gate(rng, count=True)), link="sigmoid", normaliser="count")
_bilinear("sparsemax", lambda _: Bilinear(weigh=sparsemax), normaliser="sparsemax")
_bilinear("entmax-1.5", lambda _: Bilinear(weigh=entmax(1.5)), normaliser="entmax")
_bilinear("top-k", lambda rng: Bilinear(weigh=_top_k(rng)), normaliser="top-k")
_bilinear("ALiBi", lambda rng: Bilinear(bias=_alibi(rng)), position_bias="alibi")
_bilinear("table", lambda rng: Bilinear(bias=_table(rng)), position_bias="table")
_bilinear("window", lambda rng: Bilinear(bias=_window(rng)), position_bias="window")
_bilinear("log n", lambda _: Bilinear(law=_log), length_law="log")
_bilinear("1/sqrt n", lambda _: Bilinear(law=_root), length_law="root")
_bilinear("softcap, sink", lambda rng: Bilinear(link=_cap(rng), weigh=_sink(rng)), link="softcap", normaliser="sink")
_bilinear(
    "softcap, ALiBi", lambda rng: Bilinear(link=_cap(rng), bias=_alibi(rng)), link="softcap", position_bias="alibi"
)
_bilinear(
    "softcap, table", lambda rng: Bilinear(link=_cap(rng), bias=_table(rng)), link="softcap", position_bias="table"
)
_bilinear(
    "softcap, window", lambda rng: Bilinear(link=_cap(rng), bias=_window(rng)), link="softcap", position_bias="window"
)
_bilinear("softcap, log n", lambda rng: Bilinear(link=_cap(rng), law=_log), link="softcap", length_law="log")
_bilinear(
    "sink, ALiBi", lambda rng: Bilinear(weigh=_sink(rng), bias=_alibi(rng)), normaliser="sink", position_bias="alibi"
)
_bilinear(
    "sink, table", lambda rng: Bilinear(weigh=_sink(rng), bias=_table(rng)), normaliser="sink", position_bias="table"
)
_bilinear(
    "sink, window", lambda rng: Bilinear(weigh=_sink(rng), bias=_window(rng)), normaliser="sink", position_bias="window"
)
_bilinear("sink, log n", lambda rng: Bilinear(weigh=_sink(rng), law=_log), normaliser="sink", length_law="log")
_bilinear(
    "window, 1/sqrt n", lambda rng: Bilinear(bias=_window(rng), law=_root), position_bias="window", length_law="root"
)


@_kind("softmax, score bias")
def _score_bias(rng: Random, width: int) -> Box:
    score, value, bias = _matrix(rng, width), _value(rng, width), _value(rng, width) / width**0.5
    return lambda x: _mixed(softmax(_products(x, score) + x @ bias), x, value)


@_kind("softmax, output bias")
def _output_bias(rng: Random, width: int) -> Box:
    score, value, bias = _matrix(rng, width), _value(rng, width), _decades(rng, -2, 2)
    return lambda x: _mixed(softmax(_products(x, score)), x, value) + bias


# --- scores of other forms ------------------------------------------------------------------------------------------


def _turned(vectors: Floats, places: Floats) -> Floats:  # (batch, n, width), (n,)
    half = vectors.shape[2] // 2
    angles = np.outer(places, 10000.0 ** -(np.arange(half) / half))
    one, two = vectors[..., :half], vectors[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)


def _rotary(rng: Random, width: int) -> Callable[[Floats], Floats]:
    size = _decades(rng, -2, 2)
    keys, queries = rng.standard_normal((2, width, width)) / width

    def logits(x: Floats) -> Floats:
        places = np.arange(x.shape[1])
        one, two = _turned(x @ keys.T, places), _turned(x[:, -1:] @ queries.T, places[-1:])
        return size * np.asarray(np.einsum("ntd,nsd->nt", one, two))

    return logits


def _of_scores(
    name: str,
    scores: Callable[[Random, int], Callable[[Floats], Floats]],
    attentions: Callable[[Random], Bilinear],
    **parts: str,
) -> None:
    def box(rng: Random, width: int) -> Box:
        score, attention, value = scores(rng, width), attentions(rng), _value(rng, width)
        return lambda x: _mixed(attention(score(x)), x, value)

    KINDS[name] = Kind(box, {**PLAIN, **parts})


_of_scores("rotary", _rotary, lambda _: Bilinear(), form="rotary")
_of_scores("rotary, softcap", _rotary, lambda rng: Bilinear(link=_cap(rng)), form="rotary", link="softcap")
_of_scores("rotary, sink", _rotary, lambda rng: Bilinear(weigh=_sink(rng)), form="rotary", normaliser="sink")


def _qk_norm(small: float, *, rotary: bool = False) -> Callable[[Random, int], Callable[[Floats], Floats]]:
    def draw(rng: Random, width: int) -> Callable[[Floats], Floats]:
        inner = max(2, width // int(rng.integers(1, 3)) // 2 * 2)
        keys, queries = _decades(rng, -2, 2) * rng.standard_normal((2, inner, width)) / width**0.5
        gains = rng.uniform(0.5, 2.0, (2, inner))

        def rms(y: Floats) -> Floats:
            largest = np.maximum(np.max(np.abs(y), axis=-1, keepdims=True), 1e-290)
            norms = largest * np.sqrt(np.mean((y / largest) ** 2, axis=-1, keepdims=True))
            return np.asarray(y / np.maximum(np.hypot(norms, small**0.5), 1e-290))  # a zero token has score zero

        def logits(x: Floats) -> Floats:
            one, two = gains[0] * rms(x @ keys.T), gains[1] * rms(x[:, -1:] @ queries.T)
            if rotary:
                one, two = _turned(one, np.arange(x.shape[1])), _turned(two, np.arange(x.shape[1])[-1:])
            return np.asarray(np.einsum("ntd,nsd->nt", one, two)) / inner**0.5

        return logits

    return draw


_of_scores("qk-norm", _qk_norm(0.0), lambda _: Bilinear(), form="qk-norm")
_of_scores("qk-norm, epsilon", _qk_norm(1e-6), lambda _: Bilinear(), form="qk-norm")
_of_scores("rotary qk-norm", _qk_norm(0.0, rotary=True), lambda _: Bilinear(), form="qk-norm-rotary")


def _of_kernel(name: str, kernel: Callable[[Floats], Floats], divide: Weights, **parts: str) -> None:
    """Weights divide(kernel(score)) of a bilinear score."""

    def box(rng: Random, width: int) -> Box:
        score, value = _matrix(rng, width), _value(rng, width)
        return lambda x: _mixed(divide(kernel(_products(x, score))), x, value)

    KINDS[name] = Kind(box, {**PLAIN, **parts})


def _relu(z: Floats) -> Floats:
    return np.maximum(z, 0.0)


_of_kernel("linear, sum", lambda z: z, _normalised, link="linear")
_of_kernel("squared, sum", lambda z: z**2, _normalised, link="squared")
_of_kernel("linear", lambda z: z, lambda m: m, link="linear", normaliser="none")
_of_kernel("linear/n", lambda z: z, lambda m: m / m.shape[1], link="linear", normaliser="count")
_of_kernel("ReLU", _relu, lambda m: m, link="relu", normaliser="none")
_of_kernel("ReLU/n", _relu, lambda m: m / m.shape[1], link="relu", normaliser="count")
_of_kernel("squared", lambda z: z**2, lambda m: m, link="squared", normaliser="none")


@_kind("Gaussian", form="gaussian")
def _gaussian(rng: Random, width: int) -> Box:
    size, value = _decades(rng, -1, 1), _value(rng, width)
    keys, queries = size * rng.standard_normal((2, width, width)) / width
    return lambda x: _mixed(softmax(-np.sum((x @ keys.T - x[:, -1:] @ queries.T) ** 2, axis=2)), x, value)


def _features(function: Callable[[Floats], Floats]) -> Callable[[Random, int], Box]:
    """At least 32 features: with fewer there are tokens without an active one, which such attention answers by 0/0."""

    def draw(rng: Random, width: int) -> Box:
        size, value = _decades(rng, -1, 1), _value(rng, width)
        keys, queries = size * rng.standard_normal((2, max(32, width), width)) / width

        def box(x: Floats) -> Floats:
            masses = np.einsum("ntd,nd->nt", function(x @ keys.T), function(x[:, -1] @ queries.T))
            return _mixed(_normalised(masses), x, value)

        return box

    return draw


def _exp_features(rng: Random, width: int) -> Box:
    size, value = _decades(rng, -1, 1), _value(rng, width)
    keys, queries = size * rng.standard_normal((2, width, width)) / width

    def box(x: Floats) -> Floats:
        exponents = x @ keys.T + (x[:, -1] @ queries.T)[:, None, :]
        energies = np.logaddexp.reduce(exponents, axis=2)
        return _mixed(softmax(energies), x, value)

    return box


KINDS["elu+1 features"] = Kind(
    _features(lambda z: np.where(z > 0, z + 1, np.exp(np.minimum(z, 0)))), {**PLAIN, "form": "elu-features"}
)
KINDS["exp features"] = Kind(_exp_features, {**PLAIN, "form": "exp-features"})
KINDS["ReLU features"] = Kind(_features(_relu), {**PLAIN, "form": "relu-features"})


# --- what has no name -----------------------------------------------------------------------------------------------


@_other("two heads")
def _two_heads(rng: Random, width: int) -> Box:
    heads = [(_matrix(rng, width), _value(rng, width)) for _ in range(2)]
    return lambda x: np.sum([_mixed(softmax(_products(x, score)), x, value) for score, value in heads], axis=0)


def _other_attention(name: str, draw: Callable[[Random], Bilinear]) -> None:
    def box(rng: Random, width: int) -> Box:
        attention, score, value = draw(rng), _matrix(rng, width), _value(rng, width)
        return lambda x: _mixed(attention(_products(x, score)), x, value)

    OTHERS[name] = Kind(box, None)


def _atan(rng: Random) -> Bilinear:
    size = _decades(rng, 0.3, 1.5)
    return Bilinear(link=lambda z: size * np.arctan(z / size))


def _log_softplus(z: Floats) -> Floats:
    return np.where(z < -30, z, np.log(np.logaddexp(0.0, np.maximum(z, -30))))


_other_attention("atan cap", _atan)
_other_attention("entmax-1.3", lambda _: Bilinear(weigh=entmax(1.3)))
_other_attention("temperature 1/n", lambda _: Bilinear(law=lambda n: 1.0 / n))
_other_attention("1 + s + s²/2", lambda _: Bilinear(weigh=lambda e: _normalised(1 + e + e**2 / 2)))
_other_attention("softplus", lambda _: Bilinear(link=_log_softplus))


@_other("Laplace")
def _laplace(rng: Random, width: int) -> Box:
    size, value = _decades(rng, -1, 1), _value(rng, width)
    keys, queries = size * rng.standard_normal((2, width, width)) / width
    return lambda x: _mixed(softmax(-np.sum(np.abs(x @ keys.T - x[:, -1:] @ queries.T), axis=2)), x, value)


@_other("xᵀW tanh(g)")
def _tanh_query(rng: Random, width: int) -> Box:
    score, value = _matrix(rng, width), _value(rng, width)
    return lambda x: _mixed(softmax(np.einsum("ntd,nd->nt", x, np.tanh(x[:, -1]) @ score.T)), x, value)


@_other("nonlinear value")
def _nonlinear_value(rng: Random, width: int) -> Box:
    score, value = _matrix(rng, width), _value(rng, width)
    return lambda x: np.asarray(np.einsum("nt,nt->n", softmax(_products(x, score)), np.tanh(x) @ value))
