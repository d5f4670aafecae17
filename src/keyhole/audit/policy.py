"""What defences must be worth: rules such as `queries < 1e6`, which fail an audit where they hold."""

from __future__ import annotations

import json
import operator
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.audit.defences import NONE, parse_defence
from keyhole.audit.protection import Protection, protections
from keyhole.audit.result import Audit
from keyhole.errors import FileError, UsageError

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
RULE = re.compile(r"\s*(?:(?P<defence>\S+?)\s*:\s+)?(?P<figure>[a-z-]+)\s*(?P<how><=|>=|<|>)\s*(?P<number>\S+)\s*")
POSSIBLE = (
    "queries, copy-queries, times, error or cost, compared by < <= > or >= with a number, for one defence where it is "
    "named: 'queries < 1e6', 'round:3+clip:1: cost > 0.01'"
)


def _queries(found: Protection, known: int | None) -> float:
    """What the attack took; where it came nowhere, what was tried, unless the defence allows no more than that."""
    return float("inf") if known is None and found.is_limit else float(known or found.tried)


FIGURES: dict[str, Callable[[Protection], float | None]] = {
    "queries": lambda found: _queries(found, found.queries),
    "copy-queries": lambda found: _queries(found, found.copy_queries),
    "times": lambda found: found.times if found.falls else float("inf"),
    "error": lambda found: found.error,
    "cost": lambda found: found.cost,
}


@dataclass(frozen=True)
class Rule:
    """One rule; a defence fails it where the comparison holds."""

    text: str
    figure: str
    how: str
    number: float
    defence: str | None  # None: every defence that was tried, or the bare box where none was

    def violations(self, audit: Audit) -> list[str]:
        """What fails, in words."""
        tried = {each.defence: each for each in protections(audit)}
        if self.defence is not None and self.defence not in tried:
            return [f"{self.text}: {self.defence} was not tried: add --defence {self.defence}"]
        names = [self.defence] if self.defence else [name for name in tried if name != NONE] or [NONE]
        found = []
        for each in (tried[name] for name in names):
            figure = FIGURES[self.figure](each)
            if figure is None or not COMPARISONS[self.how](figure, self.number):
                continue
            said = f"{each.defence} has {self.figure} {figure:,.6g}"
            if "queries" in self.figure and not each.falls:
                said = f"{each.defence} withstood the {figure:,.6g} queries that were tried: allow more --multiples"
            found.append(f"{self.text}: {said}")
        return found


def parse_rule(text: str) -> Rule:
    """The rule that a text says; UsageError names what is possible."""
    match = RULE.fullmatch(text)
    number = None if match is None or match["figure"] not in FIGURES else _number(match["number"])
    if match is None or number is None:
        raise UsageError(f"cannot read the rule {text!r}; a rule is {POSSIBLE}")
    defence = None if match["defence"] is None else parse_defence(match["defence"]).text
    return Rule(text.strip(), match["figure"], match["how"], number, defence)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_policy(path: Path) -> list[Rule]:
    """The rules of a file, TOML or JSON: `fail-if = ["queries < 1e6", "cost > 0.05"]`."""
    try:
        content = path.read_text(encoding="utf-8")
        found: Any = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except OSError as error:
        raise FileError(f"cannot read the policy {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"the policy {path} is no {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    rules = found.get("fail-if") if isinstance(found, dict) and set(found) == {"fail-if"} else None
    if not isinstance(rules, list) or not rules or not all(isinstance(rule, str) for rule in rules):
        raise FileError(f'the policy {path} holds a list of rules and nothing else: fail-if = ["queries < 1e6"]')
    return [parse_rule(rule) for rule in rules]


def violations(audit: Audit, rules: Sequence[Rule]) -> list[str]:
    """What fails of all rules, in words."""
    return [words for rule in rules for words in rule.violations(audit)]
