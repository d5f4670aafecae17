"""Other parameters with the same map: what no query can tell, shown on an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import UsageError
from keyhole.families import Family
from keyhole.gauge.compare import MakeWitness, find_gauge
from keyhole.gauge.tolerance import check_comparable

# Kinds whose parameters agree on sequences up to a length only.
LENGTHS = {"length-1-only": 1, "length-2-only": 2}


@dataclass(frozen=True)
class Witness:
    """Parameters that differ from given ones and define the same map."""

    params: Callable[[Array], Array]  # called like what they are a witness against; factors are of no family
    kind: str
    explanation: str  # what was changed, and why nobody can see it
    max_length: int | None = None  # the maps agree on sequences of up to so many tokens; None: on all


def kinds(params: Family) -> tuple[str, ...]:
    """The kinds of witnesses that these parameters have."""
    return tuple(kind for kind in _makers(params) if _make_witness(params, kind, 0) is not None)


def witness(params: Family, kind: str | None = None, seed: int = 0) -> Witness:
    """Distinct parameters with the same map; of the first kind there is, if none is named.

    Those of kind `length-2-only` and `length-1-only` agree on sequences that short and on no others, so an oracle with
    such a `max_length` cannot tell them apart.
    """
    makers = _makers(params)
    if kind is not None and kind not in makers:
        raise UsageError(f"unknown kind of witness {kind!r} for a {type(params).__name__}; known: {', '.join(makers)}")
    wanted: Sequence[str] = [kind] if kind else list(makers)
    for each in wanted:
        found = _make_witness(params, each, seed)
        if found is not None:
            return found
    raise UsageError(f"these parameters have no witness of kind {kind!r}; they have: {', '.join(kinds(params))}")


def _makers(params: Family) -> Mapping[str, MakeWitness[Family]]:
    gauge = find_gauge(params)
    several_forms = gauge is not None and params.anatomy.numbered and params.anatomy.form is not None
    if gauge is None or not gauge.witnesses or several_forms:
        raise UsageError(f"there are no witnesses for a {type(params).__name__}")
    check_comparable(params)
    if any(not head.attention.is_softmax for head in params.anatomy.heads):  # their short sequences tell otherwise
        return {kind: make for kind, make in gauge.witnesses.items() if kind not in LENGTHS}
    return gauge.witnesses


def _make_witness(params: Family, kind: str, seed: int) -> Witness | None:
    found = _makers(params)[kind](params, np.random.default_rng([seed, *kind.encode()]))
    return None if found is None else Witness(found[0], kind, found[1], LENGTHS.get(kind))
