"""`nn.MultiheadAttention(64, 4)` as PyTorch makes it, in float64: a thousand seeds, a hundred to a row."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown

WIDTH, HEADS = 64, 4
SEEDS, EACH = 1000, 100
# Other sequences of N(0, 1) tokens that errors are taken over, and where they are silent if certified.
OTHERS, LENGTH, WRONG = 64, 12, 1e-6
COLUMNS = [
    "positions, seeds",
    "certified",
    f"certified with an error above {WRONG:g}",
    "queries: median, most",
    "function error ÷ attention: median, most",
    "processor seconds: median, most",
    "others",
]


@dataclass(frozen=True)
class Run:
    """How one seed ended."""

    seed: int
    outcome: str
    queries: int
    seconds: float
    error: float  # of the function, over what attention does; nan without parameters
    message: str


def table(kept: Kept) -> str:
    named = {
        f"{place}, {first} to {first + EACH - 1}": lambda place=place, first=first: row(place, first)
        for place in ("last", "all")
        for first in range(0, SEEDS, EACH)
    }
    said = (
        f"`torch.manual_seed(seed)`, then `nn.MultiheadAttention({WIDTH}, {HEADS}, dtype=float64)`, method `auto`; "
        f"errors over {OTHERS} sequences of {LENGTH} tokens of N(0, 1):"
    )
    return f"{said}\n\n{markdown(COLUMNS, kept.rows_of('seeds', named))}"


def row(place: str, first: int) -> Row:
    runs = [recovered(seed, place) for seed in range(first, first + EACH)]
    queries, seconds = [run.queries for run in runs], [run.seconds for run in runs]
    errors = [run.error for run in runs if run.outcome == "CERTIFIED"]
    outcomes = Counter(run.outcome for run in runs)
    others = [f"seed {run.seed}: {run.outcome}: {run.message}" for run in runs if run.outcome != "CERTIFIED"]
    return [
        f"{place}, {first} to {first + EACH - 1}",
        f"{outcomes['CERTIFIED']}/{len(runs)}",
        sum(not error <= WRONG for error in errors),
        f"{int(np.median(queries)):,}, {max(queries):,}",
        f"{np.median(errors):.1e}, {max(errors):.1e}" if errors else "",
        f"{np.median(seconds):.1f}, {max(seconds):.1f}",
        "; ".join(others) or "–",
    ]


def recovered(seed: int, place: str) -> Run:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64).eval()
    oracle = kh.TorchOracle(layer, positions="all" if place == "all" else "last")
    start = time.process_time()
    result = kh.recover(oracle, seed=seed, throw=False)
    seconds = time.process_time() - start
    error = float("nan")
    if result.params is not None:
        tokens = torch.from_numpy(np.random.default_rng([seed, 1]).standard_normal((OTHERS, LENGTH, WIDTH)))
        with torch.no_grad():
            exact = layer(tokens, tokens, tokens, need_weights=False)[0][:, -1].numpy()
            alone = layer(*[tokens[:, -1:]] * 3, need_weights=False)[0][:, 0].numpy()
        found = np.asarray(result.params(tokens))
        error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact - alone))
    return Run(seed, result.outcome.name, result.stats.queries, seconds, error, result.message)
