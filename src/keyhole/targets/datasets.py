"""Labelled examples named by one line of text, as the command line does: files and demos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.errors import FileError, UsageError
from keyhole.families import AttentionLayer
from keyhole.shards.formats import arrays_in
from keyhole.shards.shard import NAMES, SUFFIXES, find_shards
from keyhole.targets.demos import DEMO_STREAM, read_knobs
from keyhole.targets.target import Knob

EXAMPLES = "examples.safetensors, 'shards/*.npz', demo:layer?d=8&k=4&m=2&n=4000&seed=0, demo:layer-hard?d=10&m=3"
# Coordinates that the construction itself needs.
RESERVED = 2
# β: steps are so sharp that what is left of a parity is within a few thousandths of it.
SHARPNESS = 3.0


@dataclass(frozen=True)
class Data:
    """Examples to learn from."""

    text: str
    label: str  # what they are, in words
    inputs: Any  # (n, k, d); or what names them, where there are no outputs
    outputs: Any = None  # (n, k, d_out)
    truth: AttentionLayer | None = None  # where it is known
    noise: float | None = None  # standard deviation of the outputs' errors, where it is known


def open_data(given: str | Sequence[str], names: Sequence[str] = NAMES) -> Data:
    """The examples that a text names, or several of files; UsageError or FileError says what is wrong and possible."""
    texts = [given] if isinstance(given, str) else list(dict.fromkeys(given))  # a file twice is one
    if len(texts) > 1:  # a pattern that the shell has written out
        count = len(find_shards(texts, names))
        return Data(" ".join(texts), f"examples in {count} shards, {texts[0]} to {texts[-1]}", texts)
    text = texts[0]
    kind, colon, rest = text.partition(":")
    if colon and kind == "demo":
        family, _, query = rest.partition("?")
        if family not in DEMOS:
            raise UsageError(f"unknown demo {family!r} of examples; known: {', '.join(DEMOS)}")
        knobs, make = DEMOS[family]
        return make(text, read_knobs(family, query, knobs))
    files = rest if colon and kind == "file" else text
    try:
        shards = find_shards(files, names)
    except UsageError as error:
        raise UsageError(f"{error}. Examples are named like: {EXAMPLES}") from error
    return Data(
        text, f"examples in {files}" if len(shards) == 1 else f"examples in {len(shards)} shards, {files}", files
    )


def open_inputs(path: Path) -> list[Any]:
    """Sequences (length, width) of a file of arrays (length, width) or (count, length, width)."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"inputs are in a file {', '.join(SUFFIXES)}, not in {str(path)!r}")
    if not path.exists():
        raise FileError(f"{path}: no such file")
    sequences: list[Any] = []
    for name, array in arrays_in(path).items():
        label = "the array" if path.suffix == ".npy" else name
        if array.ndim not in (2, 3) or array.dtype.kind not in "fiub":
            raise FileError(
                f"{path}: {label} has shape {array.shape} of {array.dtype}; sequences are numbers "
                "(length, width), or (count, length, width) for several of one length"
            )
        sequences += [array] if array.ndim == 2 else list(array)
    return sequences


# Demos: random layers and inputs, known to whoever judges the result, never to the learner.

LAYER_KNOBS = {
    "d": Knob(int, 8, 1, 1024),
    "k": Knob(int, 4, 1, 1024),
    "m": Knob(int, 2, 1, 64),
    "n": Knob(int, 4000, 1, 10**7),
    "out": Knob(int, None, 1, 1024),  # outputs per token; as many as inputs if left out
    "size": Knob(float, 0.5, 0.0),  # entries of scores, times √d
    "noise": Knob(float, None, 0.0),  # standard deviation of the outputs' errors, which is declared
    "gaussian": Knob(int, 0, 0, 1),  # 1: normal inputs and not signs
    "seed": Knob(int, 0, 0),
}
HARD_KNOBS = {
    "d": Knob(int, 10, 3, 64),
    "m": Knob(int, 3, 1, 16),
    "n": Knob(int, 1000, 1, 10**7),
    "sharpness": Knob(float, SHARPNESS, 0.0),
    "flips": Knob(float, 0.0, 0.0, 0.5),  # rate at which a parity comes out wrong: parity with noise
    "control": Knob(int, 0, 0, 1),  # 1: the same scores with equal projections, which is easy
    "seed": Knob(int, 0, 0),
}


