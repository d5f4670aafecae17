"""Sections about the certificate: the held-out check, and the radii of entries beside their actual errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import Family
from keyhole.gauge import align
from keyhole.recovery import Certificate, Recovery, percent, times
from keyhole.report.charts import (
    FAR_APART,
    LEAST,
    MOST,
    Chart,
    Histogram,
    Mark,
    Plot,
    Series,
    clean,
    largest,
    short,
    within,
)
from keyhole.report.content import Section, Table

MOST_POINTS = 4000  # that are drawn


def heldout_section(result: Recovery, unit: str, prefix: str = "") -> Section:
    """The held-out check, and the certificate in words."""
    certificate = result.certificate
    if not certificate.answers.size:
        return Section("Held-out check", ("No fresh answers were compared with predictions: there is no certificate.",))
    answers, predictions = certificate.answers, certificate.predictions
    seen = within(answers) & within(predictions)
    answers, predictions = answers[seen], predictions[seen]
    said = tuple(_in_words(result, unit))
    charts: list[Chart] = []
    if answers.size and not certificate.of_labels:
        charts = [
            _agreement(answers, predictions, prefix),
            *_errors(answers, predictions, certificate.worst_error, prefix),
        ]
    facts = tuple(("" if number else "assuming", each) for number, each in enumerate(certificate.assumptions))
    return Section("Held-out check", said, facts, table=_by_length(certificate), charts=tuple(charts))


def _by_length(certificate: Certificate) -> Table | None:
    """Held-out queries by length, and of the user's own inputs."""
    columns = ("held-out queries", "asked", "informative", "mispredicted at most, at 95 % confidence")
    rows = tuple(
        (each.label, str(each.queries), str(each.informative), percent(each.bound)) for each in certificate.tested
    )
    return Table(columns, rows) if rows and certificate.worst_ratio <= 1 else None


def _in_words(result: Recovery, unit: str) -> Iterator[str]:
    certificate = result.certificate
    count, ratio = certificate.heldout_queries, certificate.worst_ratio
    drawn = certificate.tested[0].queries if certificate.tested else count
    fresh = f"{drawn:,} fresh random {unit}" if unit == "sequences" else f"{count:,} {unit} held back"
    fresh += f" and {count - drawn:,} of the domain" if drawn < count else ""
    numbers = f", {certificate.answers.size:,} numbers in all," if certificate.answers.size != count else ""
    if certificate.of_labels:
        yield from _labels_in_words(result, fresh)
        return
    usual = f"to {short(certificate.typical_error)} of their size" if certificate.typical_error else "exactly"
    yield (
        f"After the parameters were fixed, {fresh}{numbers} were compared with what the parameters predict: half of "
        f"the answers {usual}."
    )
    if result.certified:
        yield (
            f"Certified: every answer lies within the error bar of its prediction, the worst at {percent(ratio)} of "
            "it. This rests on the assumptions below and on a finite number of questions; it does not rule out a box "
            "that behaves differently on questions it was never asked."
        )
        if certificate.statement:
            yield f"{certificate.statement[0].upper()}{certificate.statement[1:]}."
    elif np.isfinite(ratio):
        inside = f"{percent(ratio)} of" if ratio <= 1 else times(ratio)
        yield f"Not certified: {result.message}. Errors reach {inside} the error bar."
    else:
        yield f"Not certified: {result.message}."


def _labels_in_words(result: Recovery, fresh: str) -> Iterator[str]:
    certificate = result.certificate
    wrong = int(np.sum(certificate.answers != certificate.predictions))
    yield (
        f"After the parameters were fixed, the labels of {fresh} were compared with what the parameters predict; "
        "where an answer lies within its error bar of a boundary no label is predicted. "
        f"{wrong or 'None'} of {certificate.answers.size:,} labels {'is' if wrong == 1 else 'are'} not as predicted."
    )
    if not result.certified:
        yield f"Not certified: {result.message}."
        return
    yield (
        "Certified, on the assumptions below and a finite number of questions; it does not rule out a box that behaves "
        "differently on questions it was never asked."
    )
    if certificate.statement:
        yield f"{certificate.statement[0].upper()}{certificate.statement[1:]}."


