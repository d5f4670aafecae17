"""Attention by parts, families of one's own, and files that hold either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import keyhole as kh
from keyhole import families, gauge
from keyhole.arrays import Array, Space, namespace, to_numpy
from keyhole.errors import FileError, UsageError
from keyhole.families.files import FAMILIES
from keyhole.families.parts import (
    PARTS,
    Alibi,
    Attention,
    Causal,
    Count,
    DistanceTable,
    Entmax,
    LengthTable,
    Linear,
    Link,
    LogLength,
    NoNormaliser,
    PlusOne,
    Relu,
    RootLength,
    Sigmoid,
    Sink,
    Softcap,
    Sparsemax,
    Squared,
    Sum,
    TopK,
    Window,
    register,
)
from keyhole.families.parts.normalisers import weight_changes
from keyhole.gauge.compare import GAUGES
from keyhole.methods.base import Estimate
from keyhole.methods.certificate import certify
from keyhole.recovery import Outcome
from keyhole.session import Session


@dataclass(frozen=True, eq=False)
class Cube(Link):
    """A part of one's own: energies logit + strength·logit³."""

    strength: Array

    name: ClassVar[str] = "cube"

    def __call__(self, logits: Array) -> Array:
        return logits + self.strength * logits**3

    def slopes(self, logits: Array) -> Array:
        return 1 + 3 * self.strength * logits**2


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    known, gauges, parts = dict(FAMILIES), dict(GAUGES), dict(PARTS)
    register("link", Cube)
    yield
    for table, before in ((FAMILIES, known), (GAUGES, gauges), (PARTS, parts)):
        table.clear()
        table.update(before)


def other_parts() -> Attention:
    return Attention(link=Softcap(3.0), normaliser=Sink(0.5), position_bias=Alibi(0.3))


def random_head(rng: np.random.Generator, d: int, outputs: int | None, parts: Attention) -> kh.SingleHead:
    columns = () if outputs is None else (outputs,)
    return kh.SingleHead(
        2 * rng.standard_normal((d, d)) / d**0.5,
        rng.standard_normal((d, *columns)),
        rng.standard_normal(d),
        np.asarray(rng.standard_normal(columns)),
        parts,
    )


def naive(head: kh.SingleHead, tokens: np.ndarray, last: int) -> np.ndarray:
    """The definition of a head with softcap, sink and ALiBi, one sequence at a time."""
    answers = []
    for sequence in tokens:
        logits = sequence @ (head.score @ sequence[last] + head.score_bias)
        energies = 3.0 * np.tanh(logits / 3.0) - 0.3 * np.abs(np.arange(len(sequence)) - last % len(sequence))
        weights = np.exp(energies) / (np.sum(np.exp(energies)) + np.exp(0.5))
        answers.append(weights @ (sequence @ head.value) + head.output_bias)
    return np.asarray(answers)


