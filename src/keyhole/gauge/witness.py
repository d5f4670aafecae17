"""Other parameters with the same map: what no query can tell, shown on an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families.attention_layer import AttentionLayer
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.residual import Residual
from keyhole.families.single_head import SingleHead
from keyhole.gauge.attention_layer import as_heads, as_layer
from keyhole.gauge.tolerance import refuse_odd_numbers
from keyhole.gauge.witness_heads import HEAD_KINDS
from keyhole.gauge.witness_nets import LAYER_KINDS, NET_KINDS

# What makes a witness of some kind: (parameters, why they are the same map) of given parameters, None where it cannot.
Makers = Mapping[str, Callable[[Any, np.random.Generator], tuple[Any, str] | None]]
# Kinds whose parameters agree on sequences up to a length only.
LENGTHS = {"length-1-only": 1, "length-2-only": 2}


def _at_every_position(make: Callable[..., tuple[Any, str] | None]) -> Callable[..., tuple[Any, str] | None]:
    """What makes a witness of heads, for the layer that computes their answers at every position."""

    def made(layer: AttentionLayer, rng: np.random.Generator) -> tuple[Any, str] | None:
        found = make(as_heads(layer), rng)
        return None if found is None else (as_layer(found[0]), found[1])

    return made


def _beside_the_last_token(make: Callable[..., tuple[Any, str] | None]) -> Callable[..., tuple[Any, str] | None]:
    """What makes a witness of heads, for those with a residual."""

    def made(layer: Residual, rng: np.random.Generator) -> tuple[Any, str] | None:
        found = make(layer.attention, rng)
        return None if found is None else (Residual(found[0]), found[1])

    return made


KINDS: dict[type, Makers] = {
    SingleHead: HEAD_KINDS,
    MultiHead: HEAD_KINDS,
    ReluNet: NET_KINDS,
    OneLayer: LAYER_KINDS,
    # Its factors have no container of their own.
    AttentionLayer: {kind: _at_every_position(make) for kind, make in HEAD_KINDS.items() if kind != "factor gauge"},
    Residual: {kind: _beside_the_last_token(make) for kind, make in HEAD_KINDS.items() if kind != "factor gauge"},
}


@dataclass(frozen=True)
class Witness:
    """Parameters that differ from given ones and define the same map."""

    params: Any  # callable like what they are a witness against
    kind: str
    explanation: str  # what was changed, and why nobody can see it
    max_length: int | None = None  # the maps agree on sequences of up to so many tokens; None: on all


def kinds(params: Any) -> tuple[str, ...]:
    """The kinds of witnesses that these parameters have."""
    return tuple(kind for kind in _makers(params) if _made(params, kind, 0) is not None)


def witness(params: Any, kind: str | None = None, seed: int = 0) -> Witness:
    """Distinct parameters with the same map; of the first kind there is, if none is named.

    Those of kind `length-2-only` and `length-1-only` agree on sequences that short and on no others, so an oracle with
    such a `max_length` cannot tell them apart.
    """
    makers = _makers(params)
    if kind is not None and kind not in makers:
        raise UsageError(f"unknown kind of witness {kind!r} for a {type(params).__name__}; known: {', '.join(makers)}")
    wanted: Sequence[str] = [kind] if kind else list(makers)
    for each in wanted:
        found = _made(params, each, seed)
        if found is not None:
            return found
    raise UsageError(f"these parameters have no witness of kind {kind!r}; they have: {', '.join(kinds(params))}")


def _makers(params: Any) -> Makers:
    found = next((KINDS[kind] for kind in type(params).__mro__ if kind in KINDS), None)
    if found is None:
        raise UsageError(f"there are no witnesses for a {type(params).__name__}")
    refuse_odd_numbers(params)
    return found


def _made(params: Any, kind: str, seed: int) -> Witness | None:
    found = _makers(params)[kind](params, np.random.default_rng([seed, *kind.encode()]))
    return None if found is None else Witness(found[0], kind, found[1], LENGTHS.get(kind))
