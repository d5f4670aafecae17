"""Random pairs of parameters: does `equivalent` say what the answers to random sequences say?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.families.activations import ACTIVATIONS
from keyhole.gauge.factored import FactoredHeads

PAIRS = 1000
LENGTHS = (1, 2, 3, 4, 5, 6)
LOGITS = (0.3, 1.0, 3.0, 8.0)  # layers take the last for: as long as to pass most kinks
SEQUENCES, MANY = 24, 480  # of each length and size; many where few lengths must show what all do
# Answers that agree this far, relatively, come from the same map; nothing that differs here does so by less than 1e-3.
SAME_ANSWERS = 1e-9
# Heads that cancel leave answers of rounding alone: those are seen at this part of what one head answers.
CANCELLED = 1e-3
Random = np.random.Generator


def table() -> str:
    columns = ["family", "pairs", "same map", "another map", "largest apart of the same", "least apart of others", "≠"]
    tallies: dict[str, list[tuple[bool, bool, float]]] = {}
    wrong_length, wrong_distance = 0, 0
    for family, first, second in pairs(np.random.default_rng(0), PAIRS):
        apart = answers_apart(first, second)
        same = kh.equivalent(first, second)
        tallies.setdefault(family, []).append((same, apart <= SAME_ANSWERS, apart))
        wrong_distance += (kh.distance(first, second) <= SAME_ANSWERS) != same
        for length in (1, 2):
            short = answers_apart(first, second, length) <= SAME_ANSWERS
            wrong_length += kh.equivalent(first, second, max_length=length) != short
    rows: list[list[object]] = []
    for family, tally in sorted(tallies.items()):
        equal = [apart for same, _, apart in tally if same]
        other = [apart for same, _, apart in tally if not same]
        wrong = sum(same != numeric for same, numeric, _ in tally)
        rows.append(
            [family, len(tally), len(equal), len(other), f"{max(equal):.0e}", f"{min(other):.0e}", f"**{wrong}**"]
        )
    total = sum(len(tally) for tally in tallies.values())
    wrong = sum(same != numeric for tally in tallies.values() for same, numeric, _ in tally)
    return (
        f"{wrong} disagreements of `equivalent` with the answers to sequences of up to {LENGTHS[-1]} tokens in {total} "
        f"pairs; {wrong_length} of `equivalent(max_length=)` with answers to sequences of up to 1 and 2 tokens; "
        f"{wrong_distance} with `distance`.\n\n{markdown(columns, rows)}"
    )


def pairs(rng: Random, count: int) -> Iterator[tuple[str, Any, Any]]:
    """Parameters and others: the same in another gauge, or changed, also in another gauge."""
    families = list(MAKERS)
    for number in range(count):
        family = families[number % len(families)]
        first = MAKERS[family](rng)
        second = moved(first, rng)
        if rng.random() < 0.5:
            second = moved(changed(first, rng), rng)
        yield family, first, second


def answers_apart(first: Any, second: Any, max_length: int = LENGTHS[-1]) -> float:
    """The largest difference of answers, over the largest answer."""
    rng, apart = np.random.default_rng(1), 0.0
    count = SEQUENCES if max_length == LENGTHS[-1] else MANY
    for length in LENGTHS[:max_length]:
        for norm in {_norm(first, each) for each in LOGITS} | {_norm(second, each) for each in LOGITS}:
            tokens = rng.standard_normal((count, length, first.width)) * norm / first.width**0.5
            one, two = first(tokens), second(tokens)
            scale = max(np.max(np.abs(one)), np.max(np.abs(two)), CANCELLED * _loudest(first, tokens))
            apart = max(apart, float(np.max(np.abs(one - two)) / scale) if scale else 0.0)
    return apart


def _loudest(params: Any, tokens: Any) -> float:
    """The largest answer of any one head, of heads that are added up."""
    heads = () if params.anatomy.behind else params.anatomy.heads
    return max((float(np.max(np.abs(head(tokens)))) for head in heads), default=0.0)


def _norm(params: Any, logits: float) -> float:
    norm = params.token_norm(logits)
    return float(norm) if np.isfinite(norm) else 1.0


# --- gauge moves --------------------------------------------------------------------------------------------------


def moved(params: Any, rng: Random) -> Any:
    """A few random moves that change nothing."""
    for _ in range(rng.integers(0, 4)):
        possible = [kind for kind in kh.kinds(params) if not kind.startswith("length")]
        found = kh.witness(params, rng.choice(possible), seed=int(rng.integers(2**31))).params
        params = found.joined() if isinstance(found, FactoredHeads) else found
    return params


# --- changes ------------------------------------------------------------------------------------------------------


def changed(params: Any, rng: Random) -> Any:
    """A change that mostly shows: in a gauge of its own it may not, and then the answers will say so."""
    if rng.random() < 0.3:
        short = [kind for kind in kh.kinds(params) if kind.startswith("length")]
        if short:
            return kh.witness(params, short[0], seed=int(rng.integers(2**31))).params
    if isinstance(params, kh.OneLayer):
        return _changed_layer(params, rng)
    if isinstance(params, kh.ReluNet):
        return _changed_net(params, rng)
    heads = params if isinstance(params, kh.MultiHead) else kh.MultiHead([replace(params, output_bias=None)])
    return _changed_heads(heads, params.output_bias, rng)


def _nudged(array: Any, rng: Random) -> Any:
    """One entry moved by a part of the whole, between a thousandth and all of it."""
    array = np.array(array)
    place = tuple(rng.integers(side) for side in array.shape)
    size = np.linalg.norm(array) / array.size**0.5 or 1.0
    array[place] += 10 ** rng.uniform(-2, 0) * size * rng.choice([-1, 1])
    return array


def _changed_heads(heads: kh.MultiHead, bias: Any, rng: Random) -> kh.MultiHead:
    number = int(rng.integers(len(heads.heads)))
    head, other = heads.heads[number], heads.heads[number - 1]
    options: list[Callable[[], kh.SingleHead]] = [
        lambda: replace(head, score=_nudged(head.score, rng)),
        lambda: replace(head, value=_nudged(head.value, rng)),
        lambda: replace(head, score=-head.score),
        lambda: replace(head, score=head.score.T),
        lambda: replace(head, score=1.01 * head.score),
        lambda: replace(head, value=other.value),
        lambda: replace(head, score=other.score),
        lambda: replace(head, value=-head.value),
        lambda: replace(head, score_bias=_nudged(np.zeros(heads.width), rng)),
        lambda: replace(head, score_bias=None),
    ]
    choice = int(rng.integers(len(options) + 3))
    changed_heads = list(heads.heads)
    if choice < len(options):
        changed_heads[number] = options[choice]()
    elif choice == len(options):
        changed_heads.append(replace(head, score=0 * head.score, score_bias=None))
    elif choice == len(options) + 1 and len(changed_heads) > 1:
        changed_heads.pop(number)
    else:
        shape = () if heads.outputs is None else (heads.outputs,)
        bias = _nudged(np.zeros(shape) if bias is None else bias, rng) if shape else np.asarray(rng.standard_normal())
    return kh.MultiHead(changed_heads, bias)


def _changed_net(net: kh.ReluNet, rng: Random) -> kh.ReluNet:
    number = int(rng.integers(max(1, net.neurons)))
    flip = np.where(np.arange(net.neurons) == number, -1.0, 1.0)
    skip = np.zeros((*net.weights_out.shape[:-1], net.width)) if net.skip is None else net.skip
    options: list[Callable[[], kh.ReluNet]] = [
        lambda: replace(net, skip=_nudged(skip, rng)),
        lambda: replace(net, bias_out=np.asarray(net.bias_out + 0.1 * rng.standard_normal())),
    ]
    if net.neurons:
        options += [
            lambda: replace(net, weights_in=_nudged(net.weights_in, rng)),
            lambda: replace(net, bias_in=_nudged(net.bias_in, rng)),
            lambda: replace(net, weights_out=_nudged(net.weights_out, rng)),
            lambda: replace(net, weights_in=flip[:, None] * net.weights_in, bias_in=flip * net.bias_in),
            lambda: replace(net, weights_in=1.5 * net.weights_in, bias_in=1.5 * net.bias_in),
            lambda: replace(net, activation=str(rng.choice(ACTIVATIONS))),
            lambda: replace(
                net,
                weights_in=np.delete(net.weights_in, number, 0),
                bias_in=np.delete(net.bias_in, number),
                weights_out=np.delete(net.weights_out, number, -1),
            ),
        ]
    return options[int(rng.integers(len(options)))]()


def _changed_layer(layer: kh.OneLayer, rng: Random) -> kh.OneLayer:
    heads = kh.MultiHead(layer.heads)
    options: list[Callable[[], kh.OneLayer]] = [
        lambda: replace(layer, attention=_changed_heads(heads, layer.attention.output_bias, rng)),
        lambda: replace(layer, ffn=_changed_net(layer.ffn, rng)),
    ]
    if layer.width == layer.attention.outputs and rng.random() < 0.2:
        options.append(lambda: replace(layer, residual=not layer.residual))
    return options[int(rng.integers(len(options)))]()


# --- parameters ---------------------------------------------------------------------------------------------------


def _head(rng: Random, width: int, outputs: int | None, biased: bool) -> kh.SingleHead:
    score = rng.standard_normal((width, width)) * 10 ** rng.uniform(-1, 1)
    if rng.random() < 0.3:  # of rank one
        score = np.outer(*rng.standard_normal((2, width)))
    value = rng.standard_normal((width,) if outputs is None else (width, outputs))
    return kh.SingleHead(score, value, rng.standard_normal(width) if biased else None)


def _shape(rng: Random) -> tuple[int, int | None, bool]:
    outputs = None if rng.random() < 0.5 else int(rng.integers(1, 4))
    return int(rng.integers(1, 7)), outputs, bool(rng.random() < 0.5)


def single(rng: Random) -> kh.SingleHead:
    width, outputs, biased = _shape(rng)
    head = _head(rng, width, outputs, biased)
    bias = np.asarray(rng.standard_normal(() if outputs is None else outputs))
    return replace(head, output_bias=bias if biased else None)


def several(rng: Random) -> kh.MultiHead:
    """Heads, some of them equal, opposite, proportional, averaging or silent."""
    return _several(rng, *_shape(rng))


def _several(rng: Random, width: int, outputs: int | None, biased: bool) -> kh.MultiHead:
    heads = [_head(rng, width, outputs, biased) for _ in range(rng.integers(1, 5))]
    first = heads[0]
    relatives: list[Callable[[], kh.SingleHead]] = [
        lambda: replace(first, value=rng.standard_normal(first.value.shape)),
        lambda: replace(first, value=-first.value),
        lambda: replace(first, score=-first.score, score_bias=None if not biased else -first.score_bias),
        lambda: replace(first, score=2 * first.score),
        lambda: replace(first, score=0 * first.score, score_bias=None),
        lambda: replace(first, value=0 * first.value),
        lambda: _head(rng, width, outputs, not biased),
    ]
    heads += [relatives[rng.integers(len(relatives))]() for _ in range(rng.integers(0, 3))]
    bias = np.asarray(rng.standard_normal(() if outputs is None else outputs))
    return kh.MultiHead(heads, bias if biased else None)


def net(rng: Random, width: int | None = None, few: bool = False) -> kh.ReluNet:
    """Neurons, some of them with one kink, some that see or say nothing."""
    own, outputs, skipped = _shape(rng)
    width = own if width is None else width
    neurons = int(rng.integers(0, 3 if few else 7))
    shape = () if outputs is None else (outputs,)
    inner, bias = rng.standard_normal((neurons, width)), rng.standard_normal(neurons)
    outer = rng.standard_normal((*shape, neurons))
    for number in range(1, neurons):
        fate = rng.random()
        if fate < 0.15:  # on the kink of the first, either way
            factor = rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 2)
            inner[number], bias[number] = factor * inner[0], factor * bias[0]
        elif fate < 0.2:
            inner[number] = 0.0
        elif fate < 0.25:
            outer[..., number] = 0.0
    skip = rng.standard_normal((*shape, width)) if skipped else None
    activation = "relu" if rng.random() < 0.5 else str(rng.choice(ACTIVATIONS))
    return kh.ReluNet(inner, bias, outer, np.asarray(rng.standard_normal(shape)), skip, activation)


def layer(rng: Random) -> kh.OneLayer:
    """Heads, often one, and a net behind them, which sees all of their values or not."""
    width, _, biased = _shape(rng)
    residual = bool(rng.random() < 0.5)
    inner = width if residual else int(rng.integers(1, 7))
    behind = net(rng, inner, few=bool(rng.random() < 0.4))
    if rng.random() < 0.4:
        return kh.OneLayer(_several(rng, width, inner, biased), behind, residual)
    value = rng.standard_normal((width, inner))
    if rng.random() < 0.2:
        value = np.outer(rng.standard_normal(width), rng.standard_normal(inner))
    if rng.random() < 0.1:
        value = 0 * value
    bias = rng.standard_normal(inner) if biased else None
    head = kh.SingleHead(
        rng.standard_normal((width, width)), value, rng.standard_normal(width) if biased else None, bias
    )
    return kh.OneLayer(head, behind, residual)


MAKERS: dict[str, Callable[[Random], Any]] = {
    "single-head": single,
    "multi-head": several,
    "relu-net": net,
    "one-layer": layer,
}