@pytest.mark.parametrize("outputs", [None, 3])
def test_a_head_of_other_parts_is_the_definition_in_any_library(
    like: object, outputs: int | None, rng: np.random.Generator
) -> None:
    space, head = Space.of(like), random_head(rng, 4, outputs, other_parts())
    tokens = rng.standard_normal((7, 5, 4))
    answers = head(space.asarray(tokens))
    assert Space.of(answers) == space
    np.testing.assert_allclose(to_numpy(answers), naive(head, tokens, -1), rtol=1e-12, atol=1e-13)
    everywhere = to_numpy(head.at_all_positions(space.asarray(tokens)))
    for place in range(5):
        np.testing.assert_allclose(everywhere[:, place], naive(head, tokens, place), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("parts", [Attention(), Attention(link=Softcap(2.0)), other_parts()])
@pytest.mark.parametrize("outputs", [None, 2])
def test_the_radius_of_a_prediction_covers_perturbed_parameters(
    parts: Attention, outputs: int | None, fresh_seed: int
) -> None:
    rng, size = np.random.default_rng(fresh_seed), 1e-6
    head = random_head(rng, 5, outputs, parts)
    radius = head.with_arrays({name: np.full_like(array, size) for name, array in head.arrays().items()})
    tokens = rng.standard_normal((200, 4, 5))
    moved = type(head).of_arrays(
        **{name: array + size / 5 * rng.standard_normal(array.shape) for name, array in head.arrays().items()},
        **head.words,
    )
    bar = head.error_bar(radius, tokens, 1e-15)
    assert np.all(np.abs(moved(tokens) - head(tokens)) <= bar)
    assert np.all(bar <= 1e3 * size)
    # Heads of such parts add up, and stand beside a residual, like any other.
    several = kh.MultiHead([kh.SingleHead(head.score, head.value, head.score_bias, None, parts)] * 2, head.output_bias)
    changed = kh.MultiHead(
        [kh.SingleHead(moved.score, moved.value, moved.score_bias, None, moved.attention)] * 2, head.output_bias
    )
    radii = kh.MultiHead(
        [kh.SingleHead(radius.score, radius.value, radius.score_bias, None, radius.attention)] * 2, 0 * head.output_bias
    )
    assert np.all(np.abs(changed(tokens) - several(tokens)) <= several.error_bar(radii, tokens, 1e-15))


def test_the_radius_of_a_whole_layer_covers_perturbed_parameters(fresh_seed: int) -> None:
    rng, size = np.random.default_rng(fresh_seed), 1e-6
    layer = kh.AttentionLayer(rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 3)))
    moved = kh.AttentionLayer(
        layer.scores + size / 5 * rng.standard_normal((2, 4, 4)),
        layer.projections + size / 5 * rng.standard_normal((2, 4, 3)),
    )
    radius = kh.AttentionLayer(np.full((2, 4, 4), size), np.full((2, 4, 3), size))
    tokens = rng.standard_normal((50, 6, 4))
    bar = layer.error_bar(radius, tokens, 1e-15)
    assert bar.shape == layer(tokens).shape
    assert np.all(np.abs(moved(tokens) - layer(tokens)) <= bar)


EVERY = {
    "softcap": Attention(link=Softcap(2.0)),
    "sigmoid": Attention(link=Sigmoid(-0.4), normaliser=NoNormaliser()),
    "linear": Attention(link=Linear(), normaliser=NoNormaliser()),
    "squared": Attention(link=Squared()),
    "relu": Attention(link=Relu(), normaliser=Count()),
    "sink": Attention(normaliser=Sink(0.5)),
    "plus-one": Attention(normaliser=PlusOne()),
    "sparsemax": Attention(normaliser=Sparsemax()),
    "entmax": Attention(normaliser=Entmax()),
    "top-k": Attention(normaliser=TopK(3)),
    "alibi": Attention(position_bias=Alibi(0.3)),
    "table": Attention(position_bias=DistanceTable(np.array([0.5, -0.2]))),
    "window": Attention(position_bias=Window(3)),
    "causal": Attention(position_bias=Causal()),
    "log": Attention(length_law=LogLength()),
    "root": Attention(length_law=RootLength()),
    "lengths": Attention(length_law=LengthTable(np.array([0.7, 0.6]))),
    "cube": Attention(link=Cube(0.1)),
}


def weights_by_definition(kind: str, z: np.ndarray, far: np.ndarray) -> np.ndarray:
    """Weights of one query from the logits of tokens and their distances, as a textbook has them."""
    n, e = len(z), np.exp
    if kind in ("sparsemax", "entmax"):
        power = {"sparsemax": 1.0, "entmax": 2.0}[kind]
        z = z / power
        low, high = np.max(z) - 1.0, np.max(z)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if np.sum(np.maximum(z - middle, 0) ** power) > 1 else (low, middle)
        return np.maximum(z - low, 0) ** power
    masses = {
        "softcap": lambda: e(2 * np.tanh(z / 2)),
        "sigmoid": lambda: 1 / (1 + e(-z + 0.4)),
        "linear": lambda: z,
        "squared": lambda: z**2,
        "relu": lambda: np.maximum(z, 0),
        "top-k": lambda: np.where(z >= np.sort(z)[-min(3, n)], e(z), 0),
        "alibi": lambda: e(z - 0.3 * far),
        "table": lambda: e(z + np.array([0, 0.5, -0.2])[np.minimum(far, 2)]),
        "window": lambda: np.where(far < 3, e(z), 0),
        "log": lambda: e(z * np.log(n)),
        "root": lambda: e(z / n**0.5),
        "lengths": lambda: e(z * [1, 1, 0.7, 0.6][min(n, 4) - 1]),
        "cube": lambda: e(z + 0.1 * z**3),
    }.get(kind, lambda: e(z))()
    if kind in ("sigmoid", "linear"):
        return masses
    return masses / {"relu": n, "sink": np.sum(masses) + e(0.5), "plus-one": 1 + np.sum(masses)}.get(
        kind, np.sum(masses)
    )


