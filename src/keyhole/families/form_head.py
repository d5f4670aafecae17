"""One attention head of any score form, read at the last position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from keyhole.arrays import Array, floats
from keyhole.errors import FileError, UsageError
from keyhole.families.base import Anatomy, below, under
from keyhole.families.files import register
from keyhole.families.forms import FORMS, Form
from keyhole.families.parts import SOFTMAX, Attention, Head


@register
@dataclass(frozen=True, eq=False)
class FormHead(Head):
    """f(X) = Σ_i weight_i · x_iᵀ·value + output_bias, weights by `attention` from logits that are no bilinear form.

    `form` is one of those of `keyhole.families.forms`, its arrays are named `form.key` and so on. A head of bilinear
    logits is a `SingleHead`.
    """

    form: Form
    value: Array  # (width,) for one number per sequence, (width, outputs) for several
    output_bias: Array | None = None  # () or (outputs,), as the value has it
    attention: Attention = SOFTMAX

    family: ClassVar[str] = "form-head"

    def __post_init__(self) -> None:
        if not isinstance(self.form, Form):
            raise UsageError(f"FormHead.form must be a score form ({', '.join(FORMS)}), not {type(self.form).__name__}")
        width = self.form.width
        if not hasattr(self.value, "ndim") or self.value.ndim not in (1, 2) or self.value.shape[0] != width:
            raise UsageError(f"FormHead.value must be ({width},) or ({width}, outputs), as the form has it")
        bias, outputs = self.output_bias, tuple(self.value.shape[1:])
        if bias is not None and tuple(getattr(bias, "shape", (-1,))) != outputs:
            raise UsageError(f"FormHead.output_bias has another shape than {outputs}")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.form.width

    @property
    def words(self) -> dict[str, str]:
        """The form, and the parts of attention that are not those of a softmax."""
        return {"form": self.form.name, **super().words}

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, those of the form by their path."""
        return {**under("form", self.form.arrays()), **super().arrays()}

    @classmethod
    def of_arrays(cls, **arrays: Array) -> Self:
        """The head of arrays by name, and of parts in words."""
        name = arrays.pop("form", None)
        if name not in FORMS:
            raise FileError(f"holds the unknown score form {name!r}; known: {', '.join(FORMS)}: upgrade Keyhole")
        own = {path: arrays.pop(path) for path in list(arrays) if path.startswith("form.")}
        made = FORMS[name](**below("form-head", own, "form")["form"])
        return super().of_arrays(form=made, **arrays)

    def with_arrays(self, named: dict[str, Array]) -> Self:
        """A copy with other arrays, named as `arrays` names them."""
        own = {name.removeprefix("form."): array for name, array in named.items() if name.startswith("form.")}
        rest = {name: array for name, array in named.items() if not name.startswith("form.")}
        return super().of_arrays(form=self.form.with_arrays(own), **rest, **self.attention.words)

    def without_attention(self) -> Self:
        """A copy in which all tokens weigh the same."""
        nothing = {name: 0 * array for name, array in self.form.arrays().items()}
        return replace(self, form=self.form.with_arrays(nothing))

    @property
    def anatomy(self) -> Anatomy:
        """One head of another form."""
        return Anatomy(f"One attention head of width {self.width} with {self.form.name} logits", form=self.form)

    @property
    def counting_bound(self) -> int:
        """Queries below which such a head has more unknown numbers than answers."""
        shown = max(1, int(np.linalg.matrix_rank(floats(self.value_columns))))
        numbers = self.form.numbers + self.attention.numbers
        return -(-numbers // shown) + self.width + (0 if self.output_bias is None else 1)

    def logit_norm(self, radius: Self, logit_radius: float) -> float:
        """The norm up to which the radii leave logits of random tokens known to `logit_radius`."""
        return self.form.logit_norm(radius.form, logit_radius)
