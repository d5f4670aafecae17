"""Weights that are powers of the score, over the number of tokens or over nothing: linear, squared and ReLU.

A first token A·x beside g/A adds A·value(x)·φ(xᵀWg): the sign of x and the norm of g tell φ, a zero token before them
whether it is divided by the number. Value and score are two linear forms of x, found from their product on a plane.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import KnownAttention
from keyhole.methods.parts.naming.first_look import LONG, STEP, FirstLook
from keyhole.methods.parts.naming.plane import ONE, TWO, ZERO, Plane, Unnamed, same, words
from keyhole.methods.parts.naming.products import PREDICTED, Named

CHECKED = (2, 3, 4)
# What is less than this of another answer is nothing.
NOTHING = 1e-15
DEGREES = {"linear": 1, "relu": 1, "squared": 2}


def ask_power(plane: Plane, look: FirstLook) -> Steps[Named]:
    """Link and normaliser, and a check."""
    queries = [[LONG * x, g / LONG] for x, g in ((ONE, TWO), (-ONE, TWO), (ONE, STEP * TWO), (-ONE, STEP * TWO))]
    queries += [[ZERO, *query] for query in queries[:2]]
    read = (yield from plane.ask(queries)) / LONG
    right, left = read[0], -read[1]
    size = max(abs(right), abs(left))
    loud = 0 if abs(right) >= abs(left) else 1
    growth = abs(read[2 + loud] / read[loud]) if size > 0 else np.nan
    degree = next((power for power in (1, 2) if same(growth, STEP**power)), 0)
    cut = min(abs(right), abs(left)) <= NOTHING * size
    link = "other"
    if degree == 1:
        link = "relu" if cut else "linear" if same(right, -left) else "other"
    elif degree == 2 and same(right, left):
        link = "squared"
    if link == "other" or look.degree not in (0, 1 + 2 * degree):
        raise Unnamed("link", f"weights go with the power {degree} of the score, and are those of no known link")
    padded = read[4 + loud] / read[loud]
    normaliser = "none" if same(padded, 1.0) else "count" if same(padded, 2 / 3) else "other"
    if normaliser == "other":
        raise Unnamed("normaliser", f"a zero token before others changes what they add by {words(padded)}")
    plane.exam.say("normaliser", normaliser, f"a zero token before others changes what they add by {words(padded)}")
    sign = np.sign(right) if loud == 0 else np.sign(-left) * -1
    yield from _check(plane, link, normaliser, float(sign))
    return Named("bilinear", KnownAttention(link=link, normaliser=normaliser))


def _check(plane: Plane, link: str, normaliser: str, sign: float) -> Steps[None]:
    """Tell value from score on the plane, and predict random sequences."""
    points = [ONE, TWO, ONE + TWO, ONE - TWO]
    queries = [[LONG * x, g / LONG] for g in (ONE, TWO) for x in points]
    if link == "relu":  # x and −x add up to the linear score of one
        queries = [[LONG * x, -LONG * x, g / LONG] for g in (ONE, TWO) for x in points]
    products = yield from plane.ask([*queries, [LONG * ONE, (ONE + TWO) / LONG]])
    if not np.all(products[:-1]):
        raise Unnamed("link", "some scores of a plane vanish")
    products, both = products[:-1].reshape(2, 4) / LONG, products[-1] / LONG
    if normaliser == "count":
        products, both = products * len(queries[0]), 2 * both
    value, scores = _square_factors(products, both) if link == "squared" else _factors(products)
    if link == "relu" and sign < 0:
        value, scores = -value, -scores
    lengths = [plane.points(length) for length in CHECKED]
    read = yield from plane.ask([list(tokens) for tokens in lengths])
    worst = 0.0
    for tokens, answer in zip(lengths, read, strict=True):
        logits = tokens @ scores.T @ tokens[-1]
        masses = np.maximum(logits, 0.0) if link == "relu" else logits ** DEGREES[link]
        added = masses * (tokens @ value) / (len(tokens) if normaliser == "count" else 1)
        off = abs(np.sum(added) - answer) / np.sum(np.abs(logits ** DEGREES[link] * (tokens @ value)))
        worst = max(worst, float(off)) if np.isfinite(off) else np.inf
    said = f"{len(CHECKED)} random sequences are answered as predicted, but for {words(worst, 2)}"
    if worst > PREDICTED:
        raise Unnamed("prediction", said.replace("but for", "off by"))
    plane.exam.say("link", link, said)


def _factors(products: Floats) -> tuple[Floats, Floats]:  # (2 last tokens, 4 points) -> (2,), (2, 2)
    """The common factor of two products of linear forms, 1 for e1, and the other factor of each."""
    (a, b), crosses = products[:, :2].T, products[:, 2] - products[:, 0] - products[:, 1]
    second = (b[0] * a[1] - b[1] * a[0]) / (crosses[0] * a[1] - crosses[1] * a[0])
    value = np.array([1.0, second])
    return value, np.stack([a, crosses - second * a], axis=1)


def _square_factors(products: Floats, both: float) -> tuple[Floats, Floats]:
    """The common factor of two products of a linear form with the square of another, ±1 for e1, and those others."""
    sign = float(np.sign(products[0, 0]))
    cubics = []
    for ones, twos, plus, minus in sign * products:
        # (1 + v·s)(w1 + w2·s)²: coefficients from s = ±1, 0 and infinity
        even, odd = 0.5 * (plus + minus), 0.5 * (plus - minus)
        cubics.append(np.array([twos, even - ones, odd - twos, ones]))
    first, second = cubics
    roots = np.roots(first)
    real = roots[np.argmin(np.abs(roots.imag) + np.abs(np.polyval(second, roots)))].real
    ratio = -1 / real
    scores = [np.array([1.0, 0.5 * (cubic[2] / cubic[3] - ratio)]) * np.abs(cubic[3]) ** 0.5 for cubic in cubics]
    # Squares leave the sign of each: it shows where both last tokens are added, beside e1.
    apart, together = ((scores[0][0] + turn * scores[1][0]) ** 2 for turn in (-1, 1))
    opposite = abs(apart - sign * both) < abs(together - sign * both)
    return sign * np.array([1.0, ratio]), np.array([scores[0], -scores[1] if opposite else scores[1]])
