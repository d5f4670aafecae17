"""What of heads must be known before their biased scores are read."""

from __future__ import annotations

from typing import Protocol

from keyhole.arrays import Floats


class TokenOfHeads(Protocol):
    """One token in all heads."""

    @property
    def heads(self) -> int:
        """Heads that show."""
        ...

    @property
    def logit_sizes(self) -> Floats:  # (heads,)
        """Root mean squares of logits at natural norms."""
        ...

    @property
    def scale(self) -> float:
        """The norm of tokens at which logits are of these sizes."""
        ...

    @property
    def token(self) -> Floats:  # (width,)
        """A token of about norm one."""
        ...

    @property
    def values(self) -> Floats:  # (heads, outputs)
        """Its values."""
        ...
