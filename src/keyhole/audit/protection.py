"""Whether a defence protects, in one word, and what it costs honest users; the verdict over all of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from keyhole.arrays import floats
from keyhole.audit.defences import NONE, Defence, parse_defence
from keyhole.audit.result import COPY, NEAR, USEFUL, Audit, Cell, size, times
from keyhole.audit.servers import honest_tokens
from keyhole.families import Family
from keyhole.oracles import FunctionOracle
from keyhole.queries import Signature
from keyhole.recovery import typeset

FEW = 3  # defences that a headline names


@dataclass(frozen=True)
class Protection:
    """What one defence is worth."""

    defence: str
    queries: int | None  # the fewest after which an attacker was within 1 % of the parameters; None where none was
    copy_queries: int | None  # the same for a copy, within 10⁻⁶
    times: float | None  # over those of the bare box
    tried: int  # the most queries that were tried, or that the defence allows
    error: float  # what the attacker held at best
    is_near_floor: bool  # whether no attack is known to do better
    is_limit: bool  # whether the defence itself allows no more queries than were tried
    cost: float | None  # relative error of the answers of honest users; None where it is not known

    @property
    def falls(self) -> bool:
        """Whether an attacker came within 1 %."""
        return self.queries is not None

    @property
    def words(self) -> str:
        """The verdict in words."""
        if self.queries is not None:
            return f"falls after {self.queries:,} queries" + (f", {times(self.times)}" if self.times else "")
        if self.is_near_floor:
            return f"holds for {self.tried:,} queries"
        return f"withstood this attack for {self.tried:,} queries"

    @property
    def cost_words(self) -> str:
        """What honest users pay, in words."""
        defence = parse_defence(self.defence)
        if defence.tells_labels:
            return "labels only"
        said = [f"answers off by {size(self.cost)}"] if self.cost else []
        said += [f"none after {defence.limit:,}"] if defence.limit else []
        return "" if self.cost is None else ", ".join(said) or "nothing"

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data for JSON."""
        return {**asdict(self), "falls": self.falls, "verdict": self.words, "cost_words": self.cost_words}


def protections(audit: Audit) -> tuple[Protection, ...]:
    """What each defence is worth, in the order of the audit."""
    bare = _fewest(audit.of(NONE), USEFUL)
    return tuple(_protection(audit, defence, bare) for defence in audit.defences)


def _protection(audit: Audit, defence: str, bare: int | None) -> Protection:
    own = audit.of(defence)
    rows, parsed = [*own, *audit.short_tokens(defence)], parse_defence(defence)
    best, queries = min(rows, key=lambda row: row.error), _fewest(rows, USEFUL)
    return Protection(
        defence,
        queries,
        _fewest(rows, COPY),
        queries / bare if queries and bare and defence != NONE else None,
        own[-1].budget,
        best.error,
        best.error <= NEAR * own[-1].floor,
        parsed.limit is not None and own[-1].budget >= parsed.limit,
        own[-1].cost,
    )


def _fewest(rows: Sequence[Cell], goal: float) -> int | None:
    return min((row.queries for row in rows if row.error <= goal), default=None)


def verdict(audit: Audit) -> str:
    """The audit in one sentence: which defences protect, and what the others cost an attacker."""
    found = {each.defence: each for each in protections(audit)}
    bare = found.pop(NONE)
    falls = [each for each in found.values() if each.falls]
    holds = [each for each in found.values() if not each.falls]
    if not found:
        return f"Without a defence the box {bare.words}"
    if not holds:
        dearest = max(falls, key=lambda each: each.queries or 0)
        words = parse_defence(dearest.defence).words
        cost = f"{times(dearest.times)} the queries" if dearest.times else f"{dearest.queries:,} queries"
        if len(found) == 1:
            return f"{_capital(words)} does not protect this box: {cost}; it falls after {dearest.queries:,}"
        return (
            f"None of {len(found)} defences protects this box: the dearest, {words}, costs an attacker {cost}; "
            f"it falls after {dearest.queries:,}"
        )
    fell = f"{len(falls)} of {len(found)} defences fail to protect this box; " if falls else ""
    named = "; ".join(_held(each) for each in holds[:FEW])
    more = f"; and {len(holds) - FEW} more" if len(holds) > FEW else ""
    bare_words = f"; as it is the box {bare.words}" if bare.falls else ""
    return _capital(fell + named + more + bare_words)


def _held(found: Protection) -> str:
    cost = f" (answers off by {size(found.cost)} for honest users)" if found.cost else ""
    return f"{parse_defence(found.defence).words} {found.words}{cost}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def table_of(audit: Audit) -> Table:
    """A row per defence: the verdict, and what honest users pay."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1), header_style="bold")
    for column in ("defence", "verdict", "error left", "honest users"):
        table.add_column(column, no_wrap=True)
    for each in protections(audit):
        style = "red" if each.falls else "green" if each.is_near_floor else "yellow"
        table.add_row(each.defence, Text(each.words, style=style), typeset(size(each.error)), typeset(each.cost_words))
    return table


def honest_cost(defence: Defence, reference: Family, signature: Signature, seed: int) -> float | None:
    """How far answers to honest users are off behind a defence: root mean square, relative to that of the answers.

    Of labels it is the share that changed. The reference answers, so that nothing is asked of the box.
    """
    if defence.tells_labels:
        return None
    kind: Literal["labels", "numbers"] = "labels" if reference.tells_labels else "numbers"
    oracle = FunctionOracle(reference, width=reference.width, answers=kind)
    tokens = honest_tokens(signature)
    true = floats(oracle(tokens))
    behind = replace(defence, limit=None, detect=None).around(oracle, seed, known=False)
    defended = floats(behind(tokens))
    if reference.tells_labels:
        return float(np.mean(defended != true))
    size_of_answers = float(np.sqrt(np.mean(true**2)))
    return float(np.sqrt(np.mean((defended - true) ** 2))) / size_of_answers if size_of_answers else None
