"""`nn.MultiheadAttention(64, 4)` as PyTorch makes it, in float64: a thousand seeds, in parallel processes."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown

WIDTH, HEADS = 64, 4
PLACES = ("last", "all")
# Other sequences of N(0, 1) tokens that errors are taken over, and where they are silent if certified.
OTHERS, LENGTH, WRONG = 64, 12, 1e-6


@dataclass(frozen=True)
class Run:
    """How one seed ended."""

    seed: int
    outcome: str
    queries: int
    seconds: float
    error: float  # of the function, over what attention does; nan without parameters
    message: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--positions", choices=PLACES, nargs="+", default=PLACES, help="where the layer is observed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")


def table(arguments: argparse.Namespace) -> str:
    for library in ("OPENBLAS", "OMP", "MKL"):  # processes share the cores, not threads of each
        os.environ[f"{library}_NUM_THREADS"] = "1"
    places = arguments.positions
    tasks = [(seed, place) for place in places for seed in range(arguments.first, arguments.first + arguments.seeds)]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(recovered, *zip(*tasks, strict=True), chunksize=4))
    count = arguments.seeds
    rows = [row(place, runs[number * count :][:count]) for number, place in enumerate(places)]
    columns = [
        "positions",
        "certified",
        f"certified with an error above {WRONG:g}",
        "queries: median, most",
        "function error ÷ attention: median, most",
        "seconds: median, most",
        "outcomes",
    ]
    failed = [f"- seed {run.seed}: {run.outcome}: {run.message}" for run in runs if run.outcome != "CERTIFIED"]
    return "\n\n".join(
        [
            f"`torch.manual_seed(seed)`, then `nn.MultiheadAttention({WIDTH}, {HEADS}, dtype=float64)`, "
            f"{count} seeds from {arguments.first}, method `auto`; errors over {OTHERS} sequences of {LENGTH} tokens "
            "of N(0, 1):",
            markdown(columns, rows),
            *(["\n".join(failed)] if failed else []),
        ]
    )


def row(place: str, runs: list[Run]) -> list[object]:
    queries, seconds = [run.queries for run in runs], [run.seconds for run in runs]
    errors = [run.error for run in runs if run.outcome == "CERTIFIED"]
    outcomes = Counter(run.outcome for run in runs)
    return [
        place,
        f"{outcomes['CERTIFIED']}/{len(runs)}",
        sum(not error <= WRONG for error in errors),
        f"{int(np.median(queries)):,}, {max(queries):,}",
        f"{np.median(errors):.1e}, {max(errors):.1e}" if errors else "",
        f"{np.median(seconds):.1f}, {max(seconds):.1f}",
        ", ".join(f"{name} {times}" for name, times in sorted(outcomes.items())),
    ]


def recovered(seed: int, place: str) -> Run:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64).eval()
    oracle = kh.TorchOracle(layer, positions="all" if place == "all" else "last")
    result = kh.recover(oracle, seed=seed, throw=False)
    error = float("nan")
    if result.params is not None:
        tokens = torch.from_numpy(np.random.default_rng([seed, 1]).standard_normal((OTHERS, LENGTH, WIDTH)))
        with torch.no_grad():
            exact = layer(tokens, tokens, tokens, need_weights=False)[0][:, -1].numpy()
            alone = layer(*[tokens[:, -1:]] * 3, need_weights=False)[0][:, 0].numpy()
        found = np.asarray(result.params(tokens))
        error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact - alone))
    return Run(seed, result.outcome.name, result.stats.queries, result.stats.seconds, error, result.message)
