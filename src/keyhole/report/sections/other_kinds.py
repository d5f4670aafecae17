"""Reports of what is no single recovery: an audit, a verification, a diagnosis, all layers of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from keyhole.audit.defences import parse_defence
from keyhole.audit.protection import protections
from keyhole.audit.result import Audit
from keyhole.recovery import Recovery, of_error_bar
from keyhole.report.charts import LEAST, MOST, Bars, Curves, Histogram, Mark, short
from keyhole.report.content import Headline, Report, Section, Table, Tile, Tone, sentence
from keyhole.report.sections.attention import attention_section
from keyhole.report.sections.certificate import heldout_section
from keyhole.report.sections.parameters import heads_of, many_heads
from keyhole.report.sections.run import detected_ranks
from keyhole.report.text.diagnosis import describe_diagnosis
from keyhole.report.text.verdict import describe_verdict
from keyhole.runs.reader import SavedAudit, SavedDiagnosis, SavedModel, SavedVerdict
from keyhole.verify.verdict import Verdict

MOST_PARTS = 16  # of a verification that are drawn
FEW_PARTS = 8  # that are listed beside a picture


# --- audit ------------------------------------------------------------------------------------------------------


def report_of_audit(saved: SavedAudit) -> Report:
    """What defences cost an attacker."""
    audit = saved.audit
    found = protections(audit)
    tried = (
        f"{len(found) - 1} defence{'s' * (len(found) != 2)} against {len({row.multiple for row in audit.rows})} budgets"
    )
    held = [each for each in found[1:] if not each.falls]
    tiles = (
        Tile(f"{audit.bound:,}", "queries: the counting bound", "budgets are multiples of it"),
        Tile(short(found[0].error), "error without a defence", found[0].words),
        Tile(f"{len(held)} of {len(found) - 1}", "defences held", "within the budgets that were tried"),
        Tile(f"{sum(row.queries for row in audit.rows):,}", "queries in all", f"{audit.new_queries:,} of them now"),
    )
    facts = (("target", audit.target), ("box", audit.label), ("errors", f"relative, against {audit.reference}"))
    sentences = tuple(zip(audit.defences, audit.sentences, strict=True))
    verdicts = Table(
        ("defence", "verdict", "error left", "honest users"),
        tuple((each.defence, each.words, short(each.error), each.cost_words) for each in found),
    )
    within = "An attacker who is within 1 % of the parameters has them: the box falls. Honest users send normal tokens."
    sections = (
        Section("What each defence is worth", (within,), table=verdicts),
        Section("Error against queries", charts=(_curves(audit),)),
        Section("In words", facts=sentences),
        Section("The box", facts=facts),
        Section("All figures", ("Relative errors by budget; 1 is what a guess of nothing has.",), table=_cells(audit)),
    )
    title = re.split("[;:]", audit.verdict)[0]
    tone: Tone = "plain" if not found[1:] else "good" if len(held) == len(found) - 1 else "bad"
    headline = Headline(tone, "Audit", title, f"{audit.verdict}: {tried}.")
    return Report("audit", audit.label, headline, tiles, sections, saved.record)


def _curves(audit: Audit) -> Curves:
    ends = "; ".join(
        f"{parse_defence(defence).words}: {short(audit.of(defence)[-1].error)} after "
        f"{audit.of(defence)[-1].budget:,} queries, floor {short(audit.of(defence)[-1].floor)}"
        for defence in audit.defences
    )
    words = f"Curves of the attacker's relative error against queries sent, both logarithmic, one per defence. {ends}."
    return Curves("curves", "Error against queries", words, audit)


def _cells(audit: Audit) -> Table:
    columns = ("defence", "budget", "queries", "error", "floor", "outcome")
    rows = tuple(
        (
            row.defence,
            f"{row.multiple:g} ×",
            f"{row.queries:,}",
            short(row.error),
            short(row.floor),
            row.outcome.lower().replace("_", " "),
        )
        for row in audit.rows
    )
    return Table(columns, rows)


# --- verification -----------------------------------------------------------------------------------------------


def report_of_verdict(saved: SavedVerdict) -> Report:
    """Whether an oracle is the one that parameters describe."""
    verdict = saved.verdict
    titles = {
        "same": "The box answers like the parameters",
        "different": "The box is not the one that the parameters describe",
        "inconclusive": "It could not be decided whether they are the same",
    }
    said = sentence(verdict.message)
    tone = "good" if verdict.same else "bad"
    headline = Headline(tone, verdict.conclusion.capitalize(), titles[verdict.conclusion], said)  # type: ignore[arg-type]
    tiles = [Tile(f"{verdict.queries:,}", "queries", f"{verdict.new_queries:,} of them now")]
    if np.isfinite(verdict.worst_error):
        tiles.append(Tile(short(verdict.worst_error), "largest error of an answer", of_error_bar(verdict.worst_ratio)))
    if np.isfinite(verdict.resolution):
        tiles.append(Tile(short(verdict.resolution), "change of any part that is noticed", f"but for {verdict.miss:g}"))
    tiles.append(Tile(f"{100 * verdict.confidence:.6g} %", "confidence"))
    lines = tuple(line for line in describe_verdict(verdict, saved.label, saved.claimed) if line[0] != "verdict")
    sections = [*_difference_sections(verdict), Section("The box and the parameters", facts=lines)]
    if verdict.differing:
        rows = tuple(
            ("" if each.head is None else f"head {each.head}", (each.part or "").replace("_", " "), short(each.size))
            for each in verdict.differing
        )
        sections.append(Section("Where they differ", table=Table(("head", "part", "relative change, about"), rows)))
    sections += _resolution_section(saved)
    return Report("verification", saved.label, headline, tuple(tiles), tuple(sections), saved.record)


def _difference_sections(verdict: Verdict) -> Iterator[Section]:
    """How far answers are from their predictions, and about how much of each head has changed."""
    heads = {name: size for name, size in verdict.by_head().items() if size <= MOST}
    if heads and any(heads.values()):
        listed = ", ".join(f"{name} {short(size)}" for name, size in heads.items())
        words = f"Bars of about how much of each head has changed, relatively: {listed}."
        title = "How much of each head differs" if any(name.startswith("head ") for name in heads) else "What differs"
        across = "about how much has changed, relative to its size"
        chart = Bars("changes", title, words, tuple(heads), (("change", tuple(heads.values())),), across)
        rows = sorted(verdict.changes.items(), key=lambda item: -item[1])
        table = Table(
            ("part", "changed by about"), tuple((name, short(size)) for name, size in rows[:FEW_PARTS] if size)
        )
        said = (
            "The changes of all parts that together explain the answers best, if they are random ones. Above a tenth "
            "they are rough, since answers then no longer move in proportion."
        )
        yield Section(title, (said,), table=table, charts=(chart,))
    ratios = np.array([each for each in verdict.ratios if each > 0])
    if ratios.size:
        exact = f", {len(verdict.ratios) - ratios.size} more are exactly 0" if ratios.size < len(verdict.ratios) else ""
        outside = int(np.sum(ratios > 1))
        words = (
            f"Histogram of {ratios.size} errors of answers over their error bars{exact}, from "
            f"{short(float(ratios.min()))} to {short(float(ratios.max()))}; {outside} lie beyond them."
        )
        mark = Mark(1.0, "error bar")
        histogram = Histogram(
            "differences", f"Answers less predictions{exact}", words, (("answers", ratios),), "error over its bar", mark
        )
        said = f"{outside or 'None'} of {len(verdict.ratios)} answers lie{'s' * (outside == 1)} beyond the error bar."
        yield Section("Answers and predictions", (said,), charts=(histogram,))


def _resolution_section(saved: SavedVerdict) -> Iterator[Section]:
    sizes = {name: size for name, size in saved.verdict.parts.items() if LEAST <= size <= MOST}
    coarsest = dict(sorted(sizes.items(), key=lambda item: -item[1])[:MOST_PARTS])
    if not coarsest:
        return
    listed = ", ".join(f"{name} {short(size)}" for name, size in coarsest.items())
    words = f"Bars of the smallest relative change that would be noticed, by part, logarithmic: {listed}."
    lengths = (("change", tuple(coarsest.values())),)
    title = "Smallest change that is noticed"
    chart = Bars("noticed", title, words, tuple(coarsest), lengths, "relative change of the part", "log")
    said = (
        f"A random change of one part is noticed from these sizes on, but for a probability of {saved.verdict.miss:g}."
    )
    left = len(sizes) - len(coarsest)
    yield Section(title, (said,) + ((f"{left} finer parts are left out.",) if left else ()), charts=(chart,))


# --- diagnosis --------------------------------------------------------------------------------------------------


def report_of_diagnosis(saved: SavedDiagnosis) -> Report:
    """What kind of oracle it is, and why."""
    found = saved.diagnosis
    said = f"{'No method here' if found.method is None else f'The method {found.method}'} recovers such a box."
    tone = "good" if found.method else "bad"
    headline = Headline(tone, "Diagnosis", f"It looks like: {found.family}", said)  # type: ignore[arg-type]
    tiles = (Tile(f"{found.queries:,}", "queries"), Tile(found.method or "none", "method"))
    lines = dict(describe_diagnosis(found, saved.target))
    facts = (("target", saved.target), ("box", saved.label), ("next", lines["next"]))
    rows = tuple((each.what, each.found, each.evidence) for each in found.findings)
    sections = (
        Section("The box", facts=facts),
        Section("Evidence", table=Table(("property", "found", "evidence"), rows)),
    )
    return Report("diagnosis", saved.label, headline, tiles, sections, saved.record)


# --- all layers of a model --------------------------------------------------------------------------------------


def report_of_model(saved: SavedModel) -> Report:
    """Every layer, its heads and how it ended."""
    results = {name: each.result for name, each in saved.layers.items()}
    certified = sum(result.certified for result in results.values())
    everything = certified == len(results)
    queries = sum(result.stats.queries for result in results.values())
    title = f"{certified} of {len(results)} attention layers recovered"
    failed = [f"{name}: {each.outcome.name}, {each.message}" for name, each in results.items() if not each.certified]
    said = "Every layer has a certificate of its own." if everything else "; ".join(failed) + "."
    headline = Headline(
        "good" if everything else "bad", "Certified" if everything else "Not all certified", title, said
    )
    worst = max((each.distance for each in saved.layers.values() if each.distance is not None), default=None)
    tiles = [
        Tile(f"{queries:,}", "queries in all", f"for {len(results)} layers"),
        Tile(f"{sum(len(heads_of(each.params)) for each in results.values())}", "heads"),
    ]
    if worst is not None:
        tiles.append(Tile(short(worst), "from the weights in the file", "relatively, the worst layer"))
    tiles.append(Tile(f"{sum(each.stats.seconds for each in results.values()):.1f} s", "time"))
    rows = tuple(_layer_row(name, result, saved.layers[name].distance) for name, result in results.items())
    columns = ("layer", "outcome", "heads", "queries", "fewest possible", "held-out error, relative", "from the file")
    seen = saved.attention
    lead = None if seen is None else attention_section(seen.sentence, seen.layers)
    sections = [] if lead is None else [lead]
    sections += [Section("The layers", facts=(("target", saved.target),), table=Table(columns, rows))]
    for number, (name, result) in enumerate(results.items()):
        sections += _layer(name, result, f"layer-{number}-")
    return Report("model", saved.target, headline, tuple(tiles), tuple(sections), saved.record)


def _layer_row(name: str, result: Recovery, distance: float | None) -> tuple[str, ...]:
    stats = result.stats
    return (
        name,
        result.outcome.name.lower().replace("_", " "),
        str(len(heads_of(result.params))),
        f"{stats.queries:,}",
        f"{stats.counting_bound:,}" if stats.counting_bound else "",
        short(result.certificate.typical_error) if np.isfinite(result.certificate.worst_error) else "",
        "" if distance is None else short(distance),
    )


def _layer(name: str, result: Recovery, prefix: str) -> Iterator[Section]:
    heads = heads_of(result.params)
    if not heads:
        return
    found = many_heads(heads, (), (), prefix, detected_ranks(result))
    check = heldout_section(result, "sequences", prefix)
    charts = (*found.charts, *check.charts)
    yield replace(found, title=f"Layer {name}", said=found.said + check.said[:1], charts=charts)
