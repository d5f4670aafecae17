"""Examples in shards: the same result whoever reads them, nothing counted twice, every bad shard named."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.cli import main
from keyhole.errors import FileError, UsageError
from keyhole.executors.base import FutureCrew, OneProcess
from keyhole.executors.processes import OwnProcesses
from keyhole.recovery import Outcome
from keyhole.report.text.recovery import describe_layer
from keyhole.samples.evidence import standard_errors
from keyhole.samples.sharded import method
from keyhole.samples.sharded.source import ShardSource, keys_of
from keyhole.samples.sharded.survey import draw, survey
from keyhole.samples.six_phase.method import six_phase
from keyhole.samples.source import ArraySource
from keyhole.samples.sums import LayerAt, SummedFit
from keyhole.samples.variable_projection import LayerProblem
from keyhole.shards.shard import find_shards
from keyhole.targets.datasets import random_layer, signs
from support.mortal import killed_once

D, K, M, PER_SHARD, SHARDS = 4, 3, 2, 150, 4


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that nearly all examples stay on disk."""
    monkeypatch.setattr(method, "IN_MEMORY", 250 * K * 2 * D)


def write(folder: Path, layer: kh.AttentionLayer, noise: float = 0.0, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for number in range(SHARDS):
        inputs = rng.standard_normal((PER_SHARD, K, D))
        outputs = layer(inputs)
        outputs = outputs + noise * rng.standard_normal(outputs.shape)
        np.savez(folder / f"{number}.npz", inputs=inputs, outputs=outputs)


@pytest.fixture
def truth() -> kh.AttentionLayer:
    return random_layer(D, M, D, 0.5, np.random.default_rng(7))


@pytest.fixture
def folder(tmp_path: Path, truth: kh.AttentionLayer) -> Path:
    write(tmp_path, truth)
    return tmp_path


def together(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    pairs = [pair for shard in find_shards(folder) for pair in shard.blocks()]
    inputs, outputs = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return inputs, outputs


# --- sums ---------------------------------------------------------------------------------------------------------


def test_sums_over_shards_are_the_fit_in_memory(
    folder: Path, truth: kh.AttentionLayer, rng: np.random.Generator
) -> None:
    inputs, outputs = together(folder)
    problem = LayerProblem(inputs, outputs)
    point = problem.at(truth.scores + 0.1 * rng.standard_normal(truth.scores.shape))
    shards = survey(OneProcess(), find_shards(folder))
    source = ShardSource(OneProcess(), shards.shards, keys_of(inputs[:0]), draw(OneProcess(), shards, 10, rng), 600)
    found = SummedFit.of(source, point.scores, point.projections)
    assert (found.examples, found.numbers) == (600, outputs.size)
    assert found.rss == pytest.approx(point.rss)
    assert found.energy == pytest.approx(problem.energy)
    dense, summed = standard_errors(point, rng), found.standard_errors(rng)
    for one, two in ((dense.scores, summed.scores), (dense.projections, summed.projections)):
        assert np.allclose(one, two, rtol=1e-6)
    assert dense.unsettled == pytest.approx(summed.unsettled)
    scores, projections, promised = found.step()
    moved = SummedFit.of(source, point.scores + 1e-3 * scores, point.projections + 1e-3 * projections)
    assert (found.rss - moved.rss) == pytest.approx(2e-3 * promised, rel=0.02)


def test_parts_of_examples_add_up(truth: kh.AttentionLayer, rng: np.random.Generator) -> None:
    inputs = signs(rng, 90, K, D)
    outputs = truth(inputs) + 0.1
    at = LayerAt(truth.scores, truth.projections, full=True)
    whole, parts = at(inputs, outputs), add(at(inputs[:31], outputs[:31]), at(inputs[31:], outputs[31:]))
    for name, value in vars(whole).items():
        assert np.allclose(value, getattr(parts, name), rtol=1e-12, atol=1e-12), name


def test_keys_forget_the_order_of_tokens_alone(rng: np.random.Generator) -> None:
    inputs = signs(rng, 2000, K, D)
    keys = keys_of(inputs)
    assert np.array_equal(keys, keys_of(inputs[:, ::-1]))
    assert np.array_equal(keys, keys_of(np.where(inputs > 0, inputs, -1.0)))
    different = {tuple(sorted(map(tuple, each))) for each in inputs}
    assert len(np.unique(keys)) == len(different)
    assert len(np.unique(keys_of(inputs[:, :, [1, 0, 2, 3]] * [1, 2, 1, 1]))) == len(different)
    assert keys_of(np.zeros((1, 2, 2)))[0] == keys_of(-np.zeros((1, 2, 2)))[0]


def test_what_is_held_out_is_in_no_sum(folder: Path, truth: kh.AttentionLayer, rng: np.random.Generator) -> None:
    inputs, _ = together(folder)
    shards = survey(OneProcess(), find_shards(folder))
    held = np.unique(keys_of(inputs[::6, ::-1]))
    source = ShardSource(OneProcess(), shards.shards, held, draw(OneProcess(), shards, 10, rng), 600)
    assert SummedFit.of(source, truth.scores, truth.projections, full=False).examples == 500


# --- learning -----------------------------------------------------------------------------------------------------


def learn(data: Any, **options: Any) -> kh.Recovery:
    return kh.learn(data, heads=M, throw=False, **options)


def same(one: kh.Recovery, two: kh.Recovery) -> None:
    assert one.outcome is two.outcome
    assert np.allclose(one.params.scores, two.params.scores, rtol=0, atol=1e-13)
    assert np.allclose(one.params.projections, two.params.projections, rtol=0, atol=1e-13)
    assert one.stats.queries == two.stats.queries


def test_shards_are_learned_to_rounding(folder: Path, truth: kh.AttentionLayer) -> None:
    result = learn(str(folder / "*.npz"))
    assert result.certified, result.message
    assert kh.distance(result.params, truth) <= 1e-9
    shards = result.stats.details["shards"]
    assert (shards["used"], shards["examples"], shards["skipped"]) == (SHARDS, 600, {})
    assert result.stats.queries + result.stats.heldout_queries == 600
    with ThreadPoolExecutor(2) as executor:
        same(result, learn(folder, executor=executor))


def test_noise_is_averaged_over_all_shards(tmp_path: Path, truth: kh.AttentionLayer, fresh_seed: int) -> None:
    write(tmp_path, truth, 1e-2, fresh_seed)
    found = learn(tmp_path, noise=1e-2)
    assert not found.certified or np.all(
        np.abs(np.sort(found.params.projections.ravel()) - np.sort(truth.projections.ravel())).max() < 0.1
    )
    assert found.stats.details["shards"]["refined"]
    inputs, outputs = together(tmp_path)
    point = LayerProblem(inputs, outputs).at(found.params.scores)
    assert found.stats.queries > 500  # rests on all of them
    assert np.linalg.norm(point.projections - found.params.projections) < 0.1 * np.linalg.norm(point.projections)


def test_rounded_shards_assume_that_no_input_stands_twice(tmp_path: Path, truth: kh.AttentionLayer) -> None:
    """Rounding errs alike where inputs are alike: in memory those count once, in shards nobody looks."""
    for number in range(SHARDS):
        inputs = np.random.default_rng(number).standard_normal((PER_SHARD, K, D))
        np.savez(tmp_path / f"{number}.npz", inputs=inputs, outputs=np.round(truth(inputs), 4))
    said = "no input stands twice in the shards, whose outputs are rounded"
    noise = kh.Noise.rounded(4)
    assert said in learn(tmp_path, noise=noise).certificate.assumptions
    in_memory = kh.learn(*together(tmp_path), heads=M, noise=noise, throw=False)
    assert said not in in_memory.certificate.assumptions


def test_streams_and_columns_are_learned(folder: Path, truth: kh.AttentionLayer) -> None:
    inputs, outputs = together(folder)
    batches = ((inputs[start : start + 50], outputs[start : start + 50]) for start in range(0, 600, 50))
    for data in (batches, {"inputs": inputs.tolist(), "outputs": outputs.tolist()}):
        result = learn(data)
        assert result.certified, result.message
        assert kh.distance(result.params, truth) <= 1e-9


def test_few_shards_are_taken_into_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "IN_MEMORY", 2**20)
    inputs, outputs = together(folder)
    whole, apart = kh.learn(inputs, outputs, heads=M), learn(folder)
    same(whole, apart)
    assert "passes" not in apart.stats.details["shards"]


def test_the_six_phases_are_sums_and_selections(truth: kh.AttentionLayer, tmp_path: Path) -> None:
    write(tmp_path, truth)
    inputs, _ = together(tmp_path)
    shards = survey(OneProcess(), find_shards(tmp_path))
    rng = np.random.default_rng(0)
    sample = draw(OneProcess(), shards, 600, rng)
    apart = six_phase(ShardSource(OneProcess(), shards.shards, keys_of(inputs[:0]), sample, 600), M)
    whole = six_phase(ArraySource(sample.inputs, sample.outputs), M)
    assert np.allclose(apart.scores, whole.scores, atol=1e-9)
    assert apart.error == pytest.approx(whole.error)


def test_wrong_families_in_shards_are_not_certified(tmp_path: Path, rng: np.random.Generator) -> None:
    for number in range(3):
        inputs = rng.standard_normal((PER_SHARD, K, D))
        np.savez(tmp_path / f"{number}.npz", inputs=inputs, outputs=np.maximum(inputs, 0.0))
    assert not learn(tmp_path, restarts=2).certified


def test_one_shard_that_differs_from_the_others_is_no_surprise(folder: Path, truth: kh.AttentionLayer) -> None:
    """What few examples were drawn from is judged on all."""
    inputs = np.random.default_rng(5).standard_normal((40, K, D))
    np.savez(folder / "9.npz", inputs=inputs, outputs=truth(inputs) + 1e-3)
    assert not learn(folder).certified


# --- bad shards ---------------------------------------------------------------------------------------------------


def spoil(folder: Path) -> None:
    wide = np.zeros((5, K, D + 1))
    np.savez(folder / "5.npz", inputs=wide, outputs=wide)
    np.savez(folder / "6.npz", inputs=np.zeros((0, K, D)), outputs=np.zeros((0, K, D)))
    np.savez(folder / "7.npz", inputs=np.full((5, K, D), np.nan), outputs=np.zeros((5, K, D)))
    np.savez(folder / "8.npz", x=np.zeros((5, K, D)), outputs=np.zeros((5, K, D)))


def test_bad_shards_are_named_and_skipped_on_request(folder: Path, truth: kh.AttentionLayer) -> None:
    spoil(folder)
    with pytest.raises(FileError, match="4 of 8 shards cannot be used") as raised:
        learn(folder)
    for said in (
        "5.npz has examples of 3 tokens of 5",
        "6.npz holds no examples",
        "7.npz: 5 of 5 rows hold nan",
        "'inputs'",
    ):
        assert said in str(raised.value)
    result = learn(folder, skip_bad=True)
    assert result.certified
    skipped = result.stats.details["shards"]["skipped"]
    assert [Path(name).name for name in skipped] == ["5.npz", "6.npz", "7.npz", "8.npz"]
    assert dict(describe_layer(result, ""))["left out"].startswith("4 bad shards: ")
    with pytest.raises(FileError, match="holds no examples"):
        learn(folder / "6.npz", skip_bad=True)


def test_what_cannot_be_meant_is_refused(folder: Path, rng: np.random.Generator) -> None:
    arrays = signs(rng, 40, K, D), signs(rng, 40, K, D)
    with pytest.raises(UsageError, match=r"learn needs inputs and outputs"):
        kh.learn(arrays[0])
    with pytest.raises(UsageError, match="no column 'outputs'"):
        kh.learn({"inputs": arrays[0]})
    with pytest.raises(UsageError, match="no array of numbers"):
        kh.learn({"inputs": [[1], [2, 3]], "outputs": [[1], [2]]})
    with pytest.raises(UsageError, match=r"concurrent.futures.Executor"):
        learn(folder, executor="me")
    with pytest.raises(UsageError, match="workers must be"):
        learn(folder, workers=0)
    with pytest.raises(UsageError, match="give one of them"):
        learn(folder, workers=2, dask="tcp://127.0.0.1:1")


# --- workers ------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_changes_nothing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = OwnProcesses(1)
    crew = FutureCrew(own.open(), 1, own.open)
    assert list(crew.map(partial(killed_once, tmp_path_factory.mktemp("marks")), range(6))) == [0, 1, 4, 9, 16, 25]
    same(learn(folder), learn(folder, executor=crew.executor))
    own.end(crew.executor, hung=False)


def test_the_command_learns_from_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(folder)
    pattern = str(folder / "*.npz")
    with pytest.raises(SystemExit) as ended:
        main(["learn", pattern, "--heads", str(M)])
    assert ended.value.code == 2
    assert "4 of 8 shards cannot be used" in capsys.readouterr().err
    written_out = sorted(map(str, folder.glob("*.npz")))  # by the shell, of a pattern without quotes
    with pytest.raises(SystemExit) as ended:
        main(["learn", *written_out, "--heads", str(M), "--skip-bad", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == Outcome.CERTIFIED.name
