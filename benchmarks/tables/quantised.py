"""Rounded answers beaten by thresholds and null queries, and every bit of weights stored in a small dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.methods import Estimate, Steps
from keyhole.methods.certificate import certify
from keyhole.methods.robust.dtypes import grid_of
from keyhole.methods.robust.quantised.method import by_null_queries, by_thresholds
from keyhole.methods.robust.stored_bits import bit_exact
from keyhole.oracles import Cast, Oracle, Rounded
from keyhole.queries import Signature
from keyhole.recovery import Outcome
from keyhole.session import Session

WIDTH, SEEDS, BITS_SEEDS = 64, 5, 20
BOUND = WIDTH**2 + WIDTH


def table() -> str:
    return "\n\n".join(
        [
            f"Rounded to 3 decimals, tokens of norm at most 1, d = {WIDTH}, |v| = 1, worst of {SEEDS} seeds:",
            _thresholds(),
            f"Rounded to bfloat16, d = {WIDTH}, |v| = 1, entries of W of size 1/√d, worst of {SEEDS} seeds:",
            _null_queries(),
            f"Weights stored in a dtype, exact float64 answers, {BITS_SEEDS} seeds each:",
            _bits(),
        ]
    )


def _entries(rng: np.random.Generator, width: int) -> np.ndarray:
    return rng.standard_normal((width, width)) / width**0.5


def _spectral(rng: np.random.Generator, width: int) -> np.ndarray:
    score = rng.standard_normal((width, width))
    return score / np.linalg.norm(score, 2)


def _judged(
    oracle: Oracle, steps: Callable[[Signature, np.random.Generator], Steps[Estimate]]
) -> tuple[Estimate, int, bool]:
    session = Session(oracle)
    estimate = session.run(steps(oracle.signature, np.random.default_rng(0)))
    queries = session.queries
    judgement = session.run(certify(estimate, oracle.signature, np.random.default_rng(1), 32))
    return estimate, queries, judgement.outcome is Outcome.CERTIFIED


def _runs(
    make: Callable[[np.random.Generator, int], np.ndarray],
    max_norm: float | None,
    wrap: Callable[[Oracle], Oracle],
    steps: Callable[[Signature, np.random.Generator], Steps[Estimate]],
) -> list[object]:
    """Queries over the bound, root-mean-square and relative error, error of v, truths covered, certified."""
    rows = []
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, WIDTH])
        value = rng.standard_normal(WIDTH)
        truth = kh.SingleHead(make(rng, WIDTH), value / np.linalg.norm(value))
        oracle = wrap(kh.FunctionOracle(truth, width=WIDTH, max_norm=max_norm))
        estimate, queries, certified = _judged(oracle, steps)
        error, value_error = (np.abs(estimate.params.arrays()[n] - truth.arrays()[n]) for n in ("score", "value"))
        inside = np.all(error <= estimate.radius.score) and np.all(value_error <= estimate.radius.value)
        relative = np.linalg.norm(error) / np.linalg.norm(truth.score)
        rows.append((queries / BOUND, np.sqrt(np.mean(error**2)), relative, np.max(value_error), inside, certified))
    times, root, relative, values, inside, certified = zip(*rows, strict=True)
    worst = [f"{max(column):.1e}" for column in (root, relative, values)]
    return [f"{max(times):.2f}", *worst, f"{sum(inside)}/{SEEDS}", f"{sum(certified)}/{SEEDS}"]


COLUMNS = [
    "queries / bound",
    "rms error of W",
    "relative error of W",
    "largest error of v",
    "within radii",
    "certified",
]


def _thresholds() -> str:
    def wrap(oracle: Oracle) -> Oracle:
        return Rounded(oracle, 3)

    rows = []
    for name, make in (("entries of size 1/√d", _entries), ("spectral norm 1", _spectral)):
        for times in (2, 4, 8, 12):
            found = _runs(make, 1.0, wrap, lambda s, rng, times=times: by_thresholds(s, rng, budget=times * BOUND))
            rows.append([name, f"budget {times} × the bound", *found])
        for target in (1e-6, 1e-9):
            found = _runs(make, 1.0, wrap, lambda s, rng, target=target: by_thresholds(s, rng, target_error=target))
            rows.append([name, f"target {target:g}", *found])
    return markdown(["W", "asked for", *COLUMNS], rows)


def _null_queries() -> str:
    def wrap(oracle: Oracle) -> Oracle:
        return Cast(oracle, "bfloat16")

    rows = []
    for name, limit in (("1", 1.0), ("none", None)):
        for rounds in range(1, 6):
            budget = (rounds + 0.1) * BOUND
            found = _runs(_entries, limit, wrap, lambda s, rng, budget=budget: by_null_queries(s, rng, budget=budget))
            rows.append([name, rounds, *found])
    return markdown(["norm bound", "rounds", *COLUMNS], rows)


def _bits() -> str:
    rows = []
    for width in (32, 64):
        for dtype in ("float32", "bfloat16", "float16"):
            exact, times, certified = 0, [], 0
            for seed in range(BITS_SEEDS):
                rng = np.random.default_rng([seed, width])
                score, value = (_stored(array, dtype) for array in (_entries(rng, width), rng.standard_normal(width)))
                oracle = kh.FunctionOracle(kh.SingleHead(score, value), width=width)
                estimate, queries, right = _judged(oracle, lambda s, rng, dtype=dtype: bit_exact(s, rng, dtype=dtype))
                found = estimate.params
                exact += np.array_equal(found.score, score) and np.array_equal(found.value, value)
                times.append(queries / estimate.counting_bound)
                certified += right
            rows.append([width, dtype, f"{exact}/{BITS_SEEDS}", f"{max(times):.3f}", f"{certified}/{BITS_SEEDS}"])
    return markdown(["d", "dtype", "every bit right", "most queries / bound", "certified"], rows)


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    spacing = grid_of(dtype).spacing(array)
    return np.round(array / spacing) * spacing
