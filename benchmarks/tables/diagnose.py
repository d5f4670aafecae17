"""What `keyhole diagnose` says of 400 random boxes of 20 kinds, and what becomes of those it gets wrong."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.support.strange_boxes import KINDS, right
from keyhole.recover import diagnose

RUNS = 20
WIDTHS = (8, 16, 32, 64)


def table(kept: Kept) -> str:
    measured = {kind: lambda number=number, kind=kind: _row(number, kind) for number, kind in enumerate(KINDS)}
    rows = kept.rows_of("kinds", measured)
    boxes, good, wrong = RUNS * len(rows), sum(int(row[1].split()[0]) for row in rows), sum(int(row[4]) for row in rows)
    costs = [(int(row[5]), int(row[6])) for row in rows if row[6] != "0"]
    asked, needed, shares = sum(a for a, _ in costs), sum(b for _, b in costs), [a / b for a, b in costs]
    said = f"{good} of {boxes} named right; of the others {wrong} were recovered and certified as what they are not."
    cost = (
        f"At d = 64 diagnoses of the {len(shares)} kinds that a method recovers took {asked:,} queries, "
        f"{asked / needed:.1%} of the {needed:,} of their recoveries; the mean of the shares is {np.mean(shares):.1%}, "
        f"their median {np.median(shares):.1%}."
    )
    columns = ["box", "named right", "queries: median, most", "of those of the recovery, d = 64"]
    return markdown(columns, [row[:4] for row in rows]) + f"\n\n{said}\n\n{cost}"


def _row(number: int, kind: str) -> Row:
    """What the table shows of a kind, then: certified wrongly, queries of a diagnosis and of its recovery at d = 64."""
    make, named, wrong, queries, share, cost = KINDS[kind][1], 0, 0, [], "", (0, 0)
    for run in range(RUNS):
        rng = np.random.default_rng([number, run])
        width = WIDTHS[run % len(WIDTHS)]
        box = make(rng, width)
        oracle = kh.FunctionOracle(box, width=width)
        found = diagnose(oracle, seed=run)
        queries.append(found.queries)
        named += right(found, kind, box)
        if not right(found, kind, box) and found.method is not None:
            wrong += kh.recover(oracle, found.method, throw=False, **found.options).certified
        elif found.method is not None and run == len(WIDTHS) - 1:
            result = kh.recover(oracle, found.method, throw=False, **found.options)
            cost = found.queries, result.stats.queries
            share = f"{cost[0]} of {cost[1]:,}: {cost[0] / cost[1]:.1%}"
            share += "" if result.certified else f" ({result.outcome.name})"
    spread = f"{np.median(queries):.0f}, {max(queries)}"
    return [kind, f"{named} of {RUNS}", spread, share, wrong, *cost]
