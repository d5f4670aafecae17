"""The section about radii of entries, beside actual errors where the truth is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import Family
from keyhole.gauge import aligned
from keyhole.report.charts import LEAST, Histogram, clean, largest, short, within
from keyhole.report.content import Section, Table


def error_section(
    params: Family | None, radius: Family | None, errors: Family | None, truth: Family | None, proven: bool
) -> Section | None:
    """How sure every entry is, and how wrong it is where the truth is known."""
    if params is None or radius is None:
        return None
    radii = {name: floats(array) for name, array in radius.arrays().items()}
    standard = {} if errors is None else {name: floats(array) for name, array in errors.arrays().items()}
    values = {name: floats(array) for name, array in params.arrays().items()}
    true = {} if truth is None else aligned(params, truth)
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
    return Section("Error bars", (said,), table=Table(columns, rows), charts=tuple(_histogram(radii, actual)))


def _histogram(radii: Mapping[str, Floats], actual: Mapping[str, Floats]) -> Iterator[Histogram]:
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
