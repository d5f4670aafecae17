"""Verdicts, costs to honest users, policies; audits of endpoints that round, of heads, of labels, of real layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.audit import Audit, Cell, audit, parse_defence
from keyhole.audit.policy import parse_rule, read_policy, violations
from keyhole.audit.protection import honest_cost, protections, verdict
from keyhole.audit.servers import Detection, Fresh, ReverseSigmoid, Unbent, UserNoise, honest_tokens
from keyhole.errors import BudgetExhausted, FileError, UsageError
from keyhole.oracles import FunctionOracle
from keyhole.targets import open_target
from support.commands import Run, one_line
from support.targets import Random, small_oracle

SMALL = "demo:single-head?width=4"
BOX = """
import numpy as np
import keyhole as kh

rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4))
HEADS = kh.MultiHead([kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal((4, 4))) for _ in range(2)])

def rounded():
    return kh.FunctionOracle(lambda x: np.round(HEAD(x), 4), width=4, name="rounded")

def several():
    return kh.FunctionOracle(HEADS, width=4, name="several")
"""


def made(**cells: tuple[int, float, float]) -> Audit:
    """An audit with one cell per defence: (queries, error, floor)."""
    rows = [
        Cell(
            parse_defence(name.replace("_", ":").replace("x", "+")).text,
            *(queries / 100, queries, queries, error, floor, "CERTIFIED", "m", 0.0, 0.01),
        )
        for name, (queries, error, floor) in cells.items()
    ]
    return Audit("t", "a box", 100, "the truth", 0, tuple(rows), 0)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, "Without a defence the box falls after 100 queries"),
        (
            {"round_3": (1100, 1e-9, 0)},
            "Rounding to 3 decimals does not protect this box: 11 × the queries; it falls after 1,100",
        ),
        (
            {"round_3": (1100, 1e-9, 0), "clip_1": (100, 1e-9, 0)},
            "None of 2 defences protects this box: the dearest, rounding",
        ),
        (
            {"clip_1": (800, 0.9, 0.8)},
            "Clipping tokens to norm 1 holds for 800 queries (answers off by 1 % for honest users)",
        ),
        ({"clip_1": (800, 0.9, 0.1)}, "Clipping tokens to norm 1 withstood this attack for 800 queries"),
        ({"round_3": (110, 1e-9, 0), "clip_1": (800, 0.9, 0.8)}, "1 of 2 defences fail to protect this box; clipping"),
        (
            {"round_3": (110, 1e-9, 0), "budget_50": (50, 0.9, 0.8)},
            "1 of 2 defences fail to protect this box; allowing 50 queries holds for 50 queries (answers off by "
            "1 % for honest users); as it is the box falls after 100 queries",
        ),
    ],
)
def test_the_verdict_follows_from_the_cells(others: dict[str, tuple[int, float, float]], said: str) -> None:
    found = made(none=(100, 1e-15, 0), **others)
    assert verdict(found).startswith(said)
    assert found.as_data()["verdict"] == verdict(found)
    json.dumps(found.as_data(), allow_nan=False)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        (
            "queries < 1e6",
            ["round:3 has queries 1,100", "clip:1 withstood the 800 queries that were tried: allow more --multiples"],
        ),
        ("queries < 1000", ["clip:1 withstood the 800 queries that were tried: allow more --multiples"]),
        ("queries <= 800", ["clip:1 withstood the 800 queries that were tried: allow more --multiples"]),
        ("queries < 800", []),
        (
            "copy-queries < 1200",
            [
                "round:3 has copy-queries 1,100",
                "clip:1 withstood the 800 queries that were tried: allow more --multiples",
            ],
        ),
        ("times<12", ["round:3 has times 11"]),
        ("error < 0.1", ["round:3 has error 1e-09"]),
        ("cost > 0.005", ["round:3 has cost 0.01", "clip:1 has cost 0.01", "budget:50 has cost 0.01"]),
        ("round:3: queries < 2000", ["round:3 has queries 1,100"]),
        ("none: queries < 101", ["none has queries 100"]),
        ("labels: queries < 3", ["labels was not tried: add --defence labels"]),
    ],
)
def test_a_rule_fails_the_defences_it_describes(rule: str, broken: list[str]) -> None:
    found = made(none=(100, 1e-15, 0), round_3=(1100, 1e-9, 0), clip_1=(800, 0.9, 0.8), budget_50=(50, 0.9, 0.8))
    assert violations(found, [parse_rule(rule)]) == [f"{rule}: {each}" for each in broken]


@pytest.mark.parametrize("text", ["", "queries", "queries = 3", "queries < many", "price < 3", "rund:3: queries < 3"])
def test_rules_that_say_nothing_are_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"a rule is|in the defence"):
        parse_rule(text)


def test_a_policy_file_holds_rules(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('fail-if = ["queries < 1e6", "cost > 0.1"]')
    (tmp_path / "p.json").write_text('{"fail-if": ["queries < 1e6", "cost > 0.1"]}')
    assert read_policy(tmp_path / "p.toml") == read_policy(tmp_path / "p.json")
    for text in ("fail-if = []", 'fail-iff = ["queries < 1"]', "fail-if = [", "fail-if = [3]"):
        (tmp_path / "p.toml").write_text(text)
        with pytest.raises(FileError, match="the policy"):
            read_policy(tmp_path / "p.toml")
    with pytest.raises(FileError, match="cannot read"):
        read_policy(tmp_path / "none.toml")


def test_what_a_defence_costs_honest_users_is_the_error_of_their_answers() -> None:
    oracle, head = small_oracle()
    tokens = honest_tokens(oracle.signature)
    size = np.sqrt(np.mean(head(tokens) ** 2))

    def cost(text: str) -> float | None:
        return honest_cost(parse_defence(text), head, oracle.signature, 0)

    assert cost("none") == cost("budget:1") == cost("detect:0.01") == 0
    assert cost("labels") is None
    for text in ("noise:0.01", "user-noise:0.01"):
        assert cost(text) == pytest.approx(0.01 / size, rel=0.2)
    assert cost("round:2") == pytest.approx(0.01 / 12**0.5 / size, rel=0.2)
    assert oracle.queries == 0


def test_a_reverse_sigmoid_keeps_order_and_is_undone(rng: Random) -> None:
    values = np.concatenate([rng.standard_normal(200) * 10.0**k for k in range(-6, 4)])
    box = FunctionOracle(lambda tokens: tokens[:, 0, 0], width=1)
    bent = ReverseSigmoid(box, 3.9)
    answers = bent(values[:, None, None])
    assert np.all(np.diff(answers[np.argsort(values)]) >= 0)
    assert np.max(np.abs(answers - values)) > 1
    undone = Unbent(bent, 3.9)(values[:, None, None])
    # 1/(1 − β/4) = 40 roundings of answers of up to 1 + β/2, relative ones beyond
    np.testing.assert_allclose(undone, values, rtol=1e-14, atol=100 * 3 * np.finfo(float).eps)


def test_noise_that_is_fixed_for_a_query_is_fresh_for_one_that_differs_by_nothing(rng: Random) -> None:
    box = FunctionOracle(lambda tokens: np.zeros(len(tokens)), width=4)
    tokens = np.repeat(rng.standard_normal((1, 2, 4)), 400, axis=0)
    fixed = UserNoise(box, 0.5)
    assert len(set(fixed(tokens))) == 1
    assert UserNoise(box, 0.5, seed=1)(tokens)[0] != fixed(tokens)[0]  # another user
    fresh = Fresh(fixed)(tokens)
    assert np.std(fresh) == pytest.approx(0.5, rel=0.2)


def test_clients_with_unusual_queries_are_blocked_and_honest_ones_are_not(rng: Random) -> None:
    oracle = open_target("demo:single-head?width=8").oracle
    honest = Detection(oracle, 0.01)
    for seed in range(1, 5):
        honest(honest_tokens(oracle.signature, 1000, seed))
    with pytest.raises(BudgetExhausted, match="blocked"):
        Detection(oracle, 0.01)(np.tile(np.eye(8)[:, None, :], (4, 2, 1)))


@pytest.mark.parametrize("text", ["user-noise:0.001", "reverse-sigmoid:1", "reverse-sigmoid:3"])
def test_defences_that_are_known_are_undone(text: str) -> None:
    found = audit("demo:single-head?width=6", [text], [16])
    assert protections(found)[1].falls


def test_of_projected_tokens_nobody_learns_what_was_left_out() -> None:
    found = audit("demo:single-head?width=6", ["project:4"], [4])
    (bare, kept), (cell,) = protections(found), found.of("project:4")
    assert bare.falls
    assert not kept.falls
    assert kept.is_near_floor  # exactly what is left is found
    assert cell.error == pytest.approx(cell.floor, rel=1e-9)
    assert 0.3 < cell.cost < 1.5
    with pytest.raises(UsageError, match="fewer directions"):
        audit("demo:single-head?width=6", ["project:6"], [4])


def test_decimals_are_found_again_behind_float32_where_tokens_are_short() -> None:
    found = audit("demo:single-head?width=6&decimals=4", ["float32+clip:1"], [8])
    assert protections(found)[1].falls


def test_an_alphabet_is_audited_with_its_own_tokens() -> None:
    letters = "demo:single-head?width=4&alphabet=9"
    found = audit(letters, None, [2])
    assert protections(found)[0].falls
    assert {"round:3", "bfloat16", "reverse-sigmoid:1"} < set(found.defences)
    for text in ("clip:1", "project:2", "user-noise:0.1", "labels"):
        with pytest.raises(UsageError, match="alphabet only"):
            audit(letters, [text], [2])
    with pytest.raises(UsageError, match="measured"):
        audit(f"{letters}&decimals=4", ["bfloat16"], [2])


def test_no_more_labels_are_told_than_there_are_outputs() -> None:
    with pytest.raises(UsageError, match="as many outputs"):
        audit(SMALL, ["top:2"], [1])
    labels = "demo:single-head?width=4&outputs=4&labels=1"
    with pytest.raises(UsageError, match="labels already"):
        audit(labels, ["round:3"], [1])
    found = audit(labels, None, [1])
    assert "clip:1" in found.defences
    assert not {"round:3", "labels", "bfloat16"} & set(found.defences)


@pytest.mark.parametrize("inner", ["gaussian:0.01", "rounded:2", "bounded:0.01", "float32"])
@pytest.mark.parametrize("text", ["round:3", "noise:0.001", "float16", "clip:1", "reverse-sigmoid:2"])
def test_errors_of_the_box_and_of_the_defence_are_both_declared(inner: str, text: str) -> None:
    declared = kh.Noise.parse(inner)
    oracle = FunctionOracle(lambda tokens: tokens[:, 0, 0], width=2, noise=declared)
    noise = parse_defence(text).around(oracle).signature.noise
    assert noise.kind == "measure" or noise.radius >= declared.radius
    assert noise.kind != "exact"


# --- what people have -------------------------------------------------------------------------------------------------


def test_an_endpoint_that_rounds_already_is_audited(run: Run) -> None:
    code, out, err = run("audit", "python:box.py:rounded", "--defence", "round:2", "--multiples", "16", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert "rounded to 4 decimals" in said["reference"]
    assert said["defences"][0]["falls"]
    assert said["rows"][1]["error"] < 1e-2


def test_several_heads_are_audited_and_a_policy_fails_with_1(run: Run) -> None:
    few = ["audit", "python:box.py:several", "--defence", "round:6", "--multiples", "8"]
    code, out, _ = run(*few, "--fail-if", "queries < 1e6", "--json")
    said = json.loads(out)
    assert (code, said["policy"]["passed"], len(said["policy"]["violations"])) == (1, False, 1)
    assert "round:6 has queries" in said["policy"]["violations"][0]
    assert said["rows"][1]["method"] == "multi-head"
    code, out, _ = run(*few, "--fail-if", "cost > 0.5")
    assert code == 0
    assert "policy  passed" in out
    code, _, err = run(*few, "--fail-if", "quries < 3")
    assert (code, one_line(err)) == (2, True)


def test_a_layer_of_a_transformers_model_is_audited(tmp_path: Path) -> None:
    models = pytest.importorskip("support.transformers_models")
    models.made("bert", heads=2).save_pretrained(tmp_path / "model")
    found = audit(f"transformers:{tmp_path}/model#layer=1", ["clip:1"], [8])
    assert found.of("none")[-1].error < 1e-6
    assert protections(found)[0].falls
