"""Recoveries where a GPU is: time over that of the same oracle calls alone, peak memory, errors.

Rows are kept as they are measured. `--device cpu` with `--shrink 8` tries the table without a GPU, at an eighth of the
widths. Where calls alone would take minutes every so many are timed, and the column says how many.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown

FULL = ((1024, "float64"), (2048, "float64"), (4096, "float64"), (4096, "float32"), (8192, "float64"))
LOW_RANK = ((4096, 128), (16384, 128))
SEVERAL = ((512, 8), (1024, 16), (4096, 32))
COLUMNS = ["certified", "queries", "bound", "error", "total s", "oracle s", "alone s", "total / alone", "peak GiB"]
# Calls alone that touch more bytes of tokens than this are timed in part.
MOST_BYTES = 2.0**40
# What warms a device up: libraries are loaded when they are first used.
WARM = 256
# Random sequences that errors of several heads are measured with.
TRIED, TRIED_LENGTH = 64, 12


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", help="where the oracle lives")
    parser.add_argument("--shrink", type=int, default=1, help="divide all widths by this")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="print where the time of each row goes")


def table(arguments: argparse.Namespace) -> str:
    kept = Kept(Path(__file__).parents[1] / ".rows" / "gpu.json", arguments.only, resume=arguments.resume)
    place = Place(arguments.device, arguments.shrink, arguments.profile)
    full = {
        f"{width} {dtype}": (lambda width=width, dtype=dtype: full_rank(place, width, dtype)) for width, dtype in FULL
    }
    low = {f"{width} {rank}": (lambda width=width, rank=rank: low_rank(place, width, rank)) for width, rank in LOW_RANK}
    heads = {
        f"{width} {count}": (lambda width=width, count=count: several(place, width, count)) for width, count in SEVERAL
    }
    parts = ["One head, score of full rank:", markdown(["d", "dtype", *COLUMNS], kept.rows_of("full", full))]
    parts += ["One head, rank not known before:", markdown(["d", "rank", *COLUMNS], kept.rows_of("low", low))]
    columns = ["d", "heads", *COLUMNS[:3], "function error", *COLUMNS[4:]]
    parts += ["Several heads of rank d/H, d outputs:", markdown(columns, kept.rows_of("several", heads))]
    return "\n\n".join(parts)


class Place:
    """A device, and runs on it."""

    def __init__(self, device: str, shrink: int, profile: int) -> None:
        import torch

        self.torch, self.device, self.shrink, self.profile = torch, device, shrink, profile
        self.cuda = torch.device(device).type == "cuda"
        self._warm = False

    def normal(self, seed: int, *shape: int, dtype: str = "float64") -> Any:
        generator = self.torch.Generator(device=self.device).manual_seed(seed)
        return self.torch.randn(shape, dtype=getattr(self.torch, dtype), device=self.device, generator=generator)

    def wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def measure(
        self, truth: Callable[[Any], Any], width: int, method: str, like: Any, error: Callable[[kh.Recovery], float]
    ) -> Row:
        """Run a recovery, then its calls alone."""
        shapes: list[tuple[int, ...]] = []

        def spy(tokens: Any) -> Any:
            shapes.append(tuple(tokens.shape))
            return truth(tokens)

        self.warm_up(method, like)
        if self.cuda:
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()
        profile = cProfile.Profile()
        began = time.perf_counter()
        if self.profile:
            profile.enable()
        result = kh.recover(kh.FunctionOracle(spy, width=width, like=like, name="gpu"), method, throw=False)
        self.wait()
        profile.disable()
        total = time.perf_counter() - began
        peak = self.torch.cuda.max_memory_allocated() / 2**30 if self.cuda else float("nan")
        if self.profile:
            print(f"{method} {width}: {result.outcome} {result.message}; {result.stats.stages}", flush=True)
            for order in ("tottime", "cumtime"):
                pstats.Stats(profile).sort_stats(order).print_stats(r"^(?!.*(frozen|lib/python3))", self.profile)
        stats, apart = result.stats, error(result)
        del result
        alone, part = self.alone(truth, shapes, like)
        calls = f"{alone:.2f}" if part == 1 else f"{alone:.2f} (of one call in {part})"
        times = [f"{total:.2f}", f"{stats.oracle_seconds:.2f}", calls, f"{total / alone:.2f}"]
        return [stats.queries, stats.counting_bound, f"{apart:.1e}", *times, f"{peak:.1f}"]

    def warm_up(self, method: str, like: Any) -> None:
        """A small recovery of the same kind, so that no library is loaded in what is timed."""
        width = min(WARM, 2048 // self.shrink)
        truth = (
            _heads(self, width, 4)
            if method == "multi-head"
            else kh.SingleHead(
                self.normal(7, width, width // 4) @ self.normal(8, width // 4, width) / width, self.normal(9, width)
            )
        )
        kh.recover(kh.FunctionOracle(truth.__call__, width=width, like=like), method, throw=False)

    def alone(self, truth: Callable[[Any], Any], shapes: list[tuple[int, ...]], like: Any) -> tuple[float, int]:
        """Seconds for calls of the same shapes on tokens made beforehand, timed all or one in so many."""
        sizes = [int(np.prod(shape)) for shape in shapes]
        part = max(1, int(np.ceil(sum(sizes) * like.element_size() / MOST_BYTES)))
        made = self.torch.randn(max(sizes), dtype=like.dtype, device=self.device)
        some = [shape for shape, size in zip(shapes, sizes, strict=True) if size == max(sizes)]
        for _ in range(3):
            truth(made[: int(np.prod(some[0]))].reshape(some[0]))
        self.wait()
        began = time.perf_counter()
        asked = 0
        for shape, size in zip(shapes[part // 2 :: part], sizes[part // 2 :: part], strict=True):
            truth(made[:size].reshape(shape))
            asked += size
        self.wait()
        return (time.perf_counter() - began) * sum(sizes) / asked, part


def full_rank(place: Place, width: int, dtype: str) -> Row:
    width //= place.shrink
    score = place.normal(0, width, width, dtype=dtype) / width**0.5
    truth = kh.SingleHead(score, place.normal(1, width, dtype=dtype))

    def error(result: kh.Recovery) -> float:
        return float(place.torch.linalg.norm(result.params.score - score) / place.torch.linalg.norm(score))

    return [width, dtype, *_with_outcome(place, truth, width, "single-head", score, error)]


def low_rank(place: Place, width: int, rank: int) -> Row:
    width, rank = width // place.shrink, rank // place.shrink
    left, right = (place.normal(seed, width, rank) / width**0.5 for seed in (0, 1))
    value = place.normal(2, width)

    def truth(tokens: Any) -> Any:  # as an implementation has it, in factors
        logits = place.torch.linalg.vecdot(tokens @ left, (tokens[:, -1, :] @ right)[:, None, :])
        return place.torch.linalg.vecdot(place.torch.softmax(logits, dim=1), tokens @ value)

    def error(result: kh.Recovery) -> float:
        found, apart, size = result.params.score, 0.0, 0.0
        for rows in range(0, width, 1024):  # by parts: the matrix may be as large as what is left of the memory
            part = left[rows : rows + 1024] @ right.T
            apart += float(place.torch.sum((found[rows : rows + 1024] - part) ** 2))
            size += float(place.torch.sum(part**2))
        return (apart / size) ** 0.5

    return [width, rank, *_with_outcome(place, truth, width, "low-rank", left, error)]


def _heads(place: Place, width: int, count: int) -> kh.MultiHead:
    inner = width // count
    made = []
    for head in range(count):
        key, query, value, output = (place.normal(4 * head + part, width, inner) for part in range(4))
        score = key @ query.T / (width * inner**0.5)
        made.append(kh.SingleHead(score, value @ output.T / (width * inner) ** 0.5))
    return kh.MultiHead(made)


def several(place: Place, width: int, count: int) -> Row:
    width = width // place.shrink
    truth = _heads(place, width, count)
    tokens = place.normal(99, TRIED, TRIED_LENGTH, width)

    def error(result: kh.Recovery) -> float:
        if result.params is None:
            return float("nan")
        wanted = truth(tokens)
        return float(place.torch.linalg.norm(result.params(tokens) - wanted) / place.torch.linalg.norm(wanted))

    return [width, count, *_with_outcome(place, truth, width, "multi-head", tokens, error)]


def _with_outcome(
    place: Place,
    truth: Callable[[Any], Any],
    width: int,
    method: str,
    like: Any,
    error: Callable[[kh.Recovery], float],
) -> Row:
    outcome: list[str] = []

    def look(result: kh.Recovery) -> float:
        outcome.append("yes" if result.certified else f"no: {result.outcome.value}")
        return error(result)

    row = place.measure(truth, width, method, like, look)
    return [outcome[0], *row]
