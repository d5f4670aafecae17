"""Every certified entry over its radius, by family and noise, against known truths: none may be above one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.support.truths import inside_ball, ratios, wrong_by
from keyhole.oracles import Cast, Noisy, Oracle, Rounded, Wrapper
from keyhole.targets import random_multi_head, random_net, random_single_head

Random = np.random.Generator
# A truth, how to recover it, its options, and whether some of its boxes may only be asked within a norm.
Draw = Callable[[Random], tuple[Any, str, dict[str, Any]]]
RUNS, FIRST_SEED = 60, 100_000
NOISY_RUNS = 40
FOUND_OUT_RUNS = 20  # where the method for exact answers has to fail first


class Bounded(Wrapper):
    """Errors of at most `tau`: all alike, by the sign of the answer, by its digits, or random."""

    def __init__(self, inner: Oracle, tau: float, rng: Random) -> None:
        super().__init__(inner, inner.signature.with_changes(noise=kh.Noise.bounded(tau)))
        self.tau, self.rng, self.kind = tau, rng, int(rng.integers(4))

    def change(self, answers: Any) -> Any:
        errors = (
            np.ones_like(answers),
            np.sign(answers),
            np.sign(np.sin(1e7 * answers + 1)),
            self.rng.uniform(-1, 1, answers.shape),
        )
        return answers + self.tau * errors[self.kind]


class Truncated(Wrapper):
    """Answers cut off after some decimals, or rounded down, and declared as rounded."""

    def __init__(self, inner: Oracle, decimals: int, rng: Random) -> None:
        super().__init__(inner, inner.signature.with_changes(noise=kh.Noise.rounded(decimals)))
        self.unit, self.cut = 10.0**-decimals, (np.floor, np.ceil, np.trunc)[rng.integers(3)]

    def change(self, answers: Any) -> Any:
        return self.cut(answers / self.unit) * self.unit


def _error(rng: Random, low: float = -6.0, high: float = -2.5) -> float:
    return float(10 ** rng.uniform(low, high))


NOISES: dict[str, Callable[[Oracle, Random], Oracle]] = {
    "exact": lambda oracle, _: oracle,
    "float32": lambda oracle, _: Cast(oracle, "float32"),
    "bounded": lambda oracle, rng: Bounded(oracle, _error(rng), rng),
    "normal": lambda oracle, rng: Noisy(oracle, _error(rng), seed=int(rng.integers(2**31))),
    "decimals": lambda oracle, rng: Rounded(oracle, int(rng.integers(3, 7))),
    "decimals, not declared": lambda oracle, rng: Rounded(oracle, int(rng.integers(3, 7)), declared=False),
    "cut off": lambda oracle, rng: Truncated(oracle, int(rng.integers(3, 7)), rng),
}


def net(rng: Random, activation: str = "relu", most: int = 8, widest: int = 6) -> kh.ReluNet:
    """A random net, neurons of like or of very different sizes, with or without a way past them."""
    width, neurons = int(rng.integers(2, widest + 1)), int(rng.integers(1, most + 1))
    outputs = (None, None, 1, 2, 3)[rng.integers(5)]
    made = random_net(width, neurons, outputs, rng)
    scale = 10 ** rng.uniform(-1, 1, neurons) if rng.random() < 0.5 else np.ones(neurons)
    skip = rng.standard_normal((*(() if outputs is None else (outputs,)), width)) if rng.random() < 0.2 else None
    inner, bias, outer = made.weights_in * scale[:, None], made.bias_in * scale, made.weights_out / scale
    return kh.ReluNet(inner, bias, outer, made.bias_out, skip, activation)


def head(rng: Random, outputs: int | None = None, *, bias: bool = True) -> kh.SingleHead:
    biases = {"score_bias": 0.3, "output_bias": 0.5} if bias and rng.random() < 0.4 else {}
    size, width = float(10 ** rng.uniform(-0.5, 0.5)), int(rng.integers(2, 6))
    seed = int(rng.integers(2**31))
    return random_single_head(width, rank=width, norm=size, seed=seed, outputs=outputs, **biases)


def several(rng: Random, outputs: int | None) -> kh.MultiHead:
    heads, width = int(rng.integers(2, 4)), int(rng.integers(3, 6))
    outputs = width if outputs == 0 else outputs
    return random_multi_head(heads, width=width, outputs=outputs, seed=int(rng.integers(2**31)), score_bias=0.2)


def residual(rng: Random) -> kh.Residual:
    """Values of very uneven rows beside the token."""
    made = head(rng, outputs=1, bias=False)
    uneven = 10 ** rng.uniform(-9, 0.5, made.width)
    value = uneven[:, None] * rng.standard_normal((made.width, made.width))
    return kh.Residual(kh.SingleHead(made.score, value))


def layer(rng: Random) -> kh.OneLayer:
    inner = net(rng, widest=4)
    score = rng.standard_normal((inner.width, inner.width))
    value = rng.standard_normal((inner.width, inner.width)) / inner.width**0.5
    plain = kh.ReluNet(inner.weights_in, inner.bias_in, inner.weights_out, inner.bias_out)
    return kh.OneLayer(kh.SingleHead(score, value), plain, residual=bool(rng.integers(2)))


def _smooth(rng: Random) -> kh.ReluNet:
    made = net(rng, ("gelu", "gelu_tanh", "silu")[rng.integers(3)], most=6)
    return made if made.width > 3 else _smooth(rng)  # in few dimensions kinks are not told apart from afar


FAMILIES: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "one head": (lambda rng: (head(rng), "single-head", {}), ("exact", "float32")),
    "one head, several outputs": (lambda rng: (head(rng, 3), "single-head", {}), ("exact", "float32")),
    "one head behind noise": (
        lambda rng: (head(rng, bias=False), "robust", {}),
        ("float32", "bounded", "normal", "decimals"),
    ),
    "several heads, one output": (lambda rng: (several(rng, None), "multi-head", {}), ("exact",)),
    "several heads, d outputs": (lambda rng: (several(rng, 0), "multi-head", {}), ("exact", "float32")),
    "a head with a residual": (lambda rng: (residual(rng), "residual", {"heads": 1}), ("exact",)),
    "ReLU net": (lambda rng: (net(rng), "relu-net", {}), tuple(NOISES)),
    "ReLU net, lean": (lambda rng: (net(rng), "relu-net", {"polish": False}), ("exact",)),
    "GELU and SiLU nets, d > 3": (lambda rng: (_smooth(rng), "relu-net", {"activation": "auto"}), ("exact",)),
    "a head, then a net": (lambda rng: (layer(rng), "one-layer", {}), ("exact",)),
}


def judge(family: str, noise: str, seed: int) -> tuple[str, np.ndarray]:
    """How a box of this kind ended, in a word, and of a certified one every |error| / radius."""
    rng = np.random.default_rng([seed, *f"{family} {noise}".encode()])
    truth, method, options = FAMILIES[family][0](rng)
    limit = float(truth.width**0.5 * rng.uniform(3, 8)) if family.startswith("ReLU") and rng.random() < 0.3 else None
    oracle = NOISES[noise](kh.FunctionOracle(truth, width=truth.width, max_norm=limit), rng)
    result = kh.recover(oracle, method, seed=seed, throw=False, **options)
    if not result.certified:
        return "admitted", np.zeros(0)
    off = ratios(result, inside_ball(truth, limit))
    if not np.all(np.isfinite(off)):  # other neurons than those of the truth: as a function they must do
        word = (
            "wrong function" if wrong_by(result, truth, rng, oracle.signature) > 1 else "other neurons, right function"
        )
        return word, np.zeros(0)
    return "certified", off


def table(kept: Kept) -> str:
    columns = ["family", "noise", "boxes", "certified", "of these with other neurons", "wrong functions", "entries"]
    columns += ["above 1", "worst", "median"]
    measured: dict[str, Callable[[], Row]] = {
        f"{family}, {noise}": partial(_row, family, noise) for family, (_, kinds) in FAMILIES.items() for noise in kinds
    }
    return "Entries: |error| over radius, after alignment with the truth.\n\n" + markdown(
        columns, kept.rows_of("radii", measured)
    )


def _row(family: str, noise: str) -> Row:
    runs = RUNS if noise == "exact" else FOUND_OUT_RUNS if "not declared" in noise else NOISY_RUNS
    found = [judge(family, noise, FIRST_SEED + number) for number in range(runs)]
    words = [word for word, _ in found]
    off = np.concatenate([entries for _, entries in found])
    other = words.count("other neurons, right function")
    certified = f"{sum(word != 'admitted' for word in words)}"
    figures = [
        off.size,
        int(np.sum(off > 1)),
        f"{np.max(off, initial=0.0):.2f}",
        f"{np.median(off):.1e}" if off.size else "–",
    ]
    return [family, noise, runs, certified, other, words.count("wrong function"), *figures]
