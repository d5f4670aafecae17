"""Random heads of every score form, of scales from 1e-2 to 1e2."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import keyhole as kh
from keyhole.families.forms import EluFeatures, ExpFeatures, Gaussian, QKNorm, QKNormRotary, Rotary, geometric
from keyhole.families.parts import PARTS, Attention, Sink, Softcap

Rng = np.random.Generator


def scale(rng: Rng) -> float:
    return float(10 ** rng.uniform(-2, 2))


def matrices(rows: int, width: int, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """A query and a key."""
    query, key = (scale(rng) * rng.standard_normal((rows, width)) for _ in range(2))
    return query, key


def gains(rows: int, rng: Rng) -> np.ndarray:
    return np.asarray(rows**0.5 * (1 + 0.3 * rng.standard_normal(rows)))


def qk_norm(width: int, rows: int, rng: Rng) -> kh.FormHead:
    form = QKNorm(*matrices(rows, width, rng), gains(rows, rng))
    return kh.FormHead(form, scale(rng) * rng.standard_normal(width))


def qk_norm_rotary(width: int, rows: int, rng: Rng) -> kh.FormHead:
    query, key = matrices(rows, width, rng)
    own = 1 + 0.3 * rng.standard_normal(rows)
    form = QKNormRotary(query, key, own, gains(rows, rng), geometric(rows // 2))
    return kh.FormHead(form, scale(rng) * rng.standard_normal(width))


def gaussian(width: int, _: int, rng: Rng) -> kh.FormHead:
    query, key = matrices(width, width, rng)
    return kh.FormHead(Gaussian(2 * key.T @ query, key.T @ key), scale(rng) * rng.standard_normal(width))


def features(form: type[EluFeatures] | type[ExpFeatures]) -> Callable[[int, int, Rng], kh.FormHead]:
    def make(width: int, rows: int, rng: Rng) -> kh.FormHead:
        return kh.FormHead(form(*matrices(rows, width, rng)), scale(rng) * rng.standard_normal(width))

    return make


def rotary(attention: Attention) -> Callable[[int, int, Rng], kh.FormHead]:
    def make(width: int, rows: int, rng: Rng) -> kh.FormHead:
        form = Rotary(*matrices(rows, width, rng), geometric(rows // 2))
        return kh.FormHead(form, scale(rng) * rng.standard_normal(width), None, attention)

    return make


def power(link: str, normaliser: str) -> Callable[[int, int, Rng], kh.SingleHead]:
    attention = Attention(PARTS["link", link](), PARTS["normaliser", normaliser]())

    def make(width: int, _: int, rng: Rng) -> kh.SingleHead:
        score = scale(rng) * rng.standard_normal((width, width))
        return kh.SingleHead(score, scale(rng) * rng.standard_normal(width), attention=attention)

    return make


Make = Callable[[int, int, Rng], kh.FormHead | kh.SingleHead]
FULL = [(8, 8), (16, 16), (32, 32), (64, 64)]
# Name: how it is made, the options of the method, the sizes (width, rows of the key).
FORMS: dict[str, tuple[Make, dict[str, str], list[tuple[int, int]]]] = {
    "rotary": (rotary(Attention()), {"form": "rotary"}, [*FULL, (16, 4), (64, 16)]),
    "rotary, softcap": (rotary(Attention(Softcap(20.0))), {"form": "rotary", "link": "softcap"}, FULL[:3]),
    "rotary, sink": (rotary(Attention(normaliser=Sink(0.5))), {"form": "rotary", "normaliser": "sink"}, FULL[:3]),
    "qk-norm": (qk_norm, {"form": "qk-norm"}, [*FULL, (16, 4), (64, 16)]),
    "qk-norm and rotary": (qk_norm_rotary, {"form": "qk-norm-rotary"}, [(8, 8), (16, 4), (32, 8), (64, 16)]),
    "Gaussian": (gaussian, {"form": "gaussian"}, FULL),
    "elu + 1 features": (features(EluFeatures), {"form": "elu-features"}, FULL),
    "exp features": (features(ExpFeatures), {"form": "exp-features"}, FULL),
    "linear over its sum": (power("linear", "sum"), {"link": "linear"}, FULL),
    "squared over its sum": (power("squared", "sum"), {"link": "squared"}, FULL),
    "linear": (power("linear", "none"), {"link": "linear", "normaliser": "none"}, FULL),
    "positive over n": (power("relu", "count"), {"link": "relu", "normaliser": "count"}, FULL),
}
