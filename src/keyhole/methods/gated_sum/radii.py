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
    groups = np.eye(len(queries.groups))

    def through(each: AnswerErrors, shares: Floats) -> tuple[Floats, Floats]:  # (combinations, groups)
        gates = [each.through(linear.gate_responses(of_values, share)) for share in shares]
        return np.stack(gates), each.through(of_values)

    settled, wider = False, errors
    gates, values = through(errors, groups)
    for _ in range(MOST_ROUNDS):
        curvature = _curvature(queries, heads, gates, values)
        if not np.all(np.isfinite(curvature)):
            break
        wider = replace(errors, bound=errors.bound + (1 + SETTLED) ** 2 * curvature)
        if np.all(curvature <= NEGLIGIBLE * (errors.bound + errors.deviation)):
            settled = True
            break
        before = gates, values
        gates, values = through(wider, groups)
        if all(np.all(new <= (1 + SETTLED) * old) for new, old in zip((gates, values), before, strict=True)):
            settled = True
            break
    radii = through(wider, mixing.T)
    deviations = through(AnswerErrors(np.zeros_like(errors.bound), errors.deviation, 1.0), mixing.T)
    size, shape = heads.values.size, heads.gates.shape[1:]

    def parts(gates: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
        constant = values[size:] if queries.has_constant else np.zeros_like(heads.constant)
        return gates.reshape(-1, *shape), values[:size].reshape(heads.values.shape), constant

    return JointRadii(*parts(*radii), JointHeads(*parts(*deviations)), settled)


def _curvature(queries: JointQueries, heads: JointHeads, gates: Floats, values: Floats) -> Floats:
    """How far each answer is from its linearisation, for heads off by these radii: (n · outputs,)."""
    wide = values[: heads.values.size].reshape(heads.values.shape)
    parts = []
    for group, radius in zip(queries.groups, gates, strict=True):
        rows = np.abs(group.rows)
        logits = rows @ radius.reshape(heads.gates.shape[1:]).T  # (n, heads)
        shares = np.abs(np.einsum("nd,hdp->nhp", group.rows, heads.values))
        bend = HALF_BEND * np.einsum("nh,nhp->np", logits**2, shares)
        parts.append(bend + SLOPE * np.einsum("nh,nd,hdp->np", logits, rows, wide, optimize=True))
    if queries.plain is not None:
        parts.append(np.zeros_like(queries.plain.answers))
    return np.concatenate([np.ravel(part) for part in parts])
