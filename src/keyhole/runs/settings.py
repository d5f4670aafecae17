"""What a run is asked for, and the command line that asks for it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from math import ceil
from pathlib import Path
from typing import Any

from keyhole.errors import UsageError
from keyhole.recover import recover
from keyhole.recovery import Outcome, Recovery

SPENT = (Outcome.BUDGET_EXHAUSTED, Outcome.UNCERTIFIED)  # a larger budget may help
RESUMABLE = (*SPENT, Outcome.ORACLE_FAILED, Outcome.TIME_EXHAUSTED)
JOURNAL = "answers.db"  # a name for a journal, where one is suggested


@dataclass(frozen=True)
class Settings:
    """Everything that determines which queries a run asks, and where its answers go."""

    target: str
    method: str = "auto"
    budget: int | None = None
    journal: Path | None = None
    seed: int = 0
    heldout: int | None = None
    max_norm: float | None = None
    noise: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    out: Path | None = None
    max_seconds: float | None = None
    domain: Path | None = None
    concurrency: int | None = None
    workers: int = 1
    dask: str | None = None

    def command(self, budget: int | None = None) -> str:
        """The command line that asks the same queries within another budget."""
        words = ["keyhole", "recover", self.target]
        default = Settings(self.target)
        names = ["method", "journal", "seed", "heldout", "max_seconds", "max_norm", "noise", "out", "domain"]
        names += ["concurrency", "workers", "dask"]
        for name in names:
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
        if result.outcome is Outcome.TIME_EXHAUSTED:
            spent_seconds = self.max_seconds or result.stats.seconds - result.stats.oracle_seconds
            return replace(self, max_seconds=2 * max(1, ceil(spent_seconds))).command(self.budget)
        spent = self.budget is not None and result.outcome in SPENT
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
