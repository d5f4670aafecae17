"""What the examples and the fit say about how far to trust a result: printed, and part of the JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.numerics.svd import singular_values
from keyhole.samples.examples import GOOD_PAIRS, GOOD_RATIO, ExampleCount, Examples
from keyhole.samples.restarts import moment
from keyhole.samples.varpro import VarproFit

# Rows that the model of first order is fitted to, and judged by, at most.
MOST_ROWS = 2000
# Penalties that the model of first order chooses from, in units of the mean of its kernel.
PENALTIES = tuple(10.0**power for power in range(-10, 3))
# Held-out R² of the low orders below which the outputs look like a parity.
PARITY_LIKE = 0.35


def diagnose(examples: Examples, fitted: VarproFit, count: ExampleCount, noise: float) -> dict[str, Any]:
    """Everything there is to say before the certificate."""
    point, traces, wanted = fitted.point, fitted.search.traces, fitted.heads * (examples.length - 1)
    projections, scores = point.projections, point.scores
    singular = singular_values(np.sum(projections, axis=0))
    found = moment(point.problem, fitted.heads + 1)
    return {
        "heads": fitted.heads,
        "heads_asked": fitted.asked if fitted.asked is not None else "auto",
        "parameters": count.parameters,
        "samples": {
            "examples": count.examples,
            "different": count.once.examples,
            "ratio": count.ratio,
            "pairs": count.pairs,
            "holds": count.good,
            "needed": count.needed(GOOD_RATIO, GOOD_PAIRS),
            "sentence": count.sentence(),
        },
        "restarts": {
            "made": len(traces),
            "agreeing": fitted.search.agreement,
            "residuals": sorted(trace.relative for trace in traces),
            "in_all": fitted.starts,
        },
        "relative_residual": point.relative,
        "noise": noise,
        "predicted_error": noise / np.sqrt(count.ratio),
        "projection_norms": [float(np.linalg.norm(each)) for each in projections],
        "score_norms": [float(np.linalg.norm(each)) for each in scores],
        "score_distances": [float(np.linalg.norm(scores[i] - scores[j])) for i in range(len(scores)) for j in range(i)],
        "sum_of_projections": float(singular[-1] / singular[0]) if singular[0] > 0 else 0.0,
        "outputs_for_six_phase": {
            "outputs": examples.outputs_per_token,
            "wanted": wanted,
            "holds": examples.outputs_per_token >= wanted,
        },
        "spectral_gap": None if found is None else found.gap(fitted.heads),
    }


def two_values(examples: Examples) -> bool:
    """Whether each number of a token takes one of two values, as bits do: else there are no parities."""
    tokens = examples.inputs.reshape(-1, examples.width)
    return bool(np.all((tokens == np.min(tokens, axis=0)) | (tokens == np.max(tokens, axis=0))))


def enough_for_low_orders(examples: Examples) -> bool:
    """Whether there are as many rows to fit as the model of first order has coefficients: else its R² says nothing."""
    features = examples.width * examples.width * (examples.width + 1) // 2
    return (2 * min(MOST_ROWS, examples.count * examples.length)) // 3 >= features


def low_orders(examples: Examples, rng: np.random.Generator) -> tuple[float, float]:
    """Held-out R², beyond what is linear, of the model of first order, and of it together with squares of the token.

    Softmax to first order makes F_a linear in x_a ⊗ Cov(X), which is fitted as a kernel,
    (x_a·y_b)·‖Cov-product‖², so that its d³ coefficients are never written down. A parity of many coordinates has
    nothing of either.
    """
    n, k, d = examples.inputs.shape
    chosen = rng.permutation(n)[: max(4, MOST_ROWS // k)]
    half = max(1, (2 * len(chosen)) // 3)
    inputs, outputs = examples.inputs[chosen], examples.outputs[chosen].reshape(len(chosen) * k, -1)
    rows = inputs.reshape(-1, d)
    rest = _beyond_linear(inputs, outputs, half * k)
    centred = inputs - np.mean(inputs, axis=1, keepdims=True)
    products = np.einsum("nad,mbd->nmab", centred, centred, optimize=True)
    own = np.repeat(np.repeat(np.sum(products**2, axis=(2, 3)), k, axis=0), k, axis=1)
    overlap = rows @ rows.T
    first = overlap * own
    squares = (overlap**2) * (np.mean(first.diagonal()) / max(np.mean((overlap**2).diagonal()), 1e-300))
    train = half * k
    return _kernel_fit(first, rest, train), _kernel_fit(first + squares, rest, train)


def _beyond_linear(inputs: Floats, outputs: Floats, train: int) -> Floats:
    k = inputs.shape[1]
    mean = np.repeat(np.mean(inputs, axis=1), k, axis=0)
    features = np.hstack([mean, inputs.reshape(len(mean), -1), np.ones((len(mean), 1))])
    solution = np.linalg.lstsq(features[:train], outputs[:train], rcond=None)[0]
    return np.asarray(outputs - features @ solution)


def _kernel_fit(kernel: Floats, labels: Floats, train: int) -> float:
    """R² on the rows after the first `train`, the penalty chosen on the last quarter of those before."""
    size = max(float(np.mean(kernel.diagonal())), np.finfo(float).tiny)
    inner = max(1, (3 * train) // 4)

    def fitted(upto: int, penalty: float, stop: int) -> float:
        values, vectors = parts[upto]
        dual = vectors @ ((vectors.T @ labels[:upto]) / (np.maximum(values, 0.0) + penalty * size)[:, None])
        wrong = labels[upto:stop] - kernel[upto:stop, :upto] @ dual
        return 1.0 - float(np.sum(wrong**2)) / max(float(np.sum(labels[upto:stop] ** 2)), np.finfo(float).tiny)

    parts = {upto: np.linalg.eigh(kernel[:upto, :upto]) for upto in (inner, train)}
    best = max(PENALTIES, key=lambda penalty: fitted(inner, penalty, train))
    return fitted(train, best, len(labels))
