"""What `keyhole diagnose` says of 340 random boxes of 17 kinds, and what becomes of those it gets wrong."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.strange_boxes import KINDS
from benchmarks.tables import markdown
from keyhole.session import diagnose_box

RUNS = 20
WIDTHS = (8, 16, 32, 64)


def table() -> str:
    rows, boxes, right, wrong = [], 0, 0, 0
    for number, (kind, (family, make)) in enumerate(KINDS.items()):
        named, queries, shares = 0, [], []
        for run in range(RUNS):
            rng = np.random.default_rng([number, run])
            width = WIDTHS[run % len(WIDTHS)]
            oracle = kh.FunctionOracle(make(rng, width), width=width)
            found = diagnose_box(oracle, seed=run)
            queries.append(found.queries)
            named += found.family == family
            if found.family != family and found.method is not None:
                wrong += kh.recover(oracle, found.method, throw=False, **found.options).certified
            elif found.method is not None and width == WIDTHS[-1] and run < len(WIDTHS):
                result = kh.recover(oracle, found.method, throw=False, **found.options)
                shares.append(f"{found.queries / result.stats.queries:.1%}" if result.certified else "not certified")
        boxes, right = boxes + RUNS, right + named
        rows.append([kind, f"{named} of {RUNS}", f"{np.median(queries):.0f}, {max(queries)}", ", ".join(shares)])
    said = f"{right} of {boxes} named right; of the others {wrong} were recovered and certified as what they are not."
    columns = ["box", "named right", "queries: median, most", "share of those of the recovery, d = 64"]
    return markdown(columns, rows) + f"\n\n{said}"
