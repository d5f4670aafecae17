"""The matrices that real layers store for their heads, and the products of them that answers depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.errors import UsageError
from keyhole.families.multi_head import MultiHead
from keyhole.families.single_head import SingleHead

# A singular value beyond the width of a head, over the largest, that is taken for an error of the recovery and cut off.
MOST_EXCESS = 1e-3


@dataclass(frozen=True, eq=False)
class Projections:
    """Query, key, value and output matrices of several heads, one after another: q = query·x + query_bias, and so on.

    The logit of token i is scale·k_i·q_N, and the answer output·(mixed values of all heads) + output_bias.
    """

    heads: int
    scale: float
    query: Floats  # (heads·head width, width)
    key: Floats  # (heads·head width, width)
    value: Floats  # (heads·head width, width)
    output: Floats  # (outputs, heads·head width)
    query_bias: Floats  # (heads·head width,)
    key_bias: Floats  # (heads·head width,); no answer depends on it
    value_bias: Floats  # (heads·head width,)
    output_bias: Floats  # (outputs,)

    @classmethod
    def of(cls, heads: int, scale: float, matrices: Sequence[Floats], biases: Sequence[Floats]) -> Projections:
        """From the four matrices and the four biases, in the order query, key, value, output."""
        query, key, value, output = matrices
        return cls(heads, scale, query, key, value, output, *biases)

    @property
    def head_width(self) -> int:
        """Numbers per head."""
        return int(self.query.shape[0]) // self.heads

    def products(self) -> MultiHead:
        """What answers depend on, head by head."""
        ends = range(0, (self.heads + 1) * self.head_width, self.head_width)
        heads = [
            SingleHead(
                self.scale * self.key[part].T @ self.query[part],
                (self.output[:, part] @ self.value[part]).T,
                self.scale * self.key[part].T @ self.query_bias[part] if np.any(self.query_bias[part]) else None,
            )
            for part in starmap(slice, pairwise(ends))
        ]
        bias = self.output @ self.value_bias + self.output_bias
        return MultiHead(heads, bias if np.any(bias) else None)


def factored(layer: SingleHead | MultiHead, heads: int, head_width: int, scale: float) -> Projections:
    """Matrices with the given products, by singular values: no answer can tell them from those of the layer itself.

    The factors of a product share its scale, keys and values have no bias, and heads that are missing are zero.
    """
    found = layer.anatomy.heads
    if layer.outputs is None:
        raise UsageError("a plain number per sequence has no output matrix: use heads of several outputs")
    if len(found) > heads:
        raise UsageError(f"{len(found)} heads do not fit in a layer of {heads}")
    width, outputs, size = layer.width, layer.outputs, heads * head_width
    matrices = [np.zeros(shape) for shape in (*[(size, width)] * 3, (outputs, size))]
    last = np.zeros(outputs) if layer.output_bias is None else floats(layer.output_bias)
    made = Projections.of(heads, scale, matrices, [*np.zeros((3, size)), last])
    for number, head in enumerate(found):
        part = slice(number * head_width, (number + 1) * head_width)
        bias = np.zeros(width) if head.score_bias is None else floats(head.score_bias)
        # The bias belongs to the score: both come through the same keys.
        keys, queries = _factors(np.column_stack([floats(head.score), bias]) / scale, head_width, f"score {number}")
        made.key[part], made.query[part], made.query_bias[part] = keys.T, queries[:, :-1], queries[:, -1]
        values, rows = _factors(floats(head.value), head_width, f"value {number}")
        made.value[part], made.output[:, part] = values.T, rows.T
    return made


def _factors(product: Floats, rank: int, what: str) -> tuple[Floats, Floats]:  # (m, n) -> (m, rank), (rank, n)
    left, sizes, right = np.linalg.svd(product, full_matrices=False)
    if sizes.size > rank and sizes[rank] > MOST_EXCESS * sizes[0]:
        raise UsageError(
            f"the matrix of {what} has rank above {rank}: its singular value {rank} is {sizes[rank] / sizes[0]:.2g} of "
            "the largest, so it does not belong to a head of this width"
        )
    root = np.zeros(rank)
    root[: sizes.size] = np.sqrt(sizes[:rank])
    first, second = np.zeros((product.shape[0], rank)), np.zeros((rank, product.shape[1]))
    first[:, : sizes.size], second[: sizes.size] = left[:, :rank], right[:rank]
    return first * root, root[:, None] * second
