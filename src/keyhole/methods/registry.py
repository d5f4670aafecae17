"""The methods that `recover` knows by name, and those among them that fit a family and its noise."""

from __future__ import annotations

from collections.abc import Iterable

from keyhole.methods.alphabet.method import ALPHABET
from keyhole.methods.base import Method
from keyhole.methods.labels.method import LABELS
from keyhole.methods.low_rank.method import LOW_RANK
from keyhole.methods.multi_head.method import MULTI_HEAD
from keyhole.methods.normalised.method import NORMALISED
from keyhole.methods.one_layer.method import ONE_LAYER
from keyhole.methods.parts.method import PARTS_METHOD
from keyhole.methods.relu_net.method import NET
from keyhole.methods.residual import RESIDUAL
from keyhole.methods.robust.method import ROBUST
from keyhole.methods.sensing.method import SENSING
from keyhole.methods.single_head.method import SINGLE_HEAD
from keyhole.noise import Noise

# Of several methods for one family the first is preferred.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        SINGLE_HEAD,
        LOW_RANK,
        ROBUST,
        SENSING,
        NET,
        ONE_LAYER,
        MULTI_HEAD,
        RESIDUAL,
        LABELS,
        NORMALISED,
        PARTS_METHOD,
        ALPHABET,
    )
}


def methods_for(family: str, noise: Noise, options: Iterable[str] = ()) -> list[Method]:
    """The methods that recover a family behind such noise and have all these options, the preferred one first."""
    fitting = [
        method
        for method in METHODS.values()
        if family in method.families and method.takes(noise) and set(options) <= set(method.options)
        if not method.of_alphabet
    ]
    return sorted(fitting, key=lambda method: noise.kind not in method.takes_noise)
