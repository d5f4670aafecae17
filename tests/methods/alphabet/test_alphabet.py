"""One head behind a finite alphabet: right within its radii or admitted, and no other token is ever sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, Floats, floats
from keyhole.errors import UsageError
from keyhole.oracles import Rounded

KINDS = ("half", "full", "double", "one-hot", "signs")


def rows_of(kind: str, width: int, rng: np.random.Generator) -> Floats:
    if kind == "one-hot":
        return np.eye(width)
    if kind == "signs":
        return np.asarray(rng.choice([-1.0, 1.0], (2 * width, width)))
    return rng.standard_normal(({"half": max(2, width // 2), "full": width, "double": 2 * width}[kind], width))


def head_of(
    rows: Floats, rng: np.random.Generator, size: float, outputs: int | None = None, *, biases: bool = False
) -> kh.SingleHead:
    width = rows.shape[1]
    score, shape = rng.standard_normal((width, width)), () if outputs is None else (outputs,)
    score *= size / max(float(np.max(np.abs(rows @ score @ rows.T))), 1e-300)
    return kh.SingleHead(
        score,
        rng.standard_normal((width, *shape)),
        size * rng.standard_normal(width) / width if biases else None,
        np.asarray(rng.standard_normal(shape)) if biases else None,
    )


class Watched:
    """A head that remembers which tokens it was sent."""

    def __init__(self, head: kh.SingleHead) -> None:
        self.head, self.sent = head, set[bytes]()

    def __call__(self, tokens: Array) -> Array:
        self.sent |= {row.tobytes() for row in np.ascontiguousarray(tokens).reshape(-1, tokens.shape[-1])}
        return self.head(tokens)


def is_inside(result: kh.Recovery, head: kh.SingleHead, rows: Floats) -> bool:
    truth, found, radius = kh.on_alphabet(head, rows), result.params, result.certificate.radius
    assert isinstance(found, kh.SingleHead)
    assert isinstance(radius, kh.SingleHead)
    pairs = [(found.score, truth.score, radius.score), (found.value, truth.value, radius.value)]
    if truth.score_bias is not None and found.score_bias is not None:
        pairs.append((found.score_bias, truth.score_bias, radius.score_bias))
    return all(bool(np.all(np.abs(floats(a) - floats(b)) <= floats(w))) for a, b, w in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [None, 3])
def test_a_head_is_recovered_near_the_bound(kind: str, outputs: int | None) -> None:
    rng = np.random.default_rng([KINDS.index(kind), outputs or 0])
    rows = rows_of(kind, 12, rng)
    head = head_of(rows, rng, 2.0, outputs)
    box = Watched(head)
    result = kh.recover(kh.FunctionOracle(box, width=12, alphabet=rows))
    assert box.sent <= {row.tobytes() for row in np.ascontiguousarray(rows)}
    assert kh.distance(result.params, kh.on_alphabet(head, rows)) < 1e-9
    assert is_inside(result, head, rows)
    span, apart = (np.linalg.matrix_rank(each) for each in (rows, rows - rows[0]))
    bound = span * apart / (1 if outputs is None else min(outputs, apart)) + span
    assert result.stats.counting_bound == np.ceil(bound)
    assert result.stats.queries <= bound + (10 if outputs is None else 10 + span)


def test_biases_are_told_from_the_score_where_the_tokens_tell_them() -> None:
    rng = np.random.default_rng(1)
    rows = rows_of("double", 8, rng)
    head = head_of(rows, rng, 2.0, biases=True)
    result = kh.recover(kh.FunctionOracle(head, width=8, alphabet=rows))
    assert result.stats.details["score_bias"]
    np.testing.assert_allclose(result.params.score_bias, head.score_bias, atol=1e-10)
    np.testing.assert_allclose(result.params.output_bias, head.output_bias, atol=1e-10)
    few = rows[:8]
    merged = kh.recover(kh.FunctionOracle(head, width=8, alphabet=few))
    assert merged.params.score_bias is None
    assert merged.params.output_bias is None
    assert kh.distance(merged.params, kh.on_alphabet(head, few)) < 1e-9


def test_scores_that_saturate_are_read_by_a_ladder() -> None:
    rng = np.random.default_rng(3)
    rows = rows_of("double", 12, rng)
    head = head_of(rows, rng, 40.0)
    result = kh.recover(kh.FunctionOracle(head, width=12, alphabet=rows))
    assert kh.distance(result.params, kh.on_alphabet(head, rows)) < 1e-8
    assert is_inside(result, head, rows)
    assert result.stats.ratio > 1.1


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_that_all_drown_a_last_one_have_a_ladder_of_their_own(seed: int) -> None:
    rng = np.random.default_rng([seed, 8])
    rows = rows_of("double", 8, rng)
    head = head_of(rows, rng, 65.0)  # differences up to 130
    result = kh.recover(kh.FunctionOracle(head, width=8, alphabet=rows), throw=False)
    assert result.certified, result.message
    assert is_inside(result, head, rows)


def test_right_or_admitted(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for _ in range(12):
        rows = rows_of(str(rng.choice(KINDS)), int(rng.choice([2, 4, 6, 8])), rng)
        outputs = int(rng.integers(4)) or None
        head = head_of(rows, rng, float(10 ** rng.uniform(-3, 2)), outputs, biases=bool(rng.integers(2)))
        result = kh.recover(kh.FunctionOracle(head, width=rows.shape[1], alphabet=rows), throw=False)
        assert not result.certified or is_inside(result, head, rows)
        assert result.outcome.name != "WRONG_FAMILY", result.message


def test_heads_that_the_tokens_do_not_tell_apart_are_the_same() -> None:
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((5, 8))
    head = head_of(rows, rng, 1.0)
    outside = np.linalg.qr(rows.T, mode="complete")[0][:, 5:]
    other = kh.SingleHead(head.score + outside @ rng.standard_normal((3, 8)), head.value + outside @ np.ones(3))
    one, two = kh.on_alphabet(head, rows), kh.on_alphabet(other, rows)
    np.testing.assert_allclose(one.score, two.score, atol=1e-12)
    np.testing.assert_allclose(one.value, two.value, atol=1e-12)
    tokens = rows[rng.integers(5, size=(20, 6))]
    np.testing.assert_allclose(one(tokens), head(tokens), atol=1e-10)


@pytest.mark.parametrize(
    ("box", "outcome"),
    [
        (lambda tokens: np.ones(len(tokens)), "NOT_IDENTIFIABLE"),
        (lambda tokens: np.sum(tokens, axis=(1, 2)), "WRONG_FAMILY"),
        (lambda tokens: np.sum(tokens[:, -1] ** 2, axis=1), "WRONG_FAMILY"),
    ],
)
def test_what_is_no_head_is_admitted(box: Any, outcome: str) -> None:
    rows = np.random.default_rng(5).standard_normal((12, 6))
    result = kh.recover(kh.FunctionOracle(box, width=6, alphabet=rows), throw=False)
    assert result.outcome.name == outcome, result


def test_several_heads_are_admitted() -> None:
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((12, 6))
    layer = kh.MultiHead([head_of(rows, rng, 2.0) for _ in range(2)])
    assert not kh.recover(kh.FunctionOracle(layer, width=6, alphabet=rows), throw=False).certified


def dependent(kind: str, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Tokens, and values of which some are the same or dependent beside that of another."""
    rows, value = rng.standard_normal((10, 8)), rng.standard_normal((8, 3))
    if kind == "duplicates":
        return np.concatenate([rows, rows[:3]]), value
    if kind == "a zero token":
        return np.concatenate([rows[:3], np.zeros((1, 8))]), value
    return rng.integers(-2, 3, (20, 8)).astype(float), rng.integers(-1, 2, (8, 3)).astype(float)