@pytest.mark.parametrize("kind", EVERY)
def test_every_part_is_its_definition_at_every_position(kind: str, like: object, rng: np.random.Generator) -> None:
    space, parts = Space.of(like), EVERY[kind]
    head = random_head(rng, 4, None, parts)
    for length in (1, 2, 5):
        tokens = rng.standard_normal((6, length, 4))
        answers = to_numpy(head(space.asarray(tokens)))
        everywhere = to_numpy(head.at_all_positions(space.asarray(tokens)))
        for place in range(length):
            far = np.abs(np.arange(length) - place)
            seen = slice(place + 1) if kind == "causal" else slice(None)
            for number, one in enumerate(tokens):
                logits = one[seen] @ (head.score @ one[place] + head.score_bias)
                expected = weights_by_definition(kind, logits, far[seen]) @ (one[seen] @ head.value) + head.output_bias
                np.testing.assert_allclose(everywhere[number, place], expected, rtol=1e-10, atol=1e-11)
                if place == length - 1:
                    np.testing.assert_allclose(answers[number], expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", EVERY)
def test_the_radius_of_a_prediction_covers_every_part_and_its_constants(kind: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    head = random_head(rng, 4, None, EVERY[kind])
    for size in (1e-8, 0.05):
        radius = head.with_arrays({name: np.full_like(array, size) for name, array in head.arrays().items()})
        tokens = rng.standard_normal((200, 5, 4)) * rng.choice([1.0, 4.0], (200, 1, 1))
        bar = head.error_bar(radius, tokens, 1e-15)
        for name in head.arrays():  # one at a time: errors of several may add up, and bars add them in quadrature
            change = size * rng.choice([-1, 1], np.shape(head.arrays()[name])) * (1 if "." in name else 0.25)
            moved = head.with_arrays({**head.arrays(), name: head.arrays()[name] + change})
            assert np.all(np.abs(moved(tokens) - head(tokens)) <= 1.001 * bar), name
        if size < 1e-6:
            assert np.median(bar) < 1e3 * size * max(1.0, np.median(np.abs(head(tokens))))
            assert {label.replace(" ", "_") for label, _ in head.effects(radius, tokens)} >= {
                name.replace(".", "_") for name in head.arrays()
            }


def test_effects_of_constants_are_seen_by_verification(rng: np.random.Generator) -> None:
    for kind in ("softcap", "sink", "alibi", "table", "sigmoid"):
        head = random_head(rng, 4, None, EVERY[kind])
        (name,) = head.attention.arrays()
        other = head.with_arrays({**head.arrays(), name: head.arrays()[name] + 1e-6})
        assert kh.verify(kh.FunctionOracle(head, width=4), head).same
        assert kh.verify(kh.FunctionOracle(other, width=4), head).conclusion == "different"


def test_heads_of_the_same_parts_compare_by_constants_too_and_others_are_far_apart(rng: np.random.Generator) -> None:
    plain = random_head(rng, 4, None, Attention())
    for kind, parts in EVERY.items():
        head = replace(plain, attention=parts)
        assert kh.distance(head, head) == 0
        assert kh.equivalent(head, head)
        if kind != "causal":  # the last token sees all of it
            assert kh.distance(head, plain) == 1
            assert not kh.equivalent(head, plain)
        for name, array in parts.arrays().items():
            moved = head.with_arrays({**head.arrays(), name: array * (1 + 1e-3)})
            assert 1e-5 < kh.distance(head, moved) < 2e-3
            assert not kh.equivalent(head, moved)
        canonical = gauge.canonical(head)
        assert canonical.heads[0].attention == parts
        assert kh.distance(canonical, head) == 0
    assert kh.equivalent(
        replace(plain, attention=EVERY["plus-one"]), replace(plain, attention=Attention(normaliser=Sink(0.0)))
    )
    several = kh.MultiHead([replace(plain, output_bias=None, attention=EVERY["sink"])] * 2)
    assert kh.equivalent(several, several)
    wrapped = kh.Residual(kh.MultiHead([replace(head, value=np.eye(4)) for head in several.heads]))
    for compare in (kh.distance, kh.equivalent):
        with pytest.raises(UsageError, match="no plain softmax"):
            compare(wrapped, wrapped)
    tokens = rng.standard_normal((20, 5, 4))
    for kind, parts in EVERY.items():
        head = replace(plain, attention=parts)
        for found in kh.kinds(head):
            np.testing.assert_allclose(kh.witness(head, found).params(tokens), head(tokens), rtol=1e-9, atol=1e-9)
        assert "length-1-only" not in kh.kinds(head), kind


def test_constants_count_among_the_unknown_numbers(rng: np.random.Generator) -> None:
    numbers = {kind: random_head(rng, 4, None, parts).counting_bound for kind, parts in EVERY.items()}
    plain = random_head(rng, 4, None, Attention()).counting_bound
    assert {kind: number - plain for kind, number in numbers.items() if number != plain} == {
        "softcap": 1,
        "sigmoid": 1,
        "sink": 1,
        "alibi": 1,
        "table": 2,
        "lengths": 2,
        "cube": 1,
    }


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Attention(link=Linear(), normaliser=Sparsemax()), "takes? the link|take the link"),
        (lambda: Window(0), "width of a window"),
        (lambda: TopK(2.5), "k of top-k"),  # type: ignore[arg-type]
        (lambda: DistanceTable(np.zeros((2, 2))), "one axis"),
        (lambda: LengthTable(np.zeros(0)), "one axis"),
        (lambda: Sink(np.zeros(3)), "one number"),
        (lambda: Attention(link=Softcap(0.0)).check(), "must be positive"),
    ],
)
def test_parts_that_cannot_be_meant_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make()


