"""One table of boxes and what must become of them. A method joins by adding its rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
import targets as t
from keyhole.arrays import Array, Space
from keyhole.errors import OracleError, RecoveryFailed, UsageError
from keyhole.journal import Journal
from keyhole.oracles import Cast, Noisy, Oracle, Rounded, Wrapper
from keyhole.recovery import Outcome

DOUBLES = ("numpy-float64", "torch-float64")
CERTIFIED = frozenset({Outcome.CERTIFIED})
FLOAT32_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Case:
    """A box, and what a recovery of it must come to."""

    name: str
    build: Callable[[np.random.Generator, Array], tuple[Oracle, kh.SingleHead | None]]  # (rng, like)
    outcomes: frozenset[Outcome] = CERTIFIED  # any of these
    most_queries: float = np.inf  # held-out ones apart
    worst_error: float = np.inf  # kh.distance from the truth, where it is certified
    says: tuple[str, ...] = ()  # what the message must mention, in lower case
    options: dict[str, Any] = field(default_factory=lambda: {"method": "single-head"})
    libraries: tuple[str, ...] = DOUBLES
    details: dict[str, Any] = field(default_factory=dict)  # what the method must have found out, where it is certified
    # Figures that a few seeds in a hundred miss by bad luck: with a fresh seed it must be right or admitted, no more.
    depends_on_luck: bool = False


def head(
    score: Callable[[np.random.Generator, int], t.Floats],
    value: Callable[[np.random.Generator, int], t.Floats],
    width: int,
    score_bias: float | None = None,  # its norm
    output_bias: float | None = None,
    view: str = "last",  # "all" positions, or "causal": all, each blind to what comes after it
    **signature: Any,
) -> Callable[[np.random.Generator, Array], tuple[Oracle, kh.SingleHead]]:
    """A box that is one head, its parameters numbers of the box's own dtype."""

    def build(rng: np.random.Generator, like: Array) -> tuple[Oracle, kh.SingleHead]:
        made = None if score_bias is None else t.bias(rng, width, score_bias)
        matrix, values = score(rng, width), value(rng, width)
        offset = output_bias
        if output_bias is not None and values.ndim == 2:
            offset = t.bias(rng, values.shape[1], output_bias)
        truth = t.head_in(Space.of(like), matrix, values, made, offset)
        if view != "last":
            box = truth.at_all_positions if view == "all" else t.causal(truth)
            return kh.FunctionOracle(box, width=width, like=like, positions="all", name=view, **signature), truth
        return kh.FunctionOracle(truth, width=width, like=like, **signature), truth

    return build


def other(
    box: Callable[[np.random.Generator, int, Space], t.Box], width: int = 6, **signature: Any
) -> Callable[[np.random.Generator, Array], tuple[Oracle, None]]:
    """A box that is no head."""

    def build(rng: np.random.Generator, like: Array) -> tuple[Oracle, None]:
        function = box(rng, width, Space.of(like))
        return kh.FunctionOracle(function, width=width, like=like, name=box.__name__, **signature), None

    return build


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


MISFITS = frozenset({Outcome.WRONG_FAMILY, Outcome.SATURATED, Outcome.INCONSISTENT, Outcome.TOO_NOISY})
BROKEN = frozenset({Outcome.ORACLE_FAILED})


# Errors too small to hide that a box is no head.
NOISES = (kh.Noise.gaussian(1e-6), kh.Noise.bounded(1e-6), kh.Noise.rounded(7), kh.Noise.dtype("float32"))