@pytest.mark.parametrize("kind", ["duplicates", "a zero token", "whole numbers"])
def test_tokens_of_dependent_values(kind: str) -> None:
    """A share that no answer tells is not taken for a faint one."""
    for seed in range(6):
        rng = np.random.default_rng([32 + seed, 10])
        rows, value = dependent(kind, rng)
        head = kh.SingleHead(rng.standard_normal((8, 8)) / 12, value, rng.standard_normal(8) / 6, np.ones(3))
        result = kh.recover(kh.FunctionOracle(head, width=8, alphabet=rows), throw=False)
        assert result.certified, result.message
        assert is_inside(result, head, rows)


@pytest.mark.parametrize("words", ["", "rounded:6"])
def test_decimals_widen_radii_where_they_are_not_declared_too(words: str) -> None:
    for seed in range(4):
        rng = np.random.default_rng([seed, 10])
        rows = rows_of("full" if seed % 2 else "double", 7, rng)  # as many tokens as dimensions: each is asked alone
        head = head_of(rows, rng, 2.0)
        oracle = kh.FunctionOracle(
            lambda x, head=head: np.round(head(x), 6), width=7, alphabet=rows, noise=words or None
        )
        result = kh.recover(oracle, throw=False)
        assert result.outcome is not kh.Outcome.WRONG_FAMILY, result.message
        assert not result.certified or is_inside(result, head, rows)


