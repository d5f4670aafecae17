"""The barrier: layers that make a parity, against the same scores without the parity, and brute force."""

from __future__ import annotations

from time import process_time

import numpy as np

import keyhole as kh
from benchmarks.tables import markdown
from keyhole.datasets import signs
from keyhole.samples.diagnostics import low_orders
from keyhole.samples.examples import Examples
from keyhole.samples.hard import find_parity, parity_layer

WIDTH, INSTANCES, RESTARTS = 10, 3, 3
EXAMPLES = {1: 1000, 2: 1000, 3: 1000, 5: 1500}  # by heads: more than four numbers per parameter


def table() -> str:
    rows = []
    for m in EXAMPLES:
        hard, control = _learned(m, control=False), _learned(m, control=True)
        row = [m, hard["solved"], hard["barrier"], control["solved"], _brute(m), hard["r2"], control["r2"], hard["s"]]
        rows.append(row)
    columns = ["heads m", "parity: solved", "failures that name the barrier", "control: solved"]
    columns += ["brute force finds S, s", "first-order R²: parity", "control", "s per start of the parity"]
    counts = ", ".join(f"{count:,}" for count in EXAMPLES.values())
    title = f"d = {WIDTH}, k = 2, one output, {counts} examples, {INSTANCES} instances, {RESTARTS} starts at most\n\n"
    return title + markdown(columns, rows)


def _instance(m: int, seed: int, *, control: bool) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, m])
    layer, chosen = parity_layer(WIDTH, m, rng, control=control)
    inputs = signs(rng, EXAMPLES[m], 2, WIDTH)
    return chosen, inputs, layer(inputs)


def _learned(m: int, *, control: bool) -> dict[str, str]:
    solved, barrier, orders, made, spent = 0, 0, [], 0, 0.0
    for seed in range(INSTANCES):
        _, inputs, outputs = _instance(m, seed, control=control)
        began = process_time()
        result = kh.learn(inputs, outputs, heads=m, restarts=RESTARTS, seed=seed, throw=False)
        spent += process_time() - began
        made += result.stats.details["restarts"]["made"]
        right = result.stats.details["relative_residual"] < 1e-9
        solved += right
        barrier += not right and result.outcome is kh.Outcome.PARITY_LIKE
        orders.append(low_orders(Examples.of(inputs, outputs), np.random.default_rng(0))[0])
    return {
        "solved": f"{solved} of {INSTANCES}",
        "barrier": f"{barrier} of {INSTANCES - solved}",
        "r2": f"{np.median(orders):.2f}",
        "s": f"{spent / made:.1f}",
    }


def _brute(m: int) -> str:
    found, began = 0, process_time()
    for seed in range(INSTANCES):
        chosen, inputs, outputs = _instance(m, seed, control=False)
        found += find_parity(inputs, outputs, m)[0] == chosen
    return f"{found} of {INSTANCES}, {(process_time() - began) / INSTANCES:.2f}"
