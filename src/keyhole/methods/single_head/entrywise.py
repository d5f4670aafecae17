"""Every entry of a graded score matrix to nearly full relative accuracy, at one to two queries an entry.

Rotated bases spread the rounding of large entries over small ones. Here each entry is read by itself, with the
query [t·e_i; β·v̂; γ·e_j]: the first token carries the entry's logit t·γ·W_ij, brought to order one by t, the second
carries the contrast of values where v_i has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import lsqr

from keyhole.arrays import Floats, Integers, floats
from keyhole.errors import UsageError
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Score
from keyhole.methods.forms.scale import FIRST_PROBE
from keyhole.methods.forms.score_bias import ask_for_bias
from keyhole.methods.forms.value import Value
from keyhole.numerics.logit import logit_with_radius
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Logits between these are read with nearly full relative accuracy; they are aimed at AIM.
SMALLEST, LARGEST, AIM = 2.0**-6, 5.0, 0.5
# A logit that cannot be told from zero is tried again larger by STEP, which cannot saturate it, up to FLOOR.
STEP = 2.0**36
FLOOR = 2.0**104
# More rounds than the whole range of floating-point numbers needs.
MOST_ROUNDS = 60
# Last tokens are shorter than first ones by this, so that what they add by themselves vanishes.
NORM_RATIO = 2.0**60
# Entries per row and column that are read first, to learn how rows and columns are graded.
BANDS = 3


def ask_score_entrywise(signature: Signature, value: Value, rng: np.random.Generator) -> Steps[Score]:
    """The score matrix with a small relative error in every entry, zeros included."""
    if signature.max_norm is not None:
        raise UsageError("entrywise accuracy needs tokens of any norm: leave out max_norm, or entrywise=True")
    if signature.max_length is not None and signature.max_length < 3:
        raise UsageError("entrywise accuracy needs sequences of three tokens: raise max_length, or leave out entrywise")
    shows_bias, _ = yield from ask_for_bias(signature, value, rng)
    if shows_bias:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "the head has a score bias, beside which small entries cannot be read: leave entrywise out",
        )
    reading = _Entries(signature, value)
    yield from reading.ask_contrast()
    width = signature.width
    row, column = np.divmod(np.arange(width * width), width)
    early = np.isin((column - row) % width, rng.permutation(width)[:BANDS])
    yield from reading.ask(row[early], column[early], np.abs(reading.contrast_sizes()[column[early]]))
    sizes = _fit_grading(reading.matrix, row[early], column[early])
    yield from reading.ask(row[~early], column[~early], sizes[row[~early], column[~early]])
    xp = signature.space.xp
    matrix, radius = signature.space.asarray(reading.matrix), signature.space.asarray(reading.radius)
    rank = int(xp.linalg.matrix_rank(matrix)) if bool(xp.any(matrix != 0)) else 0
    return Score(matrix, radius, rank)


@final
class _Entries:
    def __init__(self, signature: Signature, value: Value) -> None:
        self.signature = signature
        self.space = signature.space
        self.value = value.vector
        self.bias = float(value.bias)
        self.bias_radius = float(value.bias_radius) + 2 * self.space.eps * abs(self.bias)
        self.value_norm = float(self.space.xp.linalg.vector_norm(value.vector))
        self.value_radius = float(self.space.xp.linalg.vector_norm(value.radius))
        self.units = TokenRows(self.space.eye(signature.width))
        self.contrast = TokenRows((value.vector / self.value_norm)[None, :])  # v̂
        self.matrix = np.zeros((signature.width, signature.width))
        self.radius = np.zeros((signature.width, signature.width))
        self.forms = np.zeros(signature.width)  # v̂ᵀ·W·e_j
        self.forms_radius = np.zeros(signature.width)

    def ask_contrast(self) -> Steps[None]:
        """v̂ᵀ·W·e_j for every column: the logit of the contrast token, and a first idea of the column's size."""
        every = np.arange(self.signature.width)

        def ask(open_: Integers, scale: Floats) -> Steps[tuple[Floats, Floats]]:
            first = 2.0**32 * np.exp2(np.floor(np.log2(scale) / 2))
            zero = self.space.indices(np.zeros(open_.size))
            positions = [
                [Term(self.contrast, zero, self.space.asarray(first))],
                [Term(self.units, self.space.indices(open_), self.space.asarray(scale / first))],
            ]
            answers: Measurements = yield Plan("contrast", open_.size, positions)
            high = self.space.asarray(first * self.value_norm)
            low = self.space.asarray(scale / first) * self.space.xp.take(self.value, self.space.indices(open_), axis=0)
            relative = self.space.rounding + self.value_radius / self.value_norm
            logits, radius = logit_with_radius(
                self.space,
                answers.values - self.bias,
                low,
                high,
                abs(low) * relative,
                high * relative,
                self._noise(answers),
            )
            return floats(logits), floats(radius)

        self.forms, self.forms_radius = yield from _ask_climbing(every.size, np.full(every.size, FIRST_PROBE), ask)

    def _noise(self, answers: Measurements) -> float:
        return float(answers.radius + self.bias_radius)

    def contrast_sizes(self) -> Floats:  # (width,)
        """How large the contrast is in each column, never zero."""
        sizes = np.abs(self.forms)
        return np.where(sizes > 0, sizes, float(np.median(sizes[sizes > 0])) if np.any(sizes > 0) else 1.0)

    def ask(self, row: Integers, column: Integers, size: Floats) -> Steps[None]:
        """Entries (n,) of the matrix whose sizes are guessed as `size`."""
        contrast = self.contrast_sizes()
        # Norms of the tokens, by column: what the last adds by itself is below NORM_RATIO⁻² of a logit of order one.
        last = np.exp2(np.floor(-np.log2(NORM_RATIO * np.sqrt(contrast))))[column]
        middle = np.exp2(np.floor(np.log2(SMALLEST / (last * contrast[column]))))

        start = np.exp2(np.floor(np.log2(AIM / size)))
        forms, radius = yield from _ask_climbing(
            row.size, start, lambda i, scale: self._ask(row[i], column[i], scale, last[i], middle[i])
        )
        self.matrix[row, column], self.radius[row, column] = forms, radius

    def _ask(
        self, row: Integers, column: Integers, scale: Floats, last: Floats, middle: Floats
    ) -> Steps[tuple[Floats, Floats]]:
        """Logits scale·W_ij and their radii, one query each."""
        value = floats(self.value)
        # The contrast points away from the row's own value, so that the two never balance.
        middle = np.where(value[row] > 0, -middle, middle)
        first = scale / last
        positions = [
            [Term(self.units, self.space.indices(row), self.space.asarray(first))],
            [Term(self.contrast, self.space.indices(0 * row), self.space.asarray(middle))],
            [Term(self.units, self.space.indices(column), self.space.asarray(last))],
        ]
        answers: Measurements = yield Plan("entries", row.size, positions)
        answer = floats(answers.values) - self.bias
        return self._solve(answer, self._noise(answers), row, column, first, middle, last)

    def _solve(
        self, answer: Floats, noise: float, row: Integers, column: Integers, first: Floats, middle: Floats, last: Floats
    ) -> tuple[Floats, Floats]:
        """e^z·(y − a₁) = e^w·(a₂ − y) + (a₃ − y) for values a and the known logit w of the contrast."""
        value = floats(self.value)
        relative = self.space.rounding + self.value_radius / self.value_norm
        own, other, rest = first * value[row], middle * self.value_norm, last * value[column]
        known = middle * last * self.forms[column]
        known_radius = np.abs(middle * last) * self.forms_radius[column] + 4 * self.space.eps * np.abs(known)
        weight = np.exp(known)
        above = weight * (other - answer) + (rest - answer)
        below = answer - own
        with np.errstate(over="ignore"):  # where the first token takes everything
            ratio = above / np.where(below == 0, 1.0, below)
        inside = (below != 0) & (ratio > 0) & np.isfinite(ratio)
        logit = np.log(np.where(inside, ratio, 1.0))
        share = np.exp(-np.logaddexp(0.0, np.logaddexp(known, 0.0) - logit))  # softmax weight of the first token
        answer_radius = relative * (share * np.abs(own) + (1 - share) * (np.abs(other) + np.abs(rest))) + noise
        above_radius = (
            (1 + weight) * answer_radius
            + weight * (relative * np.abs(other) + np.abs(other - answer) * known_radius)
            + relative * np.abs(rest)
        )
        below_radius = answer_radius + relative * np.abs(own)
        with np.errstate(divide="ignore"):
            radius = above_radius / np.abs(above) + below_radius / np.abs(below)
        radius += self.space.rounding * np.abs(logit)  # the oracle's own product behind the logit
        return logit, np.where(inside, radius, np.inf)


