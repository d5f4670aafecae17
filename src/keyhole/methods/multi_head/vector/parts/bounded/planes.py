"""Values of two tokens in every head, from what their weights have in common: their ratio is that of no other token.

Two tokens u and s beside one last token add λ·(a·u + e·s) to an answer in every head, a and e their masses and 1/λ the
sum of all masses. Other tokens move λ alone, so that answers span one line in each head's plane of u and s; other last
tokens turn all lines, each in its plane. Four sets of lines have a cross-ratio in every plane, and these are the
eigenvalues of a matrix whose eigenvectors are the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Unrecoverable
from keyhole.numerics.svd import least_squares, svd
from keyhole.recovery import Outcome


@dataclass(frozen=True)
class Planes:
    """What two tokens add in each head."""

    first: Floats  # (heads, outputs) of the first token
    second: Floats  # (heads, outputs) of the second one
    misfit: float  # what lines are off their planes by, over their length

    def weights(self, answers: Floats) -> Floats:  # (n, outputs) -> (n, 2, heads)
        """The weights of the two tokens in every head."""
        basis = np.concatenate([self.first, self.second])
        return np.asarray(least_squares(basis.T, answers.T).T.reshape(len(answers), 2, -1))


def spans_of(blocks: Floats, rank: int) -> Floats:  # (sets, n, outputs) -> (sets, rank, outputs)
    """Orthonormal bases of what the answers of each set span."""
    return np.stack([svd(block)[2][:rank] for block in blocks])


def solve_planes(spans: Floats, one: Floats, two: Floats) -> Planes:  # (sets, heads, outputs), twice (outputs,)
    """Planes of all heads from their lines, and the values of both tokens in them from their sums over heads."""
    count, heads, _ = spans.shape
    frame = svd(np.concatenate(spans))[2][: 2 * heads]  # (2·heads, outputs)
    lines = spans @ frame.T
    found: list[tuple[float, Floats]] = []
    for four in combinations(range(count), 4):
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)):
            planes = _by_cross_ratios(lines[[four[place] for place in order]])
            if planes is not None:
                found.append((_misfit(lines, planes), planes))
    if not found:
        raise Unrecoverable(Outcome.WRONG_FAMILY, "no heads share out the weights of two tokens beside a last one")
    misfit, planes = min(found, key=lambda each: each[0])
    return _of_sums(planes @ frame, one, two, misfit)


def _by_cross_ratios(lines: Floats) -> Floats | None:  # (4, heads, 2·heads) -> (heads, 2, 2·heads)
    """The planes by four sets of lines; None where cross-ratios are not real, or the sets too much alike."""
    heads = lines.shape[1]
    both = np.concatenate(lines[:2])
    try:
        turns = []
        for other in lines[2:]:
            shares = np.linalg.solve(both.T, other.T).T  # of the first two sets in another
            turns.append(np.linalg.solve(shares[:, :heads], shares[:, heads:]))
        sizes, vectors = np.linalg.eig(np.linalg.solve(turns[1].T, turns[0].T).T)
        if np.iscomplexobj(sizes) and np.any(np.abs(sizes.imag) > 0):
            return None
        own = np.linalg.inv(vectors.real)
    except np.linalg.LinAlgError:
        return None
    first, second = own @ lines[0], own @ turns[0] @ lines[1]
    planes = np.stack([first, second], axis=1)
    return np.asarray(planes / np.linalg.norm(planes, axis=2, keepdims=True))


def _misfit(lines: Floats, planes: Floats) -> float:
    """What is left of lines where each set has one line in every plane, root mean square over their length."""
    heads = len(planes)
    basis = planes.reshape(2 * heads, -1)
    if not np.linalg.cond(basis) < 1 / np.finfo(float).eps:
        return float("inf")
    parts = np.linalg.solve(basis.T, np.concatenate(lines).T).T.reshape(len(lines), heads, heads, 2)
    sizes = np.linalg.svd(parts.transpose(0, 2, 1, 3), compute_uv=False)  # (sets, heads, 2)
    return float(np.sqrt(np.mean(sizes[..., 1] ** 2)) / np.sqrt(np.mean(sizes[..., 0] ** 2)))


def _of_sums(planes: Floats, one: Floats, two: Floats, misfit: float) -> Planes:
    """Values of two tokens in planes, (heads, 2, outputs), from their sums over heads."""
    heads = len(planes)
    shares = least_squares(planes.reshape(2 * heads, -1).T, np.stack([one, two]).T).T.reshape(2, heads, 2)
    first, second = np.einsum("thk,hko->tho", shares, planes)
    return Planes(first, second, misfit)


def solve_beside(spans: Floats, known: Floats, total: Floats) -> tuple[Floats, float]:
    """Values of a token whose lines stand in planes with a known one's, (heads, outputs), and the misfit of lines.

    A line of each set and the known value span the same plane: the vector that is nearest to all such spans.
    """
    frame = svd(np.concatenate([*spans, known]))[2][: 2 * len(known)]
    lines, known, total = spans @ frame.T, known @ frame.T, frame @ total
    planes, misfits = [], []
    for own in known:
        unit = own / np.linalg.norm(own)
        beyond = lines - (lines @ unit)[..., None] * unit
        outer = [np.eye(len(unit)) - _projector(each) for each in beyond]
        rest = np.concatenate([np.linalg.norm(own) * unit[None] * len(outer), *outer])
        _, sizes, right = svd(rest)
        planes.append(np.stack([right[-1], unit]))
        misfits.append(float(sizes[-1]))
    made = np.stack(planes)
    shares = least_squares(made.reshape(len(frame), -1).T, total).reshape(-1, 2)
    return np.asarray(np.einsum("hk,hko->ho", shares, made) @ frame), max(misfits)


def _projector(rows: Floats) -> Floats:
    basis = np.linalg.qr(rows.T)[0]
    return np.asarray(basis @ basis.T)


def independent(rows: Sequence[Floats], floor: float) -> int:
    """Singular values of all rows together that errors do not make."""
    return int(np.sum(np.linalg.svd(np.concatenate(list(rows)), compute_uv=False) > floor))
