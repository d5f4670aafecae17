"""What parameters say of all queries at once: predictions, the rounding of any arithmetic, and what each part does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from keyhole.arrays import Array, Floats
from keyhole.families import Family
from keyhole.families.base import Sensitivity

# Rounding of an inner product by unknown arithmetic (another order, factors instead of their product, a fused kernel)
# over eps·|x|·|y|. One standard deviation is about a third; what is left is for products of factors, whose sizes do not
# show in the product and whose rounding is that of the parameters: four has been seen.
ARITHMETIC = 32.0


def sensitivity_of(params: Family, batches: Sequence[Floats], eps: float, looked_at: Array) -> Sensitivity:
    """The sensitivity of batches (n, length, width) as one, answered in arithmetic of relative spacing `eps`.

    Parts are for the outputs that `looked_at` numbers; those that no answer can show are left out.
    """
    found = [params.sensitivity(tokens, ARITHMETIC * eps, looked_at) for tokens in batches]
    parts = []
    for batches_of_part in zip(*(each.parts for each in found), strict=True):
        arrays: dict[str, Array] = {
            name: np.concatenate([getattr(part, name) for part in batches_of_part])
            for name in ("left", "right", "reach")
        }
        if np.any(arrays["reach"]):
            parts.append(replace(batches_of_part[0], **arrays))
    answers = np.concatenate([each.answers for each in found])
    return Sensitivity(answers, np.concatenate([each.rounding for each in found]), tuple(parts))
