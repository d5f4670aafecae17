"""What a family cannot reveal, and comparison of parameters modulo that. Nothing else compares parameters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Array, to_numpy
from keyhole.errors import UsageError
from keyhole.model.head import SingleHead


def distance(first: SingleHead, second: SingleHead) -> float:
    """Relative distance of two parameter sets modulo what no query can tell apart; 0 for the same map.

    The larger of two relative Frobenius distances: that of the affine map into logits (score and
    score_bias, a missing bias being zero) and that of the affine map into values (value and
    output_bias). A head whose value is zero answers the same whatever its logits, so two such
    heads differ by their output alone.
    """
    if first.width != second.width or first.outputs != second.outputs:
        raise UsageError(
            f"cannot compare heads of width {first.width} with outputs {first.outputs} "
            f"and width {second.width} with outputs {second.outputs}"
        )
    values = _relative(_joined(first.value, first.output_bias), _joined(second.value, second.output_bias))
    if _vanishes(first.value) and _vanishes(second.value):
        return values
    logits = _relative(_joined(first.score, first.score_bias), _joined(second.score, second.score_bias))
    return max(values, logits)


def _joined(linear: Array, bias: Array | None) -> npt.NDArray[np.float64]:  # (width, n) -> (width + 1, n)
    matrix = np.asarray(to_numpy(linear), dtype=np.float64).reshape(linear.shape[0], -1)
    row = np.zeros(matrix.shape[1]) if bias is None else np.ravel(to_numpy(bias))
    return np.vstack([matrix, row])


def _relative(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    scale = max(np.max(np.abs(first)), np.max(np.abs(second)))
    if scale == 0.0:
        return 0.0
    # Divided first, so that squares neither overflow nor vanish.
    first, second = first / scale, second / scale
    return float(np.linalg.norm(first - second) / max(np.linalg.norm(first), np.linalg.norm(second)))


def _vanishes(array: Array) -> bool:
    return not np.any(to_numpy(array))
