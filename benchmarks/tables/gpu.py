"""A recovery on a GPU through torch: time over that of the same oracle calls alone. Needs a CUDA device."""

from __future__ import annotations

import time

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown

CASES = ((1024, "float64"), (2048, "float64"), (4096, "float64"), (4096, "float32"))


def table() -> str:
    columns = [
        "d",
        "dtype",
        "queries",
        "bound",
        "error",
        "certified",
        "total s",
        "oracle s",
        "alone s",
        "total / alone",
    ]
    return markdown([*columns, "peak GiB"], [_row(width, dtype) for width, dtype in CASES])


def _row(width: int, dtype: str) -> list[object]:
    import torch

    like = torch.zeros(1, dtype=getattr(torch, dtype), device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    score = torch.randn(width, width, dtype=like.dtype, device="cuda", generator=generator) / width**0.5
    truth = kh.SingleHead(score, torch.randn(width, dtype=like.dtype, device="cuda", generator=generator))
    shapes: list[tuple[int, ...]] = []

    def spy(tokens: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return truth(tokens)

    _alone(truth, [(64, 2, width)], like)  # warm up
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    result = kh.recover(kh.FunctionOracle(spy, width=width, like=like, name="gpu"), "single-head", throw=False)
    total = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30
    alone = _alone(truth, shapes, like)
    error = float(torch.linalg.norm(result.params.score - score) / torch.linalg.norm(score))
    times = [f"{seconds:.2f}" for seconds in (total, result.stats.oracle_seconds, alone, total / alone)]
    stats = result.stats
    return [width, dtype, stats.queries, stats.counting_bound, f"{error:.1e}", result.certified, *times, f"{peak:.1f}"]


def _alone(truth: kh.SingleHead, shapes: list[tuple[int, ...]], like: object) -> float:
    """Seconds for calls of the same shapes on tokens made beforehand, each checked to be finite as a session does."""
    import torch

    space = kh.FunctionOracle(truth, width=truth.width, like=like).signature.space
    made = space.normal(np.random.default_rng(0), max(shape[0] for shape in shapes), 2, truth.width)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for count, _, _ in shapes:
        bool(torch.all(torch.isfinite(truth(made[:count]))))
    torch.cuda.synchronize()
    return time.perf_counter() - began
