"""Fewer heads: the two that are most alike become one, or the one that matters least is left out."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np

from keyhole.arrays import Array, floats
from keyhole.compress.inputs import Batches, relative_error
from keyhole.errors import UsageError
from keyhole.families.base import F

HEAD = re.compile(r"(?P<before>(?:.*\.)?heads\.)(?P<number>\d+)\.(?P<part>.+)")


def head_count(params: F) -> int:
    """How many numbered heads there are."""
    numbers = {match["number"] for match in map(HEAD.fullmatch, params.arrays()) if match}
    return len(numbers) or int(params.anatomy.attends)


def with_fewer_heads(params: F, heads: int, batches: Batches) -> tuple[F, list[str]]:
    """The parameters with so many heads, and what became of the others; each step changes the answers least."""
    if heads < 1:
        raise UsageError(f"heads must be a whole number of at least 1, not {heads}")
    true, said = batches.answers(params), []
    while head_count(params) > heads:
        count = head_count(params)
        ways = [(params, f"left out head {number + 1}", _without(params, number)) for number in range(count)]
        if count > 1:
            ways += [
                (params, f"merged heads {one + 1} and {other + 1}", _merged(params, one, other))
                for one, other in combinations(range(count), 2)
            ]
        errors = [relative_error(batches.answers(made), true) for _, _, made in ways]
        best = int(np.argmin(errors))
        params, words = ways[best][2], ways[best][1]
        said.append(f"{words} of {count}")
    return params, said


def _without(params: F, gone: int) -> F:
    """The parameters without one head; the others move up."""

    def renamed(name: str) -> str | None:
        match = HEAD.fullmatch(name)
        if match is None:
            return name
        number = int(match["number"])
        return None if number == gone else f"{match['before']}{number - (number > gone)}.{match['part']}"

    def kept(named: dict[str, Array]) -> dict[str, Array]:
        return {new: value for name, value in named.items() if (new := renamed(name)) is not None}

    return params.of_arrays(**kept(params.arrays()), **kept(params.words))


def _merged(params: F, one: int, other: int) -> F:
    """Two heads as one: the score is the mean, weighed by the sizes of the values, which add up."""
    arrays = params.arrays()
    paths = {
        match["part"]: (name, name.replace(f"heads.{one}.", f"heads.{other}.", 1))
        for name in arrays
        if (match := HEAD.fullmatch(name)) and int(match["number"]) == one
    }
    values = [floats(arrays[name]) for name in paths["value"]]
    weights = np.array([float(np.linalg.norm(value)) for value in values])
    weights = weights / weights.sum() if weights.sum() else np.full(2, 0.5)
    changed = dict(arrays)
    for part, (first, second) in paths.items():
        pair = [floats(arrays.get(name, 0 * floats(arrays[first]))) for name in (first, second)]
        changed[first] = pair[0] + pair[1] if part == "value" else weights[0] * pair[0] + weights[1] * pair[1]
    return _without(params.with_arrays(changed), other)