def _fit_grading(matrix: Floats, row: Integers, column: Integers) -> Floats:  # (width, width), (n,), (n,)
    """Guessed sizes of all entries: row size times column size, fitted to the entries read so far."""
    width = matrix.shape[0]
    sizes = np.abs(matrix[row, column])
    row, column, sizes = row[sizes > 0], column[sizes > 0], sizes[sizes > 0]
    if sizes.size == 0:
        return np.ones((width, width))
    logs = np.log2(sizes)
    middle = float(np.median(logs))
    place = np.arange(sizes.size)
    design = csr_array(
        (np.ones(2 * sizes.size), (np.tile(place, 2), np.concatenate([row, width + column]))),
        shape=(sizes.size, 2 * width),
    )
    parts = lsqr(design, logs - middle)[0]
    return np.asarray(np.exp2(middle + parts[:width, None] + parts[None, width:]))


def _ask_climbing(
    count: int,
    scale: Floats,  # (count,) first guesses
    ask: Callable[[Integers, Floats], Steps[tuple[Floats, Floats]]],
) -> Steps[tuple[Floats, Floats]]:
    """Change each item's scale until its logit is of order one; return logit/scale and its radius.

    Items that stay indistinguishable from zero over FLOOR are zero, with that radius.
    """
    scale = scale.copy()
    forms, radius = np.zeros(count), np.full(count, np.inf)
    climbed = np.ones(count)
    open_ = np.arange(count)
    for _ in range(MOST_ROUNDS):
        if not open_.size:
            break
        logit, logit_radius = yield from ask(open_, scale[open_])
        size = np.abs(logit)
        seen = np.isfinite(logit_radius) & (logit_radius < 1)
        sharp = seen & (size > 8 * logit_radius)
        lost = seen & ~sharp
        better = seen & (logit_radius / scale[open_] < radius[open_])
        forms[open_[better]] = (logit / scale[open_])[better]
        radius[open_[better]] = (logit_radius / scale[open_])[better]
        climbed[open_[lost]] *= STEP
        done = (sharp & (size >= SMALLEST) & (size <= LARGEST)) | (lost & (climbed[open_] > FLOOR))
        factor = np.where(sharp, np.exp2(np.floor(np.log2(AIM / np.where(sharp, size, 1.0)))), 1 / STEP)
        factor[lost] = STEP
        scale[open_] *= factor
        open_ = open_[~done]
    else:
        raise Unrecoverable(Outcome.SATURATED, f"{open_.size} entries could be read at no scale of their tokens")
    # Taken for zero, an entry is off by what was read besides.
    zero = np.abs(forms) <= radius
    return np.where(zero, 0.0, forms), np.where(zero, radius + np.abs(forms), radius)
