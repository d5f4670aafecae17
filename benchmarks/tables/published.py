"""Published learners of attention beside Keyhole, on the same boxes: queries, errors, and how often each succeeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

import keyhole as kh
from benchmarks.support.published import (
    Arithmetic,
    Counted,
    Digits,
    Double,
    Floats,
    from_copies,
    from_labels,
    from_pairs,
    heads_in,
)
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.tables.distillation import LENGTH, LOGIT_SIZE, distil
from benchmarks.tables.multi_scalar import matched, random_heads
from keyhole import oracles
from keyhole.methods import METHODS

WIDTH, HEADS, LARGE = 8, (2, 3, 4, 6), 100.0
SEEDS, FEW_SEEDS = 10, 3  # few where a run takes long
# Tokens of copies-interpolation have this norm: logits of the heads below are of size one.
SCALE, DIGITS = 2.0, 60
# Labels: entries are looked for within ± this, to this accuracy.
LARGEST, ACCURACY = 4.0, 1e-6
# A relative error of all scores up to this counts as a success; ePrint 2026/1678 reports 2⁻⁵¹ for 6 heads of width 8.
SUCCESS, FINEST = 1e-8, 2.0**-51
LABEL_SUCCESS = 2 * ACCURACY


@dataclass(frozen=True)
class Run:
    """What one learner did on one box."""

    queries: int
    error: float  # of the worst score, relative
    seconds: float
    heldout: int = 0
    certified: bool | None = None  # None: the learner has no certificate


Learner = Callable[[int], Run]  # from a seed


def table(kept: Kept) -> str:
    torch.set_num_threads(1)
    parts = {"One head, values": _one_head(), f"One head, scores × {LARGE:g}": _large_head(), "Labels only": _labels()}
    parts |= {f"{heads} heads, one output": _several(heads) for heads in HEADS}
    rows = [
        kept.rows_of(name, {each: _row(name, each, *how) for each, how in made.items()}) for name, made in parts.items()
    ]
    columns = ["box, d = 8", "learner", "queries: median", "over the bound", "score error: median, worst"]
    columns += ["success", "certified", "seconds: median"]
    return markdown(columns, [row for part in rows for row in part]) + "\n\n" + NOTE


def _row(box: str, name: str, learner: Learner, seeds: int, bound: float, success: float) -> Callable[[], Row]:
    def measure() -> Row:
        runs = [learner(seed) for seed in range(seeds)]
        queries, errors = np.median([run.queries for run in runs]), [run.error for run in runs]
        held = int(np.median([run.heldout for run in runs]))
        proven = [run.certified for run in runs if run.certified is not None]
        return [
            box,
            name,
            f"{queries:,.0f}" + (f" + {held}" if held else ""),
            f"{queries / bound:.2f}",
            f"{np.median(errors):.0e}, {np.max(errors):.0e}",
            f"{sum(error <= success for error in errors)} of {seeds}",
            f"{sum(proven)} of {seeds}" if proven else "–",
            f"{np.median([run.seconds for run in runs]):.2g}",
        ]

    return measure


Made = dict[str, tuple[Learner, int, float, float]]


def _one_head() -> Made:
    bound = WIDTH**2 + WIDTH

    def theorem(seed: int) -> Run:
        truth = _head(seed)
        return _timed(lambda counted: from_pairs(counted, WIDTH).score, truth, truth.score)

    def distillation(multiple: int) -> Learner:
        def learn(seed: int) -> Run:
            truth, rng = _head(seed), np.random.default_rng([seed, multiple])
            tokens = rng.standard_normal((multiple * bound, LENGTH, WIDTH))
            tokens *= (LOGIT_SIZE / np.linalg.norm(truth.score)) ** 0.5
            steps = 3000 if multiple == 1 else 1500

            def fit(counted: Counted) -> Floats:
                return np.asarray(distil(tokens, counted(tokens), steps=steps, seed=seed).params.score)

            return _timed(fit, truth, truth.score)

        return learn

    return {
        "Theorem 4.1 as printed, u = e_i": (theorem, SEEDS, bound, SUCCESS),
        "distillation, L-BFGS, 1 ×": (distillation(1), FEW_SEEDS, bound, SUCCESS),
        "distillation, L-BFGS, 2 ×": (distillation(2), SEEDS, bound, SUCCESS),
        "copies-interpolation, float64": (_copies(1, Double()), SEEDS, bound, SUCCESS),
        "Keyhole `single-head`": (lambda seed: _keyhole(_head(seed), "single-head", seed), SEEDS, bound, SUCCESS),
    }


def _large_head() -> Made:
    """Scores at which the softmax saturates for tokens of unit size."""
    bound = WIDTH**2 + WIDTH

    def head(seed: int) -> kh.SingleHead:
        return kh.SingleHead(LARGE * _head(seed).score, _head(seed).value)

    def theorem(seed: int) -> Run:
        return _timed(lambda counted: from_pairs(counted, WIDTH).score, head(seed), head(seed).score)

    return {
        "Theorem 4.1 as printed, u = e_i": (theorem, SEEDS, bound, SUCCESS),
        "Keyhole `single-head`": (lambda seed: _keyhole(head(seed), "single-head", seed), SEEDS, bound, SUCCESS),
    }


def _several(heads: int) -> Made:
    bound = heads * (WIDTH**2 + WIDTH)
    return {
        "copies-interpolation, float64": (_copies(heads, Double()), SEEDS, bound, SUCCESS),
        f"copies-interpolation, {DIGITS} digits": (_copies(heads, Digits(DIGITS)), FEW_SEEDS, bound, SUCCESS),
        "Keyhole `multi-head`": (
            lambda seed: _keyhole(random_heads(heads, WIDTH, seed), "multi-head", seed),
            SEEDS,
            bound,
            SUCCESS,
        ),
    }


def _labels() -> Made:
    bound = (WIDTH**2 + WIDTH) * math.log2(1 / ACCURACY)

    def bisection(seed: int) -> Run:
        truth = _head(seed)
        return _timed(
            lambda counted: from_labels(counted, WIDTH, LARGEST, ACCURACY).score,
            lambda tokens: np.where(truth(tokens) > 0, 1.0, -1.0),
            truth.score,
            of_labels=True,
        )

    def keyhole(seed: int) -> Run:
        truth = _head(seed)
        oracle = oracles.Labelled(kh.FunctionOracle(truth, width=WIDTH))
        result = kh.recover(oracle, "labels", seed=seed, throw=False, target_error=ACCURACY)
        error = _label_error(result.params.attention.score, truth.score) if result.params is not None else np.inf
        return _of(result, error)

    made: Made = {"bisection of each entry, as in Appendix B": (bisection, SEEDS, bound, LABEL_SUCCESS)}
    if "labels" in METHODS:
        made["Keyhole `labels`"] = (keyhole, SEEDS, bound, LABEL_SUCCESS)
    return made


def _head(seed: int) -> kh.SingleHead:
    return random_heads(1, WIDTH, seed).heads[0]


def _copies(heads: int, arithmetic: Arithmetic) -> Learner:
    def learn(seed: int) -> Run:
        truth = random_heads(heads, WIDTH, seed)
        counted = Counted(heads_in(arithmetic, truth) if isinstance(arithmetic, Digits) else truth)
        began = perf_counter()
        found = from_copies(counted, WIDTH, heads, SCALE, arithmetic)
        seconds = perf_counter() - began
        return Run(counted.queries, _worst(found, truth), seconds)

    return learn


def _timed(
    learn: Callable[[Counted], Floats], answer: Callable[[Floats], Floats], truth: Floats, *, of_labels: bool = False
) -> Run:
    counted, began = Counted(answer), perf_counter()
    found = learn(counted)
    seconds = perf_counter() - began
    error = _label_error(found, truth) if of_labels else float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
    return Run(counted.queries, error if np.isfinite(error) else np.inf, seconds)


def _label_error(found: Floats, truth: Floats) -> float:
    """The worst entry over the root mean square of all."""
    return float(np.max(np.abs(found - truth)) / np.sqrt(np.mean(truth**2)))


def _keyhole(truth: kh.SingleHead | kh.MultiHead, method: str, seed: int) -> Run:
    result = kh.recover(kh.FunctionOracle(truth, width=WIDTH), method, seed=seed, throw=False)
    found = result.params
    if found is None:
        return _of(result, np.inf)
    heads = [found] if method == "single-head" else found.heads
    expected = [truth] if method == "single-head" else truth.heads
    return _of(result, _worst(kh.MultiHead(heads), kh.MultiHead(expected)))


def _of(result: kh.Recovery, error: float) -> Run:
    stats = result.stats
    return Run(stats.queries, error, stats.seconds, stats.heldout_queries, result.certified)


def _worst(found: kh.MultiHead, truth: kh.MultiHead) -> float:
    if len(found.heads) != len(truth.heads):
        return np.inf
    scores = [np.asarray(head.score) for head in found.heads]
    return matched(found, truth)[1] if np.all(np.isfinite(scores)) else np.inf


NOTE = (
    f"Scores N(0, 1/d), values N(0, 1); {SEEDS} seeds a row, {FEW_SEEDS} for distillation at 1 × and for "
    f"{DIGITS} digits. Success: every score within {SUCCESS:g} of its norm; for labels, every entry within "
    f"{LABEL_SUCCESS:g} of the root mean square. The bound: numbers there are, H(d² + d); for labels their bits, "
    f"(d² + d)·log₂(1/{ACCURACY:g}). Held-out queries of a certificate come after a +. "
    f"Bisection is told that entries are within ±{LARGEST:g}; Keyhole is not.\n\n"
    "Theorem 4.1 and Appendix B: arXiv 2601.16873. Copies-interpolation is our own plain implementation in the manner "
    "of Kim, Kim and Guo, arXiv 2608.03294: 2H(d² + d − 1) + d queries, since heads are matched by their values; the "
    "paper counts 4Hd² − 2H + 1, 1,525 for 6 heads. It interpolates a rational function of degree H in the number "
    f"of copies, which loses digits with every head: with answers of {DIGITS} digits and arithmetic to match it is "
    "right, with float64 it is not. Six heads of width 8 are the size of ePrint 2026/1678, which reports 2⁻⁵¹ = "
    f"{FINEST:.1e}. Distillation is that of `python -m benchmarks distillation`."
)
