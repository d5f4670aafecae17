"""What the parts of one head are called: 43 kinds of attention and nine that have no name, each drawn a hundred times.

Besides what becomes of the same heads behind answers in float32, none of which may be named wrongly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.attention_zoo import KINDS, OTHERS, WIDTHS, Kind
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.methods.parts.naming.ask_parts import ask_parts
from keyhole.session import Session

BOXES, ROUNDED_BOXES = 100, 10


def table(kept: Kept) -> str:
    kinds = {**KINDS, **OTHERS}
    rows = kept.rows_of("kinds", {name: lambda name=name: _row(name, kinds[name]) for name in kinds})
    known, others = ([row for row in rows if row[0] in names] for names in (KINDS, OTHERS))
    right, missed, wrong = (sum(int(row[place]) for row in known) for place in (2, 3, 4))
    boxes, foreign = BOXES * len(known), BOXES * len(others)
    said = (
        f"{right:,} of {boxes:,} boxes of {len(known)} kinds were named right ({right / boxes:.2%}), {missed} were "
        f'"other" and {wrong} misnamed. Of {foreign} boxes that have no name {sum(int(row[3]) for row in others)} were '
        f'"other" and {sum(int(row[4]) for row in others)} misnamed.'
    )
    rounded = [sum(int(row[place]) for row in known) for place in (6, 7, 8)]
    in_float32 = (
        f"Behind answers in float32, which were not declared, {rounded[0]} of {sum(rounded)} were named right, "
        f'{rounded[1]} were "other" and {rounded[2]} misnamed.'
    )
    columns = ["attention", "parts that are not those of a softmax", "named", "other", "misnamed", "queries"]
    return markdown(columns, [row[:6] for row in rows]) + f"\n\n{said}\n\n{in_float32}"


def _row(name: str, kind: Kind) -> Row:
    """Counts and queries, then counts behind answers in float32."""
    number = list({**KINDS, **OTHERS}).index(name)
    exact = [_named(kind, [number, box], rounded=False) for box in range(BOXES)]
    rounded = [_named(kind, [number, box], rounded=True) for box in range(ROUNDED_BOXES)]
    queries = sorted(asked for _, asked in exact)
    words = _in_words(kind)
    spread = f"{queries[0]} to {queries[-1]}" if queries[0] < queries[-1] else f"{queries[0]}"
    counts = [[found for found, _ in each] for each in (exact, rounded)]
    return [
        name,
        words,
        *(counts[0].count(each) for each in ("right", "other", "wrong")),
        spread,
        *(counts[1].count(each) for each in ("right", "other", "wrong")),
    ]


def _in_words(kind: Kind) -> str:
    usual = KINDS["softmax"].parts
    if kind.parts is None or usual is None:
        return "no name"
    own = [f"{part.replace('_', ' ')}: {name}" for part, name in kind.parts.items() if name != usual[part]]
    return ", ".join(own) or "none"


def _named(kind: Kind, seed: list[int], *, rounded: bool) -> tuple[str, int]:
    """What became of one box, and the queries it took."""
    rng = np.random.default_rng(seed)
    width = WIDTHS[seed[1] % len(WIDTHS)]
    box = kind.draw(rng, width)

    def answer(tokens: Any) -> Any:
        with np.errstate(all="ignore"):
            answers = box(tokens)
            return answers.astype(np.float32).astype(float) if rounded else answers

    session = Session(kh.FunctionOracle(answer, width=width))
    found = session.run(ask_parts(session.signature, rng))
    verdict = "other" if not found.known else "right" if found.parts == kind.parts else "wrong"
    return verdict, session.queries
