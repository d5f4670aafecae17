"""What no query can tell apart: `canonical`, `equivalent`, `distance` and `witness`, against the answers themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.tables.gauge import MAKERS, SAME_ANSWERS, answers_apart, layer, net, pairs, several, single
from keyhole.errors import UsageError
from keyhole.gauge.compare import GAUGES
from keyhole.gauge.factored import FactoredHeads
from keyhole.targets.demos import random_layer

PAIRS = 80  # a slice of what the benchmark `gauge` asks


def callable_like(found: Any) -> Any:
    return found.joined() if isinstance(found, FactoredHeads) else found


def test_equivalent_says_what_the_answers_say(fresh_seed: int) -> None:
    verdicts = []
    for family, first, second in pairs(np.random.default_rng(fresh_seed), PAIRS):
        same = kh.equivalent(first, second)
        assert same == (answers_apart(first, second) <= SAME_ANSWERS), family
        assert same == (kh.distance(first, second) <= SAME_ANSWERS), family
        assert same == kh.equivalent(second, first)
        for length in (1, 2):
            short = answers_apart(first, second, length) <= SAME_ANSWERS
            assert kh.equivalent(first, second, max_length=length) == short, (family, length)
        verdicts.append(same)
    assert 0.2 * PAIRS < sum(verdicts) < 0.8 * PAIRS


def test_the_same_map_has_the_same_canonical_form(fresh_seed: int) -> None:
    for family, first, second in pairs(np.random.default_rng(fresh_seed), PAIRS):
        one, two = kh.canonical(first), kh.canonical(second)
        assert kh.equivalent(first, one), family
        assert answers_apart(first, one) <= SAME_ANSWERS, family
        if kh.equivalent(first, second):
            left, right = one.arrays(), two.arrays()
            assert left.keys() == right.keys(), family
            for name, array in left.items():
                np.testing.assert_allclose(array, right[name], rtol=1e-8, atol=1e-8, err_msg=family)


@pytest.mark.slow
@pytest.mark.parametrize("family", MAKERS)
def test_every_kind_of_witness(family: str) -> None:
    """Each kind is met, its parameters are others, and the map is the same as far as it says."""
    rng, met = np.random.default_rng(7), set()
    for _ in range(24):
        params = MAKERS[family](rng)
        loudness = np.max(np.abs(params(rng.standard_normal((50, 3, params.width)))))
        if loudness < 1e-12:  # heads that cancel: there is nothing but rounding to compare
            continue
        found = kh.kinds(params)
        assert set(found) <= set(GAUGES[type(params)].witnesses)
        for kind in found:
            other = kh.witness(params, kind)
            assert other.kind == kind
            assert other.explanation
            same = callable_like(other.params)
            length = other.max_length or 6
            assert answers_apart(params, other.params if length < 6 else same, length) <= SAME_ANSWERS, kind
            assert kh.equivalent(params, same, max_length=other.max_length), kind
            if other.max_length:
                assert not kh.equivalent(params, same), kind
                assert not kh.equivalent(params, same, max_length=other.max_length + 1), kind
            assert not alike(params, other.params), kind
            met.add(kind)
    lacking = {"merge", "permutation", "silent logits"} if family == "single-head" else set()
    assert met == set(GAUGES[type(params)].witnesses) - lacking
    assert kh.witness(params).kind == kh.kinds(params)[0]


def alike(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    left, right = first.arrays(), second.arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_factors_answer_like_their_products(rng: np.random.Generator) -> None:
    heads = several(np.random.default_rng(3))
    found = kh.witness(heads, "factor gauge")
    assert isinstance(found.params, FactoredHeads)
    tokens = rng.standard_normal((9, 4, heads.width))
    np.testing.assert_allclose(found.params(tokens), heads(tokens), rtol=1e-11, atol=1e-11)
    assert found.params.width == heads.width


def test_two_tokens_do_not_tell_the_sign_of_a_head() -> None:
    """The pair of the note: (W, v), (U, −v) and (−W, −v), (−U, v) agree on two tokens, not on three."""
    rng = np.random.default_rng(0)
    score, other, value = rng.standard_normal((4, 4)), rng.standard_normal((4, 4)), rng.standard_normal(4)
    first = kh.MultiHead([kh.SingleHead(score, value), kh.SingleHead(other, -value)])
    second = kh.MultiHead([kh.SingleHead(-score, -value), kh.SingleHead(-other, value)])
    assert kh.equivalent(first, second, max_length=2)
    assert answers_apart(first, second, 2) < 1e-14
    assert not kh.equivalent(first, second)
    assert not kh.equivalent(first, second, max_length=3)
    assert answers_apart(first, second, 3) > 0.01


def test_heads_nearly_alike_are_not_one(rng: np.random.Generator) -> None:
    """Large values of opposite signs show what logits differ by, however little it is."""
    score, value = rng.standard_normal((4, 4)), rng.standard_normal(4)
    near = score + 1e-9 * rng.standard_normal((4, 4))
    heads = kh.MultiHead([kh.SingleHead(score, 1e9 * value), kh.SingleHead(near, -1e9 * value)])
    assert len(kh.canonical(heads).heads) == 2
    assert not kh.equivalent(heads, kh.SingleHead(score, 0 * value))
    assert len(kh.canonical(heads, tolerance=1e-6).heads) == 1


def test_neurons_nearly_alike_are_not_one(rng: np.random.Generator) -> None:
    """A cosine cannot tell kinks that are 1e-8 apart; their difference, times 1e8, is a function all the same."""
    row, step = rng.standard_normal((2, 5))
    pair = kh.ReluNet(np.stack([row, row + 1e-8 * step]), np.zeros(2), np.array([1e8, -1e8]), np.asarray(0.0))
    nothing = kh.ReluNet(np.zeros((0, 5)), np.zeros(0), np.zeros(0), np.asarray(0.0))
    assert answers_apart(pair, nothing) == 1
    assert not kh.equivalent(pair, nothing)
    assert kh.canonical(pair).neurons == 2


def test_neurons_that_add_up_to_an_affine_map(rng: np.random.Generator) -> None:
    """act(z) − act(−z) = z for every activation, so a pair of neurons may be nothing but a skip."""
    row, shift = rng.standard_normal(4), 0.3
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        pair = kh.ReluNet(
            np.stack([row, -row]), np.array([shift, -shift]), np.array([1.0, -1.0]), np.asarray(0.5), None, activation
        )
        skip = kh.ReluNet(np.zeros((0, 4)), np.zeros(0), np.zeros(0), np.asarray(0.5 + shift), row)
        assert kh.equivalent(pair, skip)
        assert kh.canonical(pair).neurons == 0
        assert kh.distance(pair, skip) < 1e-15


def test_smooth_neurons_have_a_scale_and_relu_has_none() -> None:
    inner, bias, outer = np.array([[1.0, 2.0]]), np.array([0.5]), np.array([3.0])
    for activation, same in (("relu", True), ("gelu", False), ("silu", False)):
        first = kh.ReluNet(inner, bias, outer, np.asarray(0.0), None, activation)
        second = kh.ReluNet(2 * inner, 2 * bias, outer / 2, np.asarray(0.0), None, activation)
        assert kh.equivalent(first, second) is same


def test_logits_of_a_layer_that_does_not_show_its_attention(rng: np.random.Generator) -> None:
    """The net looks past the values: then logits are free, and not otherwise."""
    width = 4
    blind = np.diag([1.0, 1.0, 0.0, 0.0])  # the net sees two entries
    value = np.hstack([np.zeros((width, 2)), rng.standard_normal((width, 2))])  # attention writes the other two
    inner = rng.standard_normal((5, width)) @ blind
    behind = kh.ReluNet(inner, rng.standard_normal(5), rng.standard_normal(5), np.asarray(0.0))

    def made(score: np.ndarray, value: np.ndarray, residual: bool = True) -> kh.OneLayer:
        return kh.OneLayer(kh.SingleHead(score, value), behind, residual)

    one, two = rng.standard_normal((2, width, width))
    assert kh.equivalent(made(one, value), made(two, value))
    assert kh.distance(made(one, value), made(two, value)) < 1e-14
    assert "silent logits" in kh.kinds(made(one, value))
    assert not np.any(kh.canonical(made(one, value)).attention.score)
    seen = value + 1e-3 * np.eye(width)
    assert not kh.equivalent(made(one, seen), made(two, seen))
    assert kh.equivalent(made(one, seen), made(two, seen), max_length=1)
    assert not kh.equivalent(made(one, value), made(one, value, residual=False))


def test_tolerance_is_that_of_the_dtype(rng: np.random.Generator) -> None:
    head = single(np.random.default_rng(5))
    moved = replace(head, score=head.score * (1 + 1e-7))
    assert not kh.equivalent(head, moved)
    assert kh.equivalent(head, moved, tolerance=1e-6)
    short = kh.SingleHead(**{name: array.astype(np.float32) for name, array in head.arrays().items()})
    assert kh.equivalent(head, short)
    assert not kh.equivalent(head, replace(short, score=short.score * np.float32(1.001)))


def test_libraries_can_be_mixed() -> None:
    torch = pytest.importorskip("torch")

    def moved(part: Any) -> Any:
        return type(part)(**{name: torch.asarray(array) for name, array in part.arrays().items()}, **words(part))

    def words(part: Any) -> dict[str, str]:
        return getattr(part, "words", {})

    head, plain_net = single(np.random.default_rng(1)), net(np.random.default_rng(2))
    for params in (head, plain_net):
        assert kh.equivalent(params, moved(params))
        assert kh.equivalent(kh.canonical(moved(params)), params)
        assert kh.kinds(moved(params)) == kh.kinds(params)
    whole = layer(np.random.default_rng(4))
    other = kh.OneLayer(moved(whole.attention), moved(whole.ffn), whole.residual)
    assert kh.equivalent(whole, other)
    assert kh.equivalent(kh.witness(other).params, whole)


def test_what_cannot_be_compared() -> None:
    head, plain_net = single(np.random.default_rng(1)), net(np.random.default_rng(2))
    for function in (kh.equivalent, kh.distance):
        with pytest.raises(UsageError, match="cannot compare"):
            function(head, plain_net)
    with pytest.raises(UsageError, match="known: SingleHead"):
        kh.canonical("a head")
    with pytest.raises(UsageError, match="no witnesses"):
        kh.witness("a head")
    with pytest.raises(UsageError, match="unknown kind"):
        kh.witness(head, "magic")
    lonely = kh.SingleHead(np.eye(3), np.ones(3))
    with pytest.raises(UsageError, match="they have: split"):
        kh.witness(lonely, "permutation")
    for tolerance in (-1.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="tolerance"):
            kh.equivalent(head, head, tolerance=tolerance)
    with pytest.raises(UsageError, match="max_length"):
        kh.equivalent(head, head, max_length=0)
    wide = kh.SingleHead(np.eye(4), np.ones((4, 2)))
    with pytest.raises(UsageError, match="width 4 with outputs 2"):
        kh.equivalent(kh.SingleHead(np.eye(3), np.ones(3)), wide)
    own = kh.OneLayer(wide, lambda tokens: tokens[:, -1, 0])
    with pytest.raises(UsageError, match="only with a ReluNet"):
        kh.canonical(own)
    assert all(gauge.witnesses for gauge in GAUGES.values())


def test_whole_sequence_layers_are_compared_as_their_heads_are(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    layer = kh.AttentionLayer(rng.standard_normal((3, 4, 4)), rng.standard_normal((3, 4, 2)))
    sequences = rng.standard_normal((8, 5, 4))
    for kind in kh.kinds(layer):
        other = kh.witness(layer, kind).params
        same = np.allclose(other(sequences), layer(sequences), atol=1e-10)
        assert kh.equivalent(layer, other) == same == (not kind.startswith("length"))
        assert (kh.distance(layer, other) < 1e-12) == same
    assert {"split", "permutation", "zero head", "length-2-only"} <= set(kh.kinds(layer))
    assert kh.canonical(kh.witness(layer, "split").params).heads == 3


@pytest.mark.parametrize("number", [np.nan, np.inf, 1j])
def test_numbers_that_define_no_map_are_refused(number: complex) -> None:
    good, bad = kh.SingleHead(np.eye(2), np.ones(2)), kh.SingleHead(np.full((2, 2), number), np.ones(2))
    for ask in (kh.canonical, kh.kinds, kh.witness, lambda params: kh.distance(good, params)):
        with pytest.raises(UsageError, match=r"SingleHead\.score holds"):
            ask(bad)
    with pytest.raises(UsageError, match=r"SingleHead\.score holds"):
        kh.verify(kh.FunctionOracle(good, width=2), bad)


def test_options_that_are_no_numbers_are_refused() -> None:
    head = kh.SingleHead(np.eye(2), np.ones(2))
    with pytest.raises(UsageError, match="tolerance"):
        kh.canonical(head, tolerance="a")  # type: ignore[arg-type]
    for length in ("x", float("nan"), 1.5):
        with pytest.raises(UsageError, match="max_length"):
            kh.equivalent(head, head, max_length=length)  # type: ignore[arg-type]


@pytest.mark.parametrize("residual", [False, True])
def test_a_head_without_logits_is_compared_over_the_others(residual: bool) -> None:
    truth = random_layer(4, 6, None, np.random.default_rng(3), residual=residual, heads=2)
    nothing, other = truth.heads
    nothing = replace(nothing, score=0 * nothing.score)
    off = replace(nothing, score=1e-13 * other.score)
    heads, near = kh.MultiHead([nothing, other]), kh.MultiHead([off, other])
    for one, two in ((heads, near), (replace(truth, attention=heads), replace(truth, attention=near))):
        assert 1e-14 < kh.distance(one, two) < 1e-12
        assert kh.distance(one, two) == kh.distance(two, one)
