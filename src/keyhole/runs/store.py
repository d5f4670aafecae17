"""A run on disk: what was asked for, and a folder with what came of it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.errors import FileError, UsageError
from keyhole.families import Family
from keyhole.noise import Noise
from keyhole.oracles import Oracle
from keyhole.progress import Observer
from keyhole.recover import HELDOUT_QUERIES, recover
from keyhole.recovery import Outcome, Recovery
from keyhole.targets import Target, open_target

FORMAT, VERSION = "keyhole-run", 1
PARAMS, RADIUS, ERRORS = "params.safetensors", "radius.safetensors", "standard_error.safetensors"
TRUTH = "truth.safetensors"
PICTURE, RUN, REPORT = "recovery.png", "run.json", "report.html"
OWN_FILES = {PARAMS, RADIUS, ERRORS, TRUTH, PICTURE, REPORT}  # beside run.json
RESUMABLE = (Outcome.BUDGET_EXHAUSTED, Outcome.UNCERTIFIED, Outcome.ORACLE_FAILED)


@dataclass(frozen=True)
class Settings:
    """Everything that determines which questions a run asks, and where its answers go."""

    target: str
    method: str = "auto"
    budget: int | None = None
    journal: Path | None = None
    seed: int = 0
    heldout: int = HELDOUT_QUERIES
    max_norm: float | None = None
    noise: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    out: Path | None = None

    def recover(self, observer: Observer, around: Callable[[Oracle], Oracle] | None = None) -> tuple[Target, Recovery]:
        """Open the box, perhaps with something around it, and recover it; the folder is made ready before."""
        target = open_target(self.target)
        try:
            target = target.told(self.max_norm, None if self.noise is None else Noise.parse(self.noise))
            if self.out is not None:
                prepare_folder(self.out)
            result = recover(
                target.oracle if around is None else around(target.oracle),
                self.method,
                self.budget,
                self.journal,
                self.seed,
                throw=False,
                heldout=self.heldout,
                observer=observer,
                **self.options,
            )
        finally:
            target.oracle.close()
        return target, result

    def command(self, budget: int | None) -> str:
        """The command line that asks the same questions with another budget."""
        words = ["keyhole", "recover", self.target]
        default = Settings(self.target)
        for name in ("method", "journal", "seed", "heldout", "max_norm", "noise", "out"):
            if getattr(self, name) != getattr(default, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        for name, value in self.options.items():
            words += ["--option", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        if budget is not None:
            words += ["--budget", str(budget)]
        return shlex.join(words)

    def resume(self, result: Recovery, width: int) -> str | None:
        """The command that goes on where a run ended, if it kept a journal and more queries can help."""
        if self.journal is None or result.outcome not in RESUMABLE:
            return None
        spent = self.budget is not None and result.outcome is not Outcome.ORACLE_FAILED
        return self.command(2 * max(self.budget or 0, width) if spent else self.budget)


def parse_option(text: str) -> tuple[str, Any]:
    """A method option: NAME=VALUE with true, false, a number or text."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if not equals or not name.isidentifier():
        raise UsageError(f"--option {text!r} is not NAME=VALUE, for example --option entrywise=true")
    if name in signature(recover).parameters:
        raise UsageError(f"--option {name!r} is no option of a method; see keyhole recover --help")
    if value.lower() in {"true", "false"}:
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def keyhole_version() -> str:
    """The installed version."""
    try:
        return metadata.version("keyhole")
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"


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


def prepare_folder(folder: Path) -> None:
    """Make the folder and see that it takes files, before queries are spent on what could not be kept."""
    probe = _temporary(folder, RUN)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_run(
    folder: Path,
    result: Recovery,
    settings: Settings,
    box: str,  # the name a journal of this run is bound to
    distance: float | None = None,  # from the truth, where it is known
    picture: bytes | None = None,
    *,
    label: str | None = None,  # what the box is, in words
    truth: Family | None = None,  # its parameters, where they are known
) -> dict[str, Path]:
    """Write parameters, radii, picture and `run.json`; the paths written, by what they are.

    All files are made under other names first and then renamed, `run.json` last: a folder that has one is
    complete. What an earlier run left there and this one lacks is removed, so that no two runs mix.
    """
    about = {"box": box, "label": label or box, "settings": asdict(settings)}
    return _write(folder, result, about, distance, picture, truth)


