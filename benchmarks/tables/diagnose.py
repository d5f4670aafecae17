"""What `keyhole diagnose` says of 400 random boxes of 20 kinds, and what becomes of those it gets wrong."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from benchmarks.support.strange_boxes import KINDS, right
from keyhole.recover import diagnose_box

RUNS = 20
WIDTHS = (8, 16, 32, 64)


def table() -> str:
    rows, boxes, good, wrong, asked, needed, shares = [], 0, 0, 0, 0, 0, []
    for number, (kind, (_, make)) in enumerate(KINDS.items()):
        named, queries, share = 0, [], ""
        for run in range(RUNS):
            rng = np.random.default_rng([number, run])
            width = WIDTHS[run % len(WIDTHS)]
            box = make(rng, width)
            oracle = kh.FunctionOracle(box, width=width)
            found = diagnose_box(oracle, seed=run)
            queries.append(found.queries)
            named += right(found, kind, box)
            if not right(found, kind, box) and found.method is not None:
                wrong += kh.recover(oracle, found.method, throw=False, **found.options).certified
            elif found.method is not None and run == len(WIDTHS) - 1:
                result = kh.recover(oracle, found.method, throw=False, **found.options)
                part = found.queries / result.stats.queries
                share = f"{found.queries} of {result.stats.queries:,}: {part:.1%}"
                share += "" if result.certified else f" ({result.outcome.name})"
                asked, needed, shares = asked + found.queries, needed + result.stats.queries, [*shares, part]
        boxes, good = boxes + RUNS, good + named
        rows.append([kind, f"{named} of {RUNS}", f"{np.median(queries):.0f}, {max(queries)}", share])
    said = f"{good} of {boxes} named right; of the others {wrong} were recovered and certified as what they are not."
    cost = (
        f"At d = 64 diagnoses of the {len(shares)} kinds that a method recovers took {asked:,} queries, "
        f"{asked / needed:.1%} of the {needed:,} of their recoveries; the mean of the shares is {np.mean(shares):.1%}, "
        f"their median {np.median(shares):.1%}."
    )
    columns = ["box", "named right", "queries: median, most", "of those of the recovery, d = 64"]
    return markdown(columns, rows) + f"\n\n{said}\n\n{cost}"