def random_layer(width: int, heads: int, outputs: int, size: float, rng: np.random.Generator) -> AttentionLayer:
    """Gaussian scores whose logits have a standard deviation of size·√width, and Gaussian projections."""
    scores = rng.standard_normal((heads, width, width)) * (size / width**0.5)
    return AttentionLayer(scores, rng.standard_normal((heads, width, outputs)) / width**0.5)


def parity_layer(
    width: int, heads: int, rng: np.random.Generator, sharpness: float = SHARPNESS, *, control: bool = False
) -> tuple[AttentionLayer, tuple[int, ...]]:
    """A layer that is hard to learn from examples of two tokens, with one output, and the coordinates of its parity.

    With S a set of m coordinates, Θ_i = β·(1_S − t_i·e_1)·e_0ᵀ and thresholds t_i = −(m − 1), …, m − 1 in steps of two,
    head i tells whether more coordinates of x_a in S agree with x_a1 than t_i says. Projections of alternating signs,
    ±e_0, leave of these steps the parity of x_a on S, on pairs of tokens that differ in coordinate 0, and something
    linear else; for even m it is the parity on S and coordinate 1, and x_a1 is added. Parities are what no
    statistical-query algorithm learns efficiently; with equal signs, the control, the same steps add up to a staircase,
    which is easy.
    """
    if heads > width - RESERVED:
        raise UsageError(
            f"a parity of {heads} coordinates needs tokens of width {heads + RESERVED} or more, not {width}"
        )
    chosen = np.sort(rng.choice(np.arange(RESERVED, width), size=heads, replace=False))
    thresholds = np.arange(-(heads - 1), heads, 2)
    scores = np.zeros((heads, width, width))
    scores[:, chosen, 0] = sharpness
    scores[:, 1, 0] = -sharpness * thresholds
    projections = np.zeros((heads, width, 1))
    projections[:, 0, 0] = 1.0 if control else (-1.0) ** np.arange(heads)
    return AttentionLayer(scores, projections), tuple(int(each) for each in chosen)


def signs(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uniform on ±1."""
    return rng.choice([-1.0, 1.0], size=shape)


def _layer(text: str, given: Mapping[str, float]) -> Data:
    d, k, m, n = (int(given[name]) for name in "dkmn")
    rng = np.random.default_rng([int(given["seed"]), DEMO_STREAM])
    layer = random_layer(d, m, int(given.get("out", d)), given["size"], rng)
    inputs = rng.standard_normal((n, k, d)) if given["gaussian"] else signs(rng, n, k, d)
    outputs, noise = layer(inputs), given.get("noise", 0.0)
    label = f"{n:,} examples of {k} tokens from a random layer of {m} head{'s' * (m > 1)} of width {d}"
    if noise:
        outputs = outputs + noise * rng.standard_normal(outputs.shape)
        label += f", outputs with normal errors of {noise:g}"
    return Data(text, label, inputs, outputs, layer, noise)


def _hard(text: str, given: Mapping[str, float]) -> Data:
    d, m, n = (int(given[name]) for name in "dmn")
    rng = np.random.default_rng([int(given["seed"]), DEMO_STREAM])
    layer, chosen = parity_layer(d, m, rng, given["sharpness"], control=bool(given["control"]))
    inputs = signs(rng, n, 2, d)
    kind = "staircase" if given["control"] else "parity"
    label = f"{n:,} examples of 2 tokens from a layer of {m} heads that make a {kind} of coordinates "
    label += ", ".join(map(str, chosen))
    if given["flips"]:
        if m % 2 == 0:
            raise UsageError(
                f"flips turn the sign of a parity, which an odd number of heads has for its output, not {m}"
            )
        label += f", wrong in {100 * given['flips']:g} % of the examples"
    return Data(text, label, inputs, flipped(layer(inputs), given["flips"], rng), layer, 0.0)


def flipped(outputs: Any, rate: float, rng: np.random.Generator) -> Any:  # (n, k, 1)
    """Outputs of which some examples have the opposite sign.

    Parity with noise (LPN) is believed to be hard for every method, not only for those that ask for statistics:
    cryptography rests on it, nobody has proven it, and it is said of large widths, not of those that fit a screen.
    """
    return outputs * np.where(rng.random((len(outputs), 1, 1)) < rate, -1.0, 1.0)


DEMOS: dict[str, tuple[Mapping[str, Knob], Callable[[str, Mapping[str, float]], Data]]] = {
    "layer": (LAYER_KNOBS, _layer),
    "layer-hard": (HARD_KNOBS, _hard),
}
