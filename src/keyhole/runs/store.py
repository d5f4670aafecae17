"""Run folders as they are written: what was asked for, what came of it, and to whom a folder belongs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.errors import KeyholeError, UsageError
from keyhole.families import Family
from keyhole.optional import KEYHOLE_VERSION
from keyhole.recovery import Recovery
from keyhole.runs.folders import prepare_folder, replace_files, unwritable
from keyhole.targets.demos import canonical_demo

VERSION = 1
PARAMS, RADIUS, ERRORS = "params.safetensors", "radius.safetensors", "standard_error.safetensors"
TRUTH, HEADS = "truth.safetensors", "layers.safetensors"
PICTURE, REPORT = "recovery.png", "report.html"
ATTENTION = "attention.safetensors"  # what heads attend to in a sentence
OWN_FILES = {PARAMS, RADIUS, ERRORS, TRUTH, PICTURE, REPORT, ATTENTION}  # beside run.json
# The records that commands write, and what each calls itself. A folder that has one is complete.
RUN, AUDIT, LAYERS, VERIFICATION, DIAGNOSIS = "run.json", "audit.json", "layers.json", "verify.json", "diagnosis.json"
FORMATS = {
    RUN: "keyhole-run",
    AUDIT: "keyhole-audit",
    LAYERS: "keyhole-layers",
    VERIFICATION: "keyhole-verification",
    DIAGNOSIS: "keyhole-diagnosis",
}
# While a run goes on, this file says whose the folder is; its record says so afterwards.
RESERVATION = ".keyhole.json"
AUDIT_FOLDERS = {"cells", "journals"}
SUBJECTS = ("target", "data")  # settings that say what a run is of
# Settings in which two commands may differ and still be the same run: it is resumed with them.
MAY_DIFFER = {"budget", "journal", "out", "jobs", "concurrency", "workers", "dask", "max_seconds", "heldout", "domain"}


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays as lists, what is not finite as None, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


@contextmanager
def reserve_folder(
    folder: Path | None,
    name: str,  # of the record that will be written
    settings: Mapping[str, Any],  # with the target, or the data, that the run is of
    *,
    force: bool = False,
) -> Iterator[None]:
    """Make a folder ready for a run, and keep it for that run until its record is written.

    UsageError where it belongs to something else, unless `force` is set.
    """
    if folder is None:
        yield
        return
    if not force:
        _check_owner(folder, name, settings)
    prepare_folder(folder)
    reservation = folder / RESERVATION
    text = _as_json({**_header("keyhole-reservation"), "record": name, "settings": settings})
    try:
        reservation.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        yield
    finally:
        if (folder / name).exists() or [path.name for path in folder.iterdir()] == [RESERVATION]:
            reservation.unlink(missing_ok=True)


def _check_owner(folder: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Raise UsageError where a folder holds anything but files of this very run."""
    try:
        entries = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise unwritable(folder, error) from error
    journal = settings.get("journal")
    if journal is not None and Path(journal).parent.resolve() == folder.resolve():
        entries = {each for each in entries if not each.startswith(Path(journal).name)}
    entries = {each for each in entries if not re.fullmatch(r"\..*\.tmp", each)}
    records = {each: _settings_in(folder / each) for each in (RESERVATION, *FORMATS) if each in entries}
    if not records and entries and not (name == AUDIT and entries <= AUDIT_FOLDERS):
        raise UsageError(
            f"the folder {folder} has other files in it ({min(entries)}) and is no run folder: "
            "name another one with --out, or write into it with --force"
        )
    foreign = sorted(records.keys() - {name, RESERVATION})
    if foreign and not any(known for _, known in records.values()):
        raise UsageError(
            f"the folder {folder} has a damaged {foreign[0]}, which does not say what it is of: "
            "name another one with --out, or overwrite it with --force"
        )
    own = _identity(settings)
    for each, (record, other) in records.items():
        shared = own.keys() & other.keys() - MAY_DIFFER if record == name else set()
        differing = [key for key in (*SUBJECTS, *sorted(shared)) if own.get(key) != other.get(key)]
        if differing and other:
            key = differing[0]
            unfinished = "an unfinished run" if each == RESERVATION else "a run"
            theirs, ours = (_in_words(each.get(key)) for each in (other, own))
            raise UsageError(
                f"the folder {folder} belongs to {unfinished} with another {key}, {theirs} and not {ours}: "
                "name another one with --out, or overwrite it with --force"
            )


