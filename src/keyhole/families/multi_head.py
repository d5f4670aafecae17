"""Several softmax attention heads read at the last position, their answers added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from os import PathLike
from typing import Any, ClassVar

from keyhole.arrays import Array, namespace
from keyhole.errors import UsageError
from keyhole.families.files import save_arrays
from keyhole.families.single_head import SingleHead

# Heads may need tokens of very different norms. Fresh sequences of small logits have them in the sharpest head, those
# of middling logits in the median one, and those of large logits in the flattest.
SMALL_LOGITS, LARGE_LOGITS = 1.0, 6.0


@dataclass(frozen=True, eq=False)
class MultiHead:
    """f(X) = Σ_h head_h(X) + output_bias: heads of one width and as many outputs, none with a bias of its own.

    Value biases of the heads add up to one constant, and output projections belong to the values, so the value of a
    head is the product of its value and output matrices.
    """

    heads: Sequence[SingleHead]
    output_bias: Array | None = None  # () or (outputs,), as the values have it

    family: ClassVar[str] = "multi-head"

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(self.heads))
        if not self.heads or not all(isinstance(head, SingleHead) for head in self.heads):
            raise UsageError("MultiHead needs a sequence of at least one SingleHead")
        shape = tuple(self.heads[0].value.shape)
        for number, head in enumerate(self.heads):
            if tuple(head.value.shape) != shape:
                raise UsageError(f"head {number} has a value of shape {tuple(head.value.shape)}, head 0 one of {shape}")
            if head.output_bias is not None:
                raise UsageError(f"head {number} has an output bias: only MultiHead itself has one, the sum of all")
        if self.output_bias is not None and tuple(self.output_bias.shape) != shape[1:]:
            raise UsageError(f"MultiHead.output_bias has shape {tuple(self.output_bias.shape)}, expected {shape[1:]}")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.heads[0].width

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return self.heads[0].outputs

    def _added(self, part: Callable[[SingleHead], Array]) -> Array:
        """The sum of something over the heads, and the output bias."""
        total = reduce(add, map(part, self.heads))
        return total if self.output_bias is None else total + self.output_bias

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        return self.like(tokens)._added(lambda head: head(tokens))

    def at_all_positions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length[, outputs])
        """The answer with each token in turn as the last one, all tokens staying in sight of it."""
        return self.like(tokens)._added(lambda head: head.at_all_positions(tokens))

    def simplest(self) -> SingleHead | MultiHead:
        """The parameters in the smallest family that holds them: one head is a SingleHead."""
        return self if len(self.heads) > 1 else replace(self.heads[0], output_bias=self.output_bias)

    def without_attention(self) -> MultiHead:
        """The same heads with all tokens weighing the same."""
        return MultiHead([head.without_attention() for head in self.heads], self.output_bias)

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest values."""
        xp = namespace(self.heads[0].value)
        values = [head.value.reshape((self.width, -1)) for head in self.heads]
        return xp.linalg.svd(xp.concat(values, axis=1), full_matrices=False)[0][:, 0]

    def like(self, tokens: Array) -> MultiHead:
        """The same heads with their parameters in the library, dtype and device of `tokens`."""
        bias = self.output_bias
        if bias is not None:  # moved as a head's is
            bias = SingleHead(self.heads[0].score, self.heads[0].value, None, bias).like(tokens).output_bias
        return MultiHead([head.like(tokens) for head in self.heads], bias)

    def error_bar(
        self,
        radius: MultiHead,  # entrywise radii of the parameters
        tokens: Array,  # (batch, length, width)
        rounding: float,  # relative error of one inner product of unit vectors
    ) -> Array:  # (batch,) or (batch, outputs)
        """First-order bar on |f_true − f_self| when the parameters are right within `radius`, head by head."""
        xp = namespace(tokens)
        bars = [head.error_bar(wide, tokens, rounding) for head, wide in zip(self.heads, radius.heads, strict=True)]
        # The sum itself is rounded too, at the size of its parts.
        bar = reduce(add, bars) + rounding * reduce(add, [xp.abs(head.like(tokens)(tokens)) for head in self.heads])
        wide = radius.like(tokens).output_bias
        own = self.like(tokens).output_bias
        bar = bar if wide is None else bar + wide
        # A small bias may be the sum of larger ones: value biases come through the output matrix.
        return bar if own is None else bar + rounding * xp.max(xp.abs(own))

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size` in one head (inf when none has any)."""
        norms = sorted(head.token_norm(logit_size) for head in self.heads)
        finite = [norm for norm in norms if norm < float("inf")] or norms
        if logit_size < SMALL_LOGITS:
            return finite[0]
        return finite[-1] if logit_size >= LARGE_LOGITS else finite[len(finite) // 2]

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by names such as heads.0.score."""
        named = {f"heads.{n}.{name}": a for n, head in enumerate(self.heads) for name, a in head.arrays().items()}
        return named if self.output_bias is None else {**named, "output_bias": self.output_bias}

    @classmethod
    def of_arrays(cls, *, output_bias: Array | None = None, **arrays: Any) -> MultiHead:
        """The heads of arrays named as `arrays` names them."""
        known = {field.name for field in fields(SingleHead)}
        parts: dict[int, dict[str, Any]] = {}
        for name, array in arrays.items():
            word, _, rest = name.partition(".")
            number, _, inner = rest.partition(".")
            if word != "heads" or not number.isdecimal() or inner not in known:
                raise TypeError(f"a multi-head has no {name!r}")
            parts.setdefault(int(number), {})[inner] = array
        if sorted(parts) != list(range(len(parts))):
            raise TypeError(f"heads are numbered {sorted(parts)}, some are missing")
        return cls([SingleHead(**parts[number]) for number in sorted(parts)], output_bias)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        save_arrays(path, self.family, self.arrays())
