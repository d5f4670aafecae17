"""Phase 2 of six: rows on which all heads attend alike, and the linear constraints they put on every score matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import ArrayTable, Floats

# Phase 2: rows are rejected whose smallest weight is below this, or whose tokens nearly coincide.
LEAST_WEIGHT, NEARLY_EQUAL = 0.02, 1e-2
# Examples that are scored at a time.
CHUNK = 20_000


@dataclass(frozen=True)
class Rows(ArrayTable):
    """Certified rows: tokens of examples on which all heads seem to attend alike."""

    inputs: Floats  # (rows, k, d)
    own: Floats  # (rows, d): the token that attends
    outputs: Floats  # (rows, d_out)
    weights: Floats  # (rows, k): how all heads attend
    scores: Floats  # (rows,): the smaller, the more certain

    def best(self, count: int) -> Rows:
        """The most certain ones."""
        return self.take(np.argsort(self.scores, kind="stable")[:count])

    @property
    def trust(self) -> Floats:  # (rows,)
        """Weights of the rows in least squares."""
        return 1.0 / (self.scores + np.median(self.scores) + np.finfo(float).tiny)


def sculpt(inputs: Floats, outputs: Floats, total: Floats, keep: int) -> Rows:
    """Phase 2: the rows that are most certainly alike in all heads.

    F_a = SᵀXᵀp with Σp = 1 is solved for p; a small residual says that one p does for all heads (if there are m(k − 1)
    outputs or more). It is weighed against how well p is determined, and against how small its entries are.
    """
    best: list[Rows] = []
    for start in range(0, len(inputs), CHUNK):
        part = slice(start, start + CHUNK)
        best.append(_score(inputs[part], outputs[part], total).best(keep))
    return Rows.concat(*best).best(keep)


def _score(inputs: Floats, outputs: Floats, total: Floats) -> Rows:
    """All rows of examples with their scores; those rejected are left out."""
    differences = (inputs[:, :-1] - inputs[:, -1:]) @ total  # (n, k − 1, d_out)
    products = differences @ np.swapaxes(differences, 1, 2)
    values = np.linalg.eigvalsh(products)[:, 0]  # smallest eigenvalue
    fine = values > NEARLY_EQUAL * np.mean(np.sum(total**2, axis=1))
    inputs, outputs, differences, products, values = (
        array[fine] for array in (inputs, outputs, differences, products, values)
    )
    wanted = outputs - inputs[:, -1:] @ total  # (n, k rows, d_out)
    first = np.linalg.solve(products, differences @ np.swapaxes(wanted, 1, 2))  # (n, k − 1, rows)
    weights = np.concatenate([first, 1 - np.sum(first, axis=1, keepdims=True)], axis=1)  # (n, k, rows)
    left = np.linalg.norm(wanted - np.swapaxes(first, 1, 2) @ differences, axis=2)  # (n, rows)
    least = np.min(weights, axis=1)
    scores = left / (np.sqrt(values)[:, None] * np.maximum(least, LEAST_WEIGHT))
    example, row = np.nonzero(least > LEAST_WEIGHT)
    return Rows(
        inputs[example], inputs[example, row], outputs[example, row], weights[example, :, row], scores[example, row]
    )


def rescore(rows: Rows, total: Floats) -> Rows:
    """Rows with weights and scores for another S."""
    differences = (rows.inputs[:, :-1] - rows.inputs[:, -1:]) @ total
    products = differences @ np.swapaxes(differences, 1, 2)
    values = np.maximum(np.linalg.eigvalsh(products)[:, 0], np.finfo(float).tiny)
    wanted = rows.outputs - rows.inputs[:, -1] @ total
    ridge = np.finfo(float).eps * np.trace(products, axis1=1, axis2=2)[:, None, None] * np.eye(products.shape[1])
    first = np.linalg.solve(products + ridge, (differences @ wanted[:, :, None]))[..., 0]
    weights = np.concatenate([first, 1 - np.sum(first, axis=1, keepdims=True)], axis=1)
    left = np.linalg.norm(wanted - (first[:, None, :] @ differences)[:, 0], axis=1)
    least = np.min(weights, axis=1)
    scores = left / (np.sqrt(values) * np.maximum(least, LEAST_WEIGHT))
    fine = least > LEAST_WEIGHT
    return Rows(rows.inputs[fine], rows.own[fine], rows.outputs[fine], weights[fine], scores[fine])


def alike(rows: Rows, scores: Floats) -> Rows:  # (m, d, d)
    """Phase 2, later rounds: rows scored by how much the heads found so far differ on them as well."""
    logits = np.stack([(rows.inputs @ (rows.own @ each)[:, :, None])[..., 0] for each in scores])  # (m, rows, k)
    logits -= np.mean(logits, axis=2, keepdims=True)  # softmax does not show it
    apart = np.sqrt(np.mean((logits - np.mean(logits, axis=0)) ** 2, axis=(0, 2)))
    both = [each / max(float(np.median(each)), np.finfo(float).tiny) for each in (rows.scores, apart)]
    return replace(rows, scores=both[0] + both[1])


def constraints(rows: Rows) -> tuple[Floats, Floats]:  # (rows·k, d²), (rows·k,)
    """Phase 2: what certified rows say of every score matrix, (diag p − ppᵀ)·(X·Θᵀ·x_a − log p) = 0, weighed."""
    k, d = rows.inputs.shape[1:]
    p = rows.weights
    spread = p[:, :, None] * (np.eye(k) - p[:, None, :])  # diag p − ppᵀ
    keys = spread @ rows.inputs  # (rows, k, d)
    matrix = rows.own[:, None, :, None] * keys[:, :, None, :]  # (rows, k, j, l): x_aj·keys_l
    right = (spread @ np.log(p)[:, :, None])[..., 0]
    trust = rows.trust[:, None]
    return (matrix * trust[..., None, None]).reshape(-1, d * d), (right * trust).reshape(-1)