def wrong() -> list[Case]:
    """Boxes that are no single head, and boxes that misbehave: never certified."""
    misfits = [
        t.two_heads,
        t.faint_second_head,
        t.relu_net,
        t.hashed,
        t.positional,
        t.residual,
        t.mean_and_square,
        t.last_token_only,
        t.hard_attention,
        t.short_memory,
        t.two_vector_heads,
        t.faint_second_vector_head,
        t.heads_beside_each_other,
        t.one_output_apart,
        t.relu_on_top,
        t.relu_beside,
        t.tanh_on_top,
        t.skip_to_outputs,
        t.normed_tokens,
    ]
    everywhere = [
        t.placed_everywhere,
        t.near_everywhere,
        t.rotated_everywhere,
        t.two_heads_everywhere,
        t.relu_everywhere,
        t.skip_everywhere,
        t.window_everywhere,
    ]
    broken: dict[str, tuple[Any, str]] = {
        "nan_at_once": (t.nan_at_once, "nan"),
        "nan_later": (t.nan_later, "nan"),
        "inf_later": (t.inf_later, "inf"),
        "wrong_shape": (t.wrong_shape, "shape"),
        "one_number": (t.one_number, "shape"),
        "deep_shape": (t.deep_shape, "shape"),
        "changing_shape": (t.changing_shape, "must not change"),
        "a_list": (t.a_list, "list"),
        "nothing": (t.nothing, "none"),
        "raising": (t.raising, "cuda out of memory"),
    }
    return [
        *(Case(box.__name__, other(box), outcomes=MISFITS) for box in misfits),
        Case("never_twice_the_same", other(t.never_twice_the_same), outcomes=MISFITS),
        Case("all_noise", other(t.all_noise), outcomes=MISFITS),
        *(Case(name, other(box), outcomes=BROKEN, says=(word,)) for name, (box, word) in broken.items()),
        Case("relu_net-bounded", other(t.relu_net, max_norm=1.0), outcomes=MISFITS),
        Case("two_heads-bounded", other(t.two_heads, max_norm=1.0), outcomes=MISFITS),
        Case("residual-bounded", other(t.residual, max_norm=1.0), outcomes=MISFITS),
        Case("positional-wide", other(t.positional, width=48), outcomes=MISFITS),
        Case("two_heads-wide", other(t.two_heads, width=48), outcomes=MISFITS),
        Case("two_heads-width-2", other(t.two_heads, width=2), outcomes=MISFITS),
        *(Case(box.__name__, other(box, positions="all"), outcomes=MISFITS) for box in everywhere),
        *(
            Case(f"{box.__name__}-{name}", other(box, **signature), outcomes=MISFITS, options={"method": method})
            for box in (t.two_vector_heads, t.heads_beside_each_other, t.relu_on_top)
            for name, signature, method in (
                ("bounded", {"max_norm": 1.0}, "single-head"),
                ("low-rank", {}, "low-rank"),
                ("narrow", {"width": 3}, "single-head"),
            )
        ),
        *(
            Case(
                f"{box.__name__}-as-{method}",
                other(box),
                outcomes=frozenset(Outcome) - CERTIFIED,
                options={"method": method},
            )
            for box in (
                t.two_heads,
                t.hashed,
                t.positional,
                t.hard_attention,
                t.normed_tokens,
                t.mean_and_square,
                t.never_twice_the_same,
                t.nan_later,
                t.raising,
            )
            for method in ("relu-net", "one-layer")
        ),
        *(
            Case(
                f"{box.__name__}-behind-{noise.kind}",
                other(box, max_norm=1.0, noise=noise),
                outcomes=frozenset(Outcome) - CERTIFIED,
                options={"method": "robust"},
            )
            for box in (t.two_heads, t.relu_net, t.residual, t.positional, t.relu_on_top, t.hashed)
            for noise in NOISES
        ),
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
        )
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
        case("bounded", lambda oracle: Wrapper(oracle, oracle.signature.but(noise=kh.Noise.bounded(1e-5))), 1.4, 1e-3),
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
WRONG = wrong()


def rows(cases: list[Case]) -> list[Any]:
    """Every case in every library it names."""
    return [
        pytest.param(case, library, id=f"{case.name}-{library.replace('-float64', '')}")
        for case in cases
        for library in case.libraries
    ]


