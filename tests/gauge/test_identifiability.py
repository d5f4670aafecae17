"""What can and cannot be known, claim by claim: what is hidden no answer shows, what is known some answer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import UsageError
from keyhole.gauge.identifiability import CLAIMS, FAMILIES, INPUTS, Claim, claims
from keyhole.gauge.redundancy import redundancy

WIDTH, LONGEST = 5, 6
Random = np.random.Generator


def one_hot(rng: Random, length: int) -> np.ndarray:
    return np.eye(WIDTH)[rng.integers(WIDTH, size=(60, length))]


def mean_zero(rng: Random, length: int) -> np.ndarray:
    tokens = rng.standard_normal((60, length, WIDTH))
    return tokens - tokens.mean(axis=-1, keepdims=True)


TOKENS: dict[str, Callable[[Random, int], np.ndarray]] = {
    "unrestricted": lambda rng, length: rng.standard_normal((60, length, WIDTH)),
    "one-hot": one_hot,
    "mean-zero": mean_zero,
}


def head(rng: Random, outputs: int | None, output_bias: bool = False) -> kh.SingleHead:
    shape = () if outputs is None else (outputs,)
    bias = np.asarray(rng.standard_normal(shape)) if output_bias else None
    value = rng.standard_normal((WIDTH, *shape))
    return kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)), value, rng.standard_normal(WIDTH), bias)


def heads(rng: Random, outputs: int | None) -> kh.MultiHead:
    """Three heads, two of them of equal value."""
    made = [head(rng, outputs) for _ in range(3)]
    made[2] = kh.SingleHead(made[2].score, made[1].value, made[2].score_bias)
    return kh.MultiHead(made, np.asarray(rng.standard_normal(made[0].value.shape[1:])))


def net(rng: Random, outputs: int | None, width: int = WIDTH, neurons: int = 7) -> kh.ReluNet:
    shape = () if outputs is None else (outputs,)
    return kh.ReluNet(
        rng.standard_normal((neurons, width)),
        rng.standard_normal(neurons),
        rng.standard_normal((*shape, neurons)),
        np.asarray(rng.standard_normal(shape)),
        rng.standard_normal((*shape, width)) if neurons > 4 else None,
    )


def examples(family: str, rng: Random) -> list[Any]:
    if family == "single-head":
        return [head(rng, None, output_bias=True), head(rng, 2, output_bias=True)]
    if family == "multi-head":
        return [heads(rng, None), heads(rng, 2)]
    if family == "residual":
        return [kh.Residual(heads(rng, WIDTH))]
    if family == "relu-net":
        return [net(rng, None), net(rng, 2)]
    other = np.random.default_rng(3)
    return [
        kh.OneLayer(head(rng, 3), net(rng, 2, width=3)),
        kh.OneLayer(head(rng, WIDTH, output_bias=True), net(rng, None), residual=True),
        kh.OneLayer(head(rng, WIDTH), net(rng, None, neurons=3), residual=True),
        kh.OneLayer(heads(other, 3), net(other, 2, width=3)),
        kh.OneLayer(heads(other, WIDTH), net(other, None), residual=True),
    ]


def apart(first: Any, second: Any, inputs: str, lengths: range) -> float:
    rng, most = np.random.default_rng(0), 0.0
    for length in lengths:
        tokens = TOKENS[inputs](rng, length)
        one, two = first(tokens), second(tokens)
        most = max(most, float(np.max(np.abs(one - two)) / np.max(np.abs(one))))
    return most


EVERY = [(family, inputs, claim) for (family, inputs), made in CLAIMS.items() for claim in made]


@pytest.mark.parametrize(("family", "inputs", "claim"), EVERY, ids=lambda each: getattr(each, "quantity", each))
def test_claim(family: str, inputs: str, claim: Claim) -> None:
    rng, tried = np.random.default_rng(1), 0
    for params in examples(family, rng):
        other = claim.change(params, rng)
        if other is None:
            continue
        tried += 1
        if claim.known:
            assert apart(params, other, inputs, range(1, claim.since + 1)) > 1e-3
        else:
            assert apart(params, other, inputs, range(1, (claim.until or LONGEST) + 1)) < 1e-12
            if claim.until is not None:
                assert apart(params, other, inputs, range(claim.until + 1, claim.until + 2)) > 1e-3
    assert tried


def test_what_is_hidden_of_restricted_inputs_shows_to_others() -> None:
    """What only one-hot or mean-zero tokens hide is no part of the gauge."""
    rng, tried = np.random.default_rng(2), 0
    for family in FAMILIES:
        everywhere = {claim.quantity for claim in CLAIMS[family, "unrestricted"]}
        for inputs in ("one-hot", "mean-zero"):
            for claim in CLAIMS[family, inputs]:
                if claim.known or claim.quantity in everywhere:
                    continue
                for params in examples(family, rng):
                    other = claim.change(params, rng)
                    assert other is None or apart(params, other, "unrestricted", range(1, LONGEST)) > 1e-6
                    tried += other is not None
    assert tried


def test_claims_by_length() -> None:
    assert all(claim.holds(None) for claim in claims("multi-head"))
    short = {claim.quantity: claim.known for claim in claims("multi-head", max_length=2)}
    assert short["the sign of a head, against an average"] is False
    assert not any("every head whose logits differ" in quantity for quantity in short)
    alone = {claim.quantity: claim.known for claim in claims("single-head", max_length=1)}
    assert alone["W and c"] is False
    assert "score matrix W" not in alone
    assert set(CLAIMS) == {(family, inputs) for family in FAMILIES for inputs in INPUTS}
    for arguments in (("magic",), ("single-head", "magic"), ("single-head", "one-hot", 0)):
        with pytest.raises(UsageError):
            claims(*arguments)


def test_heads_that_are_nearly_alike_show_at_second_order() -> None:
    """Ten times nearer, a hundred times less of it shows."""
    rng = np.random.default_rng(4)
    score, step = rng.standard_normal((2, WIDTH, WIDTH))
    value, shows = rng.standard_normal(WIDTH), []
    for size in (1e-2, 1e-3, 1e-4):
        pair = kh.MultiHead([kh.SingleHead(score, value), kh.SingleHead(score + size * step, 0.5 * value)])
        found = redundancy(pair)
        assert found.minimal
        assert found.near[0].distance == pytest.approx(size * np.linalg.norm(step) / np.linalg.norm(score), rel=0.1)
        shows.append(found.near[0].shows)
    assert shows[0] / shows[1] == pytest.approx(100, rel=0.2)
    assert shows[1] / shows[2] == pytest.approx(100, rel=0.2)
    opposite = kh.MultiHead([kh.SingleHead(score, value), kh.SingleHead(score + 1e-3 * step, -value)])
    assert redundancy(opposite).near[0].shows is None


def test_structure_of_other_families() -> None:
    rng = np.random.default_rng(5)
    inner = rng.standard_normal((4, WIDTH))
    inner[3] = 1.01 * inner[0]
    plain_net = kh.ReluNet(inner, np.array([1.0, 2.0, 3.0, 1.02]), np.ones(4), np.asarray(0.0))
    found = redundancy(plain_net)
    assert [(pair.first, pair.second) for pair in found.near] == [(0, 3)]
    assert found.minimal
    smooth = kh.ReluNet(np.stack([inner[0], 2 * inner[0]]), np.zeros(2), np.ones(2), np.asarray(0.0), None, "gelu")
    assert redundancy(smooth).shown == 2
    assert not redundancy(smooth).near
    empty = kh.ReluNet(np.zeros((0, 3)), np.zeros(0), np.zeros(0), np.asarray(0.0))
    assert redundancy(empty).given == 0
    with pytest.raises(UsageError):
        redundancy("a head")
