"""A net that is known as a function with radii only, as a learner of one's own may find it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, namespace
from keyhole.families.base import Family

# Slopes are taken over this part of the length of the argument.
SLOPE_STEP = 2.0**-16


@dataclass(frozen=True, eq=False)
class OpaqueNet(Family):
    """f(X) = function(x_N), x_N the last token; of radii, whatever the function's `error_bar` takes."""

    function: Family  # or anything that is called like one and has its `error_bar`
    inner: int = 0  # numbers per token

    family: ClassVar[str] = "opaque-net"

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.inner

    @property
    def outputs(self) -> int | None:
        """Numbers per answer, where the function says so."""
        return getattr(self.function, "outputs", None)

    def arrays(self) -> dict[str, Array]:
        """None: they are the function's own."""
        return {}

    def __call__(self, tokens: Array) -> Array:  # (batch, 1, width) -> (batch,) or (batch, outputs)
        """Answer single tokens."""
        return self.function(tokens)

    def like(self, tokens: Array) -> OpaqueNet:  # noqa: ARG002
        """The net itself: its arrays are not known."""
        return self

    def error_bar(self, radius: OpaqueNet, tokens: Array, rounding: float) -> Array:
        """The function's own bound."""
        return self.function.error_bar(radius.function, tokens, rounding)

    def token_norm(self, size: float) -> float:
        """The function's own norm at which something happens; 0 where it does not say."""
        own = getattr(self.function, "token_norm", None)
        return 0.0 if own is None else float(own(size))

    def propagate_radius(self, x: Array, radius: Array) -> Array:  # (n, width), (n, width) -> (n,) or (n, outputs)
        """How far answers may move when the entries of their argument move within `radius`, by differences."""
        xp, answers = namespace(x), self(x[:, None, :])
        step = SLOPE_STEP * (xp.linalg.vector_norm(x, axis=-1) + np.finfo(np.float32).tiny)  # (n,)
        total = xp.zeros_like(answers)
        unit = xp.eye(x.shape[1], dtype=x.dtype, device=x.device)
        for entry in range(x.shape[1]):
            ends = [(x + sign * step[:, None] * unit[entry, :])[:, None, :] for sign in (1.0, -1.0)]
            weight = radius[:, entry] / step
            steepest = xp.maximum(*(xp.abs(self(end) - answers) for end in ends))
            total = total + steepest * (weight if answers.ndim == 1 else weight[:, None])
        return total
