"""Values of all tokens in all heads: long tokens that one head takes and all others leave.

Once the logits of one token u₀ are known against all last tokens, there are last tokens g that one head has far above
zero and all others far below, for u₀ and for everything near it: far out, T·u₀ + u has the weight of one end in every
head, and the answer tells the value of u in that head.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.parts.first_token import FirstHeads
from keyhole.methods.multi_head.vector.parts.long_tokens import FAR, LongQueries
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.numerics.svd import pseudo_inverse, singular_values, spectral_norm, svd
from keyhole.recovery import Outcome

# The known token outweighs the other by this; by so many times more where that was not enough, so often.
NEAR, NEARER, ATTEMPTS = 32.0, 16.0, 5
# Values from spans that may be off by more than this part of them are not used: all tokens are read instead.
BLURRED = 1e-11
# Tokens beyond those that span all values.
SPARE_TOKENS = 1
# Values add up to the sum within so many times their errors.
MISFIT = 64.0


def ask_long_values(queries: LongQueries, start: FirstHeads) -> Steps[VectorValues]:
    """Values of tokens until their spans are complete, then those of all from the sum; or of all tokens of a basis."""
    reader = _Reader(queries, start)
    width = queries.width
    count = min(width, queries.outputs // start.heads + SPARE_TOKENS + 1)
    while True:
        yield from reader.ask(count)
        if reader.known >= width:
            return reader.solve_basis()
        values = reader.solve_spanned()
        if values is not None:
            return values
        count = min(reader.known, width - reader.known)


class _Reader:
    def __init__(self, queries: LongQueries, start: FirstHeads) -> None:
        self.queries, self.start = queries, start
        heads = start.heads
        sides = start.odds.weights(np.where(np.eye(heads, dtype=bool), np.inf, -np.inf))
        self.sides = sides  # (queries, heads): the weight of the token where head h has it
        self.middle = start.odds.weights(np.zeros(heads))
        sizes = np.linalg.norm(start.keys, axis=1)
        wanted = np.where(np.eye(heads, dtype=bool), 1.0, -1.0) * sizes  # (queries, heads)
        self.ends = wanted @ pseudo_inverse(start.keys).T  # (queries, width)
        if not np.all(self.ends @ start.keys.T * np.sign(wanted) >= 0.5 * sizes):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "no last token tells heads apart: their scores are dependent for one token"
            )
        drawn = queries.rng.standard_normal((queries.width, queries.width))
        self.basis = np.linalg.qr(drawn)[0]
        self.token, self.own = start.token / queries.scale, start.values / queries.scale
        # Weights of the other sides, which caps leave, are known as well as caps are.
        self.values = np.zeros((heads, 0, queries.outputs))
        self.near = NEAR
        self.unit_noise = queries.noise / queries.scale
        self.sums = 0.0  # the most by which values missed their sum

    @property
    def known(self) -> int:
        return int(self.values.shape[1])

    @property
    def error(self) -> float:
        """Deviation of one value of a unit token."""
        solved = float(np.linalg.norm(np.linalg.inv(self.sides), axis=1).max())
        return max(self.unit_noise * self.near * solved, self.sums)

    def ask(self, count: int) -> Steps[None]:
        """The values of the next tokens of the basis."""
        heads, missing = self.start.heads, np.arange(self.known, self.known + count, dtype=np.int64)
        found = np.zeros((heads, count, self.queries.outputs))
        first = self.known
        for _ in range(ATTEMPTS):
            tokens = self.basis[missing] + self.near * self.token
            which = np.repeat(np.arange(missing.size, dtype=np.int64), heads)
            last = np.tile(np.arange(heads, dtype=np.int64), missing.size)
            ends = FAR * self.queries.scale * self.ends / np.linalg.norm(self.ends, axis=1, keepdims=True)
            added = [(tokens, which, np.ones(which.size))]
            answers = (yield from self.queries.ask("values", ends, last, added))[:, 0]
            answers = answers.reshape(missing.size, heads, -1) - self.near * (self.sides @ self.own)
            values = np.linalg.solve(self.sides, answers)  # (tokens, heads, outputs)
            rest = np.einsum("h,tho->to", self.middle, values) - self.basis[missing] @ self.queries.linear
            size = self.queries.outputs**0.5 * self.error
            good = np.linalg.norm(rest, axis=1) <= MISFIT * size
            found[:, missing[good] - first] = values[good].transpose(1, 0, 2)
            if np.any(good):
                self.sums = max(self.sums, float(np.sqrt(np.mean(rest[good] ** 2))))
            missing = missing[~good]
            if not missing.size:
                break
            self.near *= NEARER
        else:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, f"values of {missing.size} tokens in all heads do not add up to their sum"
            )
        self.values = np.concatenate([self.values, found], axis=1)

    def solve_basis(self) -> VectorValues:
        """The values where all tokens of a basis were read."""
        matrices = self.basis.T @ self.values
        floor = CLEAR * self.error * (self.queries.width**0.5 + self.queries.outputs**0.5)
        ranks = np.maximum(np.sum(singular_values(matrices) > floor, axis=1), 1)
        return self._whole(matrices, ranks, self.error, np.full(matrices.shape[::2], self.error))

    def _whole(self, matrices: Floats, ranks: Integers, error: float, spread: Floats) -> VectorValues:
        nothing = matrices[None][:0]
        weak = np.zeros((0, *spread.shape))
        return VectorValues(matrices, ranks, self.known, error, spread, self.queries.noise, nothing, weak, traded=0.0)

    def solve_spanned(self) -> VectorValues | None:
        """Values of all tokens, where those read span all that heads answer and heads share no direction."""
        heads, count, outputs = self.values.shape
        floor = CLEAR * self.error * (count**0.5 + outputs**0.5)
        spans, ranks, tilts = [], [], []
        for head in range(heads):
            _, singular, right = svd(self.values[head])
            rank = max(int(np.sum(singular > floor)), 1)
            spans.append(right[:rank])
            ranks.append(rank)
            tilts.append(self.error / max(float(singular[rank - 1]), 1e-300))
        if max(ranks) == count or sum(ranks) > outputs:
            return None
        together = np.concatenate(spans)
        inverse = pseudo_inverse(together)
        shares = self.queries.linear @ inverse
        ends = np.cumsum([0, *ranks])
        matrices = np.stack([shares[:, ends[h] : ends[h + 1]] @ spans[h] / self.middle[h] for h in range(heads)])
        size = float(np.sqrt(np.mean(np.sum(shares**2, axis=1)))) / float(np.min(self.middle))
        moved = (size * max(tilts) + self.unit_noise / float(np.min(self.middle))) * (1 + spectral_norm(inverse))
        apart = np.sqrt(np.mean((self.basis[:count] @ matrices - self.values) ** 2, axis=1))  # (heads, outputs)
        error = max(self.error, moved, float(np.max(apart)))
        sizes = np.sqrt(np.mean(matrices**2, axis=(1, 2)))
        if error > BLURRED * float(np.min(sizes)):
            return None
        return self._whole(matrices, np.array(ranks), error, np.full((heads, outputs), error))
