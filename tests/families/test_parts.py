"""Attention by parts, families of one's own, and files that hold either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import keyhole as kh
from keyhole import families, gauge
from keyhole.arrays import Array, Space, namespace, to_numpy
from keyhole.errors import FileError, UsageError
from keyhole.families.files import FAMILIES
from keyhole.families.parts import PARTS, Attention, Sum, register, weight_changes
from keyhole.gauge.compare import GAUGES
from keyhole.methods.base import Estimate
from keyhole.methods.certificate import certify
from keyhole.recovery import Outcome
from keyhole.session import Session


@dataclass(frozen=True)
class Softcap:
    """Energies c·tanh(logit/c), as Gemma 2 has them."""

    cap: float

    name: ClassVar[str] = "softcap"

    def __call__(self, logits: Array) -> Array:
        return self.cap * namespace(logits).tanh(logits / self.cap)

    def slopes(self, logits: Array) -> Array:
        return 1 - namespace(logits).tanh(logits / self.cap) ** 2


@dataclass(frozen=True)
class Sink:
    """exp(energy) over the sum of it and of one more."""

    energy: float

    name: ClassVar[str] = "sink"
    of_exponentials: ClassVar[bool] = False

    def __call__(self, energies: Array) -> Array:
        xp = namespace(energies)
        top = xp.max(energies, axis=-1, keepdims=True)
        weights = xp.exp(energies - top)
        return weights / (xp.sum(weights, axis=-1, keepdims=True) + xp.exp(self.energy - top))

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:
        return weights[..., None] * (values - answers[..., None, :])


@dataclass(frozen=True)
class Alibi:
    """A slope down with the distance of a token from its query."""

    slope: float

    name: ClassVar[str] = "alibi"

    def __call__(self, energies: Array) -> Array:
        xp = namespace(energies)
        places = xp.arange(energies.shape[-1], dtype=energies.dtype, device=energies.device)
        own = places[-1] if energies.ndim == 2 else places[:, None]
        return energies - self.slope * xp.abs(own - places)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    known, gauges, parts = dict(FAMILIES), dict(GAUGES), dict(PARTS)
    for kind, part in (("link", Softcap), ("normaliser", Sink), ("position_bias", Alibi)):
        register(kind, part)
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
    radius = type(head).of_arrays(**{name: np.full_like(array, size) for name, array in head.arrays().items()})
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
        [kh.SingleHead(moved.score, moved.value, moved.score_bias, None, parts)] * 2, head.output_bias
    )
    radii = kh.MultiHead([kh.SingleHead(radius.score, radius.value, radius.score_bias)] * 2, 0 * head.output_bias)
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


def test_heads_of_other_parts_are_not_taken_for_equal(rng: np.random.Generator) -> None:
    capped = random_head(rng, 4, None, Attention(link=Softcap(2.0)))
    for compare in (kh.distance, kh.equivalent):
        with pytest.raises(UsageError, match="no plain softmax"):
            compare(capped, kh.SingleHead(**capped.arrays()))


# --- files ----------------------------------------------------------------------------------------------------


def test_parts_are_kept_in_files(tmp_path: Path, rng: np.random.Generator) -> None:
    head = random_head(rng, 4, 4, other_parts())
    several = kh.MultiHead([kh.SingleHead(head.score, head.value, attention=other_parts())])
    tokens = rng.standard_normal((3, 4, 4))
    for params in (head, several, kh.Residual(head), kh.Residual(several)):
        params.save(tmp_path / "p")
        found = kh.load(tmp_path / "p")
        np.testing.assert_array_equal(found(tokens), params(tokens))
    assert (
        kh.FunctionOracle(head, width=4).name != kh.FunctionOracle(kh.SingleHead(**head.arrays()), width=4).name
    )  # a journal of one is none of the other


def test_a_part_or_family_that_is_not_known_is_named_with_the_remedy(tmp_path: Path, rng: np.random.Generator) -> None:
    random_head(rng, 3, None, Attention(link=Softcap(3.0))).save(tmp_path / "p")
    del PARTS["link", "softcap"]
    with pytest.raises(FileError, match=r"unknown link 'softcap'.*upgrade"):
        kh.load(tmp_path / "p")
    Affine(np.ones(3), np.asarray(0.0)).save(tmp_path / "q")
    with pytest.raises(FileError, match=r"unknown family 'affine'.*upgrade"):
        kh.load(tmp_path / "q")
    with pytest.raises(UsageError, match="no part 'colour'"):
        register("colour", Softcap)


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
