"""Oracles of no family: none is named as one, and what is said of them has no nan in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.recover import diagnose

Box = Callable[[Any], Any]
WIDTHS = (1, 2, 4, 8)


def softmax(logits: Any) -> Any:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))


def foreign(rng: np.random.Generator, width: int, outputs: int) -> dict[str, tuple[Box, set[str]]]:
    """By name: what answers, and the families that it may be found to be of."""
    value, score = rng.standard_normal((width, outputs)), rng.standard_normal((width, width))
    inner, offset, outer = rng.standard_normal((8, width)), rng.standard_normal(8), rng.standard_normal((8, outputs))
    wide, own, loop = (
        rng.standard_normal((width, outputs + 2)),
        rng.standard_normal(outputs),
        rng.standard_normal((8, 8)),
    )

    def logits(x: Any) -> Any:
        return np.einsum("bnd,de,be->bn", x, score, x[:, -1])

    def mix(x: Any, weights: Any) -> Any:
        return np.einsum("bn,bnd->bd", weights, x)

    def attend(x: Any) -> Any:
        return mix(x, softmax(logits(x)))

    def hard(x: Any) -> Any:
        return x[np.arange(len(x)), logits(x).argmax(axis=1)] @ value

    def two_largest(x: Any) -> Any:
        found = logits(x)
        bar = np.sort(found, axis=1)[:, -min(2, x.shape[1])][:, None]
        return mix(x, softmax(np.where(found >= bar, found, -1e300))) @ value

    def recurrent(x: Any) -> Any:
        state = np.zeros((len(x), 8))
        for place in range(x.shape[1]):
            state = np.tanh(x[:, place] @ inner.T + 0.5 * state @ loop)
        return state @ outer

    def hashed(x: Any) -> Any:
        number = np.sum(np.sin(12.9898 * x + 1.3) * 43758.5453, axis=(1, 2))
        return np.outer(number - np.floor(number), 1.0 + np.arange(outputs))

    def unit(x: Any) -> Any:
        return x / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-9)

    def one_hot(x: Any) -> Any:
        return np.eye(outputs + 2)[np.argmax(x, axis=1)][:, :outputs]

    last, places = (lambda x: x[:, -1]), {"unknown", "positional"}
    unknown, constant = {"unknown"}, {"unknown", "constant"}
    by_parts = {"unknown", "single-head", "form-head"}  # heads of other parts, which tokens of one number do not show
    return {
        "max pooling": (lambda x: x.max(axis=1) @ value, unknown),
        "largest value": (lambda x: (x @ value).max(axis=1), unknown),
        "least value": (lambda x: (x @ value).min(axis=1), unknown),
        "median": (lambda x: np.median(x @ value, axis=1), unknown),
        "sorted": (
            lambda x: np.einsum("bno,n->bo", np.sort(x @ value, axis=1), np.arange(1.0, x.shape[1] + 1)),
            unknown,
        ),
        "sum": (lambda x: x.sum(axis=1) @ value, unknown),
        "maximum and last": (lambda x: x.max(axis=1) @ value + last(x) @ value, unknown),
        "tanh net": (lambda x: np.tanh(last(x) @ inner.T + offset) @ outer, unknown),
        "sigmoid net": (lambda x: sigmoid(last(x) @ inner.T + offset) @ outer, unknown),
        "sine net": (lambda x: np.sin(last(x) @ inner.T + offset) @ outer, unknown),
        "mean, then tanh": (lambda x: np.tanh(x.mean(axis=1) @ inner.T + offset) @ outer, unknown),
        "head, then tanh": (lambda x: np.tanh(attend(x) @ value), unknown),
        "head, then sigmoid": (lambda x: sigmoid(attend(x) @ value), unknown),
        "probabilities": (lambda x: softmax(attend(x) @ wide)[:, :outputs], unknown),
        "class of the last token": (lambda x: (last(x) @ value > 0).astype(float), constant | {"labels"}),
        "class of a head": (lambda x: (attend(x) @ value > 0.1).astype(float), constant | {"labels"}),
        "sign of a head": (lambda x: np.sign(attend(x) @ value + 0.1), constant | {"labels"}),
        "one-hot class": (lambda x: one_hot(attend(x) @ wide), constant | {"labels"}),
        "number of a class": (
            lambda x: np.repeat(np.argmax(attend(x) @ inner.T, axis=1)[:, None], outputs, 1) * 1.0,
            constant | {"labels"},
        ),
        "length": (lambda x: np.full((len(x), outputs), float(x.shape[1])), unknown),
        "constant": (lambda x: np.broadcast_to(own, (len(x), outputs)), {"constant"}),
        "zero": (lambda x: np.zeros((len(x), outputs)), {"constant"}),
        "square": (lambda x: (last(x) @ value) ** 2, unknown),
        "cubic": (lambda x: (last(x) @ value) ** 3 + last(x) @ value, unknown),
        "square of the mean": (lambda x: (x.mean(axis=1) @ value) ** 2, unknown),
        "product with the mean": (lambda x: (last(x) @ value) * (x.mean(axis=1) @ value), unknown),
        "linear attention": (lambda x: mix(x, logits(x)) @ value / x.shape[1], by_parts),
        "sigmoid attention": (lambda x: mix(x, sigmoid(logits(x))) @ value, by_parts),
        "hard attention": (hard, unknown),
        "two largest weights": (two_largest, {*unknown, "single-head"}),  # a normaliser that has a name
        "attention by distance": (
            lambda x: mix(x, softmax(-np.sum((x - x[:, -1:]) ** 2, axis=-1))) @ value,
            by_parts,
        ),
        "attention of unit tokens": (
            lambda x: mix(x, softmax(logits(unit(x)))) @ value,
            {*unknown, "form-head"},  # queries and keys that are normed
        ),
        "logits by length": (lambda x: mix(x, softmax(np.log(1 + x.shape[1]) * logits(x))) @ value, unknown),
        "head times last token": (lambda x: (attend(x) @ value) * (last(x) @ value), unknown),
        "cosine of first and last": (
            lambda x: np.repeat(np.sum(unit(x[:, 0]) * unit(last(x)), axis=1)[:, None], outputs, 1),
            places,
        ),
        "recurrence": (recurrent, places),
        "window of two": (lambda x: x[:, -2:].mean(axis=1) @ value, places),
        "first token": (lambda x: x[:, 0] @ value, places),
        "hash": (hashed, places),
    }


NAMES = tuple(foreign(np.random.default_rng(0), 2, 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_oracle_is_named_as_no_family(name: str, fresh_seed: int) -> None:
    for width in WIDTHS:
        for outputs in (1, 3):
            rng = np.random.default_rng([fresh_seed, width, outputs])
            answer, families = foreign(rng, width, outputs)[name]
            oracle = kh.FunctionOracle(answer, width=width)
            found = diagnose(oracle, seed=fresh_seed % 1000)
            where = f"width {width}, {outputs} outputs: {found.in_words()}"
            assert found.family in families, where
            methods = {"labels": {"labels"}, "single-head": {"parts", None}, "form-head": {"parts", None}}
            assert found.method in methods.get(found.family, {None}), where
            said = " ".join(f"{finding.found} {finding.evidence}" for finding in found.findings).split()
            assert not {"nan", "inf", "-inf", "nan,", "inf,"} & set(said), where
            assert found.findings, where
            assert "arithmetic" not in {finding.what for finding in found.findings}, where
            if found.family == "unknown":
                assert found.in_words().startswith("its family is unknown")


def test_evidence_says_what_did_not_hold() -> None:
    rng = np.random.default_rng(1)

    def evidence(name: str) -> str:
        found = diagnose(kh.FunctionOracle(foreign(rng, 4, 1)[name][0], width=4))
        return "; ".join(f"{finding.found}: {finding.evidence}" for finding in found.findings)

    assert "however near they are" in evidence("max pooling")
    assert "saturates" in evidence("tanh net")
    assert "different values, each" in evidence("class of a head")
    assert "reflection do not add up" in evidence("attention by distance")
    assert "far from the origin" in evidence("cubic")
    assert "are the same, 0" in evidence("zero")


def members(rng: np.random.Generator) -> list[tuple[str, Any]]:
    """Random members of every family, of scores and values of all sizes."""
    width, sharp, loud = int(rng.choice([1, 2, 3, 8])), 10 ** rng.uniform(-2, 2.5), 10 ** rng.uniform(-3, 3)

    def head(outputs: int | None) -> kh.SingleHead:
        shape = (width,) if outputs is None else (width, outputs)
        score = sharp * rng.standard_normal((width, width)) / width**0.5
        return kh.SingleHead(score, loud * rng.standard_normal(shape))

    def net(activation: str) -> kh.ReluNet:
        count = int(rng.integers(2, 12))
        weights, biases = loud * rng.standard_normal((count, width)), loud * rng.standard_normal(count)
        return kh.ReluNet(weights, biases, rng.standard_normal(count), np.zeros(()), activation=activation)

    front = kh.SingleHead(head(None).score, rng.standard_normal((width, width)))
    return [
        ("single-head", head(None)),
        ("multi-head", kh.MultiHead([head(2), head(2), head(2)])),
        ("attention with a residual", kh.Residual(head(width))),
        ("average", kh.SingleHead(np.zeros((width, width)), head(None).value)),
        ("relu-net", net("relu")),
        ("relu-net", net("silu")),
        ("one-layer", kh.OneLayer(front, net("relu"), residual=bool(rng.integers(2)))),
    ]


@pytest.mark.parametrize("number", range(4))
def test_a_member_is_never_misnamed(number: int, fixed_seed: int) -> None:
    for family, params in members(np.random.default_rng([fixed_seed, number])):
        found = diagnose(kh.FunctionOracle(params, width=params.width), seed=number)
        assert found.family == family, found.in_words()
