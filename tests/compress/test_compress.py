"""Smaller parameters: the error is what is said, and models take their weights back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import keyhole as kh
from keyhole.compress.inputs import relative_error
from keyhole.compress.matrices import Truncation, roots
from keyhole.errors import UsageError
from keyhole.targets import open_target
from support.commands import Run, one_line
from support.targets import Random

BOX = ""


def decaying(rng: Random, rows: int, columns: int, rate: float = 0.5) -> np.ndarray:
    """A random matrix whose singular values fall by this rate."""
    left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (rows, columns))
    least = min(rows, columns)
    return left[:, :least] * rate ** np.arange(least) @ right[:least] * 2


def layer(rng: Random, heads: int = 3, width: int = 12) -> kh.MultiHead:
    made = [kh.SingleHead(decaying(rng, width, width), decaying(rng, width, width)) for _ in range(heads)]
    return kh.MultiHead(made, rng.standard_normal(width))


def test_the_error_is_that_of_fresh_answers_and_within_the_tolerance(rng: Random) -> None:
    params = layer(rng)
    found = kh.compress(params, 0.05)
    assert found.met
    assert found.error <= 0.05
    assert found.size < found.original
    tokens = params.token_norm(2.0) / 12**0.5 * rng.standard_normal((2000, 4, 12))
    fresh = relative_error(found.params(tokens).ravel(), params(tokens).ravel())
    assert fresh == pytest.approx(found.error, rel=1.0)  # other sequences, of one length


def test_factors_make_up_the_parameters_and_are_as_many_numbers_as_is_said(rng: Random, tmp_path: Path) -> None:
    found = kh.compress(layer(rng), 0.1)
    found.save_factors(tmp_path / "factors.safetensors")
    kept = load_file(tmp_path / "factors.safetensors")
    assert sum(array.size for array in kept.values()) == found.size
    for name, array in found.params.arrays().items():
        made = kept[name] if name in kept else kept[f"{name}.left"] @ kept[f"{name}.right"]
        np.testing.assert_allclose(made, array, atol=1e-12)


def test_a_rank_that_is_there_already_costs_nothing() -> None:
    params = open_target("demo:multi-head?heads=2&width=12&outputs=12&rank=3&value_rank=2").truth
    assert params is not None
    found = kh.compress(params, 1e-9)
    assert found.size == 2 * (3 + 2) * 24
    assert set(found.ranks.values()) == {2, 3}
    assert found.error < 1e-12


def test_rank_caps_every_matrix(rng: Random) -> None:
    found = kh.compress(layer(rng), rank=4)
    assert max(found.ranks.values()) == 4
    for name, array in found.params.arrays().items():
        assert name == "output_bias" or np.linalg.matrix_rank(array) <= 4


def test_heads_that_are_alike_are_merged_and_a_silent_one_left_out(rng: Random) -> None:
    first, second = layer(rng, 2).heads
    twin = kh.SingleHead(first.score, decaying(rng, 12, 12))
    silent = kh.SingleHead(decaying(rng, 12, 12), 1e-9 * decaying(rng, 12, 12))
    params = kh.MultiHead([silent, first, second, twin], rng.standard_normal(12))
    found = kh.compress(params, heads=2)
    assert len(found.params.heads) == 2
    assert found.error < 1e-6
    assert sorted(found.changes) == ["left out head 1 of 4", "merged heads 1 and 3 of 3"] or len(found.changes) == 2
    assert kh.compress(params, heads=1).error > 0.1


def test_what_cannot_be_within_the_tolerance_says_so(rng: Random) -> None:
    found = kh.compress(layer(rng), 1e-3, heads=1)
    assert not found.met
    assert found.error > 1e-3
    assert found.error == min(point.error for point in found.curve)


@pytest.mark.parametrize(
    "target",
    [
        "demo:single-head?width=6&outputs=4&score_bias=1",
        "demo:single-head?width=6",
        "demo:single-head?width=6&outputs=6&link=softcap&cap=2",
        "demo:multi-head?heads=2&width=5&outputs=5&residual=1",
        "demo:one-layer?width=5&neurons=4&heads=2&residual=1",
    ],
)
def test_every_family_with_heads_is_compressed_to_one_of_its_kind(target: str) -> None:
    params = open_target(target).truth
    assert params is not None
    found = kh.compress(params, 0.5)
    assert type(found.params) is type(params)
    assert found.params.words == params.words
    sizes = [point.size for point in found.curve]
    assert sizes == sorted(sizes, reverse=True)
    assert found.curve[0].error < 1e-9


def test_inputs_of_the_user_decide_what_matters(rng: Random) -> None:
    """Tokens in a subspace: what is outside of it costs nothing to leave out."""
    params, basis = layer(rng, 2), rng.standard_normal((3, 12))
    inputs = [rng.standard_normal((5, 3)) @ basis for _ in range(60)]
    own, others = kh.compress(params, 1e-6, domain=inputs), kh.compress(params, 1e-6)
    assert own.error <= 1e-6
    assert max(own.ranks.values()) <= 3
    assert own.size < others.size
    assert "inputs that were given" in own.inputs


def test_the_cut_is_the_best_for_tokens_of_that_covariance(rng: Random) -> None:
    matrix, factor = rng.standard_normal((6, 6)), rng.standard_normal((6, 6))
    root, inverse = roots(factor @ factor.T)
    best = Truncation(matrix, root, inverse, both=True)
    sizes = np.linalg.svd(root @ matrix @ root, compute_uv=False)
    for rank in range(6):
        left = root @ (matrix - best.of_rank(rank)) @ root
        assert np.linalg.norm(left) == pytest.approx(np.linalg.norm(sizes[rank:]), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "how small"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": -1e-3}, "tolerance"),
        ({"rank": -1}, "rank"),
        ({"heads": 0}, "heads"),
        ({"heads": 4}, "there are 3 heads"),
        ({"rank": 2, "domain": [np.zeros((2, 12))]}, "one sequence"),
        ({"rank": 2, "domain": [np.zeros((2, 3))]}, r"\(length, 12\)"),
    ],
)
def test_wrong_arguments_are_told(rng: Random, change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kh.compress(layer(rng), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["demo:relu-net?width=3&neurons=3", "demo:single-head?width=3&labels=1"])
def test_what_has_no_heads_or_no_numbers_is_told(target: str) -> None:
    params = open_target(target).truth
    assert params is not None
    with pytest.raises(UsageError, match=r"score or value|labels"):
        kh.compress(params, 0.1)


def test_the_command_shows_keeps_and_admits(run: Run) -> None:
    truth = open_target("demo:multi-head?heads=2&width=6&outputs=6&rank=2").truth
    assert truth is not None
    Path("run").mkdir()
    truth.save("run/params.safetensors")
    code, out, err = run("compress", "run", "--tolerance", "1e-6", "--out", "small")
    assert (code, err) == (0, "")
    assert "numbers," in out
    assert set(json.loads(Path("small/compress.json").read_text())["ranks"].values()) >= {2}
    assert kh.distance(kh.load("small/params.safetensors"), kh.load("run/params.safetensors")) < 1e-5
    assert run("verify", "file:run/params.safetensors", "small", "--tolerance", "1e-4", "-q")[0] == 0
    code, out, _ = run("compress", "run", "--heads", "1", "--tolerance", "1e-6", "--json")
    assert (code, json.loads(out)["met"]) == (1, False)
    code, _, err = run("compress", "run", "--rank", "1", "--out", "run")
    assert (code, one_line(err)) == (2, True)
    code, _, err = run("compress", "run")
    assert (code, "how small" in err) == (2, True)


def test_weights_go_back_into_the_model(run: Run) -> None:
    torch, models = pytest.importorskip("torch"), pytest.importorskip("support.transformers_models")
    models.made("bert", heads=2).save_pretrained("model")
    code, out, _ = run("compress", "transformers:model#layer=1", "--rank", "3", "--out", "small", "--json")
    assert code == 0
    found = json.loads(out)
    tensors = {name: torch.as_tensor(array) for name, array in load_file("small/weights.safetensors").items()}
    oracle = kh.TransformersOracle("model", layer=1)
    before = oracle.heads()
    own = oracle.place.module.state_dict()
    prefix = oracle.place.name + "."
    assert {name.removeprefix(prefix) for name in tensors} <= set(own)
    oracle.place.module.load_state_dict({**own, **{name.removeprefix(prefix): each for name, each in tensors.items()}})
    tokens = np.random.default_rng(0).standard_normal((6, 4, 12))
    answered = np.asarray(oracle(oracle.signature.space.asarray(tokens)))
    small = kh.load(found["files"]["params"])
    np.testing.assert_allclose(answered, small(tokens), atol=1e-9)
    assert np.max(np.abs(answered - before(tokens))) > 1e-6
