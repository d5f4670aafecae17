"""The parts of attention that a demo can be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families.parts import PARTS, SIGMOID_BESIDE, Attention, part_names
from keyhole.targets.target import Choice, Knob

LARGEST_ENERGY = 500.0
PART_KNOBS: dict[str, Knob | Choice] = {
    "link": Choice(tuple(name for name in part_names("link") if name != "unknown")),
    "normaliser": Choice(tuple(part_names("normaliser"))),
    "position_bias": Choice(tuple(part_names("position_bias"))),
    "length_law": Choice(tuple(part_names("length_law"))),
    "cap": Knob(float, None, 1e-6),  # of a softcap
    "bias": Knob(float, None, -LARGEST_ENERGY, LARGEST_ENERGY),  # of a sigmoid
    "energy": Knob(float, None, -LARGEST_ENERGY, LARGEST_ENERGY),  # of a sink
    "k": Knob(int, None, 1),  # tokens that top-k keeps
    "slope": Knob(float, None, -LARGEST_ENERGY, LARGEST_ENERGY),  # of ALiBi
    "distances": Knob(int, None, 1, 8192),  # entries of a random table by distance
    "window": Knob(int, None, 1),  # tokens in sight
    "lengths": Knob(int, None, 1, 8192),  # entries of a random table by length
}
# The numbers of parts, by kind and name: the knob, the field, and the number where none is given.
NUMBERS: dict[tuple[str, str], tuple[str, str, float]] = {
    ("link", "softcap"): ("cap", "cap", 30.0),
    ("link", "sigmoid"): ("bias", "bias", 0.0),
    ("normaliser", "sink"): ("energy", "energy", 0.5),
    ("normaliser", "top-k"): ("k", "k", 4),
    ("position_bias", "alibi"): ("slope", "slope", 0.3),
    ("position_bias", "table"): ("distances", "table", 8),
    ("position_bias", "window"): ("window", "width", 8),
    ("length_law", "table"): ("lengths", "table", 8),
}


def attention_of(given: Mapping[str, Any], rng: np.random.Generator) -> Attention:
    """The parts that the text of a demo names; UsageError for a number of a part that it does not name."""
    made, used = {}, set()
    for kind in ("link", "normaliser", "position_bias", "length_law"):
        name = given.get(kind)
        if name is None:
            continue
        own: dict[str, Any] = {}
        if (kind, name) in NUMBERS:
            knob, field, usual = NUMBERS[kind, name]
            number = given.get(knob, usual)
            used.add(knob)
            if field == "table":  # energies of about one, factors around one
                drawn = rng.standard_normal(int(number))
                own[field] = drawn if kind == "position_bias" else np.exp(0.3 * drawn)
            else:
                own[field] = number
        made[kind] = PARTS[kind, name](**own)
    owners = {knob: f"{kind}={name}" for (kind, name), (knob, _, _) in NUMBERS.items()}
    for knob, owner in owners.items():
        if knob in given and knob not in used:
            raise UsageError(f"{knob}= is a number of {owner}: name that too, or leave {knob}= out")
    if made.get("link") is not None and given["link"] == "sigmoid" and "normaliser" not in given:
        made["normaliser"] = PARTS["normaliser", "none"]()
    attention = Attention(**made)
    if attention.link.name == "sigmoid" and attention.normaliser.name not in SIGMOID_BESIDE:
        names = " or ".join(SIGMOID_BESIDE)
        raise UsageError(f"sigmoid weights take the normaliser {names}, not {attention.normaliser.name!r}")
    attention.check()
    return attention
