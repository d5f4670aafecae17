"""Score forms: the protocol of all, and the bilinear form of a plain head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

from keyhole.arrays import Array, namespace, row_norms


class ScoreForm(Protocol):
    """The logit of every token for one query per sequence (batch, width), or for several (batch, queries, width)."""

    def logits(self, tokens: Array, queries: Array) -> Array:  # -> (batch, length) or (batch, queries, length)
        """The logits."""
        ...

    def radius(self, radius: Self, tokens: Array, queries: Array, rounding: float) -> Array:
        """First-order bound on the error of each logit, (batch, queries, length), from entrywise radii."""
        ...

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""
        ...


@dataclass(frozen=True, eq=False)
class Bilinear:
    """The form xᵀ·score·g + xᵀ·bias of token x and query g."""

    score: Array  # (width, width)
    bias: Array | None = None  # (width,)

    @cached_property
    def _norms(self) -> tuple[float, float]:
        """Of score and bias."""
        xp = namespace(self.score)
        bias = 0.0 if self.bias is None else float(xp.linalg.vector_norm(self.bias))
        return float(xp.linalg.vector_norm(self.score)), bias

    def keys(self, queries: Array) -> Array:  # (..., width) -> (..., width)
        """score·g + bias: what a token is multiplied by."""
        keys = _rows_times(queries, self.score.T)
        return keys if self.bias is None else keys + self.bias

    def logits(self, tokens: Array, queries: Array) -> Array:  # -> (batch, length) or (batch, queries, length)
        """The logits."""
        xp = namespace(tokens)
        keys = self.keys(queries)
        if keys.ndim == 2:
            return xp.vecdot(tokens, keys[:, None, :])
        return xp.matrix_transpose(tokens @ xp.matrix_transpose(keys))

    def radius(self, radius: Bilinear, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries add in quadrature; rounding is that of the inner product with the key."""
        xp = namespace(tokens)
        variance = _rows_times(queries**2, (radius.score**2).T)
        if radius.bias is not None:
            variance = variance + radius.bias**2
        radii = xp.sqrt(xp.matrix_transpose(tokens**2 @ xp.matrix_transpose(variance)))
        if rounding == 0:
            return radii
        norms, key_norms = row_norms(tokens)[:, None, :], row_norms(self.keys(queries))[:, :, None]
        return radii + rounding * norms * key_norms

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""
        width = self.score.shape[0]
        quadratic, linear = self._norms[0] / width, self._norms[1] / width**0.5
        # quadratic·t² + linear·t = logit_size, in the form that does not cancel
        root = (linear**2 + 4 * quadratic * logit_size) ** 0.5
        return 2 * logit_size / (linear + root) if linear + root > 0 else float("inf")


def _rows_times(rows: Array, matrix: Array) -> Array:  # (..., width), (width, n) -> (..., n)
    """One product, where a library would make one for every sequence."""
    return (rows.reshape(-1, rows.shape[-1]) @ matrix).reshape(*rows.shape[:-1], matrix.shape[1])
