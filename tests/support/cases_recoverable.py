"""Boxes that are recovered, at what price and how well."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.arrays import Array
from keyhole.oracles import Cast, Noisy, Oracle, Rounded, Wrapper
from keyhole.recovery import Outcome
from support import targets as t
from support.cases import CERTIFIED, DOUBLES, Case, head

FLOAT32_EPS = float(np.finfo(np.float32).eps)


def well_behaved() -> list[Case]:
    """Gaussian scores: at most two queries above the counting bound."""
    sizes = [*product((8, 32, 128), (1e-3, 1.0, 1e3)), (256, 1.0)]
    return [
        Case(
            f"gaussian-{d}-norm-{norm:g}",
            head(lambda rng, d, norm=norm: t.gaussian(rng, d, norm), t.normal_value, d),
            most_queries=d**2 + d + 2,
            worst_error=1e-13,
        )
        for d, norm in sizes
    ]


def hard() -> list[Case]:
    """Scores and values far from Gaussian: at most five per cent above the counting bound of full rank."""
    shapes: dict[str, tuple[Any, Any]] = {
        "cauchy": (t.cauchy, t.normal_value),
        "log-normal": (t.log_normal, t.normal_value),
        "condition-1e10": (lambda rng, d: t.graded(rng, d, 1e10), t.normal_value),
        "rank-one": (lambda rng, d: t.of_rank(rng, d, 1), t.normal_value),
        "single-entry": (t.single_entry, t.normal_value),
        "one-hot-value": (t.gaussian, t.one_hot),
        "value-over-12-decades": (t.gaussian, t.decades),
        "norm-1e-12": (lambda rng, d: t.gaussian(rng, d, 1e-12), t.normal_value),
        "norm-1e+12": (lambda rng, d: t.gaussian(rng, d, 1e12), t.normal_value),
        "value-norm-1e-12": (t.gaussian, lambda rng, d: 1e-12 * t.normal_value(rng, d)),
        "value-norm-1e+12": (t.gaussian, lambda rng, d: 1e12 * t.normal_value(rng, d)),
        "symmetric": (lambda rng, d: (m := t.gaussian(rng, d)) + m.T, t.normal_value),
        "skew": (lambda rng, d: (m := t.gaussian(rng, d)) - m.T, t.normal_value),
        "identity": (lambda rng, d: np.eye(d), t.normal_value),
        "value-in-kernel": (_blind_to_value, lambda rng, d: np.ones(d)),
    }
    return [
        Case(f"{name}-{d}", head(*shape, d), most_queries=1.05 * (d**2 + d), worst_error=1e-12)
        for (name, shape), d in product(shapes.items(), (32, 128))
    ]


def _blind_to_value(rng: np.random.Generator, d: int) -> t.Floats:
    """Score·v = 0 and v·score = 0 for v = (1, …, 1)."""
    project = np.eye(d) - np.ones((d, d)) / d
    return project @ t.gaussian(rng, d) @ project


def bounded() -> list[Case]:
    """Tokens in the unit ball."""
    return [
        Case(f"max-norm-1-width-{d}", head(t.gaussian, t.normal_value, d, max_norm=1.0), worst_error=1e-9)
        for d in (32, 128)
    ]


def degenerate() -> list[Case]:
    """Zero values hide everything; zero scores hide nothing."""
    zero = np.zeros
    return [
        Case(
            f"no-value-{d}",
            head(t.gaussian, lambda rng, d: zero(d), d),
            outcomes=frozenset({Outcome.NOT_IDENTIFIABLE}),
            says=("value", "zero", "score"),
        )
        for d in (1, 8, 64)
    ] + [
        Case(
            f"no-score-{d}",
            head(lambda rng, d: zero((d, d)), t.normal_value, d),
            most_queries=d + 40,
            worst_error=0.0,
        )
        for d in (1, 8, 64)
    ]


def single_precision() -> list[Case]:
    """Float32 boxes: right within float32, or admitted."""
    admitted = frozenset(Outcome)
    return [
        Case(
            f"float32-{name}",
            head(score, t.normal_value, 24),
            outcomes=outcomes,
            worst_error=(1e3 if outcomes is CERTIFIED else 1e4) * FLOAT32_EPS,
            libraries=("numpy-float32", "torch-float32"),
        )
        for name, score, outcomes in (
            ("gaussian", t.gaussian, CERTIFIED),
            ("norm-1e-3", lambda rng, d: t.gaussian(rng, d, 1e-3), CERTIFIED),
            ("norm-1e+3", lambda rng, d: t.gaussian(rng, d, 1e3), CERTIFIED),
            ("rank-one", lambda rng, d: t.of_rank(rng, d, 1), admitted),
            ("cauchy", t.cauchy, admitted),
            ("condition-1e10", lambda rng, d: t.graded(rng, d, 1e10), admitted),
        )
    ]


def biased() -> list[Case]:
    """Biases are read where they show: d more queries for that of the score, and one for that of the output."""
    sizes = [(None, 0.5), (0.3, None), (1.0, -3.0), (1.0, 1e4), (1e-3, 1e-3)]
    return [
        Case(
            f"score-bias-{score}-output-bias-{output}-{d}",
            head(t.gaussian, t.normal_value, d, score_bias=score, output_bias=output),
            most_queries=1.05 * (d**2 + 2 * d + 1) + 8,
            worst_error=1e-11 * max(1.0, abs(output or 0.0)),  # every answer is rounded to the size of its bias
        )
        for (score, output), d in product(sizes, (8, 32))
    ]


def low_rank() -> list[Case]:
    """The rank is not given, and costs eight queries at most."""
    return [
        Case(
            f"low-rank-{rank}-of-{d}",
            head(lambda rng, d, rank=rank: t.of_rank(rng, d, rank), t.normal_value, d),
            most_queries=rank * (2 * d - rank) + d + 8,
            worst_error=1e-12,
            options={"method": "low-rank"},
            details={"rank": rank, "effective_rank": rank, "tail": 0.0},
            depends_on_luck=True,
            libraries=DOUBLES if d < 512 else DOUBLES[:1],
        )
        for d, rank in ((64, 4), (256, 8), (512, 16))
    ] + [
        Case(
            "low-rank-of-full-rank",
            head(t.gaussian, t.normal_value, 64),
            most_queries=64**2 + 64 + 8,
            worst_error=1e-12,
            options={"method": "low-rank"},
            details={"rank": 64},
        ),
        Case(
            "low-rank-behind-a-tolerance",
            head(lambda rng, d: t.of_rank(rng, d, 1), t.normal_value, 20, max_norm=3.0, noise=kh.Noise.bounded(1e-6)),
            most_queries=400,
            worst_error=1e-3,
            options={"method": "low-rank"},
            details={"rank": 1},
            depends_on_luck=True,
        ),
    ]


def several_outputs() -> list[Case]:
    """As many logits per query as the value has rank, at three queries above the counting bound."""

    def normal(p: int) -> Any:
        return lambda rng, d: rng.standard_normal((d, p))

    def case(name: str, value: Any, rank: int, d: int = 64, **figures: Any) -> Case:
        bound = d + -(-d * d // rank)
        bars = {"most_queries": bound + 3, "worst_error": 1e-10, **figures}
        return Case(name, head(t.gaussian, value, d), details={"output_rank": rank}, depends_on_luck=True, **bars)

    return [
        case("outputs-64", normal(64), 64),
        case("outputs-24", normal(24), 24),
        case("outputs-100", normal(100), 64),
        case("outputs-1", normal(1), 1),
        case("outputs-64-of-rank-20", lambda rng, d: t.matrix_of_rank(rng, d, 64, 20), 20),
        case("outputs-64-identity", lambda rng, d: np.eye(d), 64),
        case("outputs-10-one-hot", lambda rng, d: np.eye(d)[:, :10], 10),
        case(
            "outputs-64-condition-1e6",
            lambda rng, d: t.graded_matrix(rng, d, d, 1e6),
            64,
            most_queries=2.2 * 128,
        ),
        case("outputs-256", normal(256), 256, d=256, libraries=DOUBLES[:1]),
    ]


def affine() -> list[Case]:
    """Entries of both biases of this size beside those of the score; found without being told."""

    def case(size: float, error: float, value: Any, bound: int, name: str) -> Case:
        norm = size * 8.0
        build = head(_entries_of_size_one, value, 64, score_bias=norm, output_bias=size if bound > 200 else norm)
        details = {"score_bias": True, "output_bias": True}
        return Case(
            f"affine-{name}-{size:g}",
            build,
            most_queries=bound + 12,
            worst_error=error,
            details=details,
            depends_on_luck=True,
        )

    scalar = [case(size, 1e-12, t.normal_value, 64**2 + 2 * 64 + 1, "scalar") for size in (0.1, 1.0)]
    return scalar + [
        case(size, error, lambda rng, d: rng.standard_normal((d, d)), 64 + 64 + 1 + 1, "outputs-64")
        for size, error in ((0.1, 1e-9), (1.0, 1e-8), (10.0, 1e-6))
    ]


def _entries_of_size_one(rng: np.random.Generator, d: int) -> t.Floats:
    return rng.standard_normal((d, d))


def all_positions() -> list[Case]:
    """Every token is a last one, so that a query reads a form for each. What is masked is read at the last alone."""
    values: dict[str, Any] = {
        "scalar": t.normal_value,
        "outputs-8": lambda rng, d: rng.standard_normal((d, 8)),
        "outputs-64": lambda rng, d: rng.standard_normal((d, 64)),
    }
    return [
        Case(
            f"all-positions-{name}",
            head(t.gaussian, value, 64, view="all"),
            most_queries=70,
            worst_error=1e-12,
            details={"positions": "all"},
            depends_on_luck=True,
        )
        for name, value in values.items()
    ] + [
        Case(
            f"causal-{name}",
            head(t.gaussian, value, 12, view="causal"),
            outcomes=CERTIFIED,
            most_queries=12**2 + 12 + 8,
            worst_error=1e-10,
            depends_on_luck=True,
        )
        for name, value in values.items()
    ]


def behind_noise() -> list[Case]:
    """Tokens in the unit ball and errors that are declared: what each kind of error leaves, at what price."""
    unit = {"max_norm": 1.0}

    def case(name: str, wrap: Callable[[Oracle], Oracle], queries: float, error: float, **options: Any) -> Case:
        def build(rng: np.random.Generator, like: Array) -> tuple[Oracle, kh.SingleHead]:
            oracle, truth = head(lambda rng, d: t.gaussian(rng, d, 2.0), t.normal_value, 16, **unit)(rng, like)
            return wrap(oracle), truth

        return Case(
            f"robust-{name}",
            build,
            most_queries=queries * (16**2 + 16),
            worst_error=error,
            options={"method": "robust", **options},
            depends_on_luck=True,
        )

    return [
        case("gaussian", lambda oracle: Noisy(oracle, 1e-4), 1.13, 2e-3),
        case("gaussian-budget", lambda oracle: Noisy(oracle, 1e-4), 16.0, 5e-4, budget=16 * 272),
        case("rounded", lambda oracle: Rounded(oracle, 3), 16.0, 3e-6),
        case(
            "bounded",
            lambda oracle: Wrapper(oracle, oracle.signature.with_changes(noise=kh.Noise.bounded(1e-5))),
            1.4,
            1e-3,
        ),
        case("float32", lambda oracle: Cast(oracle, "float32"), 6.0, 1e-9),
        case("bfloat16", lambda oracle: Cast(oracle, "bfloat16"), 7.0, 1e-9),
    ]


RECOVERABLE = [
    *well_behaved(),
    *hard(),
    *bounded(),
    *degenerate(),
    *biased(),
    *single_precision(),
    *low_rank(),
    *several_outputs(),
    *affine(),
    *all_positions(),
    *behind_noise(),
]
QUICK = [case for case in RECOVERABLE if not case.name.endswith(("-128", "-256", "-512"))]
QUICK = [case for case in QUICK if "-128-" not in case.name and "-256-" not in case.name]
