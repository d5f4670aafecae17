"""What comparing parameters needs of numbers: relative distances, the rounding of a dtype."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, to_numpy
from keyhole.errors import UsageError
from keyhole.families import Family

# Parameters that agree this many relative spacings of their dtype are the same: the rounding of a few products of
# well-conditioned matrices. Larger, and parameters that differ are called the same; smaller, and a change of factors
# that changes nothing is called a difference.
SAME_SPACINGS = 128.0


def relative(first: Floats, second: Floats) -> float:
    """Relative Frobenius distance; 0 for two zeros."""
    scale = max(np.max(np.abs(first), initial=0.0), np.max(np.abs(second), initial=0.0))
    if scale == 0.0:
        return 0.0
    # Divided first, so that squares neither overflow nor vanish.
    first, second = first / scale, second / scale
    return float(np.linalg.norm(first - second) / max(np.linalg.norm(first), np.linalg.norm(second)))


def size(array: Floats) -> float:
    """Frobenius norm, also where squares overflow or vanish."""
    scale = float(np.max(np.abs(array), initial=0.0))
    return scale * float(np.linalg.norm(array / scale)) if scale else 0.0


def rounding_of(*params: Family) -> float:
    """How far parameters may differ, relatively, by the rounding of their dtype alone; the coarsest counts."""
    kinds = {to_numpy(array).dtype for each in params for array in each.arrays().values()}
    spacings = [float(np.finfo(kind).eps) for kind in kinds if kind.kind == "f"]
    return SAME_SPACINGS * max(spacings, default=float(np.finfo(np.float64).eps))


def check_shapes(first: Family, second: Family, what: str) -> None:
    """UsageError where parameters take or give other numbers of numbers; `what` they are."""
    if first.width != second.width or first.outputs != second.outputs:
        raise UsageError(
            f"cannot compare {what} of width {first.width} with outputs {first.outputs} "
            f"and width {second.width} with outputs {second.outputs}"
        )


def refuse_odd_numbers(*params: Family) -> None:
    """UsageError for parameters that define no map: nan, inf or complex numbers."""
    for each in params:
        for name, array in each.arrays().items():
            numbers = to_numpy(array)
            if np.iscomplexobj(numbers):
                raise UsageError(f"{type(each).__name__}.{name} holds complex numbers: parameters are real")
            if not np.all(np.isfinite(numbers.astype(np.float64))):
                raise UsageError(f"{type(each).__name__}.{name} holds nan or inf: such parameters define no map")


def check_comparable(*params: Family) -> None:
    """UsageError for parameters that define no map, or for several heads, wrapped up, that are no plain softmax.

    Of heads of other parts by themselves the gauge is that of their scores and values.
    """
    refuse_odd_numbers(*params)
    for each in params:
        inner = each.anatomy
        several = (len(inner.heads) > 1 and each.family != "multi-head") or inner.behind
        if several and any(not head.attention.is_softmax for head in inner.heads):
            raise UsageError(f"cannot compare a {type(each).__name__} whose attention is no plain softmax")
