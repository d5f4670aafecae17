"""Defences as text and as wrappers around a box."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from keyhole.audit import Defence, audit, default_defences, parse_defence
from keyhole.errors import UsageError
from keyhole.noise import Noise
from keyhole.oracles import FunctionOracle
from keyhole.queries import Signature
from keyhole.targets import open_target
from support.targets import Random, small_oracle

SMALL = "demo:single-head?width=4"


@pytest.mark.parametrize(
    ("text", "defence", "same"),
    [
        ("none", Defence(), "none"),
        ("round:3", Defence(decimals=3), "round:3"),
        ("round:-2", Defence(decimals=-2), "round:-2"),
        ("noise:1e-3", Defence(noise=1e-3), "noise:0.001"),
        ("bfloat16", Defence(dtype="bfloat16"), "bfloat16"),
        ("clip:2 + float32", Defence(clip=2.0, dtype="float32"), "float32+clip:2"),
        ("clip:1e300", Defence(clip=1e300), "clip:1e300"),
        ("clip:1+project:4", Defence(clip=1.0, directions=4), "clip:1+project:4"),
        ("budget:5000+clip:1+round:2+noise:3", Defence(1.0, 3.0, None, 2, 5000), "noise:3+round:2+clip:1+budget:5000"),
    ],
)
def test_defences_are_read_and_written(text: str, defence: Defence, same: str) -> None:
    assert parse_defence(text) == defence
    assert defence.text == same
    assert parse_defence(same) == defence
    assert defence.words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "possible: none"),
        ("rounded", "possible: none"),
        ("round", "possible: none"),
        ("round:", "for example round:3"),
        ("round:2.5", "for example round:3"),
        ("noise:-1", "for example noise:1e-3"),
        ("noise:nan", "for example noise:1e-3"),
        ("clip:0", "for example clip:1"),
        ("budget:0", "for example budget:5000"),
        ("project:0", "for example project:4"),
        ("float64", "possible: none"),
        ("float32:3", "possible: none"),
        ("none+clip:1", "possible: none"),
        ("clip:1+", "possible: none"),
        ("clip:1+clip:2", "keep one"),
        ("float32+bfloat16", "keep one"),
        ("float32+round:3", "keep float32 or the rest"),
    ],
)
def test_malformed_defences_are_told(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_defence(text)
    assert "\n" not in str(caught.value)


def test_defences_change_answers_and_say_so(rng: Random) -> None:
    oracle = open_target(SMALL).oracle
    tokens = 0.1 * rng.standard_normal((50, 2, 4))
    true = oracle(tokens)

    def behind(text: str) -> tuple[Signature, np.ndarray]:
        defended = parse_defence(text).around(oracle, seed=5)
        assert defended.name == f"{oracle.name} | {parse_defence(text).text}"
        return defended.signature, defended(tokens) - true

    signature, error = behind("none")
    assert signature == oracle.signature
    assert not np.any(error)
    signature, error = behind("round:2")
    assert signature.noise == Noise.rounded(2)
    assert 0 < np.max(np.abs(error)) <= 0.005
    signature, error = behind("bfloat16")
    assert signature.noise == Noise.dtype("bfloat16")
    assert np.all(np.abs(error) <= 2.0**-8 * np.abs(true))
    signature, error = behind("noise:0.1+clip:3")
    assert signature.noise == Noise.gaussian(0.1)
    assert signature.max_norm == 3.0
    assert 0.05 < np.std(error) < 0.2
    signature, _ = behind("noise:1+round:2")
    assert signature.noise.kind == "gaussian"
    assert signature.noise.scale == pytest.approx(1, rel=1e-4)
    signature, error = behind("noise:1e-4+round:2")
    assert signature.noise == Noise.bounded(0.005 + 5e-4)
    assert np.max(np.abs(error)) <= 0.0055


def test_clipping_is_real_and_known() -> None:
    seen = []
    inner = FunctionOracle(lambda tokens: seen.append(tokens) or tokens[:, 0, 0], width=3)
    defended = parse_defence("clip:2").around(inner)
    with pytest.raises(UsageError, match="max_norm"):
        defended(np.full((1, 1, 3), 9.0))
    server = defended.inner  # type: ignore[attr-defined]
    server.inner(np.stack([np.full((1, 3), 9.0), np.full((1, 3), 0.1)]))
    np.testing.assert_allclose(np.linalg.norm(seen[0], axis=-1)[:, 0], [2.0, 0.1 * 3**0.5])
    tight = FunctionOracle(lambda tokens: tokens[:, 0, 0], width=3, max_norm=1.0)
    assert parse_defence("clip:2").around(tight).signature.max_norm == 1.0


def test_a_limit_is_real() -> None:
    oracle, truth = small_oracle()
    rows = audit(oracle, ["budget:10"], [1, 4], truth=truth).of("budget:10")
    assert [(row.budget, row.queries <= 10) for row in rows] == [(10, True)]
    assert rows[0].outcome == "BUDGET_EXHAUSTED"
    with pytest.raises(kh.KeyholeError, match="10 left"):
        parse_defence("budget:10").around(oracle)(np.zeros((11, 1, 4)))


def test_the_common_defences_are_all_different() -> None:
    defences = default_defences(20)
    assert len(set(defences)) == len(defences) >= 8
    assert Defence(limit=10) in defences
