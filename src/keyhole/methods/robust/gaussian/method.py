"""A head behind independent noise, near the statistical limit: balanced pairs, repeats, maximum likelihood."""

from __future__ import annotations

import math
from typing import final

import numpy as np

from keyhole.arrays import Integers
from keyhole.families.single_head import SingleHead
from keyhole.methods.arithmetic import partial_result
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.forms.value import check_length
from keyhole.methods.robust.gaussian.estimation import Estimation
from keyhole.methods.robust.gaussian.pair_design import tilted_rows
from keyhole.methods.robust.gaussian.passes import Passes
from keyhole.numerics.svd import svd
from keyhole.queries import Signature

# Copies of each token of a pair, where none are asked for: more gain little.
COPIES = 32
# Rounds of further queries after the first pass, until the wanted error is reached.
MOST_ROUNDS = 8
# Directions of last tokens beyond the rank that show the range of the score matrix before anything else is asked.
MORE_DIRECTIONS = 2


def gaussian(
    signature: Signature,
    rng: np.random.Generator,
    *,
    target_error: float | None = None,
    budget: float = math.inf,
    rank: int | None = None,
    copies: int = COPIES,
) -> Steps[Estimate[SingleHead]]:
    """Score, value and biases from answers with normal errors, for tokens of bounded norm.

    The value from one-token queries; then pairs [m × x_k; m × (−x_k); B·p_j] for all k and j, asked as often as
    `target_error` (root-mean-square standard error of a score entry) or `budget` says, once if neither does. Where
    logits are large the first pass is a pilot with shorter last tokens, and later ones balance each pair by unequal
    copies. All parameters are fitted to all answers at once; standard errors are those of the Fisher information, and
    radii are so many of them that no entry lies outside, widened by what biases too small to be seen may hide.

    With `rank` only what a score matrix of that rank leaves open is asked: pairs that lie in its range with every
    direction, and every pair with the directions it does not annihilate.
    """
    check_length(signature)
    few = rank is not None and 2 * rank + MORE_DIRECTIONS < signature.width
    passes: Passes = LowRank(signature, rng, copies, rank) if few and rank else FullRank(signature, rng, copies, rank)
    yield from passes.ask_value(1)
    passes.settle()
    with partial_result(lambda _: passes.known.partial()):
        yield from passes.ask_null_column()
        yield from passes.ask_first_pass()
        passes.known.fit(passes.start_at)
        for _ in range(MOST_ROUNDS):
            repeats = passes.more_passes(target_error, budget)
            if repeats <= 0:
                break
            yield from passes.ask_again(repeats, budget)
            passes.known.fit(passes.start_at)
        return passes.known.estimate(target_error)


@final
class FullRank(Passes):
    """Every pair with every direction."""

    def __init__(self, signature: Signature, rng: np.random.Generator, copies: int, rank: int | None) -> None:
        super().__init__(signature, rng, Estimation(signature, copies, rank, signature.width**2))

    def ask_first_pass(self) -> Steps[None]:
        """Every pair with every direction, in random order."""
        row, column = np.divmod(self.rng.permutation(self.width**2), self.width)
        yield from self.ask_first_pairs(row, column)
        every = np.arange(self.width)
        self.keys = yield from self.ask_columns(every, every, np.linalg.inv(self.known.rows))

    def next_pass(self) -> tuple[Integers, Integers]:
        """Every pair with every direction."""
        row, column = np.divmod(np.arange(self.width**2), self.width)
        return row, column


@final
class LowRank(Passes):
    """Pairs in the range of the score matrix with every direction, and every pair with a few directions."""

    def __init__(self, signature: Signature, rng: np.random.Generator, copies: int, rank: int) -> None:
        super().__init__(signature, rng, Estimation(signature, copies, rank, 2 * signature.width * rank))
        self.rank = rank

    def ask_first_pass(self) -> Steps[None]:
        """Every pair with a few directions shows the range; then pairs of the range with all other directions."""
        known = self.known
        few = self.rank + MORE_DIRECTIONS
        row, column = np.divmod(self.rng.permutation(self.width * few), few)
        yield from self.ask_first_pairs(row, column)
        every = np.arange(self.width)
        shown = yield from self.ask_columns(every, every[:few], np.linalg.inv(known.rows))  # W·p of the few directions
        span = svd(shown, full_matrices=True)[0][:, : self.rank]
        inside = self.add_rows(tilted_rows(span, known.value(known.biased)))
        row, column = (each.ravel() for each in np.meshgrid(inside, every[few:], indexing="ij"))
        yield from self.ask_pairs("forms", row, column)
        back = span @ np.linalg.inv(known.rows[inside] @ span)
        rest = yield from self.ask_columns(inside, every[few:], back)
        self.keys = np.concatenate([span @ (span.T @ shown), rest], axis=1)

    def next_pass(self) -> tuple[Integers, Integers]:
        """Pairs of the range as it is known by now with all directions, all pairs with those of the row space."""
        known, rank = self.known, self.rank
        left, _, right = svd(known.best().point.score, full_matrices=True)
        inside = self.add_rows(tilted_rows(left[:, :rank], known.value(known.biased)))
        across = np.arange(known.columns.shape[0], known.columns.shape[0] + rank)
        known.columns = np.concatenate([known.columns, right[:rank]])
        every = np.arange(self.width)
        row = np.concatenate([np.repeat(inside, self.width), np.tile(every, rank)])
        return row, np.concatenate([np.tile(every, rank), np.repeat(across, self.width)])
