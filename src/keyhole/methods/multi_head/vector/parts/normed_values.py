"""Values of all tokens in normed heads: their logits beside a known token first, then answers whose weights are known.

Weights of normed heads depend on directions alone. So a token far shorter than the known one takes its share of the
weight beside it and adds nothing to the answer, which tells that share in every head; alone it then has known weights
beside the same last tokens, as many as there are heads, and these are linear equations for its values.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.parts.long_tokens import LongQueries
from keyhole.methods.multi_head.vector.parts.zero_pencil import NormedToken
from keyhole.methods.multi_head.vector.values import VectorValues, solve_spanned
from keyhole.numerics.svd import pseudo_inverse, singular_values
from keyhole.recovery import Outcome

# A token beside the known one is shorter by this.
SHORTER = 2.0**-60
# Draws of errors that show what they make of values from spans.
DRAWS = 8
# Last tokens beyond the heads, and sets of them that are compared.
SPARE, DRAWN = 1, 512
# Values from spans that may be off by more than this part of them are not used: all tokens are read instead.
BLURRED = 1e-8
# Errors of weights over those of answers, and misfits that no rounding makes.
WEIGHT_ERRORS, MISFIT = 4.0, 1e4


def ask_normed_values(queries: LongQueries, start: NormedToken) -> Steps[VectorValues]:
    """Values of tokens until their spans are complete, then those of all from the sum; or of all tokens of a basis."""
    reader = _Reader(queries, start)
    width = queries.width
    count = min(width, queries.outputs // start.heads + 2)
    while True:
        yield from reader.ask(count)
        if reader.known >= width:
            return reader.solve_basis()
        values = reader.solve_spanned()
        if values is not None:
            return values
        count = min(reader.known, width - reader.known)


class _Reader:
    def __init__(self, queries: LongQueries, start: NormedToken) -> None:
        self.queries, self.start = queries, start
        self.basis = np.linalg.qr(queries.rng.standard_normal((queries.width, queries.width)))[0]
        self.values = np.zeros((start.heads, 0, queries.outputs))
        self.chosen = self._choose()
        self.errors = np.zeros(0)  # of the value of each token

    @property
    def known(self) -> int:
        return int(self.values.shape[1])

    @property
    def error(self) -> float:
        """Of the values that were read."""
        return float(np.max(self.errors, initial=0.0))

    def _choose(self) -> Integers:
        """Last tokens beside which weights tell values best, by those of the known token and of one of logit zero."""
        start, rng = self.start, self.queries.rng
        count = min(start.heads + SPARE, start.last.shape[0])
        weights = 1 / (1 + start.own * np.exp(-start.logits))
        # What errors of weights beside the known token make of those without it.
        errors = np.max(start.own / (1 + start.own) ** 2 / (weights * (1 - weights)), axis=1)
        alone = 1 / (1 + start.own)

        def cost(some: Integers) -> float:
            inverse = pseudo_inverse(np.vstack([alone[some], np.full((1, start.heads), 0.5)]))
            return float(np.linalg.norm(inverse * np.append(errors[some], 0.0)))

        sets = [rng.permutation(start.last.shape[0])[:count] for _ in range(DRAWN)]
        return np.sort(min(sets, key=cost))

    def ask(self, count: int) -> Steps[None]:
        """The values of the next tokens of the basis."""
        queries, start, heads = self.queries, self.start, self.start.heads
        tokens = self.basis[self.known : self.known + count]
        which = np.repeat(np.arange(count, dtype=np.int64), self.chosen.size)
        ends = np.tile(np.arange(self.chosen.size, dtype=np.int64), count)
        zeros, ones = np.zeros(which.size, dtype=np.int64), np.ones(which.size)
        last, zero = start.last[self.chosen], np.zeros((1, queries.width))
        known, new = (start.token[None, :], zeros, ones), (tokens, which, ones)
        # The tokens stand in the same places both times.
        beside = yield from queries.ask("values", last, ends, [(tokens, which, SHORTER * ones), known])
        alone = yield from queries.ask("values", last, ends, [new, (zero, zeros, ones)])
        shape = (count, self.chosen.size, heads)
        first, own = np.exp(start.logits[self.chosen]), start.own[self.chosen]
        weights = (beside[:, 0] @ start.inverse).reshape(shape)
        masses = (1 / weights - 1) * first - own  # of the token, against a zero one
        if not np.all(masses > 0):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "tokens take less than nothing of the weight of a known one: no normed heads"
            )
        # Errors of weights beside the known token, and what they make of those without it.
        errors = start.error / weights**2 * first * (1 + own) / (1 + own + masses) ** 2
        weights = masses / (1 + own + masses)
        answers = alone[:, 0].reshape(count, self.chosen.size, -1)
        found = np.zeros((heads, count, queries.outputs))
        for number in range(count):
            # The sum over heads is known, each with half of its weight: that of a logit of zero.
            design = np.vstack([weights[number], np.full((1, heads), 0.5)])
            right = np.vstack([answers[number], tokens[number] @ queries.linear])
            allowed = self._answer_errors(pseudo_inverse(design) @ right, errors[number])
            inverse = pseudo_inverse(design / allowed[:, None]) / allowed
            found[:, number] = inverse @ right
            off = float(np.max(np.abs(design @ found[:, number] - right) / allowed[:, None]))
            if not off <= MISFIT:
                raise Unrecoverable(
                    Outcome.WRONG_FAMILY,
                    f"answers to a token are {off:.2g} times as far off what {heads} heads of known weights give as "
                    f"they may be: no normed heads",
                )
            self.errors = np.append(self.errors, np.max(np.linalg.norm(inverse * allowed, axis=1)) * max(1.0, off))
        self.values = np.concatenate([self.values, found], axis=1)

    def _answer_errors(self, values: Floats, errors: Floats) -> Floats:  # (heads, p), (n, heads) -> (n + 1,)
        """Of answers whose weights err by so much, and of the sum."""
        size = float(np.max(np.abs(values)))
        by_weights = WEIGHT_ERRORS * np.sqrt(np.mean(errors**2, axis=1)) * size
        return np.append(by_weights, 0.0) + self.queries.noise

    def solve_basis(self) -> VectorValues:
        """The values where all tokens of a basis were read."""
        matrices = self.basis.T @ self.values
        floor = CLEAR * self.error * (self.queries.width**0.5 + self.queries.outputs**0.5)
        ranks = np.maximum(np.sum(singular_values(matrices) > floor, axis=1), 1)
        return self._whole(matrices, ranks, self.error)

    def solve_spanned(self) -> VectorValues | None:
        """Values of all tokens, where those read span all that heads answer and heads share no direction."""
        heads, count, outputs = self.values.shape
        floor = CLEAR * self.error * (count**0.5 + outputs**0.5)
        ranks = [max(1, int(np.sum(singular_values(self.values[head]) > floor))) for head in range(heads)]
        if max(ranks) == count or sum(ranks) > outputs:
            return None
        linear = 2 * self.queries.linear  # each head has half of its weight beside a zero token
        matrices = solve_spanned(self.values, linear, ranks)
        apart = float(np.sqrt(np.max(np.mean((self.basis[:count] @ matrices - self.values) ** 2, axis=1))))
        moved = []
        for _ in range(DRAWS):
            values = self.values + self.errors[:, None] * self.queries.rng.standard_normal(self.values.shape)
            summed = linear + 2 * self.queries.noise * self.queries.rng.standard_normal(linear.shape)
            moved.append(solve_spanned(values, summed, ranks) - matrices)
        error = max(float(np.sqrt(np.max(np.mean(np.square(moved), axis=(0, 2))))), apart)
        sizes = np.sqrt(np.mean(matrices**2, axis=(1, 2)))
        return self._whole(matrices, np.array(ranks), error) if error <= BLURRED * float(np.min(sizes)) else None

    def _whole(self, matrices: Floats, ranks: Integers, error: float) -> VectorValues:
        spread = np.full((matrices.shape[0], matrices.shape[2]), error)
        weak = np.zeros((0, *spread.shape))
        return VectorValues(
            matrices, ranks, self.known, error, spread, self.queries.noise, matrices[None][:0], weak, traded=0.0
        )