def check(case: Case, result: kh.Recovery, truth: kh.SingleHead | None) -> None:
    """The case's expectations, and what every result must keep."""
    assert result.outcome in case.outcomes, result.message
    assert result.message.strip()
    assert result.stats.queries <= case.most_queries
    assert sum(result.stats.stages.values()) == result.stats.queries
    for word in case.says:
        assert word in result.message.lower()
    if result.certified:
        assert truth is not None
        assert kh.distance(t.plain(result.params), t.plain(truth)) <= case.worst_error
        assert t.misses(result.params, truth, result.certificate.radius) == {}
        assert result.certificate.worst_ratio <= 1.0
        assert result.stats.heldout_queries == result.certificate.heldout_queries > 0
        assert dict(result.stats.details) | case.details == result.stats.details
    else:
        assert result.outcome.value.strip()  # the remedy


@pytest.mark.parametrize(("case", "library"), rows(RECOVERABLE))
def test_recoverable(case: Case, library: str, rng: np.random.Generator) -> None:
    like = t.example(library)
    oracle, truth = case.build(rng, like)
    result = kh.recover(oracle, throw=False, **case.options)
    check(case, result, truth)
    if result.params is not None:
        assert Space.of(result.params.score) == Space.of(like)  # handed back in the caller's type


@pytest.mark.parametrize(("case", "library"), rows(QUICK))
def test_recoverable_with_fresh_seed(case: Case, library: str, fresh_seed: int) -> None:
    """What must hold for every seed. Counts are pinned on fixed seeds: a form in some hundred is read twice."""
    case = replace(case, most_queries=np.inf)
    if case.depends_on_luck:
        case = replace(case, outcomes=frozenset(Outcome), worst_error=np.inf, details={})
    oracle, truth = case.build(np.random.default_rng(fresh_seed), t.example(library))
    check(case, kh.recover(oracle, throw=False, seed=fresh_seed, **case.options), truth)


@pytest.mark.parametrize("case", [case for case in QUICK if "gaussian-budget" not in case.name], ids=lambda c: c.name)
def test_no_question_is_asked_twice(case: Case, rng: np.random.Generator) -> None:
    """But where errors are random and a budget allows it."""
    oracle, _ = case.build(rng, t.example(case.libraries[0]))
    asked: list[bytes] = []
    box = oracle
    while isinstance(box, Wrapper):
        box = box.inner
    inner = box.function

    def spy(tokens: Array) -> Array:
        asked.extend(sequence.tobytes() for sequence in tokens)
        return inner(tokens)

    box.function = spy
    kh.recover(oracle, throw=False, **case.options)
    assert len(asked) == len(set(asked))


def test_the_rank_is_right_in_every_run(fresh_seed: int) -> None:
    """Also where singular values decay to a millionth of the largest."""
    d, rank = 16, 3
    for seed in [*range(60), *range(fresh_seed, fresh_seed + 40)]:
        rng = np.random.default_rng(seed)
        sizes = np.geomspace(1.0, 10.0 ** -rng.uniform(0, 6), rank)
        score = t.orthogonal(rng, d)[:, :rank] * sizes @ t.orthogonal(rng, d)[:rank]
        truth = kh.SingleHead(score, t.normal_value(rng, d))
        result = kh.recover(kh.FunctionOracle(truth, width=d), method="low-rank", seed=seed)
        assert result.stats.details["rank"] == rank, seed
        assert t.misses(result.params, truth, result.certificate.radius) == {}, seed


@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
@pytest.mark.parametrize("seed", range(4))
def test_a_tail_below_an_effective_rank(tolerance: float, seed: int) -> None:
    d, rank = 64, 4
    rng = np.random.default_rng([seed, 4])
    truth = kh.SingleHead(t.of_rank(rng, d, rank) + t.gaussian(rng, d, 1e-6), t.normal_value(rng, d))
    result = kh.recover(kh.FunctionOracle(truth, width=d), method="low-rank", seed=seed, tolerance=tolerance)
    sizes = np.linalg.svd(truth.score, compute_uv=False)
    best = np.linalg.norm(sizes[rank:])  # what the nearest matrix of rank 4 misses
    assert np.linalg.norm(result.params.score - truth.score) <= 10 * best
    assert t.misses(result.params, truth, result.certificate.radius) == {}
    assert result.stats.details["effective_rank"] == rank
    if tolerance == 0:
        assert result.stats.details["tail"] == pytest.approx(sizes[rank] / sizes[0], rel=1e-3)
    else:
        assert result.stats.queries < d**2 / 4
        assert "tail" in result.stats.details