# --- files ----------------------------------------------------------------------------------------------------


def test_parts_are_kept_in_files(tmp_path: Path, rng: np.random.Generator) -> None:
    head = random_head(rng, 4, 4, other_parts())
    several = kh.MultiHead([kh.SingleHead(head.score, head.value, attention=other_parts())])
    tokens = rng.standard_normal((3, 4, 4))
    assert sorted(head.arrays())[:3] == ["link.cap", "normaliser.energy", "output_bias"]
    assert Attention.of_words({"link": '["softcap", {"cap": 3.0}]'}, {}) == Attention(
        link=Softcap(3.0)
    )  # as once written
    for params in (head, several, kh.Residual(head), kh.Residual(several)):
        params.save(tmp_path / "p")
        found = kh.load(tmp_path / "p")
        np.testing.assert_array_equal(found(tokens), params(tokens))
    assert (
        kh.FunctionOracle(head, width=4).name != kh.FunctionOracle(kh.SingleHead(head.score, head.value), width=4).name
    )  # a journal of one is none of the other


def test_a_part_or_family_that_is_not_known_is_named_with_the_remedy(tmp_path: Path, rng: np.random.Generator) -> None:
    random_head(rng, 3, None, Attention(link=Cube(3.0))).save(tmp_path / "p")
    del PARTS["link", "cube"]
    with pytest.raises(FileError, match=r"unknown link 'cube'.*upgrade"):
        kh.load(tmp_path / "p")
    Affine(np.ones(3), np.asarray(0.0)).save(tmp_path / "q")
    with pytest.raises(FileError, match=r"unknown family 'affine'.*upgrade"):
        kh.load(tmp_path / "q")
    with pytest.raises(UsageError, match="no part 'colour'"):
        register("colour", Cube)


