"""The form that starts a run: its fields, and what is wrong with what was written into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.errors import UsageError
from keyhole.targets import open_target
from keyhole.targets.demos import DEMOS, demo_text
from keyhole.targets.target import Knob

# Of a page nobody waits for: larger oracles are for the command line.
MOST = {"width": 256, "rank": 256, "heads": 16, "neurons": 256, "outputs": 256, "seed": 2**53}
SEED = Knob(int, 0, 0, MOST["seed"])
RATE = Knob(float, 400, 0.1, 1e6)
BUDGET = Knob(int, None, 0, 10**9)
SERVED = "served"  # the family that stands for the oracle of `keyhole serve TARGET --ui`
LONGEST = 64  # characters of a number
LABELS = {
    "width": ("Width d", "numbers per token"),
    "rank": ("Rank", "empty: full"),
    "heads": ("Heads", "added up"),
    "neurons": ("Neurons", "of the hidden layer"),
    "outputs": ("Outputs", "empty: one number"),
    "noise": ("Noise", "a deviation; empty: none"),
    "seed": ("Seed", "of all random numbers"),
    "budget": ("Budget", "queries; empty: no limit"),
    "rate": ("Answers per second", "as if from afar: slow enough to watch"),
}
FAMILIES = {
    "single-head": "One attention head",
    "multi-head": "Several heads",
    "relu-net": "A net of one hidden layer",
    "one-layer": "A head and a net behind it",
}
SMALLER = {"single-head": {"width": 24}, "multi-head": {"width": 8, "heads": 3}}  # defaults that are quick to watch


class InvalidForm(UsageError):
    """Fields that cannot be meant, each with the reason."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in fields.items()))
        self.fields = dict(fields)


@dataclass(frozen=True)
class DemoRequest:
    """What a form asks for."""

    target: str
    label: str
    seed: int
    budget: int | None
    rate: float  # answers per second
    method: str = "auto"

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> DemoRequest:
        """What was written down of one; ValueError, KeyError or TypeError where it cannot have been."""
        found = cls(*(about[name] for name in ("target", "label", "seed", "budget", "rate", "method")))
        for name in ("target", "label", "method"):
            if not isinstance(about[name], str):
                raise TypeError(f"{name} is no text")
        for name, knob in (("seed", SEED), ("budget", BUDGET), ("rate", RATE)):
            if about[name] is None and name != "budget":
                raise ValueError(f"{name} is missing")
            _number(about[name], knob)
        return found


def fields_of(family: str) -> dict[str, Knob]:
    """The fields of a family, those that all families share last."""
    shared = {"seed": SEED, "budget": BUDGET, "rate": RATE}
    if family.startswith(SERVED):
        return shared
    knobs, _ = DEMOS[family]
    own: dict[str, Knob] = {}
    for name in ("width", "rank", "heads", "neurons", "outputs", "noise"):
        if name in knobs:
            knob = knobs[name]
            default = SMALLER.get(family, {}).get(name, knob.default)
            own[name] = Knob(knob.kind, default, knob.least, min(knob.most, MOST.get(name, 1e9)))
    return {**own, **shared}


@dataclass(frozen=True)
class ServedTarget:
    """An oracle of `keyhole serve TARGET --ui --box TARGET`: named at the command line, never by a page."""

    target: str
    label: str


def _named(served: Sequence[ServedTarget]) -> dict[str, ServedTarget]:
    """Oracles of the command line by what forms call them."""
    return {SERVED if number == 0 else f"{SERVED}-{number + 1}": each for number, each in enumerate(served)}


def describe_form(served: Sequence[ServedTarget] = ()) -> list[dict[str, Any]]:
    """Families and fields as plain data, for the page to build its form of."""
    own = {name: f"{each.label[:1].upper()}{each.label[1:]}" for name, each in _named(served).items()}
    families = {**own, **FAMILIES}
    return [
        {"name": family, "label": label, "fields": [_field(name, knob) for name, knob in fields_of(family).items()]}
        for family, label in families.items()
    ]


def _field(name: str, knob: Knob) -> dict[str, Any]:
    label, hint = LABELS[name]
    default = None if knob.default is None else knob.kind(knob.default)
    return {
        "name": name,
        "label": label,
        "hint": hint,
        "whole": knob.kind is int,
        "least": knob.least,
        "most": None if knob.most == float("inf") else knob.most,
        "default": default,
    }


def read_form(given: Any, served: Sequence[ServedTarget] = ()) -> DemoRequest:
    """What the form asks for; InvalidForm says what is wrong, field by field."""
    if not isinstance(given, Mapping):
        raise InvalidForm({"family": "the form is an object of fields"})
    family = given.get("family")
    own = _named(served)
    possible = [*own, *FAMILIES]
    if family not in possible:
        raise InvalidForm({"family": f"one of {', '.join(possible)}"})
    knobs = fields_of(family)
    wrong = {str(name)[:40]: f"{family} has no such field" for name in given if name not in knobs and name != "family"}
    numbers: dict[str, float | None] = {}
    for name, knob in knobs.items():
        try:
            numbers[name] = _number(given.get(name), knob)
        except ValueError as error:
            wrong[name] = str(error)
    rank, width = numbers.get("rank"), numbers.get("width")
    if rank is not None and width is not None and rank > width:
        wrong["rank"] = f"at most the width, {width:g}"
    if wrong:
        raise InvalidForm(wrong)
    budget, rate, seed = numbers.pop("budget"), numbers.pop("rate"), int(numbers["seed"] or 0)
    budget = None if budget is None else int(budget)
    if family in own:
        return DemoRequest(own[family].target, own[family].label, seed, budget, rate or 1.0)
    target = open_target(demo_text(family, numbers))
    target.oracle.close()
    # Behind noise `auto` takes an oracle for a head, and cannot find out that it is none.
    method = family if numbers.get("noise") and family != "single-head" else "auto"
    return DemoRequest(target.text, target.label, seed, budget, rate or 1.0, method)


def _number(given: Any, knob: Knob) -> float | None:
    """The number in a field, its default where it is empty; ValueError with the reason."""
    meant = f"{'a whole number' if knob.kind is int else 'a number'} from {knob.least:g} to {knob.most:,.15g}"
    if given is None or (isinstance(given, str) and not given.strip()):
        return knob.default
    if isinstance(given, bool) or not isinstance(given, str | int | float) or len(str(given)) > LONGEST:
        raise ValueError(meant)
    try:
        number = knob.kind(str(given).strip())
    except (ValueError, OverflowError):
        raise ValueError(meant) from None
    if not knob.least <= number <= knob.most:
        raise ValueError(meant)
    return number
