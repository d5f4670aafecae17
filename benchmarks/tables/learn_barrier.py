"""The barrier: layers that make a parity, against the same scores without the parity, and brute force."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from time import process_time

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.arrays import Floats
from keyhole.samples.diagnostics import low_orders
from keyhole.samples.examples import Examples
from keyhole.targets.datasets import parity_layer, signs

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


def find_parity(inputs: Floats, outputs: Floats, size: int) -> tuple[tuple[int, ...], float]:
    """Brute force: the coordinates S whose parity correlates most with the outputs, and that correlation.

    All subsets are tried, which is what learning from statistics cannot avoid: C(d − 2, m) of them.
    """
    token, other = inputs[:, 0], inputs[:, 1]
    differ = token[:, 0] != other[:, 0]
    rows = token[differ]
    answers = outputs[differ, 0, 0] * rows[:, 1] ** (size + 1)  # which the parity of an even number has as a factor
    subsets = list(combinations(range(2, inputs.shape[2]), size))
    scores = np.array([np.mean(answers * np.prod(rows[:, list(subset)], axis=1)) for subset in subsets])
    best = int(np.argmax(np.abs(scores)))
    return subsets[best], float(abs(scores[best]) / max(np.sqrt(np.mean(answers**2)), np.finfo(float).tiny))
