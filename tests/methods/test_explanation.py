"""Answers within wide radii are certified only where some parameters within theirs explain all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.methods.base import Estimate
from keyhole.methods.explanation import has_explanation
from keyhole.methods.heldout import HeldOut, draw_heldout
from keyhole.queries import Signature

Array = np.ndarray[Any, np.dtype[np.float64]]
WIDTH, RADIUS = 3, 1e-4


def asked_of(params: kh.SingleHead, radius: float) -> tuple[Estimate[kh.SingleHead], Signature, HeldOut]:
    wide = params.with_arrays({name: 0 * array + radius for name, array in params.arrays().items()})
    estimate, signature = Estimate(params, wide, 1), Signature(width=WIDTH)
    return estimate, signature, draw_heldout(estimate, signature, np.random.default_rng(0), 120)


def answers_of(asked: HeldOut, signature: Signature, box: Callable[[Array], Array]) -> Array:
    return np.concatenate([box(plan.tokens(0, plan.count, signature.space, WIDTH)) for plan in asked.plans])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("besides", "explained"),
    [
        (lambda tokens: 0.0, True),
        (lambda tokens: 1e-5 * np.tanh(tokens[:, -1, 0]), False),
        (lambda tokens: 1e-5 * (np.linalg.norm(tokens[:, -1], axis=1) < 0.1), False),
        (lambda tokens: 1e-5 * (tokens.shape[1] > 50), False),
    ],
    ids=["nothing", "a bent term", "short last tokens", "long sequences"],
)
def test_wide_radii_hide_nothing_but_parameters_within_them(besides: Any, explained: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH))
    off = {name: array + RADIUS * rng.uniform(-1, 1, array.shape) for name, array in params.arrays().items()}
    truth = params.with_arrays(off)
    estimate, signature, asked = asked_of(params, RADIUS)
    answers = answers_of(asked, signature, lambda tokens: truth(tokens) + besides(tokens))
    assert has_explanation(estimate, signature, asked, answers) is explained
