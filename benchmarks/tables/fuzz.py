"""Random boxes: members, wrong families, careless ones, judged by code that shares nothing with the package."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from benchmarks.fuzz.attempts import KINDS, attempt
from benchmarks.fuzz.judge import BAD, VERDICTS
from benchmarks.fuzz.runner import Record, read_records, run, run_on_dask, schedule
from benchmarks.support.rows import markdown

FILE = Path(__file__).parents[1] / ".rows" / "fuzz.jsonl"
SHOWN = 8  # seeds of one kind


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this table."""
    parser.add_argument("--boxes", type=int, default=len(KINDS), help="boxes in all, kinds in turn (default: one each)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--dask", metavar="ADDRESS", help="the Dask scheduler whose workers share the boxes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for the whole run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one box; more is a hang")
    parser.add_argument(
        "--kinds",
        default="",
        help="groups (member, foreign, careless), families, or texts that names of kinds have; separated by ;",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed of every kind")
    parser.add_argument("--out", type=Path, default=FILE, help="the file of records, which a later run goes on with")
    parser.add_argument("--list", action="store_true", help="print the names of all kinds")


def chosen(text: str) -> list[str]:
    """The kinds that a text names: those of a group or family of this name, else those that have it in their names."""
    texts = [each.strip() for each in text.split(";") if each.strip()]
    whole = {each for kind in KINDS.values() for each in (kind.group, kind.family)}

    def is_meant(name: str, each: str) -> bool:
        return each in (KINDS[name].group, KINDS[name].family) if each in whole else each in name

    found = [name for name in KINDS if not texts or any(is_meant(name, each) for each in texts)]
    if not found:
        raise SystemExit(f"no kind has {text!r} in its name: --list prints them all")
    return found


def table(arguments: argparse.Namespace) -> str:
    """Run what the file does not have yet, then the table of everything in it."""
    names = chosen(arguments.kinds)
    if arguments.list:
        return "\n".join(names)
    keys = schedule({name: KINDS[name].every for name in names}, arguments.seed, arguments.boxes)
    if arguments.dask is not None:
        run_on_dask(keys, arguments.out, attempt, arguments.dask, seconds=arguments.seconds)
    else:
        run(keys, arguments.out, attempt, jobs=arguments.jobs, limit=arguments.limit, seconds=arguments.seconds)
    records = [record for record in read_records(arguments.out) if record["kind"] in names]
    return summary(records)


def summary(records: list[Record]) -> str:
    """Verdicts by family, the worst error over its radius, and the seeds of what should not be."""
    if not records:
        return "no boxes yet"
    return "\n\n".join([by_family(records), *([findings(records)] if any(_is_bad(each) for each in records) else [])])


def by_family(records: list[Record]) -> str:
    families = list(dict.fromkeys(KINDS[name].family for name in KINDS))
    rows = []
    for family in [*families, "all"]:
        own = [each for each in records if family in ("all", KINDS[each["kind"]].family)]
        if own:
            counts = Counter(each["verdict"] for each in own)
            ratios = [each["ratio"] for each in own if each["ratio"] is not None]
            worst = f"{max(ratios):.1e}" if ratios else ""
            slowest = f"{max(each['seconds'] or 0.0 for each in own):.1f}"
            shown = [f"{counts[name]:,}" if counts[name] else "" for name in VERDICTS]
            rows.append([family, f"{len(own):,}", *shown, worst, slowest])
    return markdown(["family", "boxes", *VERDICTS, "worst error / radius", "most seconds"], rows)


def findings(records: list[Record]) -> str:
    """What should not be, by kind, with seeds that repeat it."""
    kinds: dict[tuple[str, str], list[Record]] = {}
    totals = Counter(each["kind"] for each in records)
    for each in filter(_is_bad, records):
        kinds.setdefault((each["verdict"], each["kind"]), []).append(each)
    order = sorted(kinds.items(), key=lambda item: (VERDICTS.index(item[0][0]), -len(item[1])))
    rows = []
    for (verdict, kind), own in order:
        seeds = ", ".join(str(each["seed"]) for each in own[:SHOWN]) + (" …" if len(own) > SHOWN else "")
        rows.append([verdict, kind, f"{len(own)} of {totals[kind]}", seeds, _reason(own)])
    return markdown(["verdict", "kind", "boxes", "seeds", "what"], rows)


def _is_bad(record: Record) -> bool:
    return record["verdict"] in BAD


def _reason(records: list[Record]) -> str:
    """Classes of inputs and their largest shares, or the commonest detail."""
    shares: dict[str, float] = {}
    for record in records:
        for name, share in record["shares"].items():
            shares[name] = max(share, shares.get(name, 0.0))
    ratios = [record["ratio"] for record in records if record["ratio"] is not None]
    words = [f"{name} {100 * share:.0f} %" for name, share in sorted(shares.items(), key=lambda item: -item[1])]
    if ratios and max(ratios) > 1:
        words = [f"{max(ratios):.1e} radii", *words]
    if not words:
        words = [Counter(record["detail"][:120] for record in records).most_common(1)[0][0]]
    return ", ".join(words).replace("|", "∣").replace("\n", " ")
