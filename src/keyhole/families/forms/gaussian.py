"""The Gaussian kernel: tokens weigh by how far their key is from the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, floats, namespace
from keyhole.errors import UsageError
from keyhole.families.forms.base import Form, check_form


@dataclass(frozen=True, eq=False)
class Gaussian(Form):
    """xᵀ·score·g − xᵀ·gram·x, which is −|key·x − query·g|² but for what is the same for every token.

    So score is 2·keyᵀ·query and gram is keyᵀ·key, symmetric; queryᵀ·query drops out of the softmax.
    """

    score: Array  # (width, width)
    gram: Array  # (width, width) symmetric

    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        if not hasattr(self.score, "ndim") or self.score.ndim != 2 or 0 in self.score.shape:
            raise UsageError("Gaussian.score must be a matrix (width, width)")
        width = self.score.shape[0]
        check_form(self, score=(width, width), gram=(width, width))

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.score.shape[0])

    @property
    def numbers(self) -> int:
        """A matrix and a symmetric one."""
        return self.width**2 + self.width * (self.width + 1) // 2

    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits."""
        xp = namespace(tokens)
        own = xp.sum((tokens @ self.gram) * tokens, axis=-1)
        return queries @ self.score.T @ xp.matrix_transpose(tokens) - own[:, None, :]

    def radius(self, radius: Gaussian, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries add in quadrature; rounding is that of the inner products."""
        xp = namespace(tokens)
        squares = tokens**2
        variance = queries**2 @ (radius.score**2).T @ xp.matrix_transpose(squares)
        # Entries on both sides of the diagonal are one number, whose errors do not add in quadrature.
        variance = variance + 2 * xp.sum((squares @ radius.gram**2) * squares, axis=-1)[:, None, :]
        norms = xp.linalg.vector_norm(tokens, axis=-1)[:, None, :]
        keys = xp.linalg.vector_norm(queries @ self.score.T, axis=-1)[:, :, None]
        own = norms * xp.linalg.vector_norm(tokens @ self.gram, axis=-1)[:, None, :]
        return xp.sqrt(variance) + rounding * (norms * keys + own)

    def token_norm(self, logit_size: float) -> float:
        """The norm at which logits of random tokens differ by about `logit_size`; inf when they do not."""
        gram = floats(self.gram)
        size = float(np.hypot(np.linalg.norm(floats(self.score)), 2 * np.linalg.norm(gram))) / self.width
        # Tokens of different lengths differ by what the gram has on average.
        size += float(abs(np.trace(gram))) / self.width
        return (logit_size / size) ** 0.5 if size > 0 else float("inf")

    def canonical(self) -> Gaussian:
        """The gram made symmetric."""
        gram = floats(self.gram)
        return Gaussian(floats(self.score), (gram + gram.T) / 2)
