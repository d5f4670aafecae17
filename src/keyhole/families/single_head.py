"""One softmax attention head read at the last position."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import ClassVar

from keyhole.arrays import Array, namespace, to_numpy
from keyhole.errors import UsageError
from keyhole.families.files import save_arrays


@dataclass(frozen=True, eq=False)
class SingleHead:
    """f(X) = Σ_i softmax_i(x_iᵀ·score·x_N + x_iᵀ·score_bias) · x_iᵀ·value + output_bias, x_N the last token.

    A key bias or any other term that is the same for every token i drops out of the softmax, and a
    scaling such as 1/√d_k belongs to `score`. Calling the head computes f on arrays of any supported
    library, in the dtype and on the device of the tokens.
    """

    score: Array  # (width, width)
    value: Array  # (width,) for one number per sequence, (width, outputs) for several
    score_bias: Array | None = None  # (width,)
    output_bias: Array | None = None  # () or (outputs,), as the value has it

    family: ClassVar[str] = "single-head"

    def __post_init__(self) -> None:
        for name in ("score", "value", "score_bias", "output_bias"):
            if getattr(self, name) is not None and not hasattr(getattr(self, name), "ndim"):
                raise UsageError(f"SingleHead.{name} must be an array, not {type(getattr(self, name)).__name__}")
        if self.score.ndim != 2 or self.value.ndim not in (1, 2) or 0 in self.score.shape + self.value.shape:
            raise UsageError(
                f"SingleHead needs a score (width, width) and a value (width,) or (width, outputs), "
                f"not {tuple(self.score.shape)} and {tuple(self.value.shape)}"
            )
        width = self.score.shape[0]
        expected: dict[str, tuple[int, ...]] = {"score": (width, width)}
        if self.value.ndim == 2:
            expected["value"] = (width, self.value.shape[1])
        else:
            expected["value"] = (width,)
        expected["score_bias"] = (width,)
        expected["output_bias"] = expected["value"][1:]
        for name, shape in expected.items():
            array = getattr(self, name)
            if array is not None and tuple(array.shape) != shape:
                raise UsageError(f"SingleHead.{name} has shape {tuple(array.shape)}, expected {shape}")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.score.shape[0])

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return int(self.value.shape[1]) if self.value.ndim == 2 else None

    def simplest(self) -> SingleHead:
        """The parameters in the smallest family that holds them: these."""
        return self

    def without_attention(self) -> SingleHead:
        """The same head with all tokens weighing the same."""
        return SingleHead(0 * self.score, self.value, None, self.output_bias)

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest value."""
        xp = namespace(self.value)
        left = xp.linalg.svd(self.value if self.outputs is not None else self.value[:, None], full_matrices=False)[0]
        return left[:, 0]

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by name."""
        named = {name: getattr(self, name) for name in ("score", "value", "score_bias", "output_bias")}
        return {name: array for name, array in named.items() if array is not None}

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        head = self.like(tokens)
        weights = head._weights(tokens, tokens[:, -1, :])
        if head.outputs is None:
            answers = namespace(tokens).vecdot(weights, tokens @ head.value)
        else:  # the mixed token first: one product with the value per sequence, not per token
            answers = (weights[:, None, :] @ tokens)[:, 0, :] @ head.value
        return answers if head.output_bias is None else answers + head.output_bias

    def at_all_positions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length[, outputs])
        """The answer with each token in turn as the last one, all tokens staying in sight of it."""
        xp = namespace(tokens)
        head = self.like(tokens)
        logits = tokens @ xp.matrix_transpose(head._keys(tokens))  # (batch, key token, last token)
        weights = xp.exp(logits - xp.max(logits, axis=1, keepdims=True))
        weights = xp.matrix_transpose(weights / xp.sum(weights, axis=1, keepdims=True))
        values = tokens @ (head.value if head.outputs is not None else head.value[:, None])
        answers = weights @ values
        answers = answers if head.outputs is not None else answers[..., 0]
        return answers if head.output_bias is None else answers + head.output_bias

    def _keys(self, last: Array) -> Array:  # (..., width) -> (..., width)
        keys = last @ self.score.T
        return keys if self.score_bias is None else keys + self.score_bias

    def _weights(self, tokens: Array, last: Array) -> Array:  # -> (batch, length)
        """Softmax weights of the tokens for the given last tokens."""
        xp = namespace(tokens)
        logits = xp.vecdot(tokens, self._keys(last)[:, None, :])
        weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
        return weights / xp.sum(weights, axis=-1, keepdims=True)

    def like(self, tokens: Array) -> SingleHead:
        """The same head with its parameters in the library, dtype and device of `tokens`."""
        xp = namespace(tokens)

        def moved(array: Array | None) -> Array | None:
            if array is None or (namespace(array) is xp and array.dtype == tokens.dtype):
                return array if array is None or array.device == tokens.device else array.to(tokens.device)
            return xp.asarray(to_numpy(array), dtype=tokens.dtype, device=tokens.device)

        return SingleHead(*(moved(a) for a in (self.score, self.value, self.score_bias, self.output_bias)))

    def error_bar(
        self,
        radius: SingleHead,  # entrywise radii of the parameters
        tokens: Array,  # (batch, length, width)
        rounding: float,  # relative error of one inner product of unit vectors
    ) -> Array:  # (batch,) or (batch, outputs)
        """First-order bar on |f_true − f_self| when the parameters are right within `radius`.

        Independent parameter errors add in quadrature; `rounding` covers the arithmetic of the oracle
        and of this prediction.
        """
        xp = namespace(tokens)
        head, wide = self.like(tokens), radius.like(tokens)
        last = tokens[:, -1, :]
        weights = head._weights(tokens, last)
        key_variance = (last**2) @ (wide.score**2).T
        if wide.score_bias is not None:
            key_variance = key_variance + wide.score_bias**2
        norms = xp.linalg.vector_norm(tokens, axis=-1)  # (batch, length)
        key_norms = xp.linalg.vector_norm(head._keys(last), axis=-1)
        logit_bar = xp.sqrt(xp.vecdot(tokens**2, key_variance[:, None, :])) + rounding * norms * key_norms[:, None]
        worst_logit_bar = xp.max(logit_bar, axis=1)  # (batch,)

        def columns(array: Array) -> Array:
            return array if head.outputs is not None else array[..., None]

        values = columns(tokens @ head.value)  # (batch, length, outputs or 1)
        value_bar = columns(xp.sqrt((tokens**2) @ (wide.value**2)))
        value_bar = value_bar + rounding * norms[:, :, None] * xp.linalg.vector_norm(columns(head.value), axis=0)
        answers = xp.sum(weights[:, :, None] * values, axis=1)
        # Moving one logit by δ moves f by weight·(value − f)·δ.
        moved = xp.abs(values - answers[:, None, :]) * worst_logit_bar[:, None, None]
        bar = xp.sum(weights[:, :, None] * (value_bar + 2 * moved), axis=1)
        bar = bar if head.outputs is not None else bar[:, 0]
        if wide.output_bias is not None:
            bar = bar + wide.output_bias
        # A small bias may be the sum of larger ones: value biases come through the output matrix.
        return bar if head.output_bias is None else bar + rounding * xp.max(xp.abs(head.output_bias))

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size` (inf when none has any)."""
        xp = namespace(self.score)
        quadratic = float(xp.linalg.vector_norm(self.score)) / self.width
        linear = 0.0
        if self.score_bias is not None:
            linear = float(xp.linalg.vector_norm(self.score_bias)) / self.width**0.5
        # quadratic·t² + linear·t = logit_size, in the form that does not cancel
        root = (linear**2 + 4 * quadratic * logit_size) ** 0.5
        return 2 * logit_size / (linear + root) if linear + root > 0 else float("inf")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        save_arrays(path, self.family, self.arrays())
