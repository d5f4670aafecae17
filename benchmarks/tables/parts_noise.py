"""Heads of other parts than a softmax's behind errors, random ones and such that conspire: right, or admitted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

import keyhole as kh
from benchmarks.support.parts import ATTENTIONS, names_of, random_head
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.tables.parts import over_radius

WIDTH, SEEDS, NORM, SCALE = 6, 5, 3.0, 4.0
Errors = Callable[[np.ndarray, np.random.Generator], np.ndarray]
# What is declared, the norm bound, and what errors are.
CASES: dict[str, tuple[str, float | None, Errors]] = {
    "normal, 1e-3": ("gaussian:1e-3", None, lambda answers, rng: 1e-3 * rng.standard_normal(answers.shape)),
    "at most 1e-3, the sign of the answer": ("bounded:1e-3", None, lambda answers, _: 1e-3 * np.sign(answers)),
    "3 decimals": ("rounded:3", None, lambda answers, _: np.round(answers, 3) - answers),
    "normal, 1e-4, norms ≤ 3": ("gaussian:1e-4", NORM, lambda answers, rng: 1e-4 * rng.standard_normal(answers.shape)),
    "at most 1e-5, the sign, norms ≤ 3": ("bounded:1e-5", NORM, lambda answers, _: 1e-5 * np.sign(answers)),
    "4 decimals, norms ≤ 3": ("rounded:4", NORM, lambda answers, _: np.round(answers, 4) - answers),
}


def table(kept: Kept) -> str:
    columns = ["parts, d = 6", *CASES, "certified and wrong", "error over its radius, worst"]
    rows = kept.rows_of("noise", {kind: partial(_row, kind) for kind in ATTENTIONS})
    said = f"Certified and right of {SEEDS} boxes each, behind errors that were declared:"
    return f"{said}\n\n{markdown(columns, rows)}"


def _row(kind: str) -> Row:
    counts, wrong, worst = [], 0, 0.0
    for noise, norm, errors in CASES.values():
        right = 0
        for seed in range(SEEDS):
            truth, rng = random_head(kind, WIDTH, 9000 + seed, scale=SCALE), np.random.default_rng(seed)

            def answer(
                tokens: np.ndarray,
                truth: kh.SingleHead = truth,
                rng: np.random.Generator = rng,
                errors: Errors = errors,
            ) -> np.ndarray:
                answers = truth(tokens)
                return answers + errors(answers, rng)

            oracle = kh.FunctionOracle(answer, width=WIDTH, noise=noise, max_norm=norm)
            result = kh.recover(oracle, "parts", seed=seed, throw=False, **names_of(truth.attention))
            if result.certified:
                ratio = over_radius(result, truth)
                right, wrong, worst = right + (ratio <= 1), wrong + (ratio > 1), max(worst, ratio)
        counts.append(f"{right}/{SEEDS}")
    return [kind, *counts, wrong, f"{worst:.2f}"]
