"""The model: forward map against an independent one, files, and distances modulo what cannot be known."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import keyhole as kh
from keyhole.arrays import Array, Space, to_numpy
from keyhole.errors import FileError, UsageError
from support import targets as t

# Every combination of parts: outputs (None: one plain number), score bias, output bias.
SHAPES = [(outputs, score, output) for outputs in (None, 1, 3) for score in (0, 1) for output in (0, 1)]


def random_head(
    rng: np.random.Generator, d: int, outputs: int | None = None, score_bias: bool = False, output_bias: bool = False
) -> kh.SingleHead:
    columns = () if outputs is None else (outputs,)
    return kh.SingleHead(
        rng.standard_normal((d, d)) / d**0.5,
        rng.standard_normal((d, *columns)),
        score_bias=rng.standard_normal(d) if score_bias else None,
        output_bias=np.asarray(rng.standard_normal(columns)) if output_bias else None,
    )


def naive(head: kh.SingleHead, tokens: np.ndarray) -> np.ndarray:
    """The definition, one sequence at a time, in extended precision."""
    exact = {name: np.asarray(array, dtype=np.longdouble) for name, array in head.arrays().items()}
    answers = []
    for sequence in tokens.astype(np.longdouble):
        logits = np.einsum("ij,jk,k->i", sequence, exact["score"], sequence[-1])
        if "score_bias" in exact:
            logits = logits + np.einsum("ij,j->i", sequence, exact["score_bias"])
        weights = np.exp(logits - logits.max())
        weights = weights / weights.sum()
        answer = np.einsum("i,ij,j...->...", weights, sequence, exact["value"])
        answers.append(answer + exact["output_bias"] if "output_bias" in exact else answer)
    return np.asarray(answers, dtype=np.float64)


# --- forward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "score_bias", "output_bias"), SHAPES)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_forward_is_the_definition(
    like: object, outputs: int | None, score_bias: int, output_bias: int, length: int, rng: np.random.Generator
) -> None:
    space = Space.of(like)
    head = random_head(rng, 5, outputs, bool(score_bias), bool(output_bias))
    tokens = rng.standard_normal((11, length, 5))
    answers = head(space.asarray(tokens))
    assert Space.of(answers) == space
    assert tuple(answers.shape) == ((11,) if outputs is None else (11, outputs))
    np.testing.assert_allclose(to_numpy(answers), naive(head, tokens), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("library", t.LIBRARIES)
def test_forward_answers_in_the_dtype_of_its_tokens(library: str, rng: np.random.Generator) -> None:
    space = Space.of(t.example(library))
    head, tokens = random_head(rng, 4), rng.standard_normal((6, 3, 4))
    answers = head(space.asarray(tokens))
    assert Space.of(answers) == space
    np.testing.assert_allclose(to_numpy(answers), naive(head, tokens), rtol=0, atol=50 * space.eps)


def test_parameters_of_one_library_on_tokens_of_another(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    head, tokens = random_head(rng, 4, 2, True, True), rng.standard_normal((6, 3, 4))
    moved = kh.SingleHead(**{name: torch.asarray(array) for name, array in head.arrays().items()})
    expected = head(tokens)
    for answers in (moved(tokens), moved(torch.asarray(tokens)), head(torch.asarray(tokens))):
        np.testing.assert_allclose(to_numpy(answers), expected, rtol=1e-14)
    assert isinstance(moved(tokens), np.ndarray)


@pytest.mark.parametrize("size", [1e3, 1e10, 1e150])
def test_softmax_is_stable_at_huge_logits(like: object, size: float) -> None:
    space = Space.of(like)
    head = kh.SingleHead(size * np.eye(2), np.array([1.0, -2.0]))
    tokens = space.asarray([[[3.0, 0.0], [0.0, 1.0], [1.0, 0.5]], [[-3.0, 0.0], [0.0, -1.0], [0.5, 1.0]]])
    # All weight on the token most along the last one: [3, 0], then the last itself.
    np.testing.assert_allclose(to_numpy(head(tokens)), [3.0, -1.5], rtol=1e-15)


def test_equal_logits_share_evenly(like: object) -> None:
    space = Space.of(like)
    head = kh.SingleHead(np.zeros((2, 2)), np.array([1.0, 10.0]))
    tokens = space.asarray([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]])
    np.testing.assert_allclose(to_numpy(head(tokens)), [33.0 / 3])


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5))
def test_forward_is_what_a_softmax_average_must_be(seed: int, d: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    head, tokens = random_head(rng, d), rng.standard_normal((3, length, d)) * 10 ** rng.uniform(-3, 3)
    answers, values = head(tokens), tokens @ head.value
    slack = 1e-13 * np.abs(values).max()
    # Between the values of its tokens; the same when all tokens but the last are shuffled, or the whole is repeated.
    assert np.all(answers >= values.min(axis=1) - slack)
    assert np.all(answers <= values.max(axis=1) + slack)
    shuffled = np.concatenate([rng.permutation(tokens[:, :-1], axis=1), tokens[:, -1:]], axis=1)
    np.testing.assert_allclose(head(shuffled), answers, atol=slack)
    np.testing.assert_allclose(head(np.concatenate([tokens, tokens], axis=1)), answers, atol=slack)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"score": np.zeros((3, 4))}, "score"),
        ({"score": np.zeros(3)}, "score"),
        ({"value": np.zeros(4)}, "value"),
        ({"value": np.zeros((4, 2))}, "value"),
        ({"value": np.zeros((3, 2, 2))}, "value"),
        ({"score_bias": np.zeros(2)}, "score_bias"),
        ({"output_bias": np.zeros(1)}, "output_bias"),
        ({"value": np.zeros((3, 2)), "output_bias": np.zeros(3)}, "output_bias"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"SingleHead.*{name}"):
        kh.SingleHead(**({"score": np.zeros((3, 3)), "value": np.zeros(3)} | changes))


def test_error_bar_covers_a_change_of_parameters(rng: np.random.Generator) -> None:
    """Radii are several standard deviations, errors are independent: so is the bar, of their sum."""
    for outputs in (None, 2):
        head = random_head(rng, 6, outputs)
        tokens = rng.standard_normal((200, 4, 6))
        size = 1e-6
        radius = kh.SingleHead(np.full_like(head.score, size), np.full_like(head.value, size))
        moved = kh.SingleHead(
            head.score + size / 5 * rng.standard_normal(head.score.shape),
            head.value + size / 5 * rng.standard_normal(head.value.shape),
        )
        bar = head.error_bar(radius, tokens, 1e-15)
        assert np.all(np.abs(moved(tokens) - head(tokens)) <= bar)
        assert np.all(bar <= 1e3 * size)


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "score_bias", "output_bias"), SHAPES)
def test_round_trip(
    tmp_path: Path, like: object, outputs: int | None, score_bias: int, output_bias: int, rng: np.random.Generator
) -> None:
    space = Space.of(like)
    head = random_head(rng, 4, outputs, bool(score_bias), bool(output_bias))
    kh.SingleHead(**{name: space.asarray(array) for name, array in head.arrays().items()}).save(tmp_path / "p")
    found = kh.load(tmp_path / "p")
    assert type(found) is kh.SingleHead
    assert found.arrays().keys() == head.arrays().keys()
    for name, array in head.arrays().items():
        assert found.arrays()[name].tobytes() == np.asarray(array).tobytes()
        assert found.arrays()[name].shape == np.asarray(array).shape


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_round_trip_keeps_dtype_and_layout(tmp_path: Path, dtype: str, rng: np.random.Generator) -> None:
    score = np.asfortranarray(rng.standard_normal((5, 5)).astype(dtype))
    kh.SingleHead(score, score[::-1, 0]).save(str(tmp_path / "p"))
    found = kh.load(str(tmp_path / "p"))
    assert found.score.dtype == dtype
    np.testing.assert_array_equal(found.score, score)
    np.testing.assert_array_equal(found.value, score[::-1, 0])


def test_saving_twice_replaces(tmp_path: Path, rng: np.random.Generator) -> None:
    for head in (random_head(rng, 8), random_head(rng, 3)):
        head.save(tmp_path / "p")
    assert kh.load(tmp_path / "p").width == 3


@pytest.mark.parametrize("where", ["missing/p", "."])
def test_a_place_that_cannot_be_written(tmp_path: Path, where: str, rng: np.random.Generator) -> None:
    with pytest.raises(FileError, match="cannot write"):
        random_head(rng, 3).save(tmp_path / where)


ARRAYS = {"score": np.eye(3), "value": np.ones(3)}


def about(**changes: Any) -> dict[str, str]:
    """The metadata of a parameter file, as Keyhole writes it but for some changes; None leaves a key out."""
    whole = {"version": 1, "family": "single-head"} | changes
    return {"keyhole": json.dumps({key: value for key, value in whole.items() if value is not None})}


def test_these_files_differ_from_good_ones_in_one_thing_only(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "p", metadata=about())
    assert kh.load(tmp_path / "p").width == 3


@pytest.mark.parametrize(
    ("arrays", "metadata", "word"),
    [
        (ARRAYS, None, "not written by Keyhole"),
        (ARRAYS, {"format": "pt"}, "not written by Keyhole"),
        (ARRAYS, {"keyhole": "yes"}, "not written by Keyhole"),
        (ARRAYS, {"keyhole": "[1, 2]"}, "not written by Keyhole"),
        (ARRAYS, {"keyhole": "[" * 100_000}, "Keyhole|version|family"),
        (ARRAYS, about(version=2), "version 2.*upgrade"),
        (ARRAYS, about(version="1000"), "version 1000.*upgrade"),
        (ARRAYS, about(version="new"), "Keyhole|version|family"),
        (ARRAYS, about(version=float("inf")), "Keyhole|version|family"),
        (ARRAYS, about(version=-1), "Keyhole|version|family"),
        (ARRAYS, about(version=None), "Keyhole|version|family"),
        (ARRAYS, about(version=[1]), "Keyhole|version|family"),
        (ARRAYS, about(family="triple-head"), "unknown family 'triple-head'.*single-head"),
        (ARRAYS, about(family=None), "Keyhole|version|family"),
        (ARRAYS, about(family=3), "Keyhole|version|family"),
        ({"score": np.eye(3)}, about(), "valid single-head"),
        (ARRAYS | {"colour": np.ones(3)}, about(), "valid single-head"),
        (ARRAYS | {"value": np.ones(4)}, about(), "valid single-head"),
        (ARRAYS | {"score": np.asarray(1.0)}, about(), "valid single-head"),
        (ARRAYS | {"value": np.asarray(1.0)}, about(), "valid single-head"),
        (ARRAYS | {"score": np.zeros((0, 0)), "value": np.zeros(0)}, about(), "valid single-head"),
        ({}, about(), "valid single-head"),
    ],
)
def test_files_that_hold_no_head(
    tmp_path: Path, arrays: dict[str, Any], metadata: dict[str, str] | None, word: str
) -> None:
    save_file(arrays, tmp_path / "p", metadata=metadata)
    with pytest.raises(FileError, match=word) as caught:
        kh.load(tmp_path / "p")
    assert str(tmp_path / "p") in str(caught.value)


def test_equal_parameters_make_equal_files(tmp_path: Path, rng: np.random.Generator) -> None:
    head = random_head(rng, 4, 2, True, True)
    for name in ("a", "b"):
        head.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


class Bomb:
    """Goes off when a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("loading a file executed code",))


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"text, as it happens",
        pickle.dumps(Bomb()),
        struct.pack("<Q", 2**62),
        header(b"{}"),
        header(b"not json"),
        header(b'{"score": 3}'),
        header(json.dumps({"__metadata__": about()}).encode()),
        header(json.dumps({"s": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}}).encode()),
    ],
    ids=["empty", "short", "text", "pickle", "endless", "nothing", "no-json", "no-tensor", "no-arrays", "lies"],
)
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(FileError):
        kh.load(tmp_path / "p")


