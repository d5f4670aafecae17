"""How far a joint fit may be off: first-order responses to errors of the answers, and what curvature adds to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.joint import JointHeads, JointLinear, JointQueries

# Bounds on the first and half the second derivative of the sigmoid.
SLOPE, HALF_BEND = 0.25, 0.5 / (6 * 3**0.5)
# Rounds in which radii and what curvature adds to them settle, and the part of the last round that counts as settled.
MOST_ROUNDS, SETTLED = 20, 0.02
# Curvature below this part of the errors of answers changes nothing that is worth another round.
NEGLIGIBLE = 1e-3
# Curvature so many times the errors of answers never settles.
HOPELESS = 1e3


@dataclass(frozen=True)
class AnswerErrors:
    """How answers err: each by at most `bound`, and independently with standard deviation `deviation`."""

    bound: Floats  # (n · outputs,)
    deviation: Floats  # (n · outputs,)
    deviations: float  # that count

    def through(self, responses: Floats) -> Floats:  # (m, n · outputs) -> (m,)
        """How far numbers that respond so to the answers may be off."""
        sizes = np.abs(responses)
        random = np.sqrt(sizes**2 @ self.deviation**2)
        return np.asarray(sizes @ self.bound + self.deviations * random)


@dataclass(frozen=True)
class JointRadii:
    """Radii of combinations of gates, of the values and of the constant."""

    gates: Floats  # (combinations, heads, width)
    values: Floats  # (heads, width, outputs)
    constant: Floats  # (outputs,)
    deviations: JointHeads  # standard errors, of the same shapes
    settled: bool  # False: errors are so large that the model is no line within them, and radii hold nothing


def joint_radii(
    queries: JointQueries,
    heads: JointHeads,
    errors: AnswerErrors,
    mixing: Floats,  # (groups, combinations): which combinations of the groups' gates are meant
) -> JointRadii:
    """Entrywise radii at a best fit x̂: with P the pseudo-inverse of the Jacobian, x − x̂ = −P·(errors + curvature).

    Curvature is bounded by the radii of gates and values themselves, so that both are iterated until they settle.
    """
    linear = JointLinear(queries, heads)
    of_values = linear.value_responses()

    def through(each: AnswerErrors) -> tuple[Floats, Floats]:
        gates = [each.through(linear.gate_responses(of_values, shares)) for shares in mixing.T]
        return np.stack(gates), each.through(of_values)

    wider, settled = _with_curvature(linear, of_values, errors)
    radii = through(wider)
    deviations = through(AnswerErrors(np.zeros_like(errors.bound), errors.deviation, 1.0))
    size, shape = heads.values.size, heads.gates.shape[1:]

    def parts(gates: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
        constant = values[size:] if queries.has_constant else np.zeros_like(heads.constant)
        return gates.reshape(-1, *shape), values[:size].reshape(heads.values.shape), constant

    return JointRadii(*parts(*radii), JointHeads(*parts(*deviations)), settled)


def _with_curvature(linear: JointLinear, of_values: Floats, errors: AnswerErrors) -> tuple[AnswerErrors, bool]:
    """Errors of the answers with how far these are from their linearisation, and whether that settles."""
    wider, before = errors, np.zeros(errors.bound.shape)
    small = NEGLIGIBLE * (errors.bound + errors.deviation)
    for _ in range(MOST_ROUNDS):
        curvature = _curvature(linear, of_values, wider)
        if not np.all(np.isfinite(curvature)) or np.max(curvature) > HOPELESS * np.max(errors.bound + errors.deviation):
            return wider, False
        if np.all(curvature <= np.maximum((1 + SETTLED) * before, small)):
            return replace(errors, bound=errors.bound + np.maximum(curvature, (1 + SETTLED) * before)), True
        before = curvature
        wider = replace(errors, bound=errors.bound + (1 + SETTLED) * curvature)
    return wider, False


def _curvature(linear: JointLinear, of_values: Floats, errors: AnswerErrors) -> Floats:
    """How far each answer is from its linearisation, for gates and values that err as answers do: (n · outputs,)."""
    heads, shape = linear.heads, linear.heads.values.shape
    values = of_values[: heads.values.size].reshape(*shape, -1)
    groups = linear.queries.groups
    parts = []
    for number, group in enumerate(groups):
        gates = linear.gate_responses(of_values, np.eye(len(groups))[number]).reshape(*shape[:2], -1)
        known = np.abs(np.einsum("nd,hdp->nhp", group.rows, heads.values))
        part = np.zeros(group.answers.shape)
        for head in range(shape[0]):
            logits = errors.through(group.rows @ gates[head])  # (n,)
            part += HALF_BEND * logits[:, None] ** 2 * known[:, head]
            for output in range(shape[2]):
                shares = errors.through(group.rows @ values[head, :, output])
                part[:, output] += SLOPE * logits * shares
        parts.append(part)
    if linear.queries.plain is not None:
        parts.append(np.zeros_like(linear.queries.plain.answers))
    return np.concatenate([np.ravel(part) for part in parts])