def write_learned(
    folder: Path,
    result: Recovery,
    settings: Mapping[str, Any],
    distance: float | None = None,
    *,
    label: str | None = None,
    truth: Family | None = None,
) -> dict[str, Path]:
    """The same for a layer learned from examples."""
    data = str(settings.get("data"))
    return _write(folder, result, {"box": data, "label": label or data, "settings": settings}, distance, None, truth)


def _write(
    folder: Path,
    result: Recovery,
    about: Mapping[str, Any],
    distance: float | None,
    picture: bytes | None,
    truth: Family | None,
) -> dict[str, Path]:
    makers: dict[str, tuple[str, Callable[[Path], Any]]] = {}
    if result.params is not None:
        makers["params"] = (PARAMS, result.params.save)
    if result.certificate.radius is not None:
        makers["radius"] = (RADIUS, result.certificate.radius.save)
    if result.certificate.standard_error is not None:
        makers["standard_error"] = (ERRORS, result.certificate.standard_error.save)
    if truth is not None:
        makers["truth"] = (TRUTH, truth.save)
    if picture is not None:
        makers["picture"] = (PICTURE, lambda path: path.write_bytes(picture))
    files = {kind: name for kind, (name, _) in makers.items()}
    text = json.dumps(plain(_record(result, about, distance, files)), indent=2, allow_nan=False) + "\n"
    makers["run"] = (RUN, lambda path: path.write_text(text, encoding="utf-8"))
    try:
        files_made = dict(makers.values())
        _replace_all(folder, files_made, stale=(RUN, *sorted(OWN_FILES - files_made.keys())))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return {kind: folder / name for kind, (name, _) in makers.items()}


def _record(
    result: Recovery, about: Mapping[str, Any], distance: float | None, files: Mapping[str, str]
) -> dict[str, Any]:
    certificate = result.certificate
    return {
        "format": FORMAT,
        "version": VERSION,
        "keyhole": keyhole_version(),
        **about,
        "result": result.summary(),
        "distance": distance,
        "heldout": {"predictions": certificate.predictions, "answers": certificate.answers},
        "files": files,
    }


def write_record(folder: Path, name: str, data: Mapping[str, Any]) -> Path:
    """Write one JSON object into a folder, whole or not at all; what an earlier report said of it is removed."""
    path, text = folder / name, json.dumps(plain(data), indent=2, allow_nan=False) + "\n"
    try:
        _replace_all(folder, {name: lambda made: made.write_text(text, encoding="utf-8")}, stale=(REPORT,))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return path


def write_file(folder: Path, name: str, content: bytes) -> Path:
    """Write one file into a folder, whole or not at all."""
    try:
        _replace_all(folder, {name: lambda made: made.write_bytes(content)}, stale=())
    except OSError as error:
        cause = error.strerror or error
        raise FileError(f"cannot write {folder / name}: {cause}; copy the folder to where it can be") from error
    return folder / name


def _replace_all(
    folder: Path,
    makers: Mapping[str, Callable[[Path], Any]],
    stale: tuple[str, ...],  # what goes before the others come, in this order
) -> None:
    try:
        for name, make in makers.items():
            make(_temporary(folder, name))
        for name in stale:
            (folder / name).unlink(missing_ok=True)
        for name in makers:
            os.replace(_temporary(folder, name), folder / name)
    finally:
        for name in makers:
            _temporary(folder, name).unlink(missing_ok=True)


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{name}.{os.getpid()}.tmp"


def _unwritable(folder: Path, error: OSError) -> FileError:
    return FileError(f"cannot write to the folder {folder}: {error.strerror or error}; name another one with --out")
