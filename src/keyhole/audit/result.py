"""What an audit found: rows of figures, a sentence per defence, a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from keyhole.audit.defences import NONE, Defence, parse_defence
from keyhole.optional import on_demand
from keyhole.recovery import power

# Relative errors an attacker may be content with: as good as the oracle for most uses, and as good as a copy.
USEFUL, COPY = 1e-2, 1e-6
# Less than this many times the queries is no cost worth a word.
NO_COST = 1.25
# An error so many times the floor or less is the defence's merit, not the attack's fault.
NEAR = 3.0


@dataclass(frozen=True)
class Cell:
    """One cell: what an attacker got behind one defence for one budget."""

    defence: str
    multiple: float  # of the counting bound that the budget is
    budget: int  # queries the attacker may send
    queries: int  # queries he sent; one for a check comes on top where the budget leaves it
    error: float  # relative distance of what he got from the truth, proven or not; 1 where he got nothing
    floor: float  # that no attacker gets below, as far as is known
    outcome: str
    method: str
    seconds: float
    cost: float | None = None  # to honest users: relative error of their answers


@dataclass(frozen=True)
class Audit:
    """Every defence against every budget."""

    target: str
    label: str  # what the oracle is, in words
    bound: int  # the counting bound of the oracle
    reference: str  # what errors are measured against, in words
    seed: int
    rows: tuple[Cell, ...]  # by defence, then by budget
    new_queries: int  # that reached the oracle now; all others came from the folder

    @property
    def defences(self) -> tuple[str, ...]:
        """The defences, in order."""
        return tuple(dict.fromkeys(row.defence for row in self.rows))

    def of(self, defence: str) -> tuple[Cell, ...]:
        """The rows of one defence, by budget."""
        return tuple(row for row in self.rows if row.defence == defence)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What each defence achieves, in plain words."""
        return tuple(sentence(self.of(defence), self.short_tokens(defence), self) for defence in self.defences)

    @property
    def verdict(self) -> str:
        """The whole audit in one sentence."""
        words: str = on_demand("audit.protection").verdict(self)
        return words

    def short_tokens(self, defence: str) -> tuple[Cell, ...]:
        """Rows of the same defence with clipping: whoever is not clipped may send short tokens all the same."""
        own, others = parse_defence(defence), ((row, parse_defence(row.defence)) for row in self.rows)
        return tuple(row for row, other in others if own != other and replace(other, clip=None) == own)

    def table(self) -> Table:
        """Errors by defence and budget, for a terminal."""
        multiples = sorted({row.multiple for row in self.of(NONE)})
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1), header_style="bold")
        table.add_column("defence", no_wrap=True)
        for multiple in multiples:
            table.add_column(f"{multiple:g} ×", justify="right", no_wrap=True)
        table.add_column("floor", justify="right", no_wrap=True)
        for defence in self.defences:
            rows = self.of(defence)
            by_multiple = {multiple: _within(rows, multiple) for multiple in multiples}
            cells = [_colour(row.error) if row else Text("") for row in by_multiple.values()]
            table.add_row(defence, *cells, Text(power(rows[-1].floor), style="dim"))
        return table

    def __repr__(self) -> str:
        """The verdict."""
        return f"Audit({self.label!r}: {self.verdict})"

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        card: str = on_demand("report.notebook").card_of_audit(self)
        return card

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data for JSON."""
        return {
            "target": self.target,
            "box": self.label,
            "counting_bound": self.bound,
            "reference": self.reference,
            "seed": self.seed,
            "rows": [asdict(row) for row in self.rows],
            "verdict": self.verdict,
            "defences": [each.as_data() for each in on_demand("audit.protection").protections(self)],
            "sentences": dict(zip(self.defences, self.sentences, strict=True)),
            "new_queries": self.new_queries,
        }


def _within(rows: Sequence[Cell], multiple: float) -> Cell | None:
    """What an attacker has for a budget: the row of the largest budget that it covers."""
    return next((row for row in reversed(rows) if row.multiple <= multiple), None)


def _colour(error: float) -> Text:
    style = "red" if error <= COPY else "yellow" if error <= USEFUL else "green"
    return Text(power(error), style=style)


def sentence(rows: Sequence[Cell], short: Sequence[Cell], audit: Audit) -> str:
    """What one defence achieves, beside what the bare oracle gives away.

    `short` are the rows of an attacker who keeps his tokens short where the defence does not make him.
    """
    defence, bare = parse_defence(rows[0].defence), audit.of(NONE)
    if defence == Defence():
        return _bare_sentence(rows, audit.bound)
    best = min([*rows, *short], key=lambda row: row.error)
    words = defence.words[0].upper() + defence.words[1:]
    spent = f"after {times(rows[-1].budget / audit.bound)} the counting bound{_trick(best, rows)}"
    if best.error > USEFUL:
        gave_up = f" (the attack gave up: {best.outcome})" if best.queries < best.budget / 2 else ""
        return f"{words} leaves an error of {size(best.error)} {spent}{gave_up}{_beside_floor(best, rows[-1])}"
    if best.error > COPY:
        cost = _cost([*rows, *short], bare, USEFUL)
        return (
            f"{words} lets an attacker come within 1 % {cost or 'at no cost'}; an error of {size(best.error)} remains "
            f"{spent}{_beside_floor(best, rows[-1])}"
        )
    cost = _cost([*rows, *short], bare, COPY)
    costs = f"costs an attacker {cost.removeprefix('for ')}" if cost else "costs an attacker nothing"
    # The cheapest copy is what the cost is that of: more queries may only polish it.
    first = min((row for row in [*rows, *short] if row.error <= COPY), key=lambda row: row.queries)
    spent = f" with {first.queries:,} queries{_trick(first, rows)}"
    return f"{words} {costs} and stops nothing: the error falls to {first.error:.1e}{spent}."


def _trick(cell: Cell, rows: Sequence[Cell]) -> str:
    """What an attacker did besides, where the cell is none of the defence as it stands."""
    return "" if cell in rows else f" of tokens of norm {parse_defence(cell.defence).clip:g} at most"


def _bare_sentence(rows: Sequence[Cell], bound: int) -> str:
    best = min(rows, key=lambda row: (row.error > COPY, row.queries if row.error <= COPY else row.error))
    return (
        f"No defence: {best.queries:,} queries, {times(best.queries / bound)} the counting bound, "
        f"recover the box to a relative error of {best.error:.1e}."
    )


def _beside_floor(best: Cell, last: Cell) -> str:
    """Whether that is the defence's merit or the attack's fault."""
    if best.error <= NEAR * last.floor:
        return f", which is near the floor of {size(last.floor)} under every attack."
    return f". The floor is at {size(last.floor)}, so a better attack may do more."


def _cost(rows: Sequence[Cell], bare: Sequence[Cell], goal: float) -> str:
    """What an error of `goal` costs beside the bare oracle: budgets are steps, so it is no more than that."""
    needed, free = (min((row.queries for row in each if row.error <= goal), default=0) for each in (rows, bare))
    if not free:
        return f"for {needed:,} queries"
    return "" if needed < NO_COST * free else f"for at most {times(needed / free)} the queries"


def times(ratio: float) -> str:
    """A ratio as people write it."""
    return f"{ratio:.3g} ×" if ratio < 100 else f"{ratio:,.0f} ×"


def size(error: float) -> str:
    """A relative error as people write it."""
    return f"{error:.1e}" if error < USEFUL else f"{100 * error:.2g} %" if error < 0.995 else "100 %"
