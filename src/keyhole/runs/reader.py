"""Run folders read back: whatever a command wrote with --out, or a FileError that says what is wrong with it.

Everything in a folder is taken for damaged until it has been looked at, and only files that Keyhole
writes are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.audit.result import Audit, Cell
from keyhole.errors import FileError, KeyholeError
from keyhole.families import Family, MultiHead, load
from keyhole.methods.diagnosis.diagnose import Diagnosis
from keyhole.methods.examination import Finding
from keyhole.recover_model import load_layers
from keyhole.recovery import Certificate, Outcome, Recovery, Stats, Tested
from keyhole.runs import store
from keyhole.runs.store import FORMATS, HEADS, PARAMS, TRUTH, VERSION
from keyhole.sentence.token_weights import TokenWeights, load_weights_on
from keyhole.verify.verdict import Difference, Verdict

LARGEST = 1e100  # what is larger is no measurement, and cannot be drawn
BEGUN = (PARAMS, HEADS, store.RESERVATION, "cells")  # what a run leaves that does not come to its end
BARS = {"radius": store.RADIUS, "standard_error": store.ERRORS}
AGAIN = "restore it, or run the command again"


@dataclass(frozen=True)
class SavedAttention:
    """What heads attend to in a sentence, by the names of their layers."""

    sentence: str
    layers: Mapping[str, TokenWeights]


@dataclass(frozen=True)
class SavedRun:
    """A recovery, by queries or from examples."""

    record: Mapping[str, Any]
    result: Recovery
    label: str  # what the oracle is, in words
    distance: float | None = None  # from the truth
    truth: Family | None = None
    attention: SavedAttention | None = None

    @property
    def learned(self) -> bool:
        """Whether it was learned from examples."""
        return "data" in self.record["settings"]


@dataclass(frozen=True)
class SavedModel:
    """All layers of a model."""

    record: Mapping[str, Any]
    target: str
    layers: Mapping[str, SavedRun]
    attention: SavedAttention | None = None


@dataclass(frozen=True)
class SavedAudit:
    """An audit."""

    record: Mapping[str, Any]
    audit: Audit


@dataclass(frozen=True)
class SavedVerdict:
    """A verification."""

    record: Mapping[str, Any]
    verdict: Verdict
    label: str
    claimed: str  # what it was compared with, in words


@dataclass(frozen=True)
class SavedDiagnosis:
    """What family an oracle is of."""

    record: Mapping[str, Any]
    diagnosis: Diagnosis
    label: str
    target: str


Saved = SavedRun | SavedModel | SavedAudit | SavedVerdict | SavedDiagnosis


def read_folder(folder: Path) -> Saved:
    """What a command has written there; where several have, what the last of them wrote."""
    if not folder.exists():
        raise FileError(f"{folder}: no such folder; name one that a command wrote with --out")
    if not folder.is_dir():
        raise FileError(f"{folder} is a file: name the folder that a command wrote with --out")
    try:
        there = [folder / name for name in FORMATS if (folder / name).is_file()]
        there.sort(key=lambda path: path.stat().st_mtime_ns)
        if not there:
            raise FileError(_nothing(folder))
    except OSError as error:
        raise FileError(f"cannot read {folder}: {error.strerror or error}") from error
    return read_record(there[-1])


def read_run(folder: Path) -> SavedRun:
    """The recovery that was written there."""
    found = read_record(folder / store.RUN)
    assert isinstance(found, SavedRun)
    return found


def read_record(path: Path) -> Saved:
    """What one of the records holds, and the files beside it."""
    page = Page(path, _load_record(path))
    try:
        return READERS[path.name](page, path.parent)
    except KeyholeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise page.damaged(f"{type(error).__name__}: {error}") from error


def _nothing(folder: Path) -> str:
    begun = [*folder.glob(".*.tmp"), *(folder / name for name in BEGUN if (folder / name).exists())]
    if begun:
        return f"{folder} is incomplete: the run that wrote {begun[0].name} did not come to its end; run it again"
    return f"{folder} is no run folder: it has none of {', '.join(FORMATS)}; name one that a command wrote with --out"


def _load_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged, it holds no JSON ({error}): {AGAIN}") from error
    kind = FORMATS[path.name]
    if not isinstance(record, dict) or record.get("format", kind) != kind:
        raise FileError(f"{path} is no {kind} file of Keyhole's: {AGAIN}")
    version = record.get("version", VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise FileError(f"{path} is damaged, its version is {version!r}: {AGAIN}")
    if version > VERSION:
        by = f", by Keyhole {record['keyhole']}" if isinstance(record.get("keyhole"), str) else ""
        raise FileError(
            f"{path} was written in format version {version}{by}; this Keyhole reads up to {VERSION}: upgrade it to a "
            "newer version"
        )
    return record


@dataclass(frozen=True)
class Page:
    """A JSON object of which nothing is taken on trust."""

    path: Path
    data: Mapping[str, Any] = field(repr=False)

    def damaged(self, what: str) -> FileError:
        """What to raise."""
        return FileError(f"{self.path} is damaged ({what}): {AGAIN}")

    def inner(self, name: str, default: dict[str, Any] | None = None) -> Page:
        """An object inside."""
        return Page(self.path, self._get(name, dict, "an object", default))

    def text(self, name: str, default: str | None = None) -> str:
        """A text."""
        found: str = self._get(name, str, "a text", default)
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        found = self._get(name, list, "a list")
        if not all(isinstance(each, str) for each in found):
            raise self.damaged(f"{name} is no list of texts")
        return tuple(found)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        found: int = self._get(name, int, "a whole number", default)
        if not 0 <= found < 2**63:
            raise self.damaged(f"{name} is {'negative' if found < 0 else 'absurdly large'}")
        return found

    def number(self, name: str) -> float:
        """A number, nan where it is null: what is not finite is written so."""
        found = self.data.get(name)
        if found is None:
            return float("nan")
        return float(self._get(name, (int, float), "a number"))

    def maybe(self, name: str) -> float | None:
        """A number, or None where there is none."""
        return None if self.data.get(name) is None else self.number(name)

    def numbers(self, name: str) -> Floats:  # (n,)
        """A list of numbers."""
        found = self._get(name, list, "a list")
        if not all(isinstance(each, int | float) for each in found):
            raise self.damaged(f"{name} is no list of numbers")
        return np.asarray(found, dtype=np.float64)

    def inside(self, name: str) -> list[Page]:
        """The objects of a list, empty ones for what is none."""
        listed = self.data.get(name)
        found = listed if isinstance(listed, list) else []
        return [Page(self.path, each if isinstance(each, dict) else {}) for each in found]

    def fields(self, kind: Any, *others: str) -> dict[str, Any]:
        """Texts and numbers by the names that fields of a dataclass have for them, without those of the others."""
        read: dict[str, Callable[[str], Any]] = {"str": self.text, "int": self.count, "float": self.number}
        read["bool"] = lambda name: self._get(name, bool, "true or false", False)  # which runs of old do not have
        found = {}
        for name, declared in ((each.name, each.type.partition(" | ")) for each in fields(kind)):
            if declared[0] in read and name not in others:
                missing = declared[2] == "None" and self.data.get(name) is None
                found[name] = None if missing else read[declared[0]](name)
        return found

    def _get(self, name: str, kind: Any, words: str, default: Any = None) -> Any:
        found = self.data.get(name, default)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise self.damaged(f"{name} is missing" if found is None else f"{name} is not {words}")
        return found


# What each file holds.


def _run(page: Page, folder: Path) -> SavedRun:
    files = page.inner("files").data
    params = _params(folder, PARAMS, "params" in files)
    radius, errors = (_like(params, folder, name, kind in files) for kind, name in BARS.items())
    truth = _params(folder, TRUTH, "truth" in files)
    heldout = page.inner("heldout")
    page.inner("settings")
    result = _recovery(page.inner("result"), heldout, params, radius, errors)
    label = page.text("label", page.text("box"))
    return SavedRun(page.data, result, label, page.maybe("distance"), truth, _attention(folder))


def _attention(folder: Path) -> SavedAttention | None:
    """What heads attend to in a sentence, if that was asked."""
    path = folder / store.ATTENTION
    return SavedAttention(*load_weights_on(path)) if path.is_file() else None


def _params(folder: Path, name: str, listed: bool) -> Family | None:
    """Parameters, if the run wrote any."""
    if not listed:
        return None
    if not (folder / name).is_file():
        raise FileError(f"{folder} is incomplete: {name} is missing; {AGAIN}")
    try:
        return load(folder / name)
    except FileError as error:
        raise FileError(str(error) if "upgrade" in str(error) else f"{error}: {AGAIN}") from error


def _like(params: Family | None, folder: Path, name: str, listed: bool) -> Family | None:
    """Radii, which have the shapes of the parameters."""
    found = _params(folder, name, listed)
    if found is None or params is None:
        return None
    own, other = ({key: array.shape for key, array in each.arrays().items()} for each in (params, found))
    # A bias may have a radius although it is zero and left out.
    if type(found) is not type(params) or any(other.get(key, shape) != shape for key, shape in own.items()):
        raise FileError(f"{folder / name} does not belong to {PARAMS} beside it: {AGAIN}")
    return found


def _recovery(
    page: Page, heldout: Page | None, params: Family | None, radius: Family | None, errors: Family | None
) -> Recovery:
    outcome = page.text("outcome")
    if outcome not in Outcome.__members__:
        raise page.damaged(f"there is no outcome {outcome!r}")
    answers = np.empty(0) if heldout is None else heldout.numbers("answers")
    predictions = np.empty(0) if heldout is None else heldout.numbers("predictions")
    if answers.shape != predictions.shape:
        raise page.damaged(f"{answers.size} held-out answers but {predictions.size} predictions")
    certificate = Certificate(
        radius,
        errors,
        assumptions=page.texts("assumptions"),
        tested=tuple(Tested(**each.fields(Tested)) for each in page.inside("tested")) if "tested" in page.data else (),
        untested=page.texts("untested") if "untested" in page.data else (),
        predictions=predictions,
        answers=answers,
        **page.fields(Certificate),
    )
    stages = page.inner("stages")
    counts = {name: stages.count(name) for name in stages.data}
    stats = Stats(**page.fields(Stats), stages=counts, details=page.inner("details").data)
    return Recovery(Outcome[outcome], page.text("message"), params, certificate, stats, page.text("method"))


def _audit(page: Page, _: Path) -> SavedAudit:
    cells = tuple(Cell(**row.fields(Cell)) for row in page.inside("rows"))
    if not cells:
        raise page.damaged("it has no rows")
    label, bound = page.text("box"), page.count("counting_bound")
    audit = Audit(label=label, bound=bound, rows=cells, **page.fields(Audit, "label", "bound"))
    if not all(0 <= row.error <= LARGEST and 0 <= row.floor <= LARGEST and row.multiple > 0 for row in cells):
        raise page.damaged("its errors, floors or multiples are no numbers that can be meant")
    if not audit.bound or not all(row.budget for row in cells):
        raise page.damaged("its budgets are no positive numbers")
    try:
        audit.sentences  # noqa: B018 - reads every defence
    except (KeyholeError, ValueError, ZeroDivisionError) as error:
        raise page.damaged(str(error)) from error
    return SavedAudit(page.data, audit)


def _layers(page: Page, folder: Path) -> SavedModel:
    found = page.inner("layers")
    heads: Mapping[str, MultiHead] = {}
    if any(found.inner(name).data.get("certified") for name in found.data):
        if not (folder / HEADS).is_file():
            raise FileError(f"{folder} is incomplete: {HEADS} is missing; {AGAIN}")
        heads, _ = load_layers(folder / HEADS)
    layers = {}
    for name in found.data:
        each = found.inner(name)
        held = each.inner("heldout") if "heldout" in each.data else None
        result = _recovery(each, held, heads.get(name), None, None)
        layers[name] = SavedRun({"settings": {}, **each.data}, result, name, each.maybe("distance"))
    return SavedModel(page.data, page.text("target"), layers, _attention(folder))


def _verification(page: Page, _: Path) -> SavedVerdict:
    conclusion = page.text("conclusion")
    if conclusion not in {"same", "different", "inconclusive"}:
        raise page.damaged(f"there is no conclusion {conclusion!r}")
    parts, changes = page.inner("parts"), page.inner("changes", {})  # which those of old do not have
    ratios = page.numbers("ratios").tolist() if "ratios" in page.data else []
    verdict = Verdict(
        conclusion,  # type: ignore[arg-type]  # one of the three
        parts={name: parts.number(name) for name in parts.data},
        changes={name: changes.number(name) for name in changes.data},
        ratios=tuple(ratios),
        differing=tuple(Difference(**each.fields(Difference)) for each in page.inside("differing")),
        **page.fields(Verdict),
    )
    return SavedVerdict(page.data, verdict, page.text("box"), page.text("claimed"))


def _diagnosis(page: Page, _: Path) -> SavedDiagnosis:
    if not isinstance(page.data.get("findings"), list):
        raise page.damaged("it has no findings")
    method = None if page.data.get("method") is None else page.text("method")
    found = Diagnosis(
        page.text("family"),
        method,
        tuple(Finding(**each.fields(Finding)) for each in page.inside("findings")),
        dict(page.inner("options").data),
        queries=page.count("queries"),
    )
    return SavedDiagnosis(page.data, found, page.text("box"), page.text("target"))


READERS: dict[str, Callable[[Page, Path], Saved]] = {
    store.RUN: _run,
    store.AUDIT: _audit,
    store.LAYERS: _layers,
    store.VERIFICATION: _verification,
    store.DIAGNOSIS: _diagnosis,
}