def _agreement(answers: Floats, predictions: Floats, prefix: str) -> Plot:
    shown = _some(answers.size)
    ends = np.array([min(answers.min(), predictions.min()), max(answers.max(), predictions.max())])
    usual = float(np.median(np.abs(answers)))
    far = bool(0 < FAR_APART * usual < np.max(np.abs(answers)))
    both = np.corrcoef(answers, predictions)[0, 1] if np.ptp(answers) and np.ptp(predictions) else 1.0
    words = (
        f"Scatter of {answers.size:,} predictions against answers, from {short(float(ends[0]))} to "
        f"{short(float(ends[1]))}: they lie on the line where both agree, correlation {both:.6f}."
    )
    if both < 0.999:
        words = words.replace("they lie on the line where both agree", "not all lie on the line where both agree")
    series = (
        Series("prediction = answer", ends, ends, "faint"),
        Series("fresh answer", answers[shown], predictions[shown]),
    )
    scale: Any = "through zero" if far else "linear"
    title = f"{answers.size:,} predictions against answers"
    name = f"{prefix}heldout"
    return Plot(name, title, words, series, "answer of the box", "prediction", scale, scale, square=True)


def _some(count: int) -> Any:
    """All of few numbers, evenly chosen ones of many."""
    return slice(None) if count <= MOST_POINTS else np.linspace(0, count - 1, MOST_POINTS).astype(int)


def _errors(answers: Floats, predictions: Floats, worst: float, prefix: str) -> Iterator[Histogram]:
    errors = np.abs(predictions - answers)
    wrong = errors[errors >= LEAST]
    if not wrong.size:
        return
    exact = errors.size - wrong.size
    words = (
        f"Histogram of the errors of {errors.size:,} predictions on a logarithmic scale: {exact:,} are zero, the "
        f"others from {short(float(np.min(wrong)))} to {short(float(np.max(wrong)))}, median "
        f"{short(float(np.median(wrong)))}."
    )
    title = "Errors of predictions" + (f", {exact:,} more are exactly 0" if exact else "")
    mark = Mark(worst, "largest") if LEAST <= worst <= MOST else None
    yield Histogram(f"{prefix}errors", title, words, (("errors", wrong),), "|prediction − answer|", mark)


def error_section(
    params: Family | None, radius: Family | None, errors: Family | None, truth: Family | None, proven: bool
) -> Section | None:
    """How sure every entry is, and how wrong it is where the truth is known."""
    if params is None or radius is None:
        return None
    radii = {name: floats(array) for name, array in radius.arrays().items()}
    standard = {} if errors is None else {name: floats(array) for name, array in errors.arrays().items()}
    values = {name: floats(array) for name, array in params.arrays().items()}
    true = {} if truth is None else align(params, truth)
    actual = {name: clean(values[name]) - clean(array) for name, array in true.items() if name in values}
    rows = tuple(
        (
            name.replace("_", " "),
            "\u00a0×\u00a0".join(map(str, own.shape)) or "1",
            short(largest(clean(values[name]))) if name in values else "0",
            short(largest(own)),
            *([short(largest(standard[name])) if name in standard else ""] if standard else []),
            *([short(largest(actual[name])) if name in actual else ""] if actual else []),
        )
        for name, own in radii.items()
    )
    columns: tuple[str, ...] = ("part", "entries", "largest entry", "largest error bar")
    columns += ("largest standard error",) * bool(standard) + ("largest error, from the truth",) * bool(actual)
    said = "Every entry has an error bar of its own, carried from the answers to the result."
    if not proven:
        said += " The outcome is not certified, so these bars are not proven."
    return Section("Error bars", (said,), table=Table(columns, rows), charts=tuple(_radius_histogram(radii, actual)))


def _radius_histogram(radii: Mapping[str, Floats], actual: Mapping[str, Floats]) -> Iterator[Histogram]:
    sizes = np.concatenate([each.ravel() for each in radii.values()])
    sizes = sizes[within(sizes) & (sizes >= LEAST)]
    if not sizes.size:
        return
    groups = [("error bars", sizes)]
    words = (
        f"Histogram of {sizes.size} error bars on a logarithmic scale: from {short(float(np.min(sizes)))} to "
        f"{short(float(np.max(sizes)))}, median {short(float(np.median(sizes)))}."
    )
    if actual:
        errors = np.concatenate([np.abs(each).ravel() for each in actual.values()])
        wrong = errors[errors >= LEAST]
        words += f" The actual errors are at most {short(float(np.max(errors)))}; {errors.size - wrong.size} are zero."
        if wrong.size:
            groups.append(("actual errors", wrong))
    yield Histogram("error-bars", "Error bars of all entries", words, tuple(groups), "size")
