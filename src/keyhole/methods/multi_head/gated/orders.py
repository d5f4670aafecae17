"""Which gates are whose at further last tokens, where heads have equal values.

At one last token heads of equal values may change places, and no answer there differs. Gates are affine in the last
token, so that halfway between two of them every order predicts other gates.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.gated_sum.equal_values import equal_groups, orders
from keyhole.methods.gated_sum.model import GatedSum
from keyhole.methods.multi_head.gated.queries import TokenPairs
from keyhole.methods.multi_head.gated.rows import ask_rows
from keyhole.methods.multi_head.gated.scale import Norms

# Queries halfway between two last tokens; errors take more to average out.
HALFWAY, HALFWAY_NOISY = 4, 24


def ask_orders(
    pairs: TokenPairs,
    norms: Norms,
    points: Floats,  # (groups, width)
    gates: Floats,  # (groups, heads, width)
    values: Floats,  # (heads, width, outputs)
) -> Steps[Floats]:  # -> (groups, heads, width)
    """The gates, those of heads with equal values in the order that they have at the first last token."""
    alike = list(orders(equal_groups(values)))
    if len(alike) == 1:
        return gates
    found = gates.copy()
    for number in range(1, len(points)):
        halfway = (points[0] + points[number]) / 2
        raw = yield from ask_rows(pairs, norms, "gates", halfway, HALFWAY_NOISY if pairs.noise > 0 else HALFWAY)
        bare = pairs.bare_of_one(raw)
        left = [GatedSum((gates[0] + gates[number][order]) / 2, values).rms(bare) for order in alike]
        found[number] = gates[number][alike[int(np.argmin(left))]]
    return found