def test_a_truncated_file(tmp_path: Path, rng: np.random.Generator) -> None:
    random_head(rng, 4).save(tmp_path / "p")
    whole = (tmp_path / "p").read_bytes()
    for size in range(0, len(whole), 23):
        (tmp_path / "p").write_bytes(whole[:size])
        with pytest.raises(FileError):
            kh.load(tmp_path / "p")


@pytest.mark.parametrize("where", ["missing", "."])
def test_no_file(tmp_path: Path, where: str) -> None:
    with pytest.raises(FileError):
        kh.load(tmp_path / where)


# --- distance -------------------------------------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[kh.SingleHead, kh.SingleHead]:
    """Two heads of one shape, at any scale."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    d, outputs = draw(st.integers(1, 5)), draw(st.sampled_from([None, 1, 3]))
    made = []
    for _ in range(2):
        head = random_head(rng, d, outputs, draw(st.booleans()), draw(st.booleans()))
        scale = 10.0 ** draw(st.integers(-150, 150))
        made.append(kh.SingleHead(**{name: scale * array for name, array in head.arrays().items()}))
    return made[0], made[1]


def without_nones(head: kh.SingleHead) -> kh.SingleHead:
    """The same head with its missing biases written as zeros."""
    score_bias = np.zeros(head.width) if head.score_bias is None else head.score_bias
    output_bias = np.zeros(head.value.shape[1:]) if head.output_bias is None else head.output_bias
    return kh.SingleHead(head.score, head.value, score_bias, output_bias)


@given(pairs())
def test_distance_is_symmetric_and_bounded(pair: tuple[kh.SingleHead, kh.SingleHead]) -> None:
    first, second = pair
    assert kh.distance(first, second) == kh.distance(second, first)
    assert 0 < kh.distance(first, second) <= 2
    assert kh.distance(first, first) == kh.distance(second, second) == 0


@given(pairs())
def test_a_missing_bias_is_a_zero_bias(pair: tuple[kh.SingleHead, kh.SingleHead]) -> None:
    first, second = pair
    assert kh.distance(first, without_nones(first)) == 0
    assert kh.distance(first, second) == kh.distance(without_nones(first), second)


@given(pairs())
def test_scores_are_irrelevant_where_there_is_no_value(pair: tuple[kh.SingleHead, kh.SingleHead]) -> None:
    first, second = pair
    blind = [kh.SingleHead(head.score, 0 * head.value, head.score_bias, first.output_bias) for head in pair]
    assert kh.distance(*blind) == 0
    assert kh.distance(first, kh.SingleHead(first.score, 0 * first.value)) > 0
    if first.output_bias is not None:
        silent = kh.SingleHead(second.score, 0 * first.value, second.score_bias)
        assert kh.distance(blind[0], silent) > 0


@given(st.integers(0, 2**32 - 1), st.floats(-12, 0), st.sampled_from(["score", "value", "score_bias", "output_bias"]))
def test_distance_is_zero_only_for_the_same_map(seed: int, power: float, name: str) -> None:
    """Moving any part moves the distance by as much, and the answers with it."""
    rng = np.random.default_rng(seed)
    head = random_head(rng, 4, None, True, True)
    arrays = head.arrays()
    change = 10.0**power * np.asarray(rng.standard_normal(np.shape(arrays[name])))
    moved = kh.SingleHead(**(arrays | {name: arrays[name] + change}))
    assume(np.any(moved.arrays()[name] != arrays[name]))
    whole = {"score": "score", "score_bias": "score", "value": "value", "output_bias": "value"}[name]
    parts = [
        arrays[part].ravel() for part in (("score", "score_bias") if whole == "score" else ("value", "output_bias"))
    ]
    size = np.linalg.norm(np.concatenate(parts))
    expected = np.linalg.norm(moved.arrays()[name] - arrays[name]) / size
    assert kh.distance(head, moved) == pytest.approx(expected, rel=2 * expected + 1e-6)


def test_distance_is_relative() -> None:
    head = kh.SingleHead(np.eye(3), np.ones(3))
    for scale in (1e-300, 1e-150, 1.0, 1e150, 1e300):
        big = kh.SingleHead(scale * np.eye(3), scale * np.ones(3))
        near = kh.SingleHead(scale * (1 + 1e-6) * np.eye(3), scale * np.ones(3))
        assert kh.distance(big, near) == pytest.approx(1e-6, rel=1e-5)
        assert scale == 1.0 or kh.distance(head, big) > 0.1


def test_distance_of_what_cannot_be_compared() -> None:
    head = kh.SingleHead(np.eye(3), np.ones(3))
    for other in (kh.SingleHead(np.eye(2), np.ones(2)), kh.SingleHead(np.eye(3), np.ones((3, 1)))):
        with pytest.raises(UsageError, match="cannot compare"):
            kh.distance(head, other)


def test_distance_between_libraries(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    head = random_head(rng, 4, 2, True, True)

    def moved(array: Array) -> Array:
        return torch.asarray(array)

    assert kh.distance(head, kh.SingleHead(**{name: moved(a) for name, a in head.arrays().items()})) == 0


def test_error_bars_hold_where_logits_are_known_to_less_than_weights_hold() -> None:
    """Two tokens whose logits differ by less than their radius: either may win, though one weight is exactly zero."""
    near = kh.SingleHead(np.array([[1e10, 0.0], [0.0, 0.0]]), np.array([1.0, 1.0]))
    moved = kh.SingleHead(np.array([[1e10, 0.0], [1e4, 0.0]]), np.array([1.0, 1.0]))
    pair = np.array([[[1.0, 0.0], [1.0 - 1e-7, 7.0], [0.5, -1.0]]])
    wide = kh.SingleHead(np.full((2, 2), 1e4), np.zeros(2))
    assert abs(near(pair) - moved(pair))[0] > 5
    assert np.all(np.abs(near(pair) - moved(pair)) <= near.error_bar(wide, pair, 1e-16))
