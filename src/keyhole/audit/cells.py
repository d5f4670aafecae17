"""One cell of an audit: a recovery behind one defence within one budget, kept on disk once it is done."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyhole.audit.defences import Defence
from keyhole.audit.lower_bounds import NOTHING, Geometry, floor, projection_floor
from keyhole.audit.protection import honest_cost
from keyhole.audit.result import Cell
from keyhole.audit.servers import projection
from keyhole.errors import FileError, OracleError
from keyhole.families import Family, Labels, SingleHead
from keyhole.gauge import distance
from keyhole.methods.registry import methods_for
from keyhole.noise import Noise
from keyhole.optional import KEYHOLE_VERSION
from keyhole.oracles import Oracle
from keyhole.progress import Observer, Silent
from keyhole.recover import recover
from keyhole.recovery import Outcome

# Part of every key: raise it whenever the same settings start to mean another cell.
CELL_VERSION = 1
KEY_METHOD = "auto"  # in the keys of cells, whatever method is taken: cells of the first version are still found
# The truth judges what was recovered, so a certificate need not be bought: one query is the fewest there is.
HELDOUT = 1


@dataclass(frozen=True)
class Column:
    """All cells of one defence, by rising budget. They share a journal: what was answered once is asked of no one."""

    defence: Defence
    multiples: tuple[float, ...]
    bound: int
    seed: int
    folder: Path
    noise: Noise | None = None  # that the oracle itself was declared to have
    max_norm: float | None = None  # of the tokens that it takes
    max_seconds: float | None = None  # of arithmetic, for each cell

    def budgets(self) -> Iterator[tuple[float, int]]:
        """(multiple, budget) of each cell. Behind a limit no budget is larger, and the largest stands once."""
        limit = self.defence.limit or math.inf
        for multiple in self.multiples:
            budget = max(1, round(multiple * self.bound))
            if budget < limit:
                yield multiple, budget
        if self.defence.limit is not None and limit <= self.multiples[-1] * self.bound:
            yield self.defence.limit / self.bound, self.defence.limit

    def journal(self, oracle: str) -> Path:
        """Where the answers of an oracle behind this defence are kept."""
        slug = self.defence.text.replace(":", "").replace("+", "-")
        return self.folder / "journals" / f"{slug}-{digest(oracle, self.defence.text, str(self.seed))[:8]}.db"

    def file(self, oracle: str, budget: int) -> Path:
        """Where a finished cell is kept: its name is a digest of all that determines it."""
        settings = [oracle, self.defence.text, budget, self.bound, self.seed, KEY_METHOD, HELDOUT]
        settings += [] if self.noise is None else [self.noise.text]
        settings += [] if self.max_norm is None else [f"max_norm {self.max_norm!r}"]
        key = digest(json.dumps([CELL_VERSION, KEYHOLE_VERSION, *settings]))
        return self.folder / "cells" / f"{key[:32]}.json"


FilledColumn = tuple[tuple[Cell, ...], int]  # the rows of a column, and how many queries they took now


def fill(
    column: Column,
    oracle: Oracle,
    reference: Family,
    observer: Observer | None = None,
    done: Callable[[], None] = lambda: None,  # called after each cell
) -> FilledColumn:
    """Run the cells of a column that are not on disk yet."""
    rows, new_queries = [], 0
    for multiple, budget in column.budgets():
        file = column.file(oracle.name, budget)
        row = _read(file)
        if row is None:
            journal = column.journal(oracle.name)
            # Noise that began anew with every cell would repeat itself: it goes on where the journal ends.
            state = digest(str(column.seed), column.defence.text, str(budget), str(_count_answers(journal)))
            defended = column.defence.around(oracle, seed=int(state[:12], 16))
            how: dict[str, Any] = {"heldout": HELDOUT, "observer": observer or Silent()}
            how |= {"max_seconds": column.max_seconds}
            result = recover(
                defended,
                attack(defended, reference.family, bool(reference.words)),
                budget,
                journal,
                column.seed,
                throw=False,
                **how,
            )
            if result.outcome is Outcome.ORACLE_FAILED:  # which is no merit of the defence, and may go better next time
                raise OracleError(
                    f"the box failed behind {column.defence.text}: {result.message}; mend it and run again: "
                    "with a folder, finished cells and all answers are kept"
                )
            error = NOTHING if result.params is None else _distance(result.params, reference)
            row = Cell(
                defence=column.defence.text,
                multiple=multiple,
                budget=budget,
                queries=result.stats.queries,
                error=error if math.isfinite(error) else NOTHING,
                floor=_floor(column.defence, defended, reference, budget),
                outcome=result.outcome.name,
                method=result.method,
                seconds=result.stats.seconds,
                cost=honest_cost(column.defence, reference, oracle.signature, column.seed),
            )
            new_queries += result.stats.new_queries
            keep(file, row)
        rows.append(row)
        done()
    return tuple(rows), new_queries


def _floor(defence: Defence, defended: Oracle, reference: Family, budget: int) -> float:
    """What no attacker gets below, as far as is known."""
    known = floor(defended.signature.noise, budget, Geometry.of(reference, defended.signature, defence.top or 1))
    if defence.directions is None:
        return known
    return max(known, projection_floor(reference, projection(reference.width, defence.directions)))


def _distance(params: Family, reference: Family) -> float:
    """How far parameters are from the reference, those behind labels as labels tell them; as far as nothing is else."""
    if params.tells_labels and not reference.tells_labels:
        if reference.family != SingleHead.family:
            return NOTHING
        count = reference.outputs
        reference = Labels(reference.anatomy.heads[0], *([] if count is None else [tuple(range(count))]))
    if params.family != reference.family:
        params, reference = params.simplest(), reference.simplest()
    same = params.family == reference.family and params.words == reference.words
    same = same and (params.width, params.outputs) == (reference.width, reference.outputs)
    return distance(params, reference) if same else NOTHING


def attack(oracle: Oracle, family: str, by_parts: bool = False) -> str:
    """The method for a family behind the errors that an oracle declares; `auto` where that is not one of the list."""
    if oracle.signature.answers == "labels":
        return "labels"
    if oracle.signature.alphabet is not None:
        return "auto"
    noise = oracle.signature.noise
    fitting = [] if by_parts or noise.kind == "measure" else methods_for(family, noise)
    return fitting[0].name if fitting else "auto"


def digest(*parts: str) -> str:
    """SHA-256 over texts, in hexadecimal."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _count_answers(journal: Path) -> int:
    """How many answers a journal has; 0 where there is none."""
    if not journal.exists():
        return 0
    with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        try:
            (count,) = database.execute("SELECT coalesce(sum(stop - start), 0) FROM answers").fetchone()
        except sqlite3.Error:  # no journal, or one that was never begun: opening it in earnest will say so
            return 0
    return int(count)


def _read(file: Path) -> Cell | None:
    try:
        return Cell(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"cannot read the finished cell {file} ({error}): remove it, and it is run again") from error


def keep(file: Path, row: Cell) -> None:
    """Write a finished cell, under another name first: one that is there is whole."""
    if file.exists():
        return
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(asdict(row), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        raise FileError(f"cannot write to {file.parent}: {error.strerror or error}; name another --out") from error
