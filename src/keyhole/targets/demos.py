"""Demos: random parameters, known to whoever judges the result, never to the method."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.families import Labels, MultiHead, OneLayer, ReluNet, SingleHead
from keyhole.gauge.identifiability import on_alphabet
from keyhole.oracles import Flipped, FunctionOracle, Labelled, Noisy, Oracle, Rounded
from keyhole.targets.forms import FORM_KNOBS, random_form_head
from keyhole.targets.norms import NORM_KNOBS, with_norms
from keyhole.targets.parts import PART_KNOBS, attention_of
from keyhole.targets.target import Choice, Knob, Target, read_options

# Sets the random numbers of a demo's truth apart from those a method draws from the same seed.
DEMO_STREAM = 0xDE30
PARTS_STREAM = 0xDE31  # of tables of parts of attention
ALPHABET_STREAM = 0xDE32


SINGLE_HEAD_KNOBS: dict[str, Knob | Choice] = {
    "width": Knob(int, 32, 1, 8192),
    "rank": Knob(int, None, 0),  # full if left out
    "norm": Knob(float, 1.0, 0.0),
    "seed": Knob(int, 0, 0),
    "max_norm": Knob(float, None, 0.0),
    "outputs": Knob(int, None, 1, 8192),  # one plain number per sequence if left out
    "score_bias": Knob(float, None, 0.0),  # sizes of the entries of random biases
    "output_bias": Knob(float, None, 0.0),
    "all_positions": Knob(int, None, 0, 1),  # 1: answers at every position
    "noise": Knob(float, None, 0.0),  # standard deviation of normal errors of answers, which are declared
    "decimals": Knob(int, None, -300, 300),  # that answers are rounded to, which is declared
    "labels": Knob(int, None, 0, 1),  # 1: answers are signs, or the numbers of the largest of several outputs
    "classes": Knob(int, None, 2, 8192),  # answers are the numbers of the largest of so many outputs
    "flips": Knob(float, None, 0.0, 0.49),  # share of labels that are wrong, which is declared
    "alphabet": Knob(int, None, 1, 65536),  # as many random tokens are all that may be sent
    **PART_KNOBS,
    **FORM_KNOBS,
}


def _single_head_demo(text: str, given: Mapping[str, Any]) -> Target:
    if "classes" in given:
        given = {**given, "outputs": given["classes"], "labels": 1}
    if "form" in given:
        return _form_head_demo(text, given)
    for name in ("key_width", "epsilon", "biases"):
        if name in given:
            raise UsageError(f"{name}= is a number of heads of another form: name that too, or leave {name}= out")
    width, norm, seed = int(given["width"]), given["norm"], int(given["seed"])
    rank = int(given.get("rank", width))
    head = random_single_head(
        width,
        rank=rank,
        norm=norm,
        seed=seed,
        outputs=_whole(given, "outputs"),
        score_bias=given.get("score_bias", 0.0),
        output_bias=given.get("output_bias", 0.0),
    )
    attention = attention_of(given, np.random.default_rng([seed, PARTS_STREAM]))
    head = replace(head, attention=attention)
    everywhere = bool(given.get("all_positions", 0))
    alphabet = _alphabet(given, plain=attention.is_softmax)
    oracle = FunctionOracle(
        head.at_all_positions if everywhere else head,
        width=width,
        max_norm=given.get("max_norm"),
        positions="all" if everywhere else "last",
        alphabet=alphabet,
        name=text,
    )
    rank = rank if norm else 0
    plain = "softmax " if attention.is_softmax else ""
    label = f"a random {plain}head of width {width}, its score matrix of rank {rank} and norm {norm:g}"
    extras = [
        *(f"{kind.replace('_', ' ')} {part.name}" for kind, part in attention.parts.items() if kind in attention.words),
        f"{given['outputs']} outputs" if "outputs" in given else "",
        "a score bias" if head.score_bias is not None else "",
        "an output bias" if head.output_bias is not None else "",
        "observed at all positions" if everywhere else "",
        f"asked with {len(alphabet)} tokens only" if alphabet is not None else "",
    ]
    shown = head if alphabet is None else on_alphabet(head, alphabet)
    target = Target(text, oracle, ", ".join([label, *filter(None, extras)]), shown)
    return _with_labels(target, head, given) if given.get("labels") else _with_errors(target, given)


def _alphabet(given: Mapping[str, Any], *, plain: bool) -> Floats | None:  # -> (m, width)
    """The random tokens that a demo may be asked with, where it names their number."""
    if "alphabet" not in given:
        return None
    others = {"max_norm", "labels", "classes", "flips", "noise"} & set(given)
    if others or not plain:
        words = ", ".join(sorted(others)) or "parts of attention"
        raise UsageError(f"alphabet= is a number of tokens of a plain softmax head: leave out {words}, or alphabet=")
    rng = np.random.default_rng([int(given["seed"]), ALPHABET_STREAM])
    return np.asarray(rng.standard_normal((int(given["alphabet"]), int(given["width"]))))


def _form_head_demo(text: str, given: Mapping[str, Any]) -> Target:
    others = {"rank", "score_bias", "output_bias", "all_positions", "labels", "classes", "flips", "alphabet"}
    others &= set(given)
    if others:
        raise UsageError(f"a head of another form has no {', '.join(sorted(others))}: leave that out, or form=")
    width, seed, form = int(given["width"]), int(given["seed"]), given["form"]
    attention = attention_of(given, np.random.default_rng([seed, PARTS_STREAM]))
    rows, outputs = _whole(given, "key_width"), _whole(given, "outputs")
    drawn = {"rows": rows, "norm": given["norm"], "seed": seed, "outputs": outputs}
    drawn |= {name: given.get(name) for name in ("epsilon", "biases")}
    head = random_form_head(form, width, attention=attention, **drawn)
    parts = [f"{kind.replace('_', ' ')} {json.loads(word)[0]}" for kind, word in attention.words.items()]
    label = f"a random head of width {width} with {form} logits"
    oracle = FunctionOracle(head, width=width, max_norm=given.get("max_norm"), name=text)
    return _with_errors(Target(text, oracle, ", ".join([label, *parts]), head), given)


def random_single_head(
    width: int,
    *,
    rank: int,
    norm: float,
    seed: int | Sequence[int],
    outputs: int | None = None,
    score_bias: float = 0.0,
    output_bias: float = 0.0,
) -> SingleHead:
    """Gaussian value and biases; Gaussian score, or a product of two Gaussian factors, scaled to the spectral norm."""
    if rank > width:
        raise UsageError(f"rank={rank} exceeds width={width}: the rank of a matrix is at most its width")
    rng = np.random.default_rng([*np.atleast_1d(seed), DEMO_STREAM])
    value = rng.standard_normal(width)
    score = rng.standard_normal((width, width))
    if rank < width:
        score = score[:, :rank] @ rng.standard_normal((rank, width))
    size = float(np.linalg.norm(score, 2)) if rank else 1.0
    if outputs is not None:
        value = rng.standard_normal((width, outputs))
    return SingleHead(
        score / size * norm,
        value,
        score_bias * rng.standard_normal(width) if score_bias else None,
        np.asarray(output_bias * rng.standard_normal(value.shape[1:])) if output_bias else None,
    )


HEADS_KNOBS: dict[str, Knob | Choice] = {
    "heads": Knob(int, 4, 1, 1024),
    "width": Knob(int, 16, 1, 8192),
    "rank": Knob(int, None, 1),  # of every score matrix; full if left out
    "norm": Knob(float, 1.0, 0.0),
    "seed": Knob(int, 0, 0),
    "max_norm": Knob(float, None, 0.0),
    "outputs": Knob(int, None, 1, 8192),  # one plain number per sequence if left out
    "value_rank": Knob(int, None, 1),  # of every value matrix; full if left out
    "score_bias": Knob(float, None, 0.0),  # sizes of the entries of random biases
    "output_bias": Knob(float, None, 0.0),
    "residual": Knob(int, None, 0, 1),  # 1: the last token is added to the answer
    **NORM_KNOBS,
    **PART_KNOBS,  # the same in all heads
}


def _heads_demo(text: str, given: Mapping[str, Any]) -> Target:
    layer = random_multi_head(
        int(given["heads"]),
        int(given["width"]),
        rank=_whole(given, "rank"),
        norm=given["norm"],
        seed=int(given["seed"]),
        outputs=_whole(given, "outputs"),
        value_rank=_whole(given, "value_rank"),
        score_bias=given.get("score_bias", 0.0),
        output_bias=given.get("output_bias", 0.0),
    )
    attention = attention_of(given, np.random.default_rng([int(given["seed"]), PARTS_STREAM]))
    layer = MultiHead([replace(head, attention=attention) for head in layer.heads], layer.output_bias)
    residual = bool(given.get("residual"))
    if residual and layer.outputs != layer.width:
        raise UsageError(f"residual=1 adds tokens of width {layer.width} to answers: set outputs={layer.width}")
    params = with_norms(layer, residual, given)
    oracle = FunctionOracle(params, width=layer.width, max_norm=given.get("max_norm"), name=text)
    label = f"{len(layer.heads)} random {'softmax ' if attention.is_softmax else ''}heads of width {layer.width}"
    extras = [
        *(f"{kind.replace('_', ' ')} {part.name}" for kind, part in attention.parts.items() if kind in attention.words),
        f"{layer.outputs} outputs" if layer.outputs else "",
        "biases" if layer.output_bias is not None else "",
        "with a residual" if residual else "",
        f"{given['norm_before']} norm before" if "norm_before" in given else "",
        f"{given['norm_after']} norm after" if "norm_after" in given else "",
    ]
    return Target(text, oracle, ", ".join([label, *filter(None, extras)]), params)


def random_multi_head(
    heads: int,
    width: int,
    *,
    rank: int | None = None,
    norm: float = 1.0,
    seed: int = 0,
    outputs: int | None = None,
    value_rank: int | None = None,
    score_bias: float = 0.0,
    output_bias: float = 0.0,
) -> MultiHead:
    """Independent random heads, each made like a single one; values of a low rank are products of two factors."""
    made = [
        random_single_head(
            width, rank=rank or width, norm=norm, seed=[seed, number], outputs=outputs, score_bias=score_bias
        )
        for number in range(heads)
    ]
    rng = np.random.default_rng([seed, heads, DEMO_STREAM])
    if value_rank is not None:
        if outputs is None or value_rank > min(width, outputs):
            raise UsageError(f"value_rank={value_rank} exceeds what a value of width {width} and {outputs} outputs has")
        shape = (width, value_rank), (value_rank, outputs)
        made = [
            replace(head, value=rng.standard_normal(shape[0]) @ rng.standard_normal(shape[1]) / value_rank**0.5)
            for head in made
        ]
    bias = np.asarray(output_bias * rng.standard_normal(() if outputs is None else outputs))
    return MultiHead(made, bias if output_bias else None)


NET_KNOBS = {
    "width": Knob(int, 16, 1, 8192),
    "neurons": Knob(int, 32, 0, 8192),
    "outputs": Knob(int, None, 1, 8192),  # one plain number if left out
    "seed": Knob(int, 0, 0),
    "max_norm": Knob(float, None, 0.0),
    "noise": Knob(float, None, 0.0),
    "decimals": Knob(int, None, -300, 300),
}
LAYER_KNOBS = {
    "width": Knob(int, 16, 1, 8192),
    "neurons": Knob(int, 32, 0, 8192),
    "outputs": Knob(int, None, 1, 8192),
    "norm": Knob(float, 1.0, 0.0),
    "residual": Knob(int, 0, 0, 1),
    "seed": Knob(int, 0, 0),
    "heads": Knob(int, None, 1, 1024),  # one if left out
}


def random_net(width: int, neurons: int, outputs: int | None, rng: np.random.Generator) -> ReluNet:
    """Gaussian weights scaled to answers of about one, biases half as large as what meets them."""
    shape = () if outputs is None else (outputs,)
    return ReluNet(
        rng.standard_normal((neurons, width)) / width**0.5,
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal((*shape, neurons)) / max(1, neurons) ** 0.5,
        np.asarray(0.5 * rng.standard_normal(shape)),
    )


def _whole(given: Mapping[str, float], name: str) -> int | None:
    return int(given[name]) if name in given else None


def _net_demo(text: str, given: Mapping[str, float]) -> Target:
    width, neurons, outputs = int(given["width"]), int(given["neurons"]), _whole(given, "outputs")
    net = random_net(width, neurons, outputs, np.random.default_rng([int(given["seed"]), DEMO_STREAM]))
    oracle: Oracle = FunctionOracle(net, width=width, max_norm=given.get("max_norm"), name=text)
    label = f"a random net of {neurons} ReLU neurons on tokens of width {width}"
    return _with_errors(Target(text, oracle, label + (f", {outputs} outputs" if outputs else ""), net), given)


def _layer_demo(text: str, given: Mapping[str, float]) -> Target:
    width, neurons, residual = int(given["width"]), int(given["neurons"]), bool(given["residual"])
    heads = _whole(given, "heads")
    rng = np.random.default_rng([int(given["seed"]), DEMO_STREAM])
    layer = random_layer(width, neurons, _whole(given, "outputs"), rng, given["norm"], residual, heads)
    oracle = FunctionOracle(layer, width=width, name=text)
    attention = "a softmax head" if heads is None else f"{heads} softmax heads"
    label = f"a random layer of width {width}: {attention}, then a net of {neurons} ReLU neurons"
    return Target(text, oracle, label + (", with a residual" if residual else ""), layer)


def _with_labels(target: Target, head: SingleHead, given: Mapping[str, float]) -> Target:
    """A demo that tells labels only, wrong ones at times as its text asks for, which is declared."""
    if "noise" in given or "decimals" in given:
        raise UsageError("labels err by flips=, not by noise= or decimals=: leave these out")
    truth = Labels(head) if head.outputs is None else Labels(head, tuple(range(head.outputs)))
    oracle: Oracle = Labelled(target.oracle)
    label = f"{target.label}, of which labels are told"
    if flips := given.get("flips"):
        oracle = Flipped(oracle, flips, truth.labels, seed=int(given["seed"]))
        label = f"{label}, wrong at a rate of {flips:g}"
    oracle.name = target.text
    return replace(target, oracle=oracle, label=label, truth=truth)


def random_layer(
    width: int,
    neurons: int,
    outputs: int | None,
    rng: np.random.Generator,
    norm: float = 1.0,
    residual: bool = False,
    heads: int | None = None,
) -> OneLayer:
    """Gaussian heads, scores scaled to the spectral norm, and a random net; `heads` is None for a single head."""
    made = []
    for _ in range(heads or 1):
        score, value = rng.standard_normal((width, width)), rng.standard_normal((width, width)) / width**0.5
        made.append(SingleHead(score * (norm / np.linalg.norm(score, 2)), value))
    return OneLayer(
        made[0] if heads is None else MultiHead(made), random_net(width, neurons, outputs, rng), residual=residual
    )


def _with_errors(target: Target, given: Mapping[str, float]) -> Target:
    """A demo whose answers err as its text asks for, which is declared."""
    oracle, label = target.oracle, target.label
    if noise := given.get("noise"):
        oracle = Noisy(oracle, noise, seed=int(given["seed"]))
        label = f"{label}, answers with normal errors of {noise:g}"
    if "decimals" in given:
        decimals = int(given["decimals"])
        oracle, label = Rounded(oracle, decimals), f"{label}, answers rounded to {decimals} decimals"
    return replace(target, oracle=oracle, label=label)


DEMOS: dict[str, tuple[Mapping[str, Any], Callable[[str, Mapping[str, Any]], Target]]] = {
    "single-head": (SINGLE_HEAD_KNOBS, _single_head_demo),
    "multi-head": (HEADS_KNOBS, _heads_demo),
    "relu-net": (NET_KNOBS, _net_demo),
    "one-layer": (LAYER_KNOBS, _layer_demo),
}


def demo_text(family: str, numbers: Mapping[str, float | str | None]) -> str:
    """The target text of a demo, the same for the same oracle: defaults filled in, keys in one order."""
    knobs, _ = DEMOS[family]
    filled = {name: numbers.get(name, knob.default) for name, knob in knobs.items()}
    if filled.get("rank") == filled["width"]:
        filled["rank"] = None
    pairs = [f"{name}={_plain(number)}" for name, number in filled.items() if number is not None]
    return f"demo:{family}?{'&'.join(pairs)}"


def _plain(number: float | str) -> str:
    if isinstance(number, str):
        return number
    whole = isinstance(number, float) and number.is_integer() and abs(number) < 2**53
    return str(int(number)) if whole else repr(number).replace("+", "")  # a plus means a space in such a text


def open_demo(rest: str) -> Target:
    """The demo of a text such as `single-head?width=64&rank=4`."""
    family, given = _read(rest)
    return DEMOS[family][1](demo_text(family, given), given)


def canonical_demo(rest: str) -> str:
    """The full target text of such a text, the same for the same demo."""
    return demo_text(*_read(rest))


def _read(rest: str) -> tuple[str, dict[str, Any]]:
    family, _, query = rest.partition("?")
    if family not in DEMOS:
        raise UsageError(f"unknown demo family {family!r}; known: {', '.join(DEMOS)}")
    return family, read_knobs(family, query, DEMOS[family][0])


def read_knobs(family: str, query: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and names in the text of a demo, key=value&key=value, with the defaults of those left out."""
    given = read_options(query, {name: (knob.read, knob) for name, knob in knobs.items()}, f"demo:{family}")
    return {name: knob.default for name, knob in knobs.items() if knob.default is not None} | given
