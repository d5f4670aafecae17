"""The parts of one head are named right, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.support.attention_zoo import KINDS, OTHERS, PARTS, PLAIN, WIDTHS, Box
from keyhole.families.parts import part_names
from keyhole.methods.parts.naming.ask_parts import Naming, ask_parts
from keyhole.session import Session

MOST_QUERIES = 80  # 66 but for one box in a hundred, of which something is asked again


def named(box: Box, width: int, seed: int = 0, **declared: Any) -> Naming:
    def answer(tokens: Any) -> Any:
        with np.errstate(all="ignore"):
            return box(tokens)

    session = Session(kh.FunctionOracle(answer, width=width, **declared))
    found = session.run(ask_parts(session.signature, np.random.default_rng(seed)))
    assert session.queries <= found.queries <= MOST_QUERIES  # those that were answered with nan do not count
    return found


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_named(name: str, fixed_seed: int, fresh_seed: int) -> None:
    for seed in (fixed_seed, fresh_seed):
        rng = np.random.default_rng(seed)
        width = int(rng.choice(WIDTHS))
        found = named(KINDS[name].draw(rng, width), width, seed)
        assert found.known or seed == fresh_seed, found.findings[-1]
        assert not found.known or found.parts == KINDS[name].parts


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_of_them_is_not_named(name: str, fresh_seed: int) -> None:
    seed = fresh_seed
    rng = np.random.default_rng(seed)
    width = int(rng.choice(WIDTHS))
    found = named(OTHERS[name].draw(rng, width), width, seed)
    assert not found.known
    assert set(found.parts.values()) == {"other"}
    assert found.findings[-1].evidence


@pytest.mark.parametrize("name", KINDS)
def test_answers_in_float32_are_named_right_or_not_at_all(name: str) -> None:
    rng = np.random.default_rng(3)
    box = KINDS[name].draw(rng, 8)
    found = named(lambda x: box(x).astype(np.float32).astype(float), 8)
    assert not found.known or found.parts == KINDS[name].parts


def test_answers_of_several_numbers_with_biases_are_named() -> None:
    rng = np.random.default_rng(0)
    score, value, bias = rng.standard_normal((8, 8)), rng.standard_normal((8, 3)), 10 * rng.standard_normal(3)

    def box(x: Any) -> Any:
        logits = 5 * np.tanh(np.einsum("nti,ij,nj->nt", x, score, x[:, -1]) / 5)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("nt,nti->ni", weights, x) @ value + bias

    assert named(box, 8).parts == {**PLAIN, "link": "softcap"}


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"max_norm": 3.0}, "norms are free"),
        ({"noise": kh.Noise.gaussian(1e-3)}, "equal digits"),
        ({"max_length": 4}, "sequences of 16 tokens"),
        ({"like": np.zeros(1, np.float32)}, "equal digits"),
    ],
)
def test_it_is_said_why_parts_cannot_be_named(declared: dict[str, Any], why: str) -> None:
    found = named(KINDS["softmax"].draw(np.random.default_rng(0), 8), 8, **declared)
    assert found.queries == 0
    assert (found.findings[-1].found, set(found.parts.values())) == ("unknown", {"other"})
    assert why in found.findings[-1].evidence


def test_an_oracle_that_answers_nan_to_long_tokens_is_not_named() -> None:
    box = KINDS["softmax"].draw(np.random.default_rng(0), 8)
    found = named(lambda x: np.where(np.max(np.abs(x), axis=(1, 2)) > 1e9, np.nan, box(x)), 8)
    assert set(found.parts.values()) == {"other"}
    assert "nan" in found.findings[-1].evidence


def test_a_head_that_is_named_only_on_special_tokens_is_not_named() -> None:
    """Scores of tokens of usual norm that are off by a part in a thousand show in the sequences that are predicted."""
    rng = np.random.default_rng(0)
    score, value = rng.standard_normal((8, 8)), rng.standard_normal(8)

    def box(x: Any) -> Any:
        logits = np.einsum("nti,ij,nj->nt", x, score, x[:, -1])
        usual = np.linalg.norm(x[:, -1], axis=-1, keepdims=True) > 0.05
        logits = np.where(usual & (np.linalg.norm(x, axis=-1) < 20.0), 1.001 * logits, logits)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.einsum("nt,nt->n", weights / weights.sum(axis=1, keepdims=True), x @ value)

    found = named(box, 8)
    assert (found.known, found.findings[-1].what) == (False, "prediction")


def test_names_are_those_of_the_families() -> None:
    for kind in KINDS.values():
        assert kind.parts is not None
        assert set(kind.parts) == set(PARTS)
        for part in PARTS[1:]:
            assert kind.parts[part] in part_names(part)
