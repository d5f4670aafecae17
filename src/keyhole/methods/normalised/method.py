"""The method `normalised`: heads behind a norm, or with a residual before one."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families import NormAfter, NormBefore, Residual
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.multi_head.method import MULTI_HEAD
from keyhole.methods.normalised.after.method import ask_before_norm
from keyhole.methods.normalised.before.method import ask_behind_norm
from keyhole.queries import Signature
from keyhole.recovery import Outcome

PLACES = ("before", "after")


def normalised(
    signature: Signature, rng: np.random.Generator, *, place: str | None = None, **parts: Any
) -> Steps[Estimate[NormBefore | Residual | NormAfter]]:
    """Heads behind a norm of their tokens (`ask_behind_norm`), or heads whose answer and last token are normalised.

    The latter is `ask_before_norm`. Without `place` the first is tried, and where it ends early the second. The
    options of `multi-head` name parts of attention that are not those of a softmax.
    """
    if place not in (None, *PLACES):
        raise UsageError(f"place must be one of {', '.join(PLACES)}, not {place!r}")
    if place != "after":
        try:
            return (yield from ask_behind_norm(signature, rng, **parts))
        except Unrecoverable as error:
            if place == "before" or error.outcome is not Outcome.WRONG_FAMILY or error.partial is not None:
                raise
            refused = str(error)
    if parts:
        raise Unrecoverable(Outcome.WRONG_FAMILY, "before a norm heads are read whose attention is a softmax")
    try:
        return (yield from ask_before_norm(signature, rng))
    except Unrecoverable as error:
        if place == "after" or error.partial is not None:
            raise
        raise Unrecoverable(error.outcome, f"{refused}; nor is a norm after it: {error}") from error


NORMALISED = Method(
    name="normalised",
    summary="softmax heads behind LayerNorm or RMSNorm, or with a residual and LayerNorm behind them",
    run=normalised,
    families=("normalised",),
    options={
        "place": "where the norm is: before attention, or after it and the residual; found if left out",
        **MULTI_HEAD.options,
    },
    last_only=True,
)
