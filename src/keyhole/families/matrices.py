"""The matrices inside parameters of any family, by the names that people know them by."""

from __future__ import annotations

from typing import Any

from keyhole.arrays import Array


def matrices_of(params: Any) -> dict[str, Array]:
    """Score matrices, and the first weights of a net; nothing of what has neither."""
    if hasattr(params, "attention"):  # a layer: the head, then the net
        return {**matrices_of(params.attention), **matrices_of(getattr(params, "ffn", None))}
    if hasattr(params, "heads"):
        return {f"score of head {number}": head.score for number, head in enumerate(params.heads, 1)}
    if hasattr(params, "scores"):
        return {f"score of head {number + 1}": params.scores[number, :, :] for number in range(params.scores.shape[0])}
    if hasattr(params, "score"):
        return {"score": params.score}
    return {"weights into the neurons": params.weights_in} if hasattr(params, "weights_in") else {}
