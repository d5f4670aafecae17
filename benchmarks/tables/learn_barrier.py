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
from keyhole.targets.datasets import flipped, parity_layer, signs

WIDTH, INSTANCES, RESTARTS = 10, 3, 3
EXAMPLES = {1: 1000, 2: 1000, 3: 1000, 4: 1500, 5: 1500}  # by heads: more than four numbers per parameter
# Relative error on fresh inputs below which the function was learned, and below which the fit is exact. Steps as sharp
# as these leave directions so flat that a fit may crawl between the two.
LEARNED, EXACT = 1e-3, 1e-9
# Rates of wrong labels: parity, and parity with noise.
FLIPS = (0.0, 0.1)


def table(kept: Kept) -> str:
    columns = ["heads m", "projections", "learned: error < 1e-3", "exact: error < 1e-9", "median error"]
    columns += ["failures that name the barrier", "first-order R²", "s per start"]
    measured = {
        f"m = {m} {kind}": partial(_learned, m, control=kind == "control")
        for m in EXAMPLES
        for kind in ("parity", "control")
    }
    found = markdown(columns, kept.rows_of("learn", measured))
    searches = {f"m = {m} {rate:g}": partial(_brute, m, rate) for m in EXAMPLES for rate in FLIPS if m % 2}
    searched = kept.rows_of("brute force", searches)
    counts = ", ".join(f"{count:,}" for count in EXAMPLES.values())
    title = (
        f"d = {WIDTH}, k = 2, one output, {counts} examples, {INSTANCES} instances, {RESTARTS} starts at most; errors "
    )
    title += "are relative, on 2,000 fresh inputs"
    columns = [
        "heads m",
        "labels wrong",
        "brute force finds S",
        "s",
        "elimination finds S, of three examples per bit",
        "s",
    ]
    force = markdown(columns, searched)
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


def _brute(m: int, rate: float) -> Row:
    found, spent = np.zeros(2, dtype=int), np.zeros(2)
    for seed in range(INSTANCES):
        layer, chosen, inputs = _instance(m, seed, control=False)
        outputs = flipped(layer(inputs), rate, np.random.default_rng([seed, m, 2]))
        for number, search in enumerate((lambda *given: find_parity(*given)[0], eliminate)):
            began = process_time()
            found[number] += search(inputs, outputs, m) == chosen
            spent[number] += process_time() - began
    row: list[object] = [m, f"{100 * rate:g} %"]
    for count, seconds in zip(found, spent, strict=True):
        row += [f"{count} of {INSTANCES}", f"{seconds / INSTANCES:.4f}"]
    return row


def eliminate(inputs: Floats, outputs: Floats, size: int) -> tuple[int, ...] | None:
    """Gaussian elimination over bits: the odd number of coordinates whose parity the outputs are; None where none is.

    No statistics, and so no statistical-query method: it looks at single examples, a few more than there are bits,
    and one that is wrong makes it fail.
    """
    width = inputs.shape[2]
    token, other = inputs[:, 0], inputs[:, 1]
    answers = np.abs(
        outputs[:, 0, 0]
    )  # of an even number something linear is beside, which leaves none or twice as much
    rows = np.flatnonzero((token[:, 0] != other[:, 0]) & (answers > np.max(answers) / 2))[: 3 * width]
    bits = np.hstack([token[rows, 1:] < 0, np.ones((len(rows), 1), dtype=bool)])  # and whether the sign is turned
    system = np.hstack([bits, (outputs[rows, 0, 0] < 0)[:, None]])
    place, pivots = 0, []
    for column in range(width):
        below = np.flatnonzero(system[place:, column])
        if len(below):
            system[[place, place + below[0]]] = system[[place + below[0], place]]
            others = np.flatnonzero(system[:, column])
            system[others[others != place]] ^= system[place]
            pivots.append(column)
            place += 1
    if np.any(system[place:, -1]):
        return None
    found = tuple(column + 1 for row, column in enumerate(pivots) if system[row, -1] and column + 1 < width)
    return found if len(found) == size else None


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
