"""What norms of keys and queries add to squared lengths, once all else of the heads is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from keyhole.arrays import Floats
from keyhole.families.forms import QKNorm, QKNormRotary
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.recovery import Outcome

# So short tokens show an epsilon whatever it is, and where logits are so much nearer to what they are of long tokens,
# there is none.
SHORTEST, NEARLY = 2.0**-60, 0.9
# A length is sought at which lengths shrink to these shares; beside what rounding hides, and what is close to zero.
SHARES, HIDDEN, GONE = (0.3, 0.9), 1e-9, 1e-3
STEP, TRIES = 2.0**10, 24
# Pairs of directions to choose from.
PAIRS = 256
NO_EPSILON = "logits of short tokens are no shorter keys and queries of normed attention"

Form = TypeVar("Form", QKNorm, QKNormRotary)
# Asks [first; last], (width,) each, for logits of the first over the last, (heads,), and their radii.
AskPair = Callable[[Floats, Floats], Steps[tuple[Floats, Floats]]]


@dataclass(frozen=True)
class EpsilonReading:
    """Logits of [first; last] in every head: once with a short first token, once with a short last one."""

    first: Floats  # (2, width)
    last: Floats  # (2, width)
    logits: Floats  # (2, heads)
    radius: Floats  # of the same shape
    shown: tuple[bool, bool]  # whether keys have an epsilon, and queries

    def form(self, form: Form, head: int, errors: np.random.Generator | None = None) -> Form:
        """The form of a head with its epsilon."""
        logits = self.logits[:, head]
        if errors is not None:
            logits = logits + self.radius[:, head] * errors.standard_normal(2)
        added = np.zeros(2)
        for side in (0, 1):
            if self.shown[side]:
                share = _share(form, self.first[side], self.last[side], logits[side], side, added[0])
                if not 0 < share < 1:
                    raise Unrecoverable(Outcome.WRONG_FAMILY, NO_EPSILON)
                length = np.linalg.norm(form.key @ self.first[0] if side == 0 else form.query @ self.last[1])
                added[side] = float(length) ** 2 * (1 / share**2 - 1)
        return replace(form, epsilon=added).canonical()


def ask_epsilon(
    forms: Sequence[Form], values: Sequence[Floats], ask: AskPair, long: float, rng: np.random.Generator
) -> Steps[EpsilonReading | None]:
    """Logits of short tokens beside long ones; None where keys and queries of any length are of length one.

    `values` (width,) or (width, outputs) are the values of every head, along which the weights of the two must show.
    """
    first, last = _directions(forms, values, rng)
    tokens, logits, radius, shown = np.zeros((2, 2, len(first))), *np.zeros((2, 2, len(forms))), [False, False]
    added = [0.0] * len(forms)
    for side in (0, 1):
        length, low, high = SHORTEST, 0.0, np.inf
        for _ in range(TRIES):
            pair = (length * first, long * last) if side == 0 else (long * first, length * last)
            tokens[:, side] = pair
            logits[side], radius[side] = yield from ask(*pair)
            shares = [
                _share(form, *pair, logit, side, own)
                for form, logit, own in zip(forms, logits[side], added, strict=True)
            ]
            share = float(np.median(shares))
            if length == SHORTEST and share > NEARLY:
                break
            shown[side] = True
            if SHARES[0] < share < SHARES[1]:
                break
            if share < GONE:
                low = length
                length = length * STEP if np.isinf(high) else (low * high) ** 0.5
                length = 1.0 if low == SHORTEST else length
            elif 1 - share < HIDDEN:
                high = length
                length = (max(low, SHORTEST) * high) ** 0.5
            else:
                length = length * (1 / share**2 - 1) ** 0.5
        else:
            raise Unrecoverable(Outcome.WRONG_FAMILY, NO_EPSILON)
        if side == 0 and shown[0]:
            added = [
                float(np.linalg.norm(form.key @ tokens[0, 0])) ** 2 * max(1 / own**2 - 1, 0.0)
                for form, own in zip(forms, shares, strict=True)
            ]
    if not any(shown):
        return None
    return EpsilonReading(tokens[0], tokens[1], logits, radius, (shown[0], shown[1]))


def _share(form: Form, first: Floats, last: Floats, logit: float, side: int, added: float) -> float:
    """By how much the key of a short first token, or the query of a short last one, is shorter than one."""
    seen, own = form.logits(np.stack([first, last])[None], last[None])[0]
    if side == 0:
        return float((logit + own) / seen)
    length = float(np.linalg.norm(form.key @ last))
    return float(logit / (seen - own * length / (length**2 + added) ** 0.5))


def _directions(forms: Sequence[Form], values: Sequence[Floats], rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Directions whose logits are clear in every head and neither hides the weight of the other."""
    first, last = rng.standard_normal((2, PAIRS, forms[0].width))
    first, last = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (first, last))
    clear = np.full(PAIRS, np.inf)
    for form, value in zip(forms, values, strict=True):
        seen, own = form.logits(np.stack([first, last], axis=1), last).T
        columns = value.reshape(len(value), -1)
        sizes = [np.linalg.norm(each @ columns, axis=1) for each in (first, last)]
        shown = np.minimum(*sizes) / np.linalg.norm(columns)
        most = np.maximum(np.abs(seen), np.maximum(np.abs(own), np.abs(seen - own)))
        clear = np.minimum(clear, np.abs(seen) * np.exp(-most) * shown)
    best = int(np.argmax(clear))
    return first[best], last[best]