# --- a family of one's own ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Affine(families.Family):
    """f(X) = x_N · slope + offset, x_N the last token."""

    slope: Array  # (width,)
    offset: Array  # ()

    family: ClassVar[str] = "affine"

    @property
    def width(self) -> int:
        return int(self.slope.shape[0])

    @property
    def outputs(self) -> int | None:
        return None

    def arrays(self) -> dict[str, Array]:
        return {"slope": self.slope, "offset": self.offset}

    def __call__(self, tokens: Array) -> Array:
        own = self.like(tokens)
        return tokens[:, -1, :] @ own.slope + own.offset

    def error_bar(self, radius: Affine, tokens: Array, rounding: float) -> Array:
        xp, own, wide = namespace(tokens), self.like(tokens), radius.like(tokens)
        x = xp.abs(tokens[:, -1, :])
        return x @ (wide.slope + rounding * xp.abs(own.slope)) + wide.offset + rounding * xp.abs(own.offset)

    def token_norm(self, size: float) -> float:
        return size


def compare_affine(first: Affine, second: Affine) -> float:
    return float(max(np.max(np.abs(a - second.arrays()[name])) for name, a in first.arrays().items()))


def test_a_family_of_ones_own_needs_registering_only(tmp_path: Path, rng: np.random.Generator) -> None:
    families.register(Affine)
    gauge.register(
        Affine,
        gauge.Gauge(
            canonical=lambda params, _: params,
            equivalent=lambda one, two, tolerance, _: compare_affine(one, two) <= tolerance,
            distance=compare_affine,
        ),
    )
    params = Affine(rng.standard_normal(4), np.asarray(0.5))
    params.save(tmp_path / "p")
    found = kh.load(tmp_path / "p")
    assert kh.distance(found, params) == 0
    assert kh.equivalent(found, params)
    assert not kh.equivalent(found, Affine(params.slope + 1e-3, params.offset))
    assert params.matrices() == {}
    assert params.counting_bound == 5
    with pytest.raises(UsageError, match="no witnesses for a Affine"):
        kh.witness(params)
    with pytest.raises(UsageError, match="already"):
        families.register(type("Other", (Affine,), {}))
    # Verification and the certificate ask the family alone.
    oracle = kh.FunctionOracle(params, width=4)
    assert kh.verify(oracle, params).same
    assert (
        kh.verify(kh.FunctionOracle(Affine(params.slope + 1e-6, params.offset), width=4), params).conclusion
        == "different"
    )
    estimate = Estimate(params, Affine(0 * params.slope, 0 * params.offset), params.counting_bound)
    assert outcome(estimate, oracle) is Outcome.CERTIFIED
    assert outcome(estimate, kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=4)) is Outcome.WRONG_FAMILY


def outcome(estimate: Estimate, oracle: Any) -> Outcome:
    return Session(oracle).run(certify(estimate, oracle.signature, np.random.default_rng(0), 16)).outcome


def test_changes_of_weights_are_bounds_and_near_to_what_is_reached() -> None:
    """Also where one token has all the weight, and another one that is lost to rounding may take it."""
    rng, over = np.random.default_rng(0), []
    for _ in range(200):
        count = int(rng.integers(1, 8))
        energies = rng.standard_normal(count) * 10 ** rng.uniform(-2, 3.5)
        radii = np.abs(rng.standard_normal(count)) * 10 ** rng.uniform(-6, 3)
        weights = Sum()(energies)
        bounds = weight_changes(weights, energies, radii)
        moved = Sum()(energies + radii * rng.choice([-1.0, 1.0], (128, count)))
        reached = np.max(np.abs(moved - weights), axis=0)
        assert np.all(reached <= bounds * (1 + 1e-9) + 1e-13)
        over += list(bounds[reached > 1e-12] / reached[reached > 1e-12])
    assert np.median(over) < 1.5
