"""The report of a recovery, by queries or from examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from keyhole.families import AttentionLayer, Family
from keyhole.gauge.identifiability import FAMILIES, claims
from keyhole.gauge.redundancy import is_examined
from keyhole.recovery import Recovery, of_error_bar
from keyhole.report.charts import Bars, Look, largest, short
from keyhole.report.content import Headline, Report, Section, Table, Tile, sentence
from keyhole.report.sections.attention import attention_section
from keyhole.report.sections.certificate import error_section, heldout_section
from keyhole.report.sections.examples import examples_section
from keyhole.report.sections.parameters import sections_of
from keyhole.report.text.diagnosis import describe_params
from keyhole.report.text.recovery import PROVEN, describe, describe_layer
from keyhole.runs.reader import SavedRun

# The families that methods take an oracle for, where nothing was found that says it.
FAMILY_OF = {"multi-head": "multi-head", "relu-net": "relu-net", "one-layer": "one-layer"}
# Words that the headline and the tiles have said already.
SAID_BEFORE = {"outcome", "remedy", "queries", "held-out", "error bars", "truth", "time", "assuming"}
SAID_BEFORE |= {"examples", "samples", "six phases", "fit"}  # by the phases of learning
LOOKS: Mapping[str, Look] = {"certificate": "true", "counting bound": "faint"}
_LAYER_CLAIMS = (
    ("known", "score and projection of every head", "unless the examples leave them free, which is checked"),
    ("hidden", "the order of heads", "answers are added up"),
    ("hidden", "key and query matrices beyond their product", "only the product makes logits"),
    ("hidden", "value and output matrices beyond their product", "only the product makes outputs"),
)


def report_of_run(saved: SavedRun) -> Report:
    """Everything there is to say of a recovery."""
    result = saved.result
    radius, errors = result.certificate.radius, result.certificate.standard_error
    sections = [
        None if saved.attention is None else attention_section(saved.attention.sentence, saved.attention.layers),
        _box(saved),
        examples_section(result) if saved.learned else _queries(result),
        *sections_of(result.params, radius, saved.truth, detected_ranks(result)),
        heldout_section(result, "examples" if saved.learned else "sequences"),
        error_section(result.params, radius, errors, saved.truth, result.outcome in PROVEN),
        _diagnosis(result),
    ]
    return Report(
        kind="layer learned from examples" if saved.learned else "recovery",
        label=saved.label,
        headline=headline(result),
        tiles=tuple(_tiles(saved)),
        sections=tuple(section for section in sections if section is not None),
        record=saved.record,
    )


def headline(result: Recovery) -> Headline:
    """How it ended."""
    what = "A box" if result.params is None else result.params.anatomy.title
    word = result.outcome.name.replace("_", " ").capitalize()
    said = sentence(result.message)
    if result.certified:
        return Headline("good", word, f"{what}, recovered", said)
    title = "Nothing was recovered" if result.params is None else f"{what}: an estimate, not proven"
    return Headline("bad", word, title, said, result.outcome.value)


def detected_ranks(result: Recovery) -> tuple[int, ...]:
    """The ranks of the score matrices, by head, where the method has found them."""
    details = result.stats.details
    names = ("rank", "rank_above_noise", "score_ranks", "ranks")
    found = next((details[name] for name in names if name in details), ())
    ranks = found if isinstance(found, list | tuple) else (found,)
    whole = all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks)
    return tuple(ranks) if whole else ()


def _tiles(saved: SavedRun) -> Iterator[Tile]:
    result, stats = saved.result, saved.result.stats
    if saved.learned:
        yield Tile(f"{stats.queries:,}", "examples learned from", f"{stats.heldout_queries:,} held out")
    else:
        note = f"{stats.counting_bound:,} is the fewest possible: {stats.ratio:.3f} ×" if stats.counting_bound else ""
        yield Tile(f"{stats.queries:,}", "queries", note)
    certificate = result.certificate
    if certificate.answers.size:
        worst = of_error_bar(certificate.worst_ratio)
        note = f"{certificate.answers.size:,} answers" + (f", the worst at {worst}" if worst else "")
        yield Tile(short(certificate.typical_error), "usual held-out error over its answer", note)
    if result.outcome in PROVEN and certificate.radius is not None:
        bars = {name: largest(array) for name, array in certificate.radius.arrays().items()}
        part = max(bars, key=lambda name: bars[name])
        words = "largest error bar of any entry"
        yield Tile(f"± {short(bars[part])}", words, f"in {part.replace('_', ' ')}" if len(bars) > 1 else "")
    if saved.distance is not None:
        yield Tile(short(saved.distance), "from the truth, relatively", "known for a demo or a file")
    note = "" if saved.learned else f"{stats.oracle_seconds:.2f} s of it in the box"
    yield Tile(f"{stats.seconds:.2f} s", "time", note)


# --- what the oracle is -----------------------------------------------------------------------------------------


def _box(saved: SavedRun) -> Section:
    result = saved.result
    settings = saved.record["settings"]
    target = settings.get("data" if saved.learned else "target")
    lines = (describe_layer if saved.learned else describe)(result, saved.label, saved.distance)
    facts = [("target", str(target))] + [line for line in lines if line[0] not in SAID_BEFORE]
    if result.params is not None and is_examined(result.params) and drawable(result.params):
        skipped = {"parameters", "kinds"}
        facts += [
            (_WORDS.get(word, word), said) for word, said in describe_params(result.params) if word not in skipped
        ]
    said = ("Below, what answers can and cannot tell of any box of this family.",)
    return Section("The box, and what can be known of it", said, facts=tuple(facts), table=_claims(result))


_WORDS = {"canonical": "identifiable", "witness": "same answers"}


def drawable(params: Family) -> bool:
    """Whether all parameters are finite numbers."""
    return all(bool(np.all(np.isfinite(np.asarray(array)))) for array in params.arrays().values())


def _claims(result: Recovery) -> Table | None:
    """What can and cannot be known of the family."""
    family = FAMILY_OF.get(result.method, "single-head") if result.params is None else result.params.family
    columns = ("status", "quantity", "because")
    if family == AttentionLayer.family or result.method in {"varpro", "six-phase"}:
        return Table(columns, _LAYER_CLAIMS)
    if family not in FAMILIES:
        return None
    rows = [("known" if each.known else "hidden", each.quantity, each.reason) for each in claims(family)]
    return Table(columns, tuple(rows))


# --- what it cost -----------------------------------------------------------------------------------------------


def _queries(result: Recovery) -> Section | None:
    stats = result.stats
    stages = {name: count for name, count in stats.stages.items() if count}
    if not stages:
        return None
    segments: list[tuple[str, tuple[float, ...]]] = [(name, (float(count), 0.0)) for name, count in stages.items()]
    segments += [("certificate", (float(stats.heldout_queries), 0.0))] * bool(stats.heldout_queries)
    listed = ", ".join(f"{name} {count:,}" for name, count in stages.items())
    words = f"Bars of {stats.queries:,} queries by stage: {listed}; {stats.heldout_queries:,} more for the certificate"
    labels: tuple[str, ...] = ("asked",)
    bound = stats.counting_bound
    said = [f"{stats.queries:,} queries were used, one for each sequence sent."]
    if bound:
        words += f"; the counting bound is {bound:,}"
        labels = ("asked", "fewest possible")
        segments.append(("counting bound", (0.0, float(bound))))
        said.append(
            f"A method that knows nothing but the family needs at least {bound:,}: fewer answers have fewer numbers "
            f"than there are unknowns. This run took {stats.ratio:.3f} times that; {stats.heldout_queries:,} more were "
            "spent on the certificate."
        )
    else:
        segments = [(name, lengths[:1]) for name, lengths in segments]
    kept = stats.queries + stats.heldout_queries - stats.new_queries
    if kept > 0:
        said.append(f"{kept:,} of all answers came from the journal and were not asked again.")
    chart = Bars("queries", "Queries by stage", words + ".", labels, tuple(segments), "queries", looks=LOOKS)
    table = Table(("stage", "queries"), tuple((name, f"{count:,}") for name, count in stages.items()))
    return Section("Queries", tuple(said), table=table, charts=(chart,))


# --- what was found out before ----------------------------------------------------------------------------------


def _diagnosis(result: Recovery) -> Section | None:
    findings = result.stats.details.get("diagnosis_findings")
    if not isinstance(findings, list):
        return None
    rows = tuple(
        (str(each.get("what")), str(each.get("found")), str(each.get("evidence")))
        for each in findings
        if isinstance(each, Mapping)
    )
    tried, family = result.stats.details.get("tried_first"), result.stats.details.get("diagnosis")
    before = "" if tried is None else f"The box was taken for a {tried} first, which its answers contradict; then "
    said = f"{before or 'From a few first queries '}it was found to be: {family}."
    return Section("Diagnosis", (said,), table=Table(("property", "found", "evidence"), rows))
