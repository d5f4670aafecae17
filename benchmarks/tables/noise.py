"""What noise="measure" finds on boxes of every kind: the right kind, the scale over the truth, and the queries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.arrays import Array
from keyhole.methods.noise_estimation.measure import measure_noise
from keyhole.noise import Noise
from keyhole.oracles import Cast, Noisy, Oracle, Rounded, Wrapper
from keyhole.session import Session

RUNS = 200


class Shaken(Wrapper):
    """An error of at most `tolerance`, the same whenever the same question is asked."""

    def __init__(self, inner: Oracle, tolerance: float, draw: Callable[[np.random.Generator], float]) -> None:
        super().__init__(inner)
        self.tolerance, self.draw = tolerance, draw

    def answer(self, tokens: Array) -> Array:
        seeds = [int.from_bytes(each.tobytes()[:64], "little") for each in np.ascontiguousarray(tokens * np.pi)]
        return self.inner(tokens) + self.tolerance * np.array([self.draw(np.random.default_rng(s)) for s in seeds])


Make = Callable[[Oracle, np.random.Generator], tuple[Oracle, Noise]]


def _decades(rng: np.random.Generator) -> float:
    return float(10 ** rng.uniform(-8, -2))


def _gaussian(oracle: Oracle, rng: np.random.Generator) -> tuple[Oracle, Noise]:
    scale = _decades(rng)
    return Noisy(oracle, scale, seed=int(rng.integers(2**32)), declared=False), Noise.gaussian(scale)


def _bounded(draw: Callable[[np.random.Generator], float]) -> Make:
    def make(oracle: Oracle, rng: np.random.Generator) -> tuple[Oracle, Noise]:
        scale = _decades(rng)
        return Shaken(oracle, scale, draw), Noise.bounded(scale)

    return make


def _rounded(oracle: Oracle, rng: np.random.Generator) -> tuple[Oracle, Noise]:
    decimals = int(rng.integers(1, 9))
    return Rounded(oracle, decimals, declared=False), Noise.rounded(decimals)


def _cast(dtype: str) -> Make:
    return lambda oracle, _: (Cast(oracle, dtype, declared=False), Noise.dtype(dtype))


KINDS: dict[str, Make] = {
    "exact": lambda oracle, _: (oracle, Noise.exact()),
    "normal errors": _gaussian,
    "bounded, uniform": _bounded(lambda rng: rng.uniform(-1, 1)),
    "bounded, ± the tolerance": _bounded(lambda rng: rng.choice([-1.0, 1.0])),
    "rounded to 1 … 8 decimals": _rounded,
    "float32": _cast("float32"),
    "float16": _cast("float16"),
    "bfloat16": _cast("bfloat16"),
}


def table() -> str:
    columns = ["errors", "kind right", "scale found over scale: least, most", "queries: median, most"]
    return markdown(columns, [_row(name, make) for name, make in KINDS.items()])


def _row(name: str, make: Make) -> list[object]:
    right, ratios, queries = 0, [], []
    for seed in range(RUNS):
        rng = np.random.default_rng([seed, 61])
        width = int(rng.integers(2, 33))
        score = rng.standard_normal((width, width)) / width**0.5
        truth = kh.SingleHead(score, rng.standard_normal(width))
        oracle, noise = make(kh.FunctionOracle(truth, width=width, max_norm=1.0), rng)
        session = Session(oracle)
        found = session.run(measure_noise(oracle.signature.with_changes(noise=Noise.of("measure")), rng)).noise
        right += (found.kind, found.name) == (noise.kind, noise.name)
        queries.append(session.queries)
        if noise.scale:
            ratios.append(found.scale / noise.scale)
    scales = f"{min(ratios):.3f}, {max(ratios):.3f}" if ratios else "–"
    return [name, f"{right}/{RUNS}", scales, f"{np.median(queries):.0f}, {max(queries)}"]
