"""Several attention heads read at the last position, their answers added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, like, namespace
from keyhole.errors import UsageError
from keyhole.families.base import Anatomy, Family, Sensitivity, under
from keyhole.families.files import register
from keyhole.families.form_head import FormHead
from keyhole.families.sensitivity import sensitivity_of_heads
from keyhole.families.single_head import SingleHead

# Heads may need tokens of very different norms. Held-out sequences of small logits have them in the sharpest head,
# those of middling logits in the median one, and those of large logits in the flattest.
SMALL_LOGITS, LARGE_LOGITS = 1.0, 6.0

KINDS = (SingleHead, FormHead)


@register
@dataclass(frozen=True, eq=False)
class MultiHead(Family):
    """f(X) = Σ_h head_h(X) + output_bias: heads of one width and as many outputs, none with a bias of its own.

    All are of class `SingleHead`, or all of class `FormHead`, whose logits are no bilinear form of two tokens.

    Value biases of the heads add up to one constant, and output projections belong to the values, so the value of a
    head is the product of its value and output matrices.
    """

    heads: Sequence[SingleHead]  # or FormHeads
    output_bias: Array | None = None  # () or (outputs,), as the values have it

    family: ClassVar[str] = "multi-head"

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(self.heads))
        if not self.heads or not any(all(isinstance(each, kind) for each in self.heads) for kind in KINDS):
            raise UsageError("MultiHead needs a sequence of at least one SingleHead, or of FormHeads")
        shape = tuple(self.heads[0].value.shape)
        for number, head in enumerate(self.heads):
            if tuple(head.value.shape) != shape:
                raise UsageError(f"head {number} has a value of shape {tuple(head.value.shape)}, head 0 one of {shape}")
            if head.output_bias is not None:
                raise UsageError(f"head {number} has an output bias: only MultiHead itself has one, the sum of all")
        if self.output_bias is not None and tuple(self.output_bias.shape) != shape[1:]:
            raise UsageError(f"MultiHead.output_bias has shape {tuple(self.output_bias.shape)}, expected {shape[1:]}")

    @classmethod
    def of(cls, params: Family) -> MultiHead:
        """One head or several as several; UsageError for anything else."""
        if isinstance(params, SingleHead):
            return cls([replace(params, output_bias=None)], params.output_bias)
        if not isinstance(params, MultiHead):
            raise UsageError(f"the method found a {type(params).__name__}, no heads: use the method multi-head")
        return params

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.heads[0].width

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return self.heads[0].outputs

    def _sum_over_heads(self, part: Callable[[SingleHead], Array]) -> Array:
        """The sum of something over the heads, and the output bias."""
        total = reduce(add, map(part, self.heads))
        return total if self.output_bias is None else total + like(self.output_bias, total)

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        return self._sum_over_heads(lambda head: head(tokens))

    def at_all_positions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length[, outputs])
        """The answer with each token in turn as the last one, all tokens staying in sight of it."""
        return self._sum_over_heads(lambda head: head.at_all_positions(tokens))

    @property
    def has_forms(self) -> bool:
        """Whether logits are no bilinear forms, heads being FormHeads."""
        return isinstance(self.heads[0], FormHead)

    def check(self) -> None:
        """UsageError for constants of a head out of their range."""
        for head in self.heads:
            head.check()

    def simplest(self) -> SingleHead | MultiHead:
        """The parameters in the smallest family that holds them: one head is a SingleHead."""
        return self if len(self.heads) > 1 else replace(self.heads[0], output_bias=self.output_bias)

    def without_attention(self) -> MultiHead:
        """A copy in which all tokens weigh the same."""
        return MultiHead([head.without_attention() for head in self.heads], self.output_bias)

    def padded(self, absent: Array) -> MultiHead | None:  # (batch, length)
        """The heads with no weight on what pads sequences; None where one of them counts tokens or places."""
        heads = [padded for head in self.heads if (padded := head.padded(absent)) is not None]
        return MultiHead(heads, self.output_bias) if len(heads) == len(self.heads) else None

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest values."""
        xp = namespace(self.heads[0].value)
        values = [head.value_columns for head in self.heads]
        return xp.linalg.svd(xp.concat(values, axis=1), full_matrices=False)[0][:, 0]

    @property
    def constant(self) -> Array | None:
        """The output bias."""
        return self.output_bias

    def error_bar(self, radius: MultiHead, tokens: Array, rounding: float) -> Array:  # -> (batch,) or (batch, outputs)
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`, head by head."""
        xp = namespace(tokens)
        bounds = [head.error_bar(wide, tokens, rounding) for head, wide in zip(self.heads, radius.heads, strict=True)]
        # The sum itself is rounded too, at the size of its parts.
        bound = reduce(add, bounds) + rounding * reduce(add, [xp.abs(head(tokens)) for head in self.heads])
        wide, own = radius.output_bias, self.output_bias
        bound = bound if wide is None else bound + like(wide, tokens)
        # A small bias may be the sum of larger ones: value biases come through the output matrix.
        return bound if own is None else bound + rounding * xp.max(xp.abs(like(own, tokens)))

    def deviation(self, errors: MultiHead, tokens: Array) -> Array:  # (batch, length, width) -> as answers
        """Standard deviation of predictions whose numbers err independently by these standard errors."""
        if self.has_forms or not all(head.attention.is_softmax for head in self.heads):
            return super().deviation(errors, tokens)
        pairs = zip(self.heads, errors.heads, strict=True)
        total = reduce(add, [head.variance(own, tokens) for head, own in pairs])
        if errors.output_bias is not None:
            total = total + like(errors.output_bias, tokens) ** 2
        return namespace(tokens).sqrt(total if self.outputs is not None else total[:, 0])

    def effects(self, change: MultiHead, tokens: Array) -> Iterator[tuple[str, Array]]:
        """How far a change of each part of each head, and of the output bias, moves the answers."""
        for number, (head, own) in enumerate(zip(self.heads, change.heads, strict=True), 1):
            yield from ((f"{name} of head {number}", effect) for name, effect in head.effects(own, tokens))
        if self.output_bias is not None and change.output_bias is not None:
            flat = 0 * self.like(tokens).heads[0](tokens)
            yield "output bias", flat + change.like(tokens).output_bias

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size` in one head; inf when none has any."""
        norms = sorted(head.token_norm(size) for head in self.heads)
        finite = [norm for norm in norms if norm < float("inf")] or norms
        if size < SMALL_LOGITS:
            return finite[0]
        return finite[-1] if size >= LARGE_LOGITS else finite[len(finite) // 2]

    def logit_norm(self, radius: MultiHead, logit_radius: float) -> float:
        """The norm up to which the radii leave logits of random tokens of all heads known to `logit_radius`."""
        pairs = zip(self.heads, radius.heads, strict=True)
        return min(head.logit_norm(wide, logit_radius) for head, wide in pairs)

    def matrices(self) -> dict[str, Array]:
        """The matrices that people look at: those of all heads by number."""
        if not self.has_forms:
            return super().matrices()
        return {
            f"{name} of head {number}": matrix
            for number, head in enumerate(self.heads)
            for name, matrix in head.matrices().items()
        }

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by names such as heads.0.score."""
        named = self._by_path([head.arrays() for head in self.heads])
        return named if self.output_bias is None else {**named, "output_bias": self.output_bias}

    @property
    def words(self) -> dict[str, str]:
        """The parts of attention that are not those of a softmax, by head."""
        return self._by_path([head.words for head in self.heads])

    @staticmethod
    def _by_path(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
        return {path: each for n, part in enumerate(parts) for path, each in under(f"heads.{n}", part).items()}

    @classmethod
    def of_arrays(cls, *, output_bias: Array | None = None, **arrays: Array) -> MultiHead:
        """The heads of arrays named by their path."""
        parts: dict[int, dict[str, Array]] = {}
        for name, array in arrays.items():
            word, _, rest = name.partition(".")
            number, _, inner = rest.partition(".")
            if word != "heads" or not number.isdecimal() or not inner:
                raise TypeError(f"a multi-head has no {name!r}")
            parts.setdefault(int(number), {})[inner] = array
        if sorted(parts) != list(range(len(parts))):
            raise TypeError(f"heads are numbered {sorted(parts)}, some are missing")
        kinds = [FormHead if "form" in parts[number] else SingleHead for number in sorted(parts)]
        heads: list[Any] = [kind.of_arrays(**parts[number]) for number, kind in enumerate(kinds)]
        return cls(heads, output_bias)

    @property
    def anatomy(self) -> Anatomy:
        """Heads by number; of other forms than the bilinear one the form of the first."""
        if self.has_forms:
            title = f"{len(self.heads)} attention heads of width {self.width} with {self.words['heads.0.form']} logits"
            return Anatomy(title, numbered=True, form=self.heads[0].anatomy.form)
        return Anatomy(f"{len(self.heads)} attention heads of width {self.width}", tuple(self.heads), numbered=True)

    @property
    def counting_bound(self) -> int:
        """The fewest queries whose answers hold as many numbers as heads of these ranks have."""
        if self.has_forms:
            numbers = sum(head.anatomy.form.numbers for head in self.heads if head.anatomy.form is not None)
            matrices = [head.value_columns for head in self.heads]
        else:
            matrices = [matrix for head in self.heads for matrix in (head.score, head.value_columns)]
            numbers = sum(int(array.shape[0]) for head in self.heads if (array := head.score_bias) is not None)
        numbers += sum(head.attention.numbers for head in self.heads)
        for matrix in map(floats, matrices):
            rank = int(np.linalg.matrix_rank(matrix))
            numbers += rank * (sum(matrix.shape) - rank)
        return -(-numbers // (self.outputs or 1)) + (0 if self.output_bias is None else 1)

    def sensitivity(self, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
        """Predictions, their rounding, and the first-order effect of every array of heads of bilinear logits."""
        if self.has_forms:
            return super().sensitivity(tokens, unit, looked_at)
        return sensitivity_of_heads(self.heads, self.output_bias, tokens, unit, looked_at, numbered=True)