@pytest.mark.parametrize("tolerance", [-1e-9, 1.0, float("nan")])
def test_a_tolerance_is_a_fraction(tolerance: float, rng: np.random.Generator) -> None:
    truth = kh.SingleHead(t.gaussian(rng, 4), t.normal_value(rng, 4))
    with pytest.raises(UsageError, match="tolerance"):
        kh.recover(kh.FunctionOracle(truth, width=4), method="low-rank", tolerance=tolerance)


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("bound", [1.0, 0.37])
def test_no_token_is_ever_longer_than_the_bound(width: int, bound: float, rng: np.random.Generator) -> None:
    truth = kh.SingleHead(t.gaussian(rng, width), t.normal_value(rng, width))
    spy = t.Spy(truth)
    result = kh.recover(kh.FunctionOracle(spy, width=width, max_norm=bound))
    assert 0 < spy.longest <= bound  # measured in extended precision
    assert kh.distance(result.params, truth) <= (1e-9 if bound == 1.0 else 1e-7)


@pytest.mark.parametrize(("case", "library"), rows(WRONG))
def test_never_certified(case: Case, library: str, rng: np.random.Generator, tmp_path: Path) -> None:
    path = tmp_path / "answers.journal"
    oracle, _ = case.build(rng, t.example(library))
    with pytest.raises(RecoveryFailed) as caught:
        kh.recover(oracle, journal=path, **case.options)
    result = caught.value.result
    check(case, result, None)
    assert result.outcome.name in str(caught.value)
    assert result.message in str(caught.value)
    if case.outcomes == BROKEN:
        assert isinstance(caught.value.__cause__, OracleError)
    assert_intact(path, result)


@pytest.mark.parametrize(("case", "library"), rows([case for case in WRONG if case.outcomes == MISFITS]))
def test_never_certified_with_fresh_seed(case: Case, library: str, fresh_seed: int) -> None:
    for seed in range(fresh_seed, fresh_seed + 5):
        oracle, _ = case.build(np.random.default_rng(seed), t.example(library))
        assert not kh.recover(oracle, throw=False, seed=seed, **case.options).certified


def assert_intact(path: Path, result: kh.Recovery) -> None:
    """The journal is sound, opens again, and holds every answer that was paid for."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (kept,) = connection.execute("SELECT coalesce(sum(stop - start), 0) FROM answers").fetchone()
        (box,) = connection.execute("SELECT value FROM meta WHERE key = 'box'").fetchone()
        plans = connection.execute("SELECT DISTINCT plan, repeat FROM answers").fetchall()
    assert kept == result.stats.new_queries
    assert kept <= result.stats.queries + result.stats.heldout_queries  # a question may come up again
    with Journal(path, box) as journal:
        assert sum(len(answers) for plan in plans for _, answers in journal.slices(*plan)) == kept


def test_a_box_that_stops_failing_is_recovered_from_where_it_was(rng: np.random.Generator, tmp_path: Path) -> None:
    truth = kh.SingleHead(t.gaussian(rng, 12), t.normal_value(rng, 12))
    broken = [True]
    asked = [0]

    def box(tokens: Array) -> Array:
        if broken[0] and asked[0] > 60:
            raise ConnectionError("the server is down")
        asked[0] += len(tokens)
        return truth(tokens)

    oracle = kh.FunctionOracle(box, width=12, batch_limit=7)
    result = kh.recover(oracle, journal=tmp_path / "j", throw=False)
    assert result.outcome is Outcome.ORACLE_FAILED
    assert "the server is down" in result.message
    broken[0] = False
    result = kh.recover(oracle, journal=tmp_path / "j")
    assert asked[0] == result.stats.queries + result.stats.heldout_queries
    assert kh.distance(result.params, truth) <= 1e-13
