"""Sequences of long tokens before a short last one: weights depend on one bilinear form alone, and nothing else adds.

In [A·u; …; g/A] the logit of a token is that of u and g, the last token has a logit of nearly zero and no value to
speak of, and so has a zero token. So caps, sinks and distances show in the weights with nothing mixed in, which tokens
of natural norms do not allow: the last token's own logit would be part of every one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.forms.value import Value
from keyhole.methods.multi_head.vector.probe import AFFINE, VectorQueries
from keyhole.queries import Measurements, Plan, Position, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Tokens are longer by this, last tokens shorter: what those add themselves is below 2⁻¹⁶⁰.
LONG = 2.0**80
# Last tokens are longer by this where all weights are to saturate, still 2⁻⁸⁰ of what tokens are.
FAR = 2.0**40
# Weights take up this part of the outputs: more, and their errors grow.
FILLED = 0.75
# Rounding of a weight and of the sum over heads, in units of the answers' spacing.
ROUNDINGS = 4.0


class LogitsBiased(Unrecoverable):
    """Raised where a long token beside a zero one has another logit than zero: queries may have biases."""


@dataclass
class Odds:
    """How the odds of a token against all others but the long ones become its logit, in every head."""

    rest: Floats  # (heads,) exp(energy) of what is beside a token at distance one, over that of a token of logit zero
    cap: Floats | None = None  # (heads,) logits are cap·tanh(logit/cap)
    falls: Floats | None = None  # (heads,) by how much the energy falls with each further token between
    table: Floats | None = None  # (heads, distances) energies at distances from one on, over that of the last token
    window: float = np.inf  # tokens that the last one sees, itself included

    def offsets(self, count: int, between: int) -> Floats:  # -> (heads, count)
        """Energies over the rest where logits are zero, of so many tokens before some zero ones, the nearest last."""
        if self.table is not None:
            known = self.table.shape[1]
            nearer = self.table[:, np.minimum(np.arange(between), known - 1)]
            rest = 1 + np.sum(np.exp(nearer), axis=1, keepdims=True)
            return np.asarray(
                self.table[:, np.minimum(between + np.arange(count - 1, -1, -1), known - 1)] - np.log(rest)
            )
        further = 0.0 if self.falls is None else self.falls[:, None] * np.arange(count - 1, -1, -1)
        return np.asarray(-np.log(self.rest + between)[:, None] - further + np.zeros((1, count)))

    def logits(self, odds: Floats, between: int = 0) -> tuple[Floats, Floats]:  # (…, heads, k) -> twice the same
        """Logits, and how much more uncertain they are than the logarithms of the odds; inf beyond a cap."""
        energies = np.log(odds) - self.offsets(odds.shape[-1], between)
        if self.cap is None:
            return energies, np.ones_like(energies)
        part = energies / self.cap[:, None]
        inside = np.abs(part) < 1
        part = np.where(inside, part, 0.0)
        logits = self.cap[:, None] * np.arctanh(part)
        return logits, np.where(inside, 1 / (1 - part**2), np.inf)

    def weights(self, logits: Floats) -> Floats:  # (…, heads) -> the same
        """The weight of a lone long token."""
        energies = logits if self.cap is None else self.cap * np.tanh(logits / self.cap)
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + self.rest * np.exp(-energies)))


@dataclass
class LongQueries(VectorQueries):
    """The oracle, asked with long tokens before short last ones, those between being zero."""

    before: int = 0  # zero tokens before all others
    odds: Odds = field(default_factory=lambda: Odds(np.ones(1)))
    filled: float = FILLED
    long: float = LONG
    short: float = 1 / LONG

    def set_scale(self, scale: float) -> None:
        """Have tokens and last ones of this norm logits of order one: both are brought to their lengths."""
        self.scale, self.noise = floor_power(scale), self.noise * floor_power(scale) / self.scale
        self.long, self.short = LONG / self.scale, self.scale / LONG

    def on_grid(self, tokens: Floats) -> Floats:
        """Tokens as they are: none are added up."""
        return tokens

    def ask(
        self,
        stage: str,
        last: Floats,  # (m, width) last tokens
        index: Integers,  # (n,) which of them ends sequence n
        added: list[tuple[Floats, Integers, Floats]],  # (rows, index, scale): the tokens before it
        plain: int = 1,  # noqa: ARG002 - there is one last token
        places: tuple[int, ...] = (-1,),  # noqa: ARG002
    ) -> Steps[Floats]:  # (n, 1, outputs)
        """Answers of [0; …; A·added_1; …; 0; …; g/A] over A, less the output bias."""
        space = self.signature.space
        positions: list[Position] = [[] for _ in range(self.before)]
        positions += [
            [Term(TokenRows(space.asarray(self.long * rows)), space.indices(which), space.asarray(scale))]
            for rows, which, scale in added
        ]
        positions += [[] for _ in range(self.between)]
        positions.append([Term(TokenRows(space.asarray(self.short * last)), space.indices(index))])
        answers: Measurements = yield Plan(stage, index.size, positions)
        return (self.values_at(answers, (-1,)) - self.bias) / self.long

    def ask_token(self, stage: str, token: Floats, last: Floats) -> Steps[Floats]:  # (width,), (n, width) -> (n, p)
        """Answers of one token beside several last ones."""
        every, zeros = np.arange(last.shape[0], dtype=np.int64), np.zeros(last.shape[0], dtype=np.int64)
        added = [(token[None, :], zeros, np.ones(every.size))]
        return (yield from self.ask(stage, last, every, added))[:, 0]

    def logits(self, odds: Floats) -> tuple[Floats, Floats]:  # (n, heads, k) -> twice the same
        """Logits of tokens by their odds, the nearest last, and how much more uncertain they are than the odds."""
        return self.odds.logits(odds, self.between)


def ask_total(signature: Signature, token: Floats) -> Steps[tuple[Value, float]]:
    """The sum of all heads' values, each by the weight of a logit of zero; the output bias; and errors of answers.

    A zero last token has logits of zero with all others: [A·x; 0] is linear in x. That is tested with one more token,
    whose answer is off by as much as answers err.
    """
    space, width = signature.space, signature.width
    rows = np.vstack([np.zeros((1, width)), np.eye(width), token[None, :]])
    plan = Plan("value", width + 2, [[Term(TokenRows(space.asarray(LONG * rows)))], []])
    answers: Measurements = yield plan
    values = floats(answers.values)
    if values.ndim != 2:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, "several heads of such attention are read from several outputs: the box has one"
        )
    bias, total = values[0], (values[1:-1] - values[0]) / LONG
    size = float(np.max(np.abs(values[1:] - bias))) / LONG
    if not np.isfinite(size) or size == 0.0:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "the values of all heads add up to zero beside a zero token")
    error = float(np.max(np.abs((values[-1] - bias) / LONG - token @ total)))
    eps = signature.space.eps
    if not error <= AFFINE * eps * size * width**0.5:
        raise LogitsBiased(
            Outcome.WRONG_FAMILY,
            f"answers beside a zero token are not linear: {error:.2g} off where they are {size:.2g}; there is a score "
            f"bias, or more in the box than heads",
        )
    noise = max(error, ROUNDINGS * eps * size)
    shown = np.abs(bias) > 0
    radius = ROUNDINGS * eps * np.abs(bias)
    made = Value(total, np.full(total.shape, noise), np.where(shown, bias, 0.0), radius)
    return made, noise
