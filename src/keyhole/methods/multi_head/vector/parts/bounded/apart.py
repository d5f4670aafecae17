"""Heads by least squares over all answers, each by itself: what others add is projected out of answers.

Where values of all heads together have no more dimensions than answers, some linear map of answers tells what one head
adds, whatever the others do. It is linear, as values are: logits alone are left to a step of Levenberg and Marquardt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.multi_head.vector.parts.bounded.factors import FactoredHead, LinearisedHead
from keyhole.numerics.svd import least_squares, pseudo_inverse, svd

# Rounds go on while answers are off by more than is enough, and while a round lowers that to less than this part.
ROUNDS, GAIN = 8, 0.8
# Damping of steps, over the largest singular value: the first that are better than none, until more is worse.
DAMPED = 10.0 ** np.arange(-12, 0)
# Multiplications of a step of one head, at most: some ten seconds.
MOST = 2.0**35
# What a number does is taken for this part of what others do at least.
SHOWN = 1e-9
# Directions of unknowns that are this part of the largest are left out.
LEAST = 1e-13


@dataclass(frozen=True)
class _Fit:
    """Heads at all sequences."""

    heads: list[FactoredHead]
    parts: list[list[LinearisedHead]]  # of every head, at the sequences of each length
    off: float  # what answers are off by, over them

    @classmethod
    def of(cls, heads: Sequence[FactoredHead], tokens: Sequence[Floats], answers: Floats) -> _Fit:
        """The heads with the outputs that suit their logits best."""
        parts = [[LinearisedHead(head, each) for each in tokens] for head in heads]
        shares = np.concatenate([_shares(own) for own in parts], axis=1)
        outputs = least_squares(shares, answers)
        off = float(np.linalg.norm(answers - shares @ outputs) / np.linalg.norm(answers))
        ends = np.cumsum([head.left.shape[1] for head in heads])[:-1]
        made = [replace(head, right=own) for head, own in zip(heads, np.split(outputs, ends), strict=True)]
        return cls(made, parts, off)


def fits_apart(heads: Sequence[FactoredHead], answers: Floats) -> bool:
    """Whether heads can be told apart so, in a time that is worth it."""
    cost = max(answers.shape[0] * head.right.shape[0] * (head.key.size + head.query.size) ** 2 for head in heads)
    return bool(sum(head.right.shape[0] for head in heads) <= answers.shape[1] and cost <= MOST)


def fit_apart(
    heads: Sequence[FactoredHead],
    tokens: Sequence[Floats],  # (n, length, width + 1) each
    answers: Floats,  # (all of them, outputs)
    enough: float,  # what answers may be off by, over them
) -> list[FactoredHead]:
    """Heads that answer better, of the same ranks; those given where none do."""
    fit = _Fit.of(heads, tokens, answers)
    for _ in range(ROUNDS):
        if fit.off <= enough:
            break
        inverse = pseudo_inverse(np.concatenate([head.right for head in fit.heads]))  # (outputs, all ranks)
        ends = np.cumsum([head.left.shape[1] for head in fit.heads])[:-1]
        moved = [
            _moved(head, parts, tokens, answers, own)
            for head, parts, own in zip(fit.heads, fit.parts, np.split(inverse, ends, axis=1), strict=True)
        ]
        after = _Fit.of(moved, tokens, answers)
        if not after.off < fit.off:
            break
        gained, fit = after.off < GAIN * fit.off, after
        if not gained:
            break
    return fit.heads


def _shares(parts: Sequence[LinearisedHead]) -> Floats:  # (n, rank)
    return np.concatenate([part.shares for part in parts])


def _moved(
    head: FactoredHead, parts: Sequence[LinearisedHead], tokens: Sequence[Floats], answers: Floats, inverse: Floats
) -> FactoredHead:
    """The head after one step, answers @ inverse being its shares but for what is linear."""
    others = answers @ svd(head.right, full_matrices=True)[2][len(head.right) :].T
    told = answers @ inverse

    def linear(parts: Sequence[LinearisedHead]) -> Floats:
        """What is multiplied with unknown numbers: mean tokens, what other heads add, one."""
        return np.column_stack([np.concatenate([part.mean for part in parts]), others, np.ones(len(answers))])

    def misfit(design: Floats) -> tuple[float, Floats]:
        sizes = np.linalg.norm(design, axis=0) + (np.linalg.norm(design, axis=0) == 0)
        solved = least_squares(design / sizes, told) / sizes[:, None]
        return float(np.linalg.norm(told - design @ solved)), solved

    now: Floats = linear(parts)
    spanned = _spanned(now)
    slopes = np.concatenate([part.slopes() for part in parts])  # (n, rank, k)
    flat = slopes.reshape(len(slopes), -1)
    flat = (flat - spanned @ (spanned.T @ flat)).reshape(-1, slopes.shape[2])
    rest = (told - spanned @ (spanned.T @ told)).ravel()
    sizes = np.linalg.norm(flat, axis=0)
    sizes = np.maximum(sizes, SHOWN * np.max(sizes))  # some numbers show in no answer
    triangle: Floats = np.asarray(np.linalg.qr(np.column_stack([flat / sizes, rest]), mode="r"))
    left, singular, right = svd(triangle[:, :-1])
    along = np.where(singular > LEAST * singular[0], left.T @ triangle[:, -1], 0.0)
    best, (least, solved) = head, misfit(now)
    start = least
    for damping in DAMPED:
        step = right.T @ (singular * along / (singular**2 + (damping * singular[0]) ** 2)) / sizes
        tried = head.with_logits(step)
        off, values = misfit(linear([LinearisedHead(tried, each) for each in tokens]))
        if off < least:
            best, least, solved = tried, off, values
        elif least < start:
            break
    return replace(best, left=solved[: head.left.shape[0]])


def _spanned(columns: Floats) -> Floats:
    """An orthonormal basis of columns, each of norm one before."""
    sizes = np.linalg.norm(columns, axis=0)
    left, singular, _ = svd(columns / (sizes + (sizes == 0)))
    return np.asarray(left[:, singular > LEAST * singular[0]])
