"""The norms that a demo can be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.families import Family, MultiHead, NormAfter, NormBefore, Residual
from keyhole.families.norms.normalise import NORMS
from keyhole.targets.target import Choice, Knob

NORMS_STREAM = 0xDE32  # sets gains and biases apart from the heads
USUAL_EPSILON = 1e-5
NORM_KNOBS: dict[str, Knob | Choice] = {
    "norm_before": Choice(NORMS),  # tokens are normalised, with a random gain and bias
    "norm_after": Choice(NORMS),  # answers are, with the last token where residual=1
    "epsilon": Knob(float, None, 0.0),  # of the norms
}


def with_norms(layer: MultiHead, residual: bool, given: Mapping[str, Any]) -> Family:
    """The heads behind and before the norms that a text names, gains about one and biases about a third."""
    before, after, epsilon = given.get("norm_before"), given.get("norm_after"), given.get("epsilon", USUAL_EPSILON)
    if before is None and after is None:
        if "epsilon" in given:
            raise UsageError("epsilon= is a number of a norm: name norm_before= or norm_after= too, or leave it out")
        return Residual(layer) if residual else layer
    rng = np.random.default_rng([int(given["seed"]), NORMS_STREAM])

    def gain_and_bias(norm: str, width: int) -> tuple[Floats, Floats]:
        return 1 + 0.3 * rng.standard_normal(width), 0.3 * rng.standard_normal(width) * (norm == "layer")

    inner: Any = layer
    if before is not None:
        gain, bias = gain_and_bias(before, layer.width)
        inner = NormBefore.folded(layer, gain, epsilon, bias, before)
    inner = Residual(inner) if residual else inner
    if after is None:
        made: Family = inner
        return made
    if layer.outputs is None:
        raise UsageError("norm_after= normalises answers of several outputs: set outputs=")
    return NormAfter(inner, *gain_and_bias(after, layer.outputs), np.asarray(epsilon), after)
