"""Heads of any positions whose tokens may not be long, and the same behind a norm: right or admitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.families.forms import Rotary, geometric
from keyhole.methods.multi_head.vector.parts.bounded.planes import solve_beside, solve_planes, spans_of

WIDTH, HEADS, PAIRS = 16, 2, 3
RECOVERED = 1e-6  # off by this part of answers, a function counts as recovered, here as in the benchmarks


def heads_of(rng: np.random.Generator, *, biased: bool) -> kh.MultiHead:
    """Rotary heads with a residual's outputs, logits of order one at norms of √width."""
    heads: list[Any] = []
    for _ in range(HEADS):
        query, key = 0.3 * rng.standard_normal((2, 2 * PAIRS, WIDTH))
        biases = 0.3 * rng.standard_normal((2, 2 * PAIRS)) if biased else (None, None)
        value = 0.3 * rng.standard_normal((WIDTH, 6)) @ rng.standard_normal((6, WIDTH))
        heads.append(kh.FormHead(Rotary(query, key, geometric(PAIRS), *biases), value))
    return kh.MultiHead(heads, rng.standard_normal(WIDTH))


def test_values_of_two_tokens_come_from_lines_in_their_planes() -> None:
    rng, heads = np.random.default_rng(0), 3
    one, two, three = rng.standard_normal((3, heads, 9))
    lines = one + rng.uniform(0.5, 2.0, (5, heads, 1)) * two
    blocks = rng.standard_normal((5, 6, heads)) @ lines
    found = solve_planes(spans_of(blocks, heads), one.sum(axis=0), two.sum(axis=0))
    order = np.argmin(np.linalg.norm(found.first[:, None] - one, axis=2), axis=0)
    assert np.max(np.abs(found.first[order] - one)) < 1e-9
    assert np.max(np.abs(found.second[order] - two)) < 1e-9
    weights = rng.uniform(0, 1, (4, 2, heads))
    answers = np.einsum("nth,tho->no", weights, np.stack([found.first, found.second]))
    assert np.max(np.abs(found.weights(answers) - weights)) < 1e-9
    lines = three + rng.uniform(0.5, 2.0, (2, heads, 1)) * two
    beside, misfit = solve_beside(spans_of(rng.standard_normal((2, 6, heads)) @ lines, heads), two, three.sum(axis=0))
    assert np.max(np.abs(beside - three)) < 1e-9
    assert misfit < 1e-12


@pytest.mark.parametrize("biased", [False, True])
def test_rotary_heads_are_read_within_a_bound(biased: bool) -> None:
    truth = heads_of(np.random.default_rng(1), biased=biased)
    oracle = kh.FunctionOracle(truth, width=WIDTH, max_norm=4.0)
    result = kh.recover(oracle, "multi-head", form="rotary", frequencies=geometric(PAIRS))
    assert result.certified
    tokens = np.random.default_rng(2).standard_normal((40, 9, WIDTH))
    tokens *= 3.9 / np.linalg.norm(tokens, axis=2, keepdims=True)
    assert np.max(np.abs(result.params(tokens) - truth(tokens))) < RECOVERED * np.max(np.abs(truth(tokens)))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_rotary_heads_are_read_behind_a_norm(norm: str) -> None:
    truth = kh.Residual(kh.NormBefore(heads_of(np.random.default_rng(3), biased=True), np.asarray(1e-5), norm))
    oracle = kh.FunctionOracle(truth, width=WIDTH)
    result = kh.recover(oracle, "normalised", form="rotary", frequencies=geometric(PAIRS))
    assert result.certified
    assert result.params.attention.norm == norm
    tokens = np.random.default_rng(2).standard_normal((40, 9, WIDTH))
    assert np.max(np.abs(result.params(tokens) - truth(tokens))) < RECOVERED * np.max(np.abs(truth(tokens)))


def test_caps_within_a_bound_and_positions_before_a_norm_are_admitted() -> None:
    truth = heads_of(np.random.default_rng(1), biased=False)
    bounded = kh.FunctionOracle(truth, width=WIDTH, max_norm=4.0)
    result = kh.recover(bounded, "multi-head", link="softcap", throw=False)
    assert result.outcome is kh.Outcome.TOO_NOISY
    assert "max_norm" in result.message
    after = kh.NormAfter(kh.Residual(truth), np.ones(WIDTH), np.zeros(WIDTH), np.asarray(1e-5))
    result = kh.recover(kh.FunctionOracle(after, width=WIDTH), "normalised", form="rotary", place="after", throw=False)
    assert result.outcome is kh.Outcome.WRONG_FAMILY
