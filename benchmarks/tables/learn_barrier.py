"""The barrier: layers that make a parity, against the same scores without the parity, and brute force."""

from __future__ import annotations

from functools import partial
from time import process_time

import numpy as np

import keyhole as kh
from benchmarks.support.parity import find_parity
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.samples.diagnostics import low_orders
from keyhole.samples.examples import Examples
from keyhole.targets.datasets import signs
from keyhole.targets.parity import parity_layer

WIDTH, INSTANCES, RESTARTS = 10, 3, 3
EXAMPLES = {1: 1000, 2: 1000, 3: 1000, 4: 1500, 5: 1500}  # by heads: more than four numbers per parameter
# Relative error on fresh inputs below which the function was learned, and below which the fit is exact. Steps as sharp
# as these leave directions so flat that a fit may crawl between the two.
LEARNED, EXACT = 1e-3, 1e-9


def table(kept: Kept) -> str:
    columns = ["heads m", "projections", "learned: error < 1e-3", "exact: error < 1e-9", "median error"]
    columns += ["failures that name the barrier", "first-order R²", "s per start"]
    measured = {
        f"m = {m} {kind}": partial(_learned, m, control=kind == "control")
        for m in EXAMPLES
        for kind in ("parity", "control")
    }
    found = markdown(columns, kept.rows_of("learn", measured))
    searched = kept.rows_of("brute force", {f"m = {m}": partial(_brute, m) for m in EXAMPLES})
    counts = ", ".join(f"{count:,}" for count in EXAMPLES.values())
    title = (
        f"d = {WIDTH}, k = 2, one output, {counts} examples, {INSTANCES} instances, {RESTARTS} starts at most; errors "
    )
    title += "are relative, on 2,000 fresh inputs"
    force = markdown(["heads m", "brute force finds S", "s"], searched)
    return f"{title}\n\n{found}\n\n{force}"


def _instance(m: int, seed: int, *, control: bool) -> tuple[kh.AttentionLayer, tuple[int, ...], np.ndarray]:
    rng = np.random.default_rng([seed, m])
    layer, chosen = parity_layer(WIDTH, m, rng, control=control)
    return layer, chosen, signs(rng, EXAMPLES[m], 2, WIDTH)


def _learned(m: int, *, control: bool) -> Row:
    errors, named, orders, made, spent = [], 0, [], 0, 0.0
    for seed in range(INSTANCES):
        layer, _, inputs = _instance(m, seed, control=control)
        outputs = layer(inputs)
        began = process_time()
        result = kh.learn(inputs, outputs, heads=m, restarts=RESTARTS, seed=seed, throw=False)
        spent += process_time() - began
        made += result.stats.details["restarts"]["made"]
        fresh = signs(np.random.default_rng([seed, m, 1]), 2000, 2, WIDTH)
        errors.append(float(np.linalg.norm(result.params(fresh) - layer(fresh)) / np.linalg.norm(layer(fresh))))
        named += errors[-1] > LEARNED and result.outcome is kh.Outcome.PARITY_LIKE
        orders.append(low_orders(Examples.of(inputs, outputs), np.random.default_rng(0))[0])
    learned, exact = (sum(error < bar for error in errors) for bar in (LEARNED, EXACT))
    row: list[object] = [m, "equal (control)" if control else "alternating (parity)"]
    row += [f"{learned} of {INSTANCES}", f"{exact} of {INSTANCES}", f"{np.median(errors):.0e}"]
    return [*row, f"{named} of {INSTANCES - learned}", f"{np.median(orders):.2f}", f"{spent / made:.1f}"]


def _brute(m: int) -> Row:
    found, spent = 0, 0.0
    for seed in range(INSTANCES):
        layer, chosen, inputs = _instance(m, seed, control=False)
        outputs = layer(inputs)
        began = process_time()
        found += find_parity(inputs, outputs, m)[0] == chosen
        spent += process_time() - began
    return [m, f"{found} of {INSTANCES}", f"{spent / INSTANCES:.3f}"]
