"""Score forms: what their logits tell, counted by Jacobians; what changes nothing; files; error bars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import floats
from keyhole.errors import FileError, UsageError
from keyhole.families.forms import EluFeatures, ExpFeatures, Form, Gaussian, QKNorm, QKNormRotary, Rotary
from keyhole.families.parts import Attention, Sink, Softcap
from keyhole.gauge import align
from keyhole.targets.forms import random_form_head

WIDTH, ROWS = 4, 4
SHAPES = {"rotary": (4, 2), "qk-norm": (4, 3), "qk-norm-rotary": (4, 4), "gaussian": (4,), "elu-features": (4, 3)}
SHAPES |= {"exp-features": (4, 3), "rotary-partly": (4, 4)}  # of whose pairs one does not turn
SHAPES |= {"rotary-biased": (4, 2), "rotary-partly-biased": (4, 4)}
# Norms that add something to squared lengths of keys and of queries.
SHAPES |= {f"{name}, epsilon": SHAPES[name] for name in ("qk-norm", "qk-norm-rotary")}
ADDED = np.array([0.7, 0.4])
STEP = 1e-5  # of differences: larger, and bends count; smaller, and rounding does


def drawn(name: str, rng: np.random.Generator) -> Form:
    width, *rows = SHAPES[name]
    matrix = [rng.standard_normal((*rows, width) if rows else (width, width)) for _ in range(2)]
    count = rows[0] if rows else 0
    angles = np.array([1.3, 0.4])[: count // 2]
    added = ADDED if "epsilon" in name else None
    name = name.removesuffix(", epsilon")
    if name.startswith("rotary"):
        biases = rng.standard_normal((2, count)) if "biased" in name else (None, None)
        return Rotary(*matrix, np.array([0.0, 1.3]) if "partly" in name else angles, *biases)
    if name == "qk-norm":
        return QKNorm(*matrix, 1 + rng.uniform(size=count), added)
    if name == "qk-norm-rotary":
        return QKNormRotary(*matrix, 1 + rng.uniform(size=count), 1 + rng.uniform(size=count), angles, added)
    if name == "gaussian":
        return Gaussian(matrix[0], matrix[1] @ matrix[1].T)
    return (EluFeatures if name == "elu-features" else ExpFeatures)(*matrix)


def jacobian(head: kh.FormHead, tokens: np.ndarray) -> np.ndarray:
    """Derivatives of the answers by every number but frequencies, which are known; of a Gram matrix by both halves."""
    columns = []
    for name, array in head.arrays().items():
        for place in np.ndindex(array.shape) if name != "form.frequencies" else ():
            change = np.zeros(array.shape)
            change[place] = STEP
            if name == "form.gram":
                change = (change + change.T) / 2
            plus, minus = (head.with_arrays({**head.arrays(), name: array + sign * change}) for sign in (1, -1))
            columns.append((plus(tokens) - minus(tokens)) / (2 * STEP))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("name", SHAPES)
def test_numbers_are_the_rank_of_the_jacobian(name: str) -> None:
    rng = np.random.default_rng(5)
    form = drawn(name, rng)
    head = kh.FormHead(form, rng.standard_normal(WIDTH))
    sizes = np.linalg.svd(jacobian(head, rng.standard_normal((400, 5, WIDTH))), compute_uv=False)
    rank = form.numbers + WIDTH
    assert head.counting_bound == rank
    assert sizes[rank - 1] > 1e-6 * sizes[0] > 1e3 * np.max(sizes[rank:], initial=0.0)


@pytest.mark.parametrize("name", SHAPES)
def test_canonical_and_aligned_arrays_make_the_same_logits(name: str) -> None:
    rng = np.random.default_rng(6)
    form, other = drawn(name, rng), drawn(name, rng)
    head, tokens = kh.FormHead(form, rng.standard_normal(WIDTH)), rng.standard_normal((9, 6, WIDTH))
    for same in (form.canonical(), form.aligned_to(other.canonical()), form.without_shift()):
        again = kh.FormHead(same, head.value)
        assert np.allclose(head(tokens), again(tokens), rtol=1e-12, atol=1e-12)
        assert kh.equivalent(head, again)
        assert kh.distance(head, kh.FormHead(other, head.value)) > 0.01
    if name != "gaussian":
        assert np.allclose(kh.witness(head).params(tokens), head(tokens), rtol=1e-12, atol=1e-12)
    back = align(head, kh.FormHead(form.canonical(), head.value))
    assert set(back) == set(head.arrays())


def test_gauges_change_nothing() -> None:
    """Scales, phases, signs, gains of either sign and orders, each in its form."""
    rng = np.random.default_rng(7)
    tokens = rng.standard_normal((9, 6, WIDTH))
    form = drawn("rotary", rng)
    turned = Rotary(form.query, form.key, form.frequencies)
    phase, size = np.exp(0.7j), 3.0
    key = phase * size * (form.key[0] + 1j * form.key[1])
    query = phase / size * (form.query[0] + 1j * form.query[1])
    turned = Rotary(np.stack([query.real, query.imag]), np.stack([key.real, key.imag]), form.frequencies)
    assert kh.equivalent(kh.FormHead(form, tokens[0, 0]), kh.FormHead(turned, tokens[0, 0]))
    normed = drawn("qk-norm", rng)
    order = [2, 0, 1]
    signs = np.array([1.0, -1.0, 1.0])[:, None]
    other = QKNorm(5 * (signs * normed.query)[order], 0.1 * normed.key[order], (signs[:, 0] * normed.gain)[order])
    assert kh.equivalent(kh.FormHead(normed, tokens[0, 0]), kh.FormHead(other, tokens[0, 0]))
    features = drawn("exp-features", rng)
    moved = ExpFeatures((features.query + rng.standard_normal(WIDTH))[order], features.key[order])
    assert kh.equivalent(kh.FormHead(features, tokens[0, 0]), kh.FormHead(moved, tokens[0, 0]), 1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_error_bars_cover_changes(name: str) -> None:
    rng, misses, sizes = np.random.default_rng(8), 0, []
    for _ in range(10):  # heads: of some, errors that tokens share are most of what there is
        head = kh.FormHead(drawn(name, rng), rng.standard_normal(WIDTH), np.asarray(0.3))
        radius = head.with_arrays({key: 1e-6 * (1 + abs(array)) for key, array in head.arrays().items()})
        tokens = rng.standard_normal((50, 7, WIDTH))
        bars = head.error_bar(radius, tokens, 1e-15)
        sizes.append(np.median(bars))
        for _ in range(2):
            moved = {
                key: array + 1e-6 * (1 + abs(array)) * rng.uniform(-1, 1, array.shape)
                for key, array in head.arrays().items()
            }
            misses += int(np.sum(np.abs(head.with_arrays(moved)(tokens) - head(tokens)) > bars))
    assert misses <= 10  # of a thousand: bars add in quadrature, and errors now and then do not
    assert np.median(sizes) < 1e-3  # not by being of no use


@pytest.mark.parametrize("name", SHAPES)
def test_files_keep_the_form_and_its_parts(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    attention = Attention(Softcap(5.0), Sink(0.5))
    head = kh.FormHead(drawn(name, rng), rng.standard_normal((WIDTH, 2)), rng.standard_normal(2), attention)
    head.save(tmp_path / "head.safetensors")
    again = kh.load(tmp_path / "head.safetensors")
    tokens = rng.standard_normal((3, 5, WIDTH))
    assert again.form.name == head.form.name
    assert np.array_equal(again(tokens), head(tokens))
    assert again.attention == attention


def test_rotary_logits_are_those_of_turned_keys_and_queries() -> None:
    rng = np.random.default_rng(10)
    form = drawn("qk-norm-rotary", rng)
    tokens = rng.standard_normal((2, 6, WIDTH))
    logits = Rotary(form.query, form.key, form.frequencies).logits(tokens, tokens[:, -1, :])

    def turn(row: np.ndarray, place: int) -> np.ndarray:
        angles = place * form.frequencies
        one, two = row[:2], row[2:]
        return np.concatenate(
            [one * np.cos(angles) - two * np.sin(angles), one * np.sin(angles) + two * np.cos(angles)]
        )

    expected = [
        [turn(form.key @ x, place) @ turn(form.query @ sequence[-1], 5) for place, x in enumerate(sequence)]
        for sequence in tokens
    ]
    assert np.allclose(logits, expected, rtol=1e-12, atol=1e-12)


def test_a_key_bias_that_does_not_turn_shows_beside_a_sink_alone() -> None:
    rng = np.random.default_rng(14)
    form, value = drawn("rotary-partly-biased", rng), rng.standard_normal(WIDTH)
    other = form.with_arrays({**form.arrays(), "key_bias": form.key_bias + np.array([1.0, 0.0, 2.0, 0.0])})
    assert kh.distance(kh.FormHead(form, value), kh.FormHead(other, value)) < 1e-14
    sink = Attention(normaliser=Sink(0.5))
    tokens = rng.standard_normal((3, 5, WIDTH))
    one, two = (kh.FormHead(each, value, None, sink) for each in (form, other))
    assert kh.distance(one, two) > 0.01
    assert np.max(np.abs(one(tokens) - two(tokens))) > 0.01


def test_all_positions_are_last_ones_in_turn() -> None:
    head = random_form_head("rotary", WIDTH, seed=1)
    tokens = np.random.default_rng(11).standard_normal((3, 6, WIDTH))
    everywhere = head.at_all_positions(tokens)
    assert np.allclose(everywhere[:, -1], head(tokens))
    assert everywhere.shape == (3, 6)


def test_a_token_without_a_key_has_logit_zero() -> None:
    form = drawn("qk-norm", np.random.default_rng(12))
    tokens = np.zeros((1, 3, WIDTH))
    tokens[0, 0, 0] = 1.0
    assert np.array_equal(form.logits(tokens, tokens[:, 0, :])[0, 1:], [0.0, 0.0])
    assert np.all(np.isfinite(form.radius(form, tokens, tokens, 1e-16)))


def test_wrong_arrays_and_files_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(13)
    matrix = rng.standard_normal((3, WIDTH))
    with pytest.raises(UsageError, match="even"):
        Rotary(matrix, matrix, np.ones(1))
    with pytest.raises(UsageError, match="shape"):
        QKNorm(matrix, matrix, np.ones(2))
    with pytest.raises(UsageError, match="matrix"):
        QKNorm(matrix[0], matrix, np.ones(3))
    with pytest.raises(UsageError, match="below zero"):
        QKNorm(matrix, matrix, np.ones(3), np.array([1.0, -1.0]))
    with pytest.raises(UsageError, match="epsilon has shape"):
        QKNorm(matrix, matrix, np.ones(3), np.ones(3))
    with pytest.raises(UsageError, match="score form"):
        kh.FormHead(matrix, matrix[0])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="value"):
        kh.FormHead(QKNorm(matrix, matrix, np.ones(3)), np.ones(2))
    with pytest.raises(FileError, match="unknown score form"):
        kh.FormHead.of_arrays(form="none", value=floats(np.ones(2)))
