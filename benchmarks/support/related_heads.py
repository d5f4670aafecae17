"""Several random heads, two or all of which are related."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keyhole import MultiHead, SingleHead


def related_heads(
    kind: str, heads: int, width: int, seed: int | Sequence[int], outputs: int | None = None
) -> MultiHead:
    """Gaussian heads, related as the first word of `kind` says; behind it may stand a number."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((heads, width, width)) / width**0.5
    values = rng.standard_normal((heads, width, *(() if outputs is None else (outputs,))))
    biases = [None] * heads
    word, _, number = kind.partition(" ")
    if word == "biases":
        biases = list(0.5 * rng.standard_normal((heads, width)))
    elif word == "double":
        scores[1] = 2 * scores[0]
    elif word in ("opposite", "mirror"):
        scores[1] = -scores[0]
    elif word == "factor":
        scores = np.einsum("hi,j->hij", rng.standard_normal((heads, width)), rng.standard_normal(width)) / width**0.5
    elif word == "near":
        scores[1] = scores[0] + float(number) * scores[1]
    elif word == "quiet":
        values[1] *= float(number)
    elif word == "cancel":
        values[1] = -values[0]
    if word in ("equal", "mirror"):
        values[1] = values[0]
    output = np.asarray(rng.standard_normal()) if word == "biases" else None
    return MultiHead([SingleHead(*each) for each in zip(scores, values, biases, strict=True)], output)
