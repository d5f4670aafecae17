"""`verify`: no alarm for the same box in another arithmetic, a small change found and placed, else honest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.tables.verify import FAMILIES, changed, equal
from keyhole.errors import FileError, UsageError
from keyhole.oracles import Cast, Counted, Noisy, Rounded
from keyhole.targets import random_multi_head, random_net, random_single_head
from keyhole.verify.judge import MISS

EQUAL, CHANGED = 40, 24  # slices of what the benchmark `verify` asks


def oracle_of(params: Any, **options: Any) -> kh.FunctionOracle:
    return kh.FunctionOracle(params, width=params.width, **options)


def layer_of(residual: bool = False) -> kh.OneLayer:
    rng = np.random.default_rng(3)
    head = kh.SingleHead(rng.standard_normal((6, 6)), rng.standard_normal((6, 6)), rng.standard_normal(6))
    return kh.OneLayer(head, random_net(6, 9, 2, rng), residual)


BOXES = {
    "single-head": random_single_head(8, rank=8, norm=1.0, seed=0, score_bias=0.3, output_bias=0.2),
    "multi-head": random_multi_head(5, 8, seed=1, score_bias=0.3, output_bias=0.2),
    "several outputs": random_multi_head(3, 8, seed=2, outputs=4),
    "relu-net": random_net(6, 9, None, np.random.default_rng(2)),
    "one-layer": layer_of(),
    "residual": layer_of(residual=True),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_same_box_in_another_arithmetic_is_no_alarm(family: str, dtype: str, fresh_seed: int) -> None:
    if "torch" in family:
        pytest.importorskip("torch")
    rng = np.random.default_rng(fresh_seed)
    for number in range(EQUAL // len(FAMILIES)):
        oracle, params = equal(family, dtype, rng)
        verdict = kh.verify(oracle, params, seed=number)
        assert verdict.conclusion != "different", verdict.message
        assert verdict.worst_ratio <= 1
        assert dtype == "float32" or verdict.same, verdict.message


@pytest.mark.parametrize(("draw", "number"), [(10, 1), (582, 2)])
def test_weights_that_vanish_in_float32_are_no_alarm(draw: int, number: int) -> None:
    """Beside a zero token others have weights of 1e-45 and less: zero in float32, not in the float64 prediction."""
    rng = np.random.default_rng([5, draw])
    boxes = [equal(FAMILIES[0], "float32", rng) for _ in range(number + 1)]
    verdict = kh.verify(*boxes[number], seed=number)
    assert verdict.conclusion != "different", verdict.message


@pytest.mark.parametrize("cut", [np.floor, np.ceil, np.trunc])
def test_the_right_weights_behind_digits_that_are_cut_are_the_same(cut: Any) -> None:
    params = BOXES["single-head"]
    verdict = kh.verify(kh.FunctionOracle(lambda x: cut(1e4 * params(x)) / 1e4, width=params.width), params)
    assert verdict.same, verdict.message
    assert verdict.noise == "rounded to 4 decimals, in some direction"


def test_a_small_change_of_one_part_is_found(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for number in range(CHANGED):
        oracle, params, _, _ = changed(1e-6, rng)
        counted = Counted(oracle)
        verdict = kh.verify(counted, params, seed=number)
        assert verdict.conclusion == "different", verdict.message
        assert counted.queries == verdict.queries == verdict.new_queries <= 64


def test_most_changes_are_placed(rng: np.random.Generator) -> None:
    """How many is a matter of luck, so the seed is fixed; the benchmark verify counts them among 2000."""
    placed = 0
    for number in range(CHANGED):
        oracle, params, _, head = changed(1e-6, rng)
        for difference in kh.verify(oracle, params, seed=number).differing:
            placed += difference.head in (head, None)
            assert 1e-8 < difference.size < 1e-4
    assert placed >= 0.9 * CHANGED


@pytest.mark.parametrize("name", BOXES)
def test_every_part_of_every_family(name: str) -> None:
    """A change of ten times the stated resolution is found, part by part."""
    params = BOXES[name]
    verdict = kh.verify(oracle_of(params), params)
    assert verdict.same
    assert verdict.miss == MISS
    assert verdict.confidence == 1 - MISS
    assert verdict.resolution < 1e-6
    rng = np.random.default_rng(5)
    for array_name, array in params.arrays().items():
        step = np.asarray(rng.standard_normal(array.shape))
        step *= np.linalg.norm(array) / np.linalg.norm(step)
        resolution = verdict.parts[label(array_name)]
        other = rebuilt(params, {array_name: np.asarray(array + 10 * resolution * step)})
        assert kh.verify(oracle_of(other), params).conclusion == "different", array_name


@pytest.mark.parametrize("name", BOXES)
def test_a_recovery_is_verified_by_its_own_error_bars(name: str, fixed_seed: int) -> None:
    params = BOXES[name]
    method = "one-layer" if isinstance(params, kh.OneLayer) else "auto"
    result = kh.recover(oracle_of(params), method=method, throw=False)
    verdict = kh.verify(oracle_of(params), result.params, radius=result.certificate.radius, seed=fixed_seed)
    assert verdict.same, verdict.message
    assert verdict.resolution < 1e-4
    array_name, array = next(iter(result.params.arrays().items()))
    other = rebuilt(result.params, {array_name: np.asarray(array) * (1 + 1e-3)})
    assert kh.verify(oracle_of(other), result.params, radius=result.certificate.radius).conclusion == "different"


def test_error_bars_of_others_are_refused() -> None:
    params, others = BOXES["single-head"], random_single_head(7, rank=7, norm=1.0, seed=0)
    for radius in (others, BOXES["relu-net"], rebuilt(params, {"score": -np.asarray(params.score)})):
        with pytest.raises(UsageError, match="radius"):
            kh.verify(oracle_of(params), params, radius=radius)


def label(array_name: str) -> str:
    words = array_name.split(".")
    if words[0] == "heads":
        return f"{words[2].replace('_', ' ')} of head {words[1]}"
    return words[-1].replace("_", " ")


def rebuilt(params: Any, arrays: dict[str, Any]) -> Any:
    whole = {**params.arrays(), **arrays}
    words = getattr(params, "words", {})
    return params.of_arrays(**whole, **words) if hasattr(params, "of_arrays") else type(params)(**whole, **words)


def test_head_and_part_are_named() -> None:
    params = BOXES["multi-head"]
    for number, part in ((0, "score"), (3, "value"), (4, "score_bias")):
        heads = list(params.heads)
        array = getattr(heads[number], part)
        step = np.random.default_rng(number).standard_normal(array.shape)
        moved = array + 1e-3 * np.linalg.norm(array) / np.linalg.norm(step) * step
        heads[number] = replace(heads[number], **{part: moved})
        verdict = kh.verify(oracle_of(kh.MultiHead(heads, params.output_bias)), params)
        (difference,) = verdict.differing
        assert (difference.head, difference.part) == (number, part)
        assert 1e-4 < difference.size < 1e-2
        assert f"the {part.replace('_', ' ')} of head {number}" in verdict.message


def test_changes_of_several_heads_are_told_apart(fixed_seed: int) -> None:
    params = random_multi_head(8, 16, seed=fixed_seed, outputs=8)
    rng = np.random.default_rng(fixed_seed)

    def moved(array: Any, part: float) -> Any:
        step = rng.standard_normal(array.shape)
        return array + part * np.linalg.norm(array) * step / np.linalg.norm(step)

    heads = list(params.heads)
    heads[2] = replace(heads[2], score=moved(heads[2].score, 1e-3))
    heads[5] = replace(heads[5], value=moved(heads[5].value, 1e-2))
    verdict = kh.verify(oracle_of(kh.MultiHead(heads)), params)
    assert verdict.conclusion == "different"
    assert verdict.changes["score of head 2"] == pytest.approx(1e-3, rel=0.7)
    assert verdict.changes["value of head 5"] == pytest.approx(1e-2, rel=0.5)
    by_head = verdict.by_head()
    assert max(by_head, key=lambda name: by_head[name]) == "head 5"
    others = [size for name, size in by_head.items() if name not in ("head 2", "head 5")]
    assert max(others) < 1e-4
    assert len(verdict.ratios) == verdict.queries - 2
    assert max(verdict.ratios) == pytest.approx(verdict.worst_ratio)
    same = kh.verify(oracle_of(params), params)
    assert same.changes == {}
    assert 0 < max(same.ratios) <= 1


@pytest.mark.parametrize("name", BOXES)
def test_what_is_another_box_altogether_has_changes_that_are_numbers(name: str) -> None:
    params = BOXES[name]
    verdict = kh.verify(oracle_of(params.with_arrays({k: -v for k, v in params.arrays().items()})), params)
    assert verdict.conclusion == "different"
    assert all(0 <= size < np.inf for size in verdict.by_head().values())
    assert any(verdict.by_head().values())


def test_other_heads_altogether_are_different() -> None:
    params = BOXES["multi-head"]
    verdict = kh.verify(oracle_of(random_multi_head(5, 8, seed=9, score_bias=0.3, output_bias=0.2)), params)
    assert verdict.conclusion == "different"
    assert verdict.confidence == 1
    others = kh.witness(params, "length-2-only").params
    assert kh.verify(oracle_of(others), params).conclusion == "different"
    short = kh.verify(oracle_of(others, max_length=2), params)
    assert short.same
    assert "up to 2 tokens" in short.message
    for kind in kh.kinds(params):
        if not kind.startswith("length"):
            same = kh.witness(params, kind).params
            assert kh.verify(oracle_of(same, name=kind), params).same, kind


def test_tolerance() -> None:
    """Parts may differ by the tolerance, all at once; much larger changes are still found."""
    rng = np.random.default_rng(8)
    for name, params in BOXES.items():
        for size, same in ((1e-4, True), (3e-2, False)):
            changes = {}
            for array_name, array in params.arrays().items():
                step = np.asarray(rng.standard_normal(array.shape))
                changes[array_name] = np.asarray(array + size * np.linalg.norm(array) / np.linalg.norm(step) * step)
            verdict = kh.verify(oracle_of(rebuilt(params, changes)), params, tolerance=1e-4)
            assert verdict.same is same, (name, verdict.message)
            assert verdict.tolerance == 1e-4
            assert kh.verify(oracle_of(rebuilt(params, changes)), params).conclusion == "different"


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_every_kind(seed: int) -> None:
    params = BOXES["multi-head"]
    other = replace(params, heads=[replace(params.heads[0], value=2 * params.heads[0].value), *params.heads[1:]])
    boxes = {
        "gaussian": lambda box: Noisy(box, 1e-3, seed=seed),
        "rounded": lambda box: Rounded(box, 4),
        "float16": lambda box: Cast(box, "float16"),
        "bfloat16": lambda box: Cast(box, "bfloat16"),
    }
    for kind, wrap in boxes.items():
        same = kh.verify(wrap(oracle_of(params)), params, seed=seed)
        assert same.conclusion != "different", kind
        assert same.false_alarm == (1e-6 if kind == "gaussian" else 0)
        assert kh.verify(wrap(oracle_of(other)), params, seed=seed).conclusion == "different", kind
    tau = kh.verify(oracle_of(params, noise=kh.Noise.bounded(1e-3)), params)
    assert tau.conclusion != "different"


def test_noise_that_hides_everything_is_inconclusive() -> None:
    params = BOXES["multi-head"]
    verdict = kh.verify(Noisy(oracle_of(params), 10.0), params)
    assert verdict.conclusion == "inconclusive"
    assert verdict.confidence == 0
    assert "might go unnoticed" in verdict.message


def test_hidden_noise_is_a_contradiction() -> None:
    params = BOXES["single-head"]
    verdict = kh.verify(Noisy(oracle_of(params), 1e-3, declared=False), params)
    assert verdict.conclusion == "inconclusive"
    assert "contradicts itself" in verdict.message


def test_limits_of_the_box_are_kept() -> None:
    params = random_multi_head(4, 8, seed=3, norm=4.0)
    for limits in ({"max_norm": 0.5}, {"max_length": 2}, {"max_length": 1}, {"batch_limit": 3}):
        assert kh.verify(oracle_of(params, **limits), params).conclusion != "different"
    everywhere = kh.FunctionOracle(params.at_all_positions, width=8, positions="all")
    assert kh.verify(everywhere, params).same


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_saturated_and_flat_boxes(scale: float) -> None:
    params = random_multi_head(4, 8, seed=3, norm=scale, outputs=2)
    assert kh.verify(oracle_of(params), params).same
    sharp = oracle_of(params, max_norm=1.0)
    assert kh.verify(sharp, params).conclusion != "different"


def test_few_questions_and_odd_parameters() -> None:
    params = BOXES["multi-head"]
    for queries in (1, 2, 7, 8):
        verdict = kh.verify(oracle_of(params), params, queries=queries)
        assert verdict.queries <= queries
        assert verdict.conclusion != "different"
    half = kh.SingleHead(np.eye(3), np.eye(3)[:, :1] * np.array([[1.0] + 30 * [0.0]]))  # most outputs say nothing
    assert kh.verify(oracle_of(half), half).conclusion != "different"
    silent = kh.SingleHead(np.eye(3), np.zeros(3))
    assert kh.verify(oracle_of(silent), silent).same
    flat = kh.SingleHead(np.zeros((3, 3)), np.ones(3))
    assert kh.verify(oracle_of(flat), flat).same
    empty = kh.ReluNet(np.zeros((0, 3)), np.zeros(0), np.zeros(0), np.asarray(0.0))
    assert kh.verify(oracle_of(empty), empty).same
    assert kh.verify(oracle_of(flat), silent).conclusion == "different"
    one, many = random_multi_head(2, 4), random_multi_head(2, 4, outputs=3)
    verdict = kh.verify(oracle_of(one), many)
    assert verdict.conclusion == "different"
    assert "one number" in verdict.message


def test_a_net_of_ones_own() -> None:
    """A layer whose net is only a function is compared all the same; what would be noticed cannot be said."""
    head = kh.SingleHead(np.eye(3), np.eye(3))
    layer = kh.OneLayer(head, OwnNet())
    verdict = kh.verify(kh.FunctionOracle(layer, width=3), layer)
    assert verdict.same
    assert "not known" in verdict.message
    other = kh.OneLayer(replace(head, score=1.001 * np.eye(3)), OwnNet())
    assert kh.verify(kh.FunctionOracle(other, width=3), layer).conclusion == "different"


class OwnNet:
    outputs = None

    def __call__(self, tokens: Any) -> Any:
        return np.sin(tokens[:, -1, :]).sum(axis=-1)

    def error_bar(self, radius: Any, tokens: Any, rounding: float) -> Any:
        return rounding * np.ones(len(tokens))


def test_a_journal_is_used(tmp_path: Path) -> None:
    params = BOXES["single-head"]
    first = kh.verify(oracle_of(params), params, journal=tmp_path / "answers.db")
    again = kh.verify(oracle_of(params), params, journal=tmp_path / "answers.db")
    assert first.new_queries == first.queries == again.queries
    assert again.new_queries == 0


def test_failing_boxes_and_wrong_use() -> None:
    params = BOXES["single-head"]
    broken = kh.FunctionOracle(lambda tokens: tokens[:, 0, 0] * np.nan, width=8)
    verdict = kh.verify(broken, params)
    assert verdict.conclusion == "inconclusive"
    assert "failed" in verdict.message
    with pytest.raises(UsageError, match="width"):
        kh.verify(kh.FunctionOracle(params, width=7), params)
    with pytest.raises(UsageError, match="Oracle"):
        kh.verify(3, params)
    with pytest.raises(UsageError, match="params"):
        kh.verify(oracle_of(params), 3)
    with pytest.raises(FileError, match="no such file"):  # a text names parameters
        kh.verify(oracle_of(params), "a head")
    with pytest.raises(UsageError, match="queries"):
        kh.verify(oracle_of(params), params, queries=0)
    with pytest.raises(UsageError, match="tolerance"):
        kh.verify(oracle_of(params), params, tolerance=2.0)


ROUNDING = {
    "rounding to 4 decimals": lambda box: Rounded(box, 4, declared=False),
    "rounding to float32": lambda box: Cast(box, "float32", declared=False),
    "rounding to bfloat16": lambda box: Cast(box, "bfloat16", declared=False),
}


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("words", ROUNDING)
def test_rounding_that_nobody_declared_is_found_and_named(name: str, words: str, fresh_seed: int) -> None:
    params = BOXES[name]
    verdict = kh.verify(ROUNDING[words](oracle_of(params)), params, seed=fresh_seed)
    assert verdict.conclusion != "different", verdict.message
    assert verdict.message.startswith(f"up to {words}, ")
    assert verdict.noise == words.replace("rounding", "rounded")
    assert "different answers have at most" in str(verdict.noise_evidence)
    if "bfloat16" not in words:
        assert verdict.same
        assert verdict.resolution > 1e-9  # and no finer than the rounding


@pytest.mark.parametrize("words", ROUNDING)
def test_rounding_excuses_no_other_box(words: str) -> None:
    params = BOXES["several outputs"]
    other = random_multi_head(3, 8, seed=3, outputs=4)
    verdict = kh.verify(ROUNDING[words](oracle_of(other)), params)
    assert not verdict.same
    if "decimals" in words:
        assert verdict.conclusion == "different"
        assert "although they are rounded to 4 decimals" in verdict.message


def test_arithmetic_in_float32_behind_float64_answers_is_the_same_box() -> None:
    params = BOXES["single-head"]
    short = {name: array.astype(np.float32) for name, array in params.arrays().items()}
    inside = type(params).of_arrays(**short)
    rounded = type(params).of_arrays(**{name: array.astype(np.float64) for name, array in short.items()})
    oracle = kh.FunctionOracle(lambda tokens: inside(tokens.astype(np.float32)).astype(np.float64), width=8)
    assert kh.verify(oracle, rounded).same


def test_noise_is_measured_where_that_is_asked_for() -> None:
    params = BOXES["single-head"]
    oracle = Counted(Noisy(oracle_of(params, noise="measure"), 1e-3, declared=False))
    verdict = kh.verify(oracle, params)
    assert verdict.conclusion != "different", verdict.message
    assert "standard deviation" in str(verdict.noise)
    assert oracle.queries == verdict.queries > 64
    other = replace(params, value=1.5 * params.value)
    assert kh.verify(Noisy(oracle_of(other, noise="measure"), 1e-3, declared=False), params).conclusion == "different"


def test_a_verdict_is_plain_data() -> None:
    params = BOXES["multi-head"]
    said = kh.verify(oracle_of(params), params).summary()
    assert said["conclusion"] == "same"
    assert said["parts"]["score of head 0"] < 1e-6
    assert said["differing"] == []


def test_a_net_that_sees_earlier_tokens_is_not_one_of_the_last_token(rng: np.random.Generator) -> None:
    net = kh.ReluNet(rng.standard_normal((6, 4)), rng.standard_normal(6), rng.standard_normal((1, 6)), np.zeros(1))
    oracle = kh.FunctionOracle(lambda tokens: net(tokens.mean(axis=1, keepdims=True)), width=4)
    assert kh.verify(kh.FunctionOracle(net, width=4), net).same
    assert not kh.verify(oracle, net).same
