"""What a finite alphabet of tokens shows of a head, and what equals what there.

Of tokens e_1, …, e_m answers depend on the values of single tokens and on the logits (e_a − e_b)ᵀ(W·e_b + c). So W
shows on D × span E only, with D the span of all differences. Where some n has e_a·n = 1 for all tokens, as where they
are linearly independent, a score bias c is the same as c·nᵀ added to W, and an output bias as its n-fold added to the
value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Floats, floats, like
from keyhole.families.parts import SOFTMAX
from keyhole.families.single_head import SingleHead
from keyhole.numerics.svd import svd


@dataclass(frozen=True)
class AlphabetSpan:
    """Directions that the tokens of an alphabet have, and that they differ by."""

    rows: Floats  # (m, width)
    span: Floats  # (width, r) orthonormal
    differences: Floats  # (width, r₀) orthonormal
    unit: Floats | None  # (width,) whose inner product with every token is one, if there is such a vector

    @classmethod
    def of(cls, alphabet: Array) -> AlphabetSpan:
        """The spans, up to the rounding of the numbers."""
        rows = floats(alphabet)
        span, differences = _directions(rows), _directions(rows - np.mean(rows, axis=0))
        if span.shape[1] == differences.shape[1]:
            return cls(rows, span, differences, None)
        inner = rows @ span
        unit = span @ np.linalg.lstsq(inner, np.ones(len(rows)), rcond=None)[0]
        return cls(rows, span, differences, unit)

    @property
    def numbers(self) -> tuple[int, int]:
        """How many directions tokens have and differ by: r and r₀."""
        return self.span.shape[1], self.differences.shape[1]

    def canonical(self, head: SingleHead) -> SingleHead:
        """The head of smallest norm that answers all sequences of the tokens alike."""
        score, value = floats(head.score), floats(head.value)
        bias = None if head.score_bias is None else floats(head.score_bias)
        constant = None if head.output_bias is None else floats(head.output_bias)
        if self.unit is not None:
            score = score if bias is None else score + np.outer(bias, self.unit)
            value = value if constant is None else value + np.multiply.outer(self.unit, constant)
            bias = constant = None
        onto, along = self.span @ self.span.T, self.differences @ self.differences.T
        made = (along @ score @ onto, onto @ value, None if bias is None else along @ bias, constant)
        return replace(
            head,
            **{
                name: None if part is None else like(part, head.score)
                for name, part in zip(("score", "value", "score_bias", "output_bias"), made, strict=True)
            },
            attention=SOFTMAX,
        )


def on_alphabet(head: SingleHead, alphabet: Array) -> SingleHead:
    """The part of a softmax head that sequences of these tokens (m, width) show: the same for heads that answer alike.

    The method `alphabet` recovers this, so that `keyhole.distance` to it is an error.
    """
    return AlphabetSpan.of(alphabet).canonical(head)


def _directions(rows: Floats) -> Floats:  # (m, width) -> (width, rank)
    """Orthonormal directions of the rows, those of rounding left out."""
    _, sizes, right = svd(rows)
    least = np.finfo(np.float64).eps * max(rows.shape) * max(float(sizes[0]), 1e-300)
    return np.asarray(right[: int(np.sum(sizes > least))].T)
