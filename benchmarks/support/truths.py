"""Known parameters in the gauge of recovered ones, and how many radii each recovered entry is off."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

import keyhole as kh

Arrays = dict[str, np.ndarray]


def ratios(result: kh.Recovery, truth: Any) -> np.ndarray:
    """|error| / radius of every entry of a recovery, after alignment; infinite where the structure is another one.

    Nothing of `keyhole.gauge` is used. An entry that is exactly right counts 0 whatever its radius.
    """
    known = aligned(result.params, truth)
    if known is None:
        return np.array([np.inf])
    found, radius = _arrays(result.params), _arrays(result.certificate.radius)
    parts = []
    for name, true in known.items():
        own = found.get(name, np.zeros_like(true))
        error = np.abs(own - true)
        wide = np.broadcast_to(radius.get(name, np.zeros_like(true)), true.shape)
        # What is left out, and a truth that its own gauge adds up from large terms, are known up to rounding.
        error = np.where(error <= known_to(truth) * ROUNDING, 0.0, error) if name not in found else error
        with np.errstate(divide="ignore", invalid="ignore"):
            parts.append(np.where(error == 0, 0.0, error / wide).ravel())
    return np.concatenate(parts) if parts else np.zeros(0)


ROUNDING = 1e-13


def known_to(truth: Any) -> float:
    """The largest entry: alignment adds such numbers up."""
    return max(float(np.max(np.abs(array), initial=0.0)) for array in _arrays(truth).values())


def _arrays(params: Any) -> Arrays:
    return {name: np.asarray(array, dtype=np.float64) for name, array in params.arrays().items()}


def aligned(found: Any, truth: Any) -> Arrays | None:
    """Arrays of the truth by the names of the recovered ones; None where they cannot correspond."""
    if isinstance(truth, kh.ReluNet):
        return _aligned_net(found, truth) if isinstance(found, kh.ReluNet) else None
    if isinstance(truth, kh.OneLayer):
        return _aligned_layer(found, truth) if isinstance(found, kh.OneLayer) else None
    if isinstance(truth, kh.Residual):
        return aligned(found.attention, truth.attention) if isinstance(found, kh.Residual) else None
    return _aligned_heads(found, truth)


def _heads(params: Any) -> tuple[list[Arrays], Any] | None:
    if isinstance(params, kh.SingleHead):
        return [_arrays(kh.SingleHead(params.score, params.value, params.score_bias))], params.output_bias
    if isinstance(params, kh.MultiHead):
        return [_arrays(head) for head in params.heads], params.output_bias
    return None


def _aligned_heads(found: Any, truth: Any) -> Arrays | None:
    one, two = _heads(found), _heads(truth)
    if one is None or two is None or len(one[0]) != len(two[0]):
        return None
    size = max(np.linalg.norm(head["score"]) for head in two[0]) or 1.0
    costs = np.array([[np.linalg.norm(a["score"] - b["score"]) / size for b in two[0]] for a in one[0]])
    order = linear_sum_assignment(np.minimum(np.nan_to_num(costs, nan=1e6), 1e6))[1]
    many = isinstance(found, kh.MultiHead)
    known: Arrays = {}
    for number, place in enumerate(order):
        for name in {*one[0][number], *two[0][place]}:
            true = two[0][place].get(name, np.zeros(found.width))
            known[f"heads.{number}.{name}" if many else name] = true
    if one[1] is not None or two[1] is not None:
        known["output_bias"] = np.asarray(two[1] if two[1] is not None else np.zeros_like(one[1]), dtype=np.float64)
    return known


def _aligned_net(found: kh.ReluNet, truth: kh.ReluNet) -> Arrays | None:
    """The true neurons in the order, orientation and scale of those recovered, and what that makes of the rest."""
    own, true = _arrays(found), _arrays(truth)
    if found.activation != truth.activation or own["weights_in"].shape != true["weights_in"].shape:
        return None
    inner, bias, outer = true["weights_in"], true["bias_in"], np.atleast_2d(true["weights_out"])
    if inner.shape[0] == 0:
        order, turn = np.zeros(0, dtype=int), np.zeros(0)
    else:
        order, turn = _matched(own["weights_in"], own["bias_in"], inner, bias)
    inner, bias, outer = inner[order], bias[order], outer[:, order]
    length = np.linalg.norm(inner, axis=1) if truth.activation == "relu" else np.ones(order.size)
    # c·act(z) = c·act(−z) + c·z.
    away = turn < 0
    constant = np.atleast_1d(true["bias_out"]) + outer[:, away] @ bias[away]
    skip = outer[:, away] @ inner[away] + (np.atleast_2d(true["skip"]) if "skip" in true else 0.0)
    scalar = own["weights_out"].ndim == 1
    return {
        "weights_in": turn[:, None] * inner / length[:, None],
        "bias_in": turn * bias / length,
        "weights_out": (outer * length)[0] if scalar else outer * length,
        "bias_out": constant[0] if scalar else constant,
        "skip": skip[0] if scalar else skip,
    }


def _matched(inner: np.ndarray, bias: np.ndarray, true: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which true neuron each recovered one is, and which way it is turned: kinks are compared."""

    def unit(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(a, axis=1)
        length = np.where(length > 0, length, 1.0)
        return np.column_stack([a / length[:, None], b / length])

    one, two = unit(inner, bias), unit(true, level)
    far = float(np.median(np.abs(two[:, -1]))) or 1.0
    one[:, -1] /= far
    two[:, -1] /= far
    plus = np.linalg.norm(one[:, None] - two[None], axis=2)
    minus = np.linalg.norm(one[:, None] + two[None], axis=2)
    sharp = np.abs(np.log(np.linalg.norm(inner, axis=1)[:, None] / np.linalg.norm(true, axis=1)[None]))
    costs = np.minimum(plus, minus) + 1e-6 * np.minimum(sharp, 10.0)
    order = linear_sum_assignment(np.minimum(np.nan_to_num(costs, nan=1e9), 1e9))[1]
    rows = np.arange(order.size)
    return order, np.where(plus[rows, order] <= minus[rows, order], 1.0, -1.0)


def _aligned_layer(found: kh.OneLayer, truth: kh.OneLayer) -> Arrays | None:
    """Logits, and the net behind the value matrix; of a layer with a residual logits alone."""
    if found.residual != truth.residual:
        return None
    known = {"attention.score": np.asarray(truth.attention.score, dtype=np.float64)}
    own, true = found.attention.score_bias, truth.attention.score_bias
    if own is not None or true is not None:
        known["attention.score_bias"] = np.zeros(truth.width) if true is None else np.asarray(true, dtype=np.float64)
    if not truth.residual:
        net, value = truth.ffn, np.asarray(truth.attention.value)
        merged = kh.ReluNet(net.weights_in @ value.T, net.bias_in, net.weights_out, net.bias_out, None, net.activation)
        inner = _aligned_net(found.ffn, merged)
        if inner is None:
            return None
        known |= {f"ffn.{name}": array for name, array in inner.items()}
    return known


def inside_ball(truth: Any, limit: float | None) -> Any:
    """A net as it is on tokens of at most this norm: neurons without a kink there are affine."""
    if limit is None or not isinstance(truth, kh.ReluNet):
        return truth
    inner, bias, outer = np.asarray(truth.weights_in), np.asarray(truth.bias_in), np.atleast_2d(truth.weights_out)
    kinked = np.abs(bias) < 0.999 * limit * np.linalg.norm(inner, axis=1)
    on = ~kinked & (bias > 0)
    constant = np.atleast_1d(truth.bias_out) + outer[:, on] @ bias[on]
    skip = outer[:, on] @ inner[on] + (0.0 if truth.skip is None else np.atleast_2d(truth.skip))
    left = outer[:, kinked]
    if truth.outputs is None:
        left, constant, skip = left[0], constant[0], skip[0]
    return kh.ReluNet(inner[kinked], bias[kinked], left, np.asarray(constant), skip, truth.activation)


def wrong_by(result: kh.Recovery, truth: Any, rng: np.random.Generator, signature: Any) -> float:
    """How far answers to new tokens are off, at most, over three error bars and what noise hides."""
    reach = result.stats.details.get("valid_to_norm", np.inf)
    reach = min(reach, np.inf if signature.max_norm is None else 0.99 * signature.max_norm)
    worst = 0.0
    for size in (0.3, 1.0, 3.0, 10.0):
        tokens = size * rng.standard_normal((400, 1 if isinstance(truth, kh.ReluNet) else 3, truth.width))
        tokens *= np.minimum(1.0, reach / np.linalg.norm(tokens, axis=-1, keepdims=True))
        true, own = np.asarray(truth(tokens)), np.asarray(result.params(tokens))
        bars = np.asarray(result.params.error_bar(result.certificate.radius, tokens, 1e-15))
        hidden = 5 * signature.noise.radius + (5 * signature.noise.relative + 1e-9) * np.max(np.abs(true))
        worst = max(worst, float(np.max(np.abs(true - own) / (3 * bars + hidden))))
    return worst
