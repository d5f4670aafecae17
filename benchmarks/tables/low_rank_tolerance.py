"""Low rank behind a tolerance: queries, errors and radii of `low-rank`, beside `robust`, which reads all entries."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import numpy.typing as npt

import keyhole as kh
from benchmarks.support.heads import low_rank
from benchmarks.support.rows import Kept, Row, markdown

MAX_NORM = 3.0
# (width, rank, tolerance): seeds
CASES = {
    (20, 1, 1e-5): 10,
    (20, 2, 1e-5): 10,
    (32, 2, 1e-5): 10,
    (64, 2, 1e-5): 5,
    (64, 4, 1e-5): 5,
    (64, 4, 1e-7): 5,
    (128, 4, 1e-6): 2,
    (20, 20, 1e-5): 10,
}


def table(kept: Kept) -> str:
    rows = kept.rows_of("case", {str(case): lambda case=case: _row(*case, CASES[case]) for case in CASES})
    columns = ["d, r, τ", "queries: median, most", "over r(2d − r) + d", "queries of `robust`", "error: median, worst"]
    columns += ["radius: median", "radius of `robust`", "certified", "outside their radius", "seconds"]
    return markdown(columns, rows) + (
        f"\n\nScores of orthogonal factors and singular values 1, normal values, tokens of norm ≤ {MAX_NORM:g}; errors "
        "of at most τ, by turns uniform, of a sign that depends on the question, and towards zero. Error and radius of "
        "the worst entry of the score."
    )


def _row(width: int, rank: int, tau: float, seeds: int) -> Row:
    results: dict[str, list[tuple[kh.Recovery, float]]] = {"low-rank": [], "robust": []}
    began, outside, errors = perf_counter(), 0, []
    for method, found in results.items():
        for seed in range(seeds):
            truth = low_rank(rank)(width, np.random.default_rng([seed, width, rank]))
            result = kh.recover(_erring(truth, tau, seed), method=method, seed=seed, throw=False)
            radius = np.asarray(result.certificate.radius.score)
            error = np.abs(np.asarray(result.params.score) - truth.score)
            outside += int(np.sum(error > radius))
            found.append((result, float(np.max(radius))))
            errors += [float(np.max(error))] if method == "low-rank" else []
    queries = [each.stats.queries for each, _ in results["low-rank"]]
    bound = rank * (2 * width - rank) + width
    return [
        f"{width}, {rank}, {tau:g}",
        f"{np.median(queries):,.0f}, {max(queries):,}",
        f"{np.median(queries) / bound:.2f}",
        f"{np.median([each.stats.queries for each, _ in results['robust']]):,.0f}",
        f"{np.median(errors):.0e}, {max(errors):.0e}",
        *(f"{np.median([radius for _, radius in results[method]]):.0e}" for method in results),
        f"{sum(each.certified for each, _ in results['low-rank'])} of {seeds}",
        outside,
        f"{(perf_counter() - began) / seeds / 2:.1f}",
    ]


def _erring(head: kh.SingleHead, tau: float, seed: int) -> kh.FunctionOracle:
    """The head with errors of at most tau."""
    rng = np.random.default_rng([seed, 1])

    def box(tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        answers = np.asarray(head(tokens))
        kinds = (
            rng.uniform(-1, 1, answers.shape),
            np.where(np.sin(1e5 * tokens.sum(axis=(1, 2))) > 0, 1.0, -1.0),
            -np.sign(answers),
        )
        return np.asarray(answers + tau * kinds[seed % 3])

    return kh.FunctionOracle(box, head.width, noise=kh.Noise.bounded(tau), max_norm=MAX_NORM)
