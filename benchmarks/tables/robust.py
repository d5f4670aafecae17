"""Errors behind normal noise over the statistical floor, coverage of intervals, scaling, float32 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.numerics.cramer_rao import universal_floor
from keyhole.oracles import Noisy

Make = Callable[[np.random.Generator], kh.SingleHead]


def plain(width: int, scale: float = 1.0, outputs: int | None = None, rank: int | None = None) -> Make:
    """Score entries of variance scale²/d and a value of norm one: logits of unit tokens are about scale/√d."""

    def make(rng: np.random.Generator) -> kh.SingleHead:
        score = rng.standard_normal((width, width))
        if rank is not None:
            score = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width)) / rank**0.5
        value = rng.standard_normal(width if outputs is None else (width, outputs))
        return kh.SingleHead(scale * score / width**0.5, value / np.linalg.norm(value, 2 if outputs else None))

    return make


def recovered(make: Make, noise: float, seed: int, **options: Any) -> tuple[kh.SingleHead, kh.Recovery]:
    """A recovery at token norms of at most one."""
    truth = make(np.random.default_rng([seed, 41]))
    oracle = kh.FunctionOracle(truth, width=truth.width, max_norm=1.0)
    return truth, kh.recover(Noisy(oracle, noise, seed=seed), "robust", seed=seed, throw=False, **options)


def error(truth: kh.SingleHead, result: kh.Recovery) -> float:
    """Root mean square over the entries of the score matrix."""
    return float(np.sqrt(np.mean((result.params.score - truth.score) ** 2)))


def table() -> str:
    parts = {
        "Standard deviation 1e-3, token norm 1, 20 seeds": _limit(),
        "95 % intervals, d = 16, 200 runs": _coverage(),
        "How errors scale, d = 16, 5 seeds": _scaling(),
        "An oracle that computes in float32 (PyTorch), d = 64, token norm 1, 5 seeds": _single_precision(),
    }
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts.items())


CASES: dict[str, tuple[Make, int, dict[str, Any]]] = {
    "d = 32": (plain(32), 32, {}),
    "d = 32, score × 6": (plain(32, 6.0), 32, {}),
    "d = 32, score × 10": (plain(32, 10.0), 32, {}),
    "d = 32, 16 × the queries": (plain(32), 32, {"budget": 16 * 33 * 32 + 32}),
    "d = 32, rank 2 given": (plain(32, rank=2), 32, {"rank": 2}),
    "d = 32, rank 2 given, 2000 queries": (plain(32, rank=2), 32, {"rank": 2, "budget": 2000}),
    "d = 32, 8 outputs": (plain(32, outputs=8), 32, {}),
    "d = 32, 32 outputs": (plain(32, outputs=32), 32, {}),
    "d = 64": (plain(64), 64, {}),
}


def _limit() -> str:
    rows = []
    for name, (make, width, options) in CASES.items():
        found = [(*recovered(make, 1e-3, seed, **options), seed) for seed in range(20)]
        errors = np.array([error(truth, result) for truth, result, _ in found])
        queries = [result.stats.queries for _, result, _ in found]
        floor = [universal_floor(width, 1.0, 1.0, 1e-3, number) for number in queries]
        expected = [result.stats.details["standard_error"] for _, result, _ in found]
        over = _rms(errors / np.array(floor))
        one = found[0][0].outputs is None and "rank" not in options
        certified = sum(result.certified for _, result, _ in found)
        ratio = np.mean([result.stats.ratio for _, result, _ in found])
        rows.append(
            [
                name,
                f"{ratio:.2f}",
                f"{_rms(errors):.2e}",
                f"{over:.2f}" if one else "–",
                f"{_rms(errors / np.array(expected)):.3f}",
                f"{certified}/20",
                sum(_missed(truth, result) for truth, result, _ in found),
            ]
        )
    head = ["case", "queries over the bound", "error", "over the universal floor", "over the Cramér–Rao bound"]
    return markdown([*head, "certified", "outside their radius"], rows)


def _missed(truth: kh.SingleHead, result: kh.Recovery) -> bool:
    radius = result.certificate.radius
    return bool(
        np.any(np.abs(result.params.score - truth.score) > radius.score)
        or np.any(np.abs(result.params.value - truth.value) > radius.value)
    )


def _coverage() -> str:
    rows = []
    for name, options in {"one pass": {}, "8 passes": {"budget": 8 * 17 * 17 + 64}}.items():
        inside: dict[str, list[float]] = {"score": [], "value": []}
        for seed in range(200):
            truth, result = recovered(plain(16), 1e-3, 1000 + seed, **options)
            for part, shares in inside.items():
                off = np.abs(getattr(result.params, part) - getattr(truth, part))
                shares.append(float(np.mean(off <= 1.959964 * getattr(result.certificate.standard_error, part))))
        rows.append([name, *(f"{100 * np.mean(shares):.2f} %" for shares in inside.values())])
    return markdown(["", "score entries inside", "value entries inside"], rows)


def _scaling() -> str:
    noises = 10.0 ** np.arange(-6, -1)
    repeats = 4.0 ** np.arange(5)
    by_noise = [_typical(noise, {}) for noise in noises]
    by_queries = [_typical(1e-3, {"budget": int(number * 17 * 17) + 32}) for number in repeats]
    rows = [
        ["standard deviation 1e-6 … 1e-2", _list(by_noise), f"{_exponent(noises, by_noise):.3f}", "1"],
        ["1, 4, 16, 64, 256 passes", _list(by_queries), f"{_exponent(repeats, by_queries):.3f}", "−1/2"],
    ]
    return markdown(["varied", "errors", "fitted exponent", "expected"], rows)


def _typical(noise: float, options: dict[str, Any]) -> float:
    return _rms([error(*recovered(plain(16), noise, seed, **options)) for seed in range(5)])


def _single_precision() -> str:
    import torch

    rows = []
    for name, options in {"one pass": {}, "8 × the queries": {"budget": 8 * 65 * 65 + 32}}.items():
        errors, relative, ratios, certified, missed = [], [], [], 0, 0
        for seed in range(5):
            drawn = plain(64)(np.random.default_rng([seed, 42]))
            truth = kh.SingleHead(drawn.score.astype(np.float32), drawn.value.astype(np.float32))
            box = kh.SingleHead(torch.tensor(truth.score), torch.tensor(truth.value))
            oracle = kh.FunctionOracle(box, width=64, max_norm=1.0, like=torch.zeros(1, dtype=torch.float32))
            result = kh.recover(oracle, "robust", seed=seed, throw=False, **options)
            off = result.params.score.numpy().astype(np.float64) - truth.score
            errors.append(float(np.sqrt(np.mean(off**2))))
            relative.append(float(np.linalg.norm(off) / np.linalg.norm(truth.score)))
            ratios.append(result.stats.ratio)
            certified += result.certified
            missed += bool(np.any(np.abs(off) > result.certificate.radius.score.numpy()))
        rows.append(
            [name, f"{np.mean(ratios):.2f}", f"{_rms(errors):.1e}", f"{_rms(relative):.1e}", f"{certified}/5", missed]
        )
    head = ["", "queries over the bound", "error", "relative to the score matrix", "certified", "outside their radius"]
    return markdown(head, rows)


def _rms(numbers: Any) -> float:
    return float(np.sqrt(np.mean(np.square(numbers))))


def _exponent(varied: Any, errors: Any) -> float:
    return float(np.polyfit(np.log(varied), np.log(errors), 1)[0])


def _list(numbers: list[float]) -> str:
    return ", ".join(f"{number:.1e}" for number in numbers)
