"""Queries of `auto` beside those of the right method, for every family: at most 5 % and 16 queries more."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from benchmarks.support.strange_boxes import KINDS
from keyhole.oracles import Cast, Noisy, Oracle, Rounded, Wrapper

RUNS = 12
WIDTHS = (8, 12, 16, 24)
SHARE, QUERIES = 0.05, 16


@dataclass(frozen=True)
class Case:
    """A kind of oracle, and the method that a user who knows it would take."""

    kind: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[Oracle], Oracle] = field(default=lambda oracle: oracle)
    limits: dict[str, Any] = field(default_factory=dict)
    declared: bool = True  # whether `auto` is told of the noise; the right method is, or measures it
    runs: int = RUNS


def _residual_head(rng: np.random.Generator, width: int) -> Any:
    head = KINDS["one head"][1](rng, width)
    assert isinstance(head, kh.SingleHead)
    return kh.Residual(kh.SingleHead(head.score, rng.standard_normal((width, width)) / width**0.5))


MAKERS = {name: make for name, (_, make) in KINDS.items()} | {"one head with a residual": _residual_head}
MEASURED = kh.Noise.of("measure")


def _noisy(oracle: Oracle) -> Oracle:
    return Noisy(oracle, 1e-3)


def _decimals(oracle: Oracle) -> Oracle:
    return Rounded(oracle, 4)


def _float32(oracle: Oracle) -> Oracle:
    return Cast(oracle, "float32")


CASES = {
    "one head": Case("one head", "single-head"),
    "one head of rank 1 to 3": Case("one head of rank 1 to 3", "single-head"),
    "one head, biases": Case("one head, biases", "single-head"),
    "one head, several outputs": Case("one head, several outputs", "single-head"),
    "one head, norms ≤ 1": Case("one head", "single-head", limits={"max_norm": 1.0}),
    "one head, all positions": Case("one head", "single-head", limits={"positions": "all"}),
    "2 to 8 heads, one output": Case("2 to 8 heads, one output", "multi-head"),
    "2 to 8 heads, d outputs": Case("2 to 8 heads, d outputs", "multi-head"),
    "2 to 8 heads, d outputs, biases": Case("2 to 8 heads, d outputs, biases", "multi-head"),
    "2 to 8 heads, d outputs, all positions": Case(
        "2 to 8 heads, d outputs", "multi-head", limits={"positions": "all"}
    ),
    "heads with a residual": Case("heads with a residual", "residual"),
    "one head with a residual": Case("one head with a residual", "residual", {"heads": 1}),
    "ReLU net": Case("ReLU net", "relu-net"),
    "GELU net": Case("GELU net", "relu-net", {"activation": "gelu"}),
    "SiLU net": Case("SiLU net", "relu-net", {"activation": "silu"}),
    "head, then a net": Case("head, then a net", "one-layer", runs=4),
    "head with a residual, then a net": Case("head with a residual, then a net", "one-layer", runs=4),
    "one head, normal errors declared, norms ≤ 1": Case("one head", "robust", wrap=_noisy, limits={"max_norm": 1.0}),
    "one head, 4 decimals declared, norms ≤ 1": Case("one head", "robust", wrap=_decimals, limits={"max_norm": 1.0}),
    "one head, float32 declared": Case("one head", "robust", wrap=_float32),
    "ReLU net, normal errors declared": Case("ReLU net", "relu-net", wrap=_noisy),
    "one head, normal errors not declared": Case("one head", "robust", wrap=_noisy, declared=False),
    "one head, 4 decimals not declared": Case("one head", "robust", wrap=_decimals, declared=False),
    "one head, float32 not declared": Case("one head", "robust", wrap=_float32, declared=False),
    "ReLU net, 4 decimals not declared": Case("ReLU net", "relu-net", wrap=_decimals, declared=False),
}


def _oracle(case: Case, run: int) -> tuple[Oracle, Any]:
    rng = np.random.default_rng([run, *case.kind.encode()])
    width = WIDTHS[run % len(WIDTHS)]
    box = MAKERS[case.kind](rng, width)
    function = box.at_all_positions if case.limits.get("positions") == "all" else box
    return case.wrap(kh.FunctionOracle(function, width=width, **case.limits)), box


def _with_noise(oracle: Oracle, noise: kh.Noise) -> Oracle:
    return Wrapper(oracle, oracle.signature.with_changes(noise=noise))


def measure(name: str, run: int) -> tuple[int, int, bool, bool, bool]:
    """Queries of the right method and of `auto`, whether each is certified, and whether that of `auto` is right."""
    case = CASES[name]
    oracle, box = _oracle(case, run)
    hidden = oracle.signature.noise.kind == "gaussian" and not case.declared
    known = _with_noise(oracle, MEASURED) if hidden else oracle
    right = kh.recover(known, case.method, seed=run, throw=False, progress=False, **case.options)
    oracle, _ = _oracle(case, run)
    found = kh.recover(
        oracle if case.declared else _with_noise(oracle, kh.Noise.exact()), seed=run, throw=False, progress=False
    )
    tokens = np.random.default_rng(run).standard_normal((256, 5, oracle.signature.width))
    tokens *= min(1.0, 0.99 * (case.limits.get("max_norm") or np.inf) / float(np.max(np.linalg.norm(tokens, axis=-1))))
    good = found.params is not None
    if good:
        truth, told = np.asarray(box(tokens)), np.asarray(found.params(tokens))
        good = bool(np.max(np.abs(truth - told)) <= 0.1 * np.std(truth))
    return right.stats.queries, found.stats.queries, right.certified, found.certified, good


def table() -> str:
    rows, over, wrong, total = [], 0, 0, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        waiting = {name: [pool.submit(measure, name, run) for run in range(case.runs)] for name, case in CASES.items()}
        for name, futures in waiting.items():
            done = [future.result() for future in futures]
            extra = [auto - right for right, auto, _, _, _ in done]
            share = [(auto - right) / (SHARE * right + QUERIES) for right, auto, _, _, _ in done]
            over += sum(each > 1 for each in share)
            wrong += sum(certified and not good for _, _, _, certified, good in done)
            total += len(done)
            rows.append(
                [
                    name,
                    f"{CASES[name].method}",
                    f"{np.median([each[0] for each in done]):,.0f}",
                    f"{np.median([each[1] for each in done]):,.0f}",
                    f"{np.median(extra):.0f}, {max(extra)}",
                    f"{max(share):.2f}",
                    f"{sum(each[2] for each in done)}, {sum(each[3] for each in done)} of {len(done)}",
                ]
            )
    columns = ["oracle", "right method", "its queries", "auto", "more: median, most", "of what is allowed", "certified"]
    said = (
        f"{over} of {total} runs of `auto` took more than {SHARE:.0%} and {QUERIES} queries beyond the right method; "
        f"{wrong} were certified with a wrong function. Widths {', '.join(map(str, WIDTHS))}. Noise that is not "
        "declared is measured by the right method too where it is random, and declared to it where it is rounding."
    )
    return markdown(columns, rows) + f"\n\n{said}"
