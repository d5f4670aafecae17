"""Where fresh queries come from: every length, every token structure, each for itself; and inputs of a user."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import keyhole as kh
from keyhole.errors import FileError, UsageError
from keyhole.numerics.domain import (
    LENGTH_CLASSES,
    LONGEST,
    STRUCTURE_ORDER,
    class_label,
    draw_from,
    draw_lengths,
    draw_structures,
    draw_tokens,
    length_class,
    sampler_of,
)
from keyhole.targets.datasets import open_inputs


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("count", [8, 32, 64, 256])
def test_every_length_can_occur_and_the_longest_always_does(count: int) -> None:
    drawn = [draw_lengths(rng(seed), count, None) for seed in range(200)]
    assert all(len(lengths) == count and max(lengths) == LONGEST == 64 for lengths in drawn)
    assert set(np.concatenate(drawn)) == set(range(1, LONGEST + 1))
    if count >= 32:  # none of the classes is left out
        assert all({length_class(each) for each in lengths} == set(range(len(LENGTH_CLASSES))) for lengths in drawn)


def test_as_many_queries_as_a_certificate_asks_have_every_length() -> None:
    assert all(len(set(draw_lengths(rng(seed), 112, None))) == LONGEST for seed in range(20))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 15, 40, 64, 100])
def test_no_sequence_is_longer_than_the_oracle_takes(most: int) -> None:
    drawn = [draw_lengths(rng(seed), 64, most) for seed in range(60)]
    longest = min(most, LONGEST)
    assert all(min(lengths) >= 1 and max(lengths) == longest for lengths in drawn)
    assert set(np.concatenate(drawn)) == set(range(1, longest + 1))


def test_one_query_has_the_longest_sequence() -> None:
    assert draw_lengths(rng(), 1, None) == [64]
    assert draw_lengths(rng(), 1, 5) == [5]
    assert draw_lengths(rng(), 0, None) == []


def test_classes_cover_every_length_once() -> None:
    assert [length for each in LENGTH_CLASSES for length in each] == list(range(1, 65))
    assert length_class(1000) == len(LENGTH_CLASSES) - 1
    assert [class_label(number) for number in (0, 1, 5)] == ["1 token", "2–3 tokens", "33–64 tokens"]
    assert class_label(3, most=12) == "9–12 tokens"
    assert class_label(4, most=17) == "17 tokens"


def test_length_and_structure_are_drawn_independently() -> None:
    """No structure goes with some lengths only: of 20,000 queries every pair occurs about as often as it should."""
    table = np.zeros((len(LENGTH_CLASSES), len(set(STRUCTURE_ORDER))))
    names = sorted(set(STRUCTURE_ORDER))
    for seed in range(300):
        source = rng(seed)
        lengths, structures = draw_lengths(source, 64, None), draw_structures(source, 64)
        for length, structure in zip(lengths, structures, strict=True):
            table[length_class(length), names.index(structure)] += 1
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    assert np.all(np.abs(table - expected) < 5 * np.sqrt(expected))


def test_few_queries_have_every_structure() -> None:
    assert set(draw_structures(rng(), len(STRUCTURE_ORDER))) == set(STRUCTURE_ORDER)


@pytest.mark.parametrize("structure", sorted(set(STRUCTURE_ORDER)))
@pytest.mark.parametrize("length", [1, 2, 3, 17])
@pytest.mark.parametrize("width", [1, 8])
def test_tokens_are_finite_and_of_norm_about_one(structure: str, length: int, width: int) -> None:
    drawn = np.stack([draw_tokens(structure, rng(seed), length, width) for seed in range(50)])
    assert drawn.shape == (50, length, width)
    assert np.all(np.isfinite(drawn))
    longest = np.max(np.linalg.norm(drawn, axis=2), axis=1)
    assert 0.01 < np.median(longest) < 4
    assert np.max(longest) < 8
    assert np.all(longest > 0)  # a sequence of zeros says nothing


def test_structures_are_what_they_are_called() -> None:
    def drawn(structure: str) -> list[np.ndarray]:
        return [draw_tokens(structure, rng(seed), 12, 8) for seed in range(40)]

    assert all(np.all(np.count_nonzero(each, axis=1) == 1) for each in drawn("one-hot"))
    assert all(len(np.unique(each, axis=0)) < 12 for each in drawn("repeated"))
    zero = np.array([~np.any(each, axis=1) for each in drawn("zeros")])
    assert np.all(np.any(zero[:, :-1], axis=1))
    assert np.any(zero[:, -1])
    assert not np.all(zero[:, -1])
    apart = [float(np.max(np.linalg.norm(each - each[-1], axis=1))) for each in drawn("near")]
    assert min(apart) < 1e-3
    assert max(apart) > 0.03
    norms = np.concatenate([np.linalg.norm(each, axis=1) for each in drawn("mixed")])
    assert np.min(norms) < 0.01 < 0.3 < np.max(norms)


# --- inputs of a user -------------------------------------------------------------------------------------------------


def test_given_sequences_are_drawn_once_each() -> None:
    given = [np.full((length, 3), float(length)) for length in range(1, 10)]
    drawn = draw_from(sampler_of(given), rng(), 6, 3)
    assert len({len(each) for each in drawn}) == 6
    assert sorted(len(each) for each in draw_from(sampler_of(given), rng(), 100, 3)) == list(range(1, 10))
    assert [each.shape for each in draw_from(sampler_of(np.zeros((4, 5, 3))), rng(), 2, 3)] == [(5, 3)] * 2


def test_a_sampler_draws_no_more_than_asked_for() -> None:
    assert len(draw_from(lambda _, count: np.ones((3 * count, 2, 3)), rng(), 7, 3)) == 7


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([np.zeros((2, 4))], r"sequences \(length, 3\), not an array of shape \(2, 4\)"),
        (np.zeros((2, 3)), r"not an array of shape \(3,\)"),
        ([np.zeros((0, 3))], r"not an array of shape \(0, 3\)"),
        ([np.full((2, 3), np.nan)], "not finite"),
        ([np.full((2, 3), 9.0)], "norm 15.6, the oracle takes up to 5"),
        ([np.zeros((9, 3))], "9 tokens, the oracle takes up to 6"),
        ([], "no sequences"),
        (3, "must be a sampler or sequences"),
    ],
)
def test_what_an_oracle_does_not_take_is_said_before_anything_is_asked(inputs: object, message: str) -> None:
    asked = []
    oracle = kh.FunctionOracle(lambda tokens: asked.append(1) or tokens[:, -1, 0], width=3, max_norm=5.0, max_length=6)
    with pytest.raises(UsageError, match=message):
        kh.recover(oracle, domain=inputs)  # type: ignore[arg-type]
    assert not asked


def test_files_of_inputs(tmp_path) -> None:
    one, several = rng().standard_normal((4, 3)), rng().standard_normal((5, 2, 3))
    np.save(tmp_path / "one.npy", one)
    np.savez(tmp_path / "both.npz", one=one, several=several)
    save_file({"several": several}, tmp_path / "several.safetensors")
    assert [each.shape for each in open_inputs(tmp_path / "one.npy")] == [(4, 3)]
    assert [each.shape for each in open_inputs(tmp_path / "both.npz")] == [(4, 3)] + [(2, 3)] * 5
    assert [each.shape for each in open_inputs(tmp_path / "several.safetensors")] == [(2, 3)] * 5


def test_files_that_hold_no_inputs_are_refused(tmp_path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros(3))
    (tmp_path / "broken.npy").write_bytes(b"no array")
    np.save(tmp_path / "objects.npy", np.array([{}, {}], dtype=object))
    with pytest.raises(FileError, match=r"the array has shape \(3,\)"):
        open_inputs(tmp_path / "flat.npy")
    for name in ("broken.npy", "objects.npy"):
        with pytest.raises(FileError, match=r"not a readable \.npy file"):
            open_inputs(tmp_path / name)
    with pytest.raises(FileError, match="no such file"):
        open_inputs(tmp_path / "absent.npz")
    with pytest.raises(UsageError, match=r"\.npy, \.safetensors"):
        open_inputs(tmp_path / "inputs.csv")


def test_a_path_is_no_domain() -> None:
    with pytest.raises(UsageError, match="load it"):
        sampler_of("inputs.npy")
