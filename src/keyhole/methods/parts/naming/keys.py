"""Scores with a part of the key alone: a score bias, Gaussian kernels, and features of elu + 1 and of exp.

The log-odds of t·x beside a zero token are that part: linear in t for a score bias, −t² times a constant for a
Gaussian kernel. Features give odds Σ φ(t·kᵣᵀx)φ(0): of elu + 1 they are affine far out on both sides, with intercepts
that add up to one and slopes whose difference is that of t = 0; of exp they are moments, whose Hankel matrices are
positive.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import NONE, KnownAttention
from keyhole.methods.parts.naming.plane import ONE, TWO, ZERO, Plane, Unnamed, same, words
from keyhole.methods.parts.naming.products import PREDICTED, Named
from keyhole.methods.parts.naming.zero_scores import ZeroScores

# At which odds are nearly even, and still many digits off it.
SMALL = 2.0**-10
# Equally spaced steps along a ray, over the norm at which log-odds are about one.
STEPS = 0.5 * np.array([-4, -3, -2, -1, 1, 2, 3, 4])
# So far out features of elu + 1 are dead or linear, but for few; odds have about eleven digits left.
FAR_OUT = 2.0**16
ASYMPTOTIC = 1e-4
# A step over which the derivative of odds is taken, with half of the digits.
SLIGHT = 2.0**-24
# Hankel matrices of moments have no eigenvalue below this of the largest.
POSITIVE = 1e-10
# Log-odds at which entries are read.
ENTRY = 0.1
CHECKED = (2, 3, 4)


class _Beside:
    """Log-odds of tokens beside a last one."""

    def __init__(self, plane: Plane, values: Floats) -> None:
        self.plane, self.values = plane, values

    def ask(self, tokens: Floats, lasts: Floats) -> Steps[Floats]:  # (count, 2) each -> (count,)
        """One log-odds for each pair."""
        read = yield from self.plane.ask(list(zip(tokens, lasts, strict=True)))
        own, last = tokens @ self.values, lasts @ self.values
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.log((read - last) / (own - read)))


def ask_keys(plane: Plane, zero: ZeroScores | None, values: Floats) -> Steps[Named]:
    """The form of a score with a part of the key alone."""
    if zero is not None and (zero.attention.normaliser, zero.attention.position_bias) != ("sum", NONE):
        raise Unnamed("score form", "a part of the key alone is named for plain weights over their sum only")
    beside = _Beside(plane, values)
    right, left = yield from beside.ask(SMALL * np.array([ONE, -ONE]), np.zeros((2, 2)))
    slope, bend = (right - left) / (2 * SMALL), (right + left) / (2 * SMALL**2)
    norm = min(1 / max(abs(slope), SMALL**3), 1 / max(abs(bend), SMALL**3) ** 0.5)
    ray = np.outer(STEPS * norm, ONE)
    along = yield from beside.ask(ray, np.zeros_like(ray))
    (copies,) = yield from plane.ask([[norm * ONE, norm * ONE, ZERO]])
    weight = copies / (norm * values[0])
    with np.errstate(invalid="ignore", divide="ignore"):
        double = float(np.log(weight / (1 - weight)))
    if not same(double, along[5] + np.log(2), 1.0):
        raise Unnamed("normaliser", "two equal tokens have not twice the odds of one")
    if same(along, along[5] * STEPS, 1.0):
        return (yield from _ask_score_bias(beside, slope))
    if along[5] < 0 and same(along, along[5] * STEPS**2, 1.0):
        return (yield from _ask_gaussian(beside, norm))
    if zero is None:
        raise Unnamed("score form", "features are not read behind an output bias")
    return (yield from _ask_features(beside, norm, along))


def _predict(beside: _Beside, norm: float, scores: Callable[[Floats, Floats], Floats], form: str) -> Steps[Named]:
    """Predict random sequences from scores of tokens beside the last one."""
    queries = [norm * beside.plane.points(length) for length in CHECKED]
    read = yield from beside.plane.ask([list(tokens) for tokens in queries])
    worst = 0.0
    for tokens, answer in zip(queries, read, strict=True):
        values = tokens @ beside.values
        expected = KnownAttention().weights(scores(tokens, tokens[-1])) @ values
        off = float(abs(expected - answer) / np.max(np.abs(values)))
        worst = max(worst, off) if np.isfinite(off) else np.inf
    said = f"{len(CHECKED)} random sequences are answered as predicted, but for {words(worst, 2)} of their values"
    if worst > PREDICTED:
        raise Unnamed("prediction", said.replace("but for", "off by"))
    beside.plane.exam.say("score form", form, said)
    return Named(form, KnownAttention())


def _ask_score_bias(beside: _Beside, slope: float) -> Steps[Named]:
    """The bias and the score matrix of the plane: x beside g has log-odds (x − g)ᵀ(W·g + bias)."""
    axes = np.stack([ONE, TWO])
    size = abs(slope)
    for _ in range(2):  # the second coordinate may be far larger
        bias = (yield from beside.ask(ENTRY / size * axes, np.zeros((2, 2)))) / (ENTRY / size)
        size = float(np.nanmax(np.abs(bias)))
    step, long = ENTRY / size, SMALL
    for _ in range(2):
        lasts = long * np.repeat(axes, 2, axis=0)
        odds = yield from beside.ask(lasts + step * np.tile(axes, (2, 1)), lasts)
        score = ((odds / step).reshape(2, 2) - bias).T / long
        long = float(size / np.nanmax(np.abs(score)))
    norm = float(min(1 / np.max(np.abs(score)) ** 0.5, 1 / size))

    def scores(tokens: Floats, last: Floats) -> Floats:
        return np.asarray(tokens @ (score @ last + bias))

    return (yield from _predict(beside, norm, scores, "bilinear"))


def _ask_gaussian(beside: _Beside, norm: float) -> Steps[Named]:
    """X beside g has log-odds −xᵀKx + gᵀKg + 2(x − g)ᵀMg; K from g = 0, M from x = 0 and from two pairs more."""
    near = 0.5 * norm
    both = near * np.array([ONE, TWO, ONE + TWO])
    keys = -(yield from beside.ask(both, np.zeros((3, 2)))) / near**2
    cross = 0.5 * (keys[2] - keys[0] - keys[1])
    gram = np.array([[keys[0], cross], [cross, keys[1]]])
    pairs = [(ZERO, ONE), (ZERO, TWO), (ONE, TWO), (TWO, ONE)]
    odds = yield from beside.ask(near * np.array([x for x, _ in pairs]), near * np.array([g for _, g in pairs]))
    odds = odds / near**2
    mixed = np.empty((2, 2))
    mixed[0, 0], mixed[1, 1] = 0.5 * (gram[0, 0] - odds[0]), 0.5 * (gram[1, 1] - odds[1])
    mixed[0, 1] = 0.5 * (odds[2] + gram[0, 0] - gram[1, 1]) + mixed[1, 1]
    mixed[1, 0] = 0.5 * (odds[3] + gram[1, 1] - gram[0, 0]) + mixed[0, 0]

    def scores(tokens: Floats, last: Floats) -> Floats:
        return np.asarray(2 * tokens @ mixed @ last - np.einsum("ni,ij,nj->n", tokens, gram, tokens))

    return (yield from _predict(beside, norm, scores, "gaussian"))


def _ask_masses(beside: _Beside, norm: float) -> Steps[None]:
    """Whether tokens beside another one than zero have masses of their own, in whatever order."""
    one, two, last = norm * beside.plane.points(3)
    odds = np.exp((yield from beside.ask(np.array([one, two]), np.array([last, last]))))
    read = yield from beside.plane.ask([[one, two, last], [two, one, last]])
    values = np.array([one, two, last]) @ beside.values
    expected = (odds @ values[:2] + values[2]) / (np.sum(odds) + 1)
    if not same(read, expected, float(np.max(np.abs(values))), PREDICTED):
        raise Unnamed("normaliser", "odds of two tokens beside a third do not add up")


def _ask_features(beside: _Beside, norm: float, along: Floats) -> Steps[Named]:
    """Features of elu + 1, or of exp."""
    odds, affine = yield from _ask_affine(beside, norm * ONE)
    yield from _ask_masses(beside, norm)
    if affine:
        return _elu_features(beside, affine)
    moments = np.exp(np.concatenate([along[:4], [0.0], along[4:]]))
    hankel = np.array([[moments[i + j] for j in range(5)] for i in range(5)])
    scale = np.diag(hankel) ** -0.5
    eigenvalues = np.linalg.eigvalsh(scale[:, None] * hankel * scale)
    exponential = not np.any(np.isfinite(odds) & (odds > FAR_OUT**-0.5) & (odds < FAR_OUT**2))
    if np.all(np.isfinite(moments)) and eigenvalues[0] > -POSITIVE * eigenvalues[-1] and exponential:
        said = f"odds along a ray have positive Hankel matrices, and grow beyond {FAR_OUT:.3g}"
        beside.plane.exam.say("score form", "exp-features", said)
        return Named("exp-features", KnownAttention())
    # A feature may be neither dead nor linear far out on one ray.
    _, affine = yield from _ask_affine(beside, norm * TWO)
    if affine:
        return _elu_features(beside, affine)
    raise Unnamed("score form", "the part of the key alone is that of no known form")


def _ask_affine(beside: _Beside, ray: Floats) -> Steps[tuple[Floats, tuple[float, float] | None]]:
    """Odds (4,) far out on both sides, and their intercepts where they are those of features of elu + 1."""
    distances = np.array([FAR_OUT, 2 * FAR_OUT, -FAR_OUT, -2 * FAR_OUT, SLIGHT, -SLIGHT])
    odds = np.exp((yield from beside.ask(np.outer(distances, ray), np.zeros((6, 2)))))
    odds, slope = odds[:4], float(odds[4] - odds[5]) / (2 * SLIGHT)
    with np.errstate(invalid="ignore"):  # features of exp overflow
        slopes = (odds[1] - odds[0]) / FAR_OUT, (odds[3] - odds[2]) / FAR_OUT
        intercepts = float(2 * odds[0] - odds[1]), float(2 * odds[2] - odds[3])
        grows = slopes[0] - slopes[1]
    affine = abs(sum(intercepts) - 1) < ASYMPTOTIC and same(grows, slope, max(map(abs, slopes)), ASYMPTOTIC)
    inner = min(intercepts) > ASYMPTOTIC  # features of both signs: with one alone it may be a link of the score
    return odds, intercepts if affine and inner and min(slopes) >= 0 else None


def _elu_features(beside: _Beside, intercepts: tuple[float, float]) -> Named:
    said = f"far out odds are affine: intercepts {intercepts[0]:.4g} and {intercepts[1]:.4g} add up to one"
    beside.plane.exam.say("score form", "elu-features", said)
    return Named("elu-features", KnownAttention())