def _in_words(setting: Any) -> str:
    return "left out" if setting is None else repr(setting)


def _settings_in(path: Path) -> tuple[str, Mapping[str, Any]]:
    """The name of the record that a file is or stands for, and its settings; none where it is damaged."""
    try:
        record = json.loads(path.read_bytes())
        settings = record.get("settings", record)  # records of older versions name the target beside the rest
        return str(record.get("record", path.name)), _identity(settings)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return path.name, {}


def _identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as plain data, a demo named by its full text."""
    found: dict[str, Any] = plain(settings)
    target = found.get("target")
    if isinstance(target, str) and target.startswith("demo:"):
        with suppress(KeyholeError):  # whoever opens it says what is wrong with it
            found["target"] = canonical_demo(target.removeprefix("demo:"))
    return found


def write_run(
    folder: Path,
    result: Recovery,
    settings: Mapping[str, Any],
    oracle: str,  # the name a journal of this run is bound to, or the data it learned from
    distance: float | None = None,  # from the truth, where it is known
    picture: bytes | None = None,
    *,
    label: str | None = None,  # what the oracle is, in words
    truth: Family | None = None,  # its parameters, where they are known
) -> dict[str, Path]:
    """Write parameters, radii, picture and `run.json`; the paths written, by what they are.

    All files are made under other names first and then renamed, `run.json` last: a folder that has one is
    complete. What an earlier run left there and this one lacks is removed, so that no two runs mix.
    """
    certificate = result.certificate
    makers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        kind: (name, params.save)
        for kind, name, params in (
            ("params", PARAMS, result.params),
            ("radius", RADIUS, certificate.radius),
            ("standard_error", ERRORS, certificate.standard_error),
            ("truth", TRUTH, truth),
        )
        if params is not None
    }
    if picture is not None:
        makers["picture"] = (PICTURE, lambda path: path.write_bytes(picture))
    record = {
        **_header(FORMATS[RUN]),
        "box": oracle,
        "label": label or oracle,
        "settings": settings,
        "result": result.summary(),
        "distance": distance,
        "heldout": certificate.heldout(),
        "files": {kind: name for kind, (name, _) in makers.items()},
    }
    text = _as_json(record)
    makers["run"] = (RUN, lambda path: path.write_text(text, encoding="utf-8"))
    files = dict(makers.values())
    _replace(folder, files, stale=(RUN, *sorted(OWN_FILES - files.keys())))
    return {kind: folder / name for kind, (name, _) in makers.items()}


def write_record(folder: Path, name: str, data: Mapping[str, Any]) -> Path:
    """Write one of the other records, whole or not at all; an earlier report in the folder is removed."""
    text = _as_json({**_header(FORMATS[name]), **data})
    _replace(folder, {name: lambda made: made.write_text(text, encoding="utf-8")}, stale=(REPORT,))
    return folder / name


def _replace(folder: Path, files: Mapping[str, Callable[[Path], Any]], stale: tuple[str, ...]) -> None:
    try:
        replace_files(folder, files, stale)
    except OSError as error:
        raise unwritable(folder, error) from error


def _header(form: str) -> dict[str, Any]:
    return {"format": form, "version": VERSION, "keyhole": KEYHOLE_VERSION}


def _as_json(data: Mapping[str, Any]) -> str:
    return json.dumps(plain(data), indent=2, allow_nan=False) + "\n"