@pytest.mark.parametrize("seed", [13, 17])
def test_a_score_bias_behind_few_decimals_is_no_other_family(seed: int) -> None:
    """Tokens of norms over four decades, some of whose answers round to next to nothing."""
    rng, width, rows = np.random.default_rng([14, seed]), 3, 6
    letters = rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-3, 1, (rows, 1))
    score, value, bias = rng.standard_normal((width, width)) / width, *rng.standard_normal((2, width))
    head = kh.SingleHead(score, value, score_bias=bias)
    oracle = Rounded(kh.FunctionOracle(head, width=width, alphabet=letters), 3)
    result = kh.recover(oracle, "alphabet", throw=False, seed=seed)
    assert is_inside(result, head, letters) if result.certified else result.outcome is kh.Outcome.TOO_NOISY


@pytest.mark.parametrize("rows", [[["a", "b", "c"]], np.ones((2, 3)) * 1j, [[1, 2], [1]], [[None] * 3]])
def test_an_alphabet_of_no_numbers(rows: Any) -> None:
    with pytest.raises(UsageError, match="3 real numbers as rows"):
        kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=3, alphabet=rows)


def test_no_other_token_is_sent() -> None:
    rows = np.random.default_rng(7).standard_normal((4, 3))
    head = head_of(rows, np.random.default_rng(7), 1.0)
    oracle = kh.FunctionOracle(head, width=3, alphabet=rows)
    oracle(rows[None, [0, 0, 3]])
    with pytest.raises(UsageError, match="alphabet"):
        oracle(rows[None] + 1e-15)
    with pytest.raises(UsageError, match="use method alphabet"):
        kh.recover(oracle, "single-head")
    with pytest.raises(UsageError, match="declare it"):
        kh.recover(kh.FunctionOracle(head, width=3), "alphabet")
    with pytest.raises(UsageError, match="domain"):
        kh.recover(oracle, domain=[np.ones((2, 3))])
    with pytest.raises(UsageError, match="as rows"):
        kh.FunctionOracle(head, width=3, alphabet=np.ones(3))


def test_verification_sends_no_other_token_either() -> None:
    rng = np.random.default_rng(8)
    rows = rows_of("double", 6, rng)
    head = head_of(rows, rng, 2.0)
    oracle = kh.FunctionOracle(Watched(head), width=6, alphabet=rows)
    result = kh.recover(oracle)
    assert kh.verify(oracle, result.params, radius=result.certificate.radius).conclusion == "same"
    assert kh.verify(oracle, kh.SingleHead(1.01 * head.score, head.value)).conclusion == "different"


def test_float32_is_read_to_its_digits() -> None:
    rng = np.random.default_rng(9)
    rows = rows_of("double", 8, rng).astype(np.float32)
    head = head_of(rows.astype(np.float64), rng, 2.0)
    result = kh.recover(kh.FunctionOracle(head, width=8, alphabet=rows, like=np.zeros(1, np.float32)))
    assert kh.distance(result.params, kh.on_alphabet(head, rows)) < 1e-4
