"""The fuzzer: a slice of it on fresh seeds, defects that it must find, and runs that are killed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.fuzz
import keyhole as kh
from benchmarks.fuzz.alignment import worst_ratio
from benchmarks.fuzz.attempts import KINDS, attempt
from benchmarks.fuzz.boxes import Box
from benchmarks.fuzz.judge import VERDICTS, Found, judge
from benchmarks.fuzz.maps import Head, Heads, Net
from benchmarks.fuzz.runner import read_records, record_file, run, schedule
from benchmarks.tables import fuzz
from support.fuzz_attempts import attempt as quick_attempt

# --- a slice --------------------------------------------------------------------------------------------------------

MEMBERS = (
    "one head: full rank",
    "one head: low rank",
    "one head: all biases",
    "one head: typed-in matrices",
    "heads, several outputs: generic",
    "heads, one number: generic",
    "residual: one head",
    "ReLU net: few neurons",
    "one layer: one neuron",
    "one head, coarse: normal errors",
    "one head, coarse: decimals",
    "max_norm: one head",
    "max_length: one head",
    "careless: reused memory",
    "careless: changes its input",
)
FOUND_OUT = (
    "other attention, one head: values by position",
    "other attention, one head: ALiBi",
    "other attention, one head: no attention to itself",
    "other attention, one head: softcap",
    "other attention, one head: sink",
    "other attention, residual: sparsemax",
    "other attention, heads: hard attention",
    "pooling: largest entries",
    "pooling: median",
    "functions of answers: 0/1 classifier",
    "careless: nan at times",
    "careless: random numbers",
)
WRONG = ("outside", "member wrong", "foreign wrong", "crash")


@pytest.mark.parametrize("name", MEMBERS)
def test_members_are_right_or_admitted(name: str, fresh_seed: int) -> None:
    records = [attempt(name, seed) for seed in range(fresh_seed, fresh_seed + 4)]
    assert not [record for record in records if record["verdict"] in WRONG]
    assert Counter(record["verdict"] for record in records)["refused"] < 3  # honesty is not silence


@pytest.mark.parametrize("name", FOUND_OUT)
def test_other_boxes_are_found_out(name: str, fresh_seed: int) -> None:
    """Unless the difference happens to show nowhere, such as a window that no sequence is longer than."""
    records = [attempt(name, seed) for seed in range(fresh_seed, fresh_seed + 3)]
    assert not [record for record in records if record["verdict"] in WRONG]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("one head, coarse: bfloat16", 91004),  # logits that saturate at every norm but where they look flat
        ("careless: dropout", 130005),  # responses at last tokens of zero only
        ("other attention, one head: acts at some lengths only", 91008),
        ("other attention, heads: temperature at one length", 91003),
        ("other attention, net behind: drops the first token", 130007),  # a net that is flat nearly everywhere
        ("other attention, net behind: logits over log n", 130003),
        ("one head, output bias, rounded twice or cut: floor", 120004),  # errors of one sign
    ],
)
def test_boxes_that_were_not(name: str, seed: int) -> None:
    assert attempt(name, seed)["verdict"] in ("right", "admitted")


# --- it can fail ----------------------------------------------------------------------------------------------------

Recover = Callable[..., Any]


def certify_everything(*args: Any, **options: Any) -> kh.Recovery:
    """Defect: whatever was estimated is certified."""
    result = kh.recover(*args, **options)
    return result if result.params is None else replace(result, outcome=kh.Outcome.CERTIFIED)


def narrow_radii(*args: Any, **options: Any) -> kh.Recovery:
    """Defect: radii a ten-thousandth as wide."""
    result = kh.recover(*args, **options)
    radius = result.certificate.radius
    if radius is None:
        return result
    narrow = radius.of_arrays(**{name: 1e-4 * array for name, array in radius.arrays().items()}, **radius.words)
    return replace(result, certificate=replace(result.certificate, radius=narrow))


def change_an_entry(*args: Any, **options: Any) -> kh.Recovery:
    """Defect: one entry of a score matrix is changed after the certificate was made."""
    result = kh.recover(*args, **options)
    params = result.params
    if params is None:
        return result
    arrays = {name: np.array(array) for name, array in params.arrays().items()}
    name = next(name for name in arrays if name.endswith("score"))
    arrays[name][0, 0] += 1e-2 * np.max(np.abs(arrays[name]))
    return replace(result, params=params.of_arrays(**arrays, **params.words))


@pytest.mark.parametrize(
    ("defect", "name", "verdict"),
    [
        (certify_everything, "other attention, one head: softcap", "foreign wrong"),
        (certify_everything, "other attention, net behind: ALiBi", "foreign wrong"),
        (certify_everything, "other nets: sees the first token", "foreign wrong"),
        (narrow_radii, "one head: full rank", "outside"),
        (narrow_radii, "ReLU net: few neurons", "outside"),
        (change_an_entry, "one head: full rank", "member wrong"),
        (change_an_entry, "heads, several outputs: generic", "member wrong"),
        (change_an_entry, "one layer: head, then a net", "member wrong"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_defects_are_found(defect: Recover, name: str, verdict: str) -> None:
    seeds = range(3)
    assert verdict not in [attempt(name, seed)["verdict"] for seed in seeds]
    assert verdict in [attempt(name, seed, defect)["verdict"] for seed in seeds]


def test_an_exception_is_a_crash() -> None:
    def raising(*args: Any, **options: Any) -> kh.Recovery:
        raise np.linalg.LinAlgError("singular")

    record = attempt("one head: full rank", 0, raising)
    assert record["verdict"] == "crash"
    assert "LinAlgError: singular" in record["detail"]


def test_boxes_are_the_same_for_the_same_seed() -> None:
    tokens = np.random.default_rng(0).standard_normal((3, 5, 16))
    for name, kind in KINDS.items():
        one, two = kind.box(7), kind.box(7)
        own = tokens[:, :, : one.width]
        np.testing.assert_array_equal(one.truth(own), two.truth(own), err_msg=name)
        assert one.truth(own).ndim == 2, name


def test_the_judge_shares_nothing_with_the_package() -> None:
    """Only one module imports it, and that the entry points and the arrays of a result."""
    folder = Path(benchmarks.fuzz.__file__).parent
    for path in folder.glob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            for alias in getattr(node, "names", [])
            if isinstance(node, ast.Import)
        }
        names |= {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        own = {name for name in names if name and name.split(".")[0] == "keyhole"}
        assert own == ({"keyhole"} if path.name == "attempts.py" else set())
    used = {
        node.attr
        for node in ast.walk(ast.parse((folder / "attempts.py").read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kh"
    }
    assert used == {"FunctionOracle", "Noise", "recover"}


# --- alignment ------------------------------------------------------------------------------------------------------


def test_heads_in_another_order_and_split_are_the_same(rng: np.random.Generator) -> None:
    a, b = (Head(rng.standard_normal((3, 3)), np.zeros(3), rng.standard_normal((3, 2))) for _ in range(2))
    split = (Head(a.score, a.bias, 0.3 * a.value), b, Head(a.score, a.bias, 0.7 * a.value))
    radius = Heads((Head(np.full((3, 3), 1e-9), np.zeros(3), np.full((3, 2), 1e-9)),) * 2, np.zeros(2))
    assert worst_ratio(Heads(split, np.zeros(2)), Heads((b, a), np.zeros(2)), radius) < 1e-3
    moved = Head(a.score + 3e-9 * np.eye(3), a.bias, a.value)
    assert worst_ratio(Heads(split, np.zeros(2)), Heads((b, moved), np.zeros(2)), radius) == pytest.approx(3, rel=1e-3)


def test_neurons_are_compared_up_to_order_scale_and_orientation(rng: np.random.Generator) -> None:
    inner, bias, outer = rng.standard_normal((4, 3)), rng.standard_normal(4), rng.standard_normal((2, 4))
    net = Net(inner, bias, outer, rng.standard_normal(2), rng.standard_normal((2, 3)))
    order, scale = rng.permutation(4), np.array([2.0, 0.1, -1.0, -3.0])
    turned = (scale < 0) * 1.0
    weights = outer[:, order] / np.abs(scale)
    other = Net(
        inner[order] * scale[:, None],
        bias[order] * scale,
        weights,
        net.constant + (outer[:, order] * turned) @ bias[order],
        net.skip + (outer[:, order] * turned) @ inner[order],
    )
    tokens = rng.standard_normal((50, 1, 3))
    np.testing.assert_allclose(net.map()(tokens), other.map()(tokens), atol=1e-12)
    radius = Net(
        *(np.full_like(getattr(other, name), 1e-9) for name in ("inner", "inner_bias", "outer")),
        np.full(2, 1e-9),
        np.full((2, 3), 1e-9),
    )
    assert worst_ratio(net, other, radius) < 1e-3
    assert worst_ratio(net, replace(other, outer=weights + 5e-9), radius) > 1.5
    unknown = replace(radius, outer=np.full_like(weights, np.inf))
    assert worst_ratio(net, replace(other, outer=weights + 5e-9), unknown) < 1e-3


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "records" / "fuzz.jsonl"
    keys = schedule({"a": 1, "b": 1, "rare": 3}, 5, 20)
    assert keys[:6] == [("a", 5), ("b", 5), ("a", 6), ("b", 6), ("rare", 6), ("a", 7)]
    assert run(keys[:7], path, quick_attempt, jobs=2, limit=30) == 7
    with path.open("ab") as file:
        file.write(b'{"kind": "cut sho')  # as a run that was killed leaves it
    assert run(keys, path, quick_attempt, jobs=2, limit=30) == 13
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((record["kind"], record["seed"]) for record in records) == sorted(keys)
    assert run(keys, path, quick_attempt, jobs=2, limit=30) == 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.jsonl"
    keys = schedule({"slow": 1}, 0, 60)
    code = (
        "from pathlib import Path; from benchmarks.fuzz.runner import run, schedule; "
        "from support.fuzz_attempts import attempt; "
        f"run(schedule({{'slow': 1}}, 0, 60), Path({str(path)!r}), attempt, jobs=2, limit=30)"
    )
    tests = Path(__file__).parent
    path_of = os.pathsep.join([str(tests), str(tests.parent), str(tests.parent / "src")])
    running = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path_of})
    until = time.monotonic() + 60
    while len(read_records(path)) < 5 and time.monotonic() < until:
        time.sleep(0.02)
    running.kill()
    running.wait()
    before = len(read_records(path))
    assert 5 <= before < 60
    assert run(keys, path, quick_attempt, jobs=2, limit=30) == 60 - before
    assert sorted((record["kind"], record["seed"]) for record in read_records(path)) == keys


def test_what_hangs_is_ended_and_what_dies_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.jsonl"
    keys = [("endless", 1), ("deadly", 1), *(("slow", seed) for seed in range(5))]
    assert run(keys, path, quick_attempt, jobs=2, limit=1.0) == 7
    verdicts = {record["kind"]: record["verdict"] for record in read_records(path)}
    assert verdicts == {"endless": "hang", "deadly": "crash", "slow": "right"}


def test_a_run_ends_when_its_time_is_over(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run([("endless", 1)], tmp_path / "fuzz.jsonl", quick_attempt, jobs=1, limit=600, seconds=2)
    assert done == 0
    assert time.monotonic() - began < 30


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with record_file(tmp_path / "fuzz.jsonl"), pytest.raises(SystemExit, match="another run"):
        run([("a", 1)], tmp_path / "fuzz.jsonl", quick_attempt, jobs=1, limit=1)


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.jsonl"
    options = ["--kinds", "one head: full rank; pooling: mean", "--boxes", "4", "--jobs", "2", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks", "fuzz", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    head, _, *rows = ended.stdout.splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")][2:-2] == list(VERDICTS)
    assert [row.split("|")[1].strip() for row in rows[:3]] == ["one head", "pooling", "all"]
    assert len(out.read_text().splitlines()) == 4


def test_findings_are_named_with_their_seeds() -> None:
    records = [
        {
            "kind": "pooling: mean",
            "seed": seed,
            "verdict": verdict,
            "detail": "why",
            "ratio": None,
            "shares": {},
            "seconds": 1,
        }
        for seed, verdict in enumerate(["admitted", "crash", "crash"])
    ]
    text = fuzz.summary(records)
    assert "| crash | pooling: mean | 2 of 3 | 1, 2 | why |" in text


def test_kinds_are_chosen_by_text() -> None:
    named = {"pooling: mean", "pooling: sum", "pooling: mean without the last"}
    assert set(fuzz.chosen("pooling: mean; pooling: sum")) == named
    assert all(KINDS[name].family == "one head" for name in fuzz.chosen("one head"))
    assert {KINDS[name].group for name in fuzz.chosen("foreign")} == {"foreign"}
    with pytest.raises(SystemExit, match="clairvoyance"):
        fuzz.chosen("clairvoyance")


def test_what_no_blind_class_shows_is_a_trapdoor() -> None:
    """A ridge that a recovered net lacks is judged by how many tokens meet it, not by the name of its kind."""

    def ridge(width: float) -> Box:
        inner, bias = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), 0.3 + width * np.array([-1.0, 0.0, 1.0])
        net = Net(inner, -bias, np.array([[1.0, -2.0, 1.0]]) / width, np.zeros(1), np.ones((1, 2)))
        return Box(net.map(), 2, True, params=net, kinks=lambda x, rng: x + (0.3 - x[:, :1]) * np.array([1.0, 0.0]))

    def plain(tokens: Any) -> Any:
        return tokens[:, -1].sum(axis=1)

    found = Found("CERTIFIED", family="relu-net", function=plain)
    names = [judge("member", ridge(width), found, np.random.default_rng(0)) for width in (0.5, 1e-2, 1e-7)]
    assert [each.name for each in names] == ["member wrong", "rare", "trapdoor"]
    assert max(names[2].shares) == "around kinks"
    flat = replace(ridge(0.5), truth=lambda x: x[:, -1].sum(axis=1, keepdims=True), params=None, trapdoor=True)
    assert judge("foreign", flat, found, np.random.default_rng(0)).name == "trapdoor"
    assert judge("foreign", replace(ridge(0.5), trapdoor=True), found, np.random.default_rng(0)).name == "foreign wrong"
