"""Odds of two long tokens, beside which a short last token has no mass: what kernels of features are read from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import PairValues
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.score_forms.readings import ask_values, refuse
from keyhole.queries import Measurements, Signature, sequences
from keyhole.recovery import Outcome

# Tokens that show values are short: features of long ones overflow, or all of them are dead, in boxes that compute
# them as they stand.
SHORT = 2.0**-4
# Answers, and values of short tokens, are known to this of their size, or nothing is read: many digits are lost.
FINE = 1e-11
# A system of inequalities whose least-squares residual is smaller than this has no solution.
INFEASIBLE = 1e-10
# What several learners say.
ONE_FEATURE = "of one feature the query does not show in any answer"
WITHIN = "this form is read from longer tokens than the box takes: leave max_norm= out, or raise it, if that may be"


@dataclass(frozen=True)
class FarOdds:
    """Asks [first; second; last] for the mass of first tokens over that of second ones."""

    signature: Signature
    value: Value  # of one output

    def ask(self, stage: str, first: Floats, second: Floats, last: Floats) -> Steps[tuple[Floats, Floats]]:
        """Odds and their radii, (n,) each, of tokens (n, width): infinite radii where nothing can be said."""
        space, limit = self.signature.space, self.signature.norm_limit
        if max(float(np.max(np.linalg.norm(each, axis=1))) for each in (first, second, last)) > limit:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, WITHIN)
        values, vector = PairValues(self.signature, self.value), floats(self.value.vector)
        answers: Measurements = yield sequences(stage, space.asarray(np.stack([first, second, last], axis=1)))
        seen = floats(answers.values) - float(self.value.bias)
        with np.errstate(all="ignore"):
            above, below = seen - second @ vector, first @ vector - seen
            errors = [values.error * np.linalg.norm(each, axis=1) for each in (second, first)]
            errors = [each + values.noise(answers.radius) + 2 * space.eps * np.abs(seen) for each in errors]
            odds = above / below
            radius = errors[0] / np.abs(below) + errors[1] * np.abs(above) / below**2
            radius = radius + space.rounding * np.abs(odds)  # the rounding of the masses themselves
            clear = (np.abs(below) > errors[1]) & np.isfinite(odds) & (odds > -radius)
        return np.where(clear, odds, np.nan), np.where(clear, radius, np.inf)

    def ask_logs(self, stage: str, first: Floats, second: Floats, last: Floats) -> Steps[tuple[Floats, Floats]]:
        """Logarithms of the odds and their radii: nan and infinity where the odds are none or drown."""
        odds, radius = yield from self.ask(stage, first, second, last)
        clear = odds > radius
        odds = np.where(clear, odds, 1.0)
        return np.where(clear, np.log(odds), np.nan), np.where(clear, radius / odds, np.inf)


def ask_short_values(signature: Signature, rng: np.random.Generator) -> Steps[Value]:
    """The value and the output bias from short tokens; Unrecoverable where too few digits of them are known."""
    if signature.space.eps > FINE or signature.noise.kind != "exact":
        raise Unrecoverable(Outcome.TOO_NOISY, "features are read from exact answers of double precision")
    value = yield from ask_values(signature, rng, SHORT)
    if np.any(np.linalg.norm(floats(value.radius), axis=0) > FINE * np.linalg.norm(floats(value.vector), axis=0)):
        message = (
            "the output bias hides the values of short tokens: subtract the answer to a zero token from all answers"
        )
        raise Unrecoverable(Outcome.TOO_NOISY, message)
    return value


def shortest(rows: Floats, least: Floats) -> Floats:  # (n, width), (n,) -> (width,)
    """The shortest token of at least these products with the rows: least-distance programming by NNLS."""
    system = np.concatenate([rows.T, least[None, :]])
    target = np.zeros(len(system))
    target[-1] = 1.0
    found, size = nnls(system, target)
    if size < INFEASIBLE:
        raise refuse("no token has a mass of one feature alone: their keys depend on each other")
    rest = target - system @ found
    return np.asarray(-rest[:-1] / rest[-1])


def apart(rows: Floats, least: Floats, vector: Floats, side: float) -> Floats:
    """A short token of at least these products, with a value of this sign that is no small one for its length."""
    # In units in which the products are of size one, so that nothing is lost to the residual.
    size = float(np.max(np.linalg.norm(rows, axis=1)))
    units = rows / size
    start = shortest(units, least)
    lean = side * float(np.linalg.norm(start)) * vector / np.linalg.norm(vector)
    return np.asarray(lean + shortest(units, least - units @ lean)) / size
