"""The parity of a layer that is hard to learn, by brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from keyhole.arrays import Floats
from keyhole.targets.parity import RESERVED


def find_parity(inputs: Floats, outputs: Floats, size: int) -> tuple[tuple[int, ...], float]:
    """Brute force: the coordinates S whose parity correlates most with the outputs, and that correlation.

    All subsets are tried, which is what learning from statistics cannot avoid: C(d − 2, m) of them.
    """
    token, other = inputs[:, 0], inputs[:, 1]
    differ = token[:, 0] != other[:, 0]
    signs = outputs[differ, 0, 0]
    rows = token[differ]
    signs = signs * rows[:, 1] ** (size + 1)  # which the parity of an even number has as a factor
    subsets = list(combinations(range(RESERVED, inputs.shape[2]), size))
    scores = np.array([np.mean(signs * np.prod(rows[:, list(subset)], axis=1)) for subset in subsets])
    best = int(np.argmax(np.abs(scores)))
    return subsets[best], float(abs(scores[best]) / max(np.sqrt(np.mean(signs**2)), np.finfo(float).tiny))
