"""Heads that people write down, and as libraries make them: no basis meets them in exact zeros."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.fft import dct
from scipy.linalg import hadamard

import keyhole as kh

Floats = npt.NDArray[np.float64]


def matrices(d: int) -> dict[str, Floats]:
    """Score matrices that somebody would type first."""
    place, one = np.arange(d), np.ones(d)
    found = {
        "identity": np.eye(d),
        "ones": np.ones((d, d)),
        "mean": np.full((d, d), 1 / d),
        "centering": np.eye(d) - 1 / d,
        "flip": np.eye(d)[::-1].copy(),
        "cosines": dct(np.eye(d), norm="ortho"),
        "signs": np.outer((-1.0) ** place, (-1.0) ** place),
        "columns": np.outer(place + 1.0, one),
        "rows": np.outer(one, place + 1.0),
        "one entry": np.outer(np.eye(d)[0], np.eye(d)[-1]),
        "antisymmetric": np.triu(np.ones((d, d)), 1) - np.tril(np.ones((d, d)), -1),
        "projection": np.diag((place < (d + 1) // 2) * 1.0),
        "zero": np.zeros((d, d)),
    }
    return found | ({"hadamard": hadamard(d) * 1.0} if d & (d - 1) == 0 else {})


def biases(d: int) -> list[Floats | None]:
    """Score biases along the vectors that plain matrices are made of, and none."""
    return [None, np.ones(d), np.eye(d)[0], (-1.0) ** np.arange(d), np.arange(d) + 1.0]


def assert_recovered(head: kh.SingleHead, seed: int, dtype: str = "float64", method: str = "single-head") -> None:
    """Certified, and every entry within its radius."""
    result = recover(head, seed, dtype, method)
    assert result.certified, result.message


def recover(head: kh.SingleHead, seed: int, dtype: str, method: str = "single-head") -> kh.Recovery:
    """What comes back, certified or too coarse for that, every entry within its radius."""
    plain = [None if each is None else np.asarray(each, dtype) for each in (head.score, head.value, head.score_bias)]
    oracle = kh.FunctionOracle(kh.SingleHead(*plain), width=head.width, like=np.zeros(1, dtype))
    result = kh.recover(oracle, method, seed=seed, throw=False)
    assert result.outcome in (kh.Outcome.CERTIFIED, kh.Outcome.UNCERTIFIED), result.message
    found, radius = result.params, result.certificate.radius
    tiny = float(np.finfo(dtype).tiny)  # what is read exactly has no radius
    for name, true in zip(("score", "value", "score_bias"), plain, strict=True):
        mine, bar = getattr(found, name), getattr(radius, name)
        off = (0.0 if mine is None else mine) - (0.0 if true is None else true)
        assert np.all(np.abs(off) <= (0.0 if bar is None else bar) + tiny), name
    return result


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_matrices_that_people_type(d: int) -> None:
    """Whatever the value is, and whatever the seed."""
    values = (np.eye(d)[0], np.ones(d), (-1.0) ** np.arange(d))
    for number, score in enumerate(matrices(d).values()):
        for seed in range(2):
            value = values[(number + seed) % len(values)]
            assert_recovered(kh.SingleHead(score, value), seed)


@pytest.mark.parametrize("d", [2, 8])
def test_biases_that_people_type(d: int) -> None:
    """Along the columns of the score, its rows or orthogonal to them; one output, or three of which one is dead."""
    values = (np.eye(d)[0], np.ones(d), np.arange(d) + 1.0)
    for number, score in enumerate(matrices(d).values()):
        for seed, bias in enumerate(biases(d)):
            value = values[(number + seed) % len(values)]
            if (number + seed) % 2:
                value = np.stack([value, 0 * value, np.eye(d)[d // 2] + value], axis=1)
            assert_recovered(kh.SingleHead(score, value, bias), seed)


@pytest.mark.parametrize(("d", "rank"), [(4, 1), (8, 2), (16, 3), (16, 8)])
@pytest.mark.parametrize("method", ["single-head", "auto"])
def test_a_query_bias_lies_in_the_column_space(d: int, rank: int, method: str, fixed_seed: int) -> None:
    """W = KᵀQ and c = Kᵀb: rows orthogonal to the bias see a score of one rank less, or none at all."""
    for seed in range(fixed_seed, fixed_seed + 4):
        rng = np.random.default_rng(seed)
        query, key = rng.standard_normal((2, rank, d))
        head = kh.SingleHead(key.T @ query, rng.standard_normal(d), key.T @ rng.standard_normal(rank))
        assert_recovered(head, seed, method=method)


def test_a_key_side_bias(fixed_seed: int) -> None:
    """A score whose rows lie along the bias: every direction but one is silent."""
    for seed in range(fixed_seed, fixed_seed + 4):
        rng = np.random.default_rng(seed)
        bias = rng.standard_normal(6)
        assert_recovered(kh.SingleHead(np.outer(rng.standard_normal(6), bias), rng.standard_normal(6), bias), seed)
        assert_recovered(kh.SingleHead(np.outer(bias, bias), rng.standard_normal((6, 3)), bias), seed)


def test_float32_beside_a_bias() -> None:
    """The range of the dtype ends before probes without a bias in mind stop saturating."""
    certified = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        head = kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4), rng.standard_normal(4))
        certified += recover(head, seed, "float32").certified  # where seven digits are enough
    assert certified >= 6


def test_float32_outputs_over_decades() -> None:
    """Outputs that are lost in the rounding of others are left out, not divided by."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        value = rng.standard_normal((4, 4)) * 10.0 ** np.array([1.0, -1.0, -4.0, -8.0])
        assert_recovered(kh.SingleHead(rng.standard_normal((4, 4)) / 2, value), seed, "float32")
