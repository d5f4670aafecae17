"""Certificates: boxes that differ on some class of inputs are not certified, and the statement is what was tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole import recovery
from keyhole.families.parts import Attention, TopK, Window
from keyhole.methods.base import Estimate
from keyhole.methods.certificate import Judgement, certify
from keyhole.oracles import Counted
from keyhole.queries import Measurements, Signature
from keyhole.report.text.recovery import describe
from keyhole.runs.reader import read_run
from support.commands import Run
from support.targets import quiet

Array = np.ndarray[Any, np.dtype[np.float64]]
Weights = Callable[[Array, Array], Array]  # logits (n, N), tokens (n, N, d) -> weights (n, N)
SEEDS = (0, 1)
WIDTH = 4
BOX = ""  # no box of a file is asked here


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return np.asarray(weights / np.sum(weights, axis=-1, keepdims=True))


def plain(logits: Array, _: Array) -> Array:
    return softmax(logits)


def softened(wrong: Callable[[int], bool]) -> Weights:
    return lambda logits, tokens: softmax(logits * (0.5 if wrong(tokens.shape[1]) else 1.0))


def without(hidden: Callable[[Array], Array]) -> Weights:
    """Attention that passes over some tokens, but for the last where none is left."""

    def weights(logits: Array, tokens: Array) -> Array:
        off = hidden(tokens)
        off[:, -1] &= ~np.all(off, axis=1)
        return softmax(np.where(off, -np.inf, logits))

    return weights


def once(tokens: Array) -> Array:
    """Tokens that have occurred already."""
    same = np.all(tokens[:, :, None] == tokens[:, None], axis=-1)  # (n, N, N)
    return np.asarray(np.any(np.tril(same, -1), axis=2))


def near(tokens: Array) -> Array:
    last = tokens[:, -1:]
    close = np.linalg.norm(tokens - last, axis=-1) < 0.3 * np.linalg.norm(last, axis=-1)
    close[:, -1] = False
    return np.asarray(close)


def one_hot(logits: Array, tokens: Array) -> Array:
    special = np.all(np.count_nonzero(tokens, axis=-1) == 1, axis=1)
    return softmax(np.where(special[:, None], 0.5 * logits, logits))


def top(count: int) -> Weights:
    def weights(logits: Array, _: Array) -> Array:
        least = np.sort(logits, axis=1)[:, -min(count, logits.shape[1])][:, None]
        return softmax(np.where(logits >= least, logits, -np.inf))

    return weights


def dropped(logits: Array, _: Array) -> Array:
    weights = softmax(logits)
    weights = np.where(weights < 1e-3, 0.0, weights)
    return np.asarray(weights / np.sum(weights, axis=1, keepdims=True))


WRONG: dict[str, Weights] = {
    "temperature at 4 tokens": softened(lambda n: n == 4),
    "temperature at 6 and 7": softened(lambda n: n in {6, 7}),
    "temperature from 9 to 15": softened(lambda n: 9 <= n <= 15),
    "temperature from 17 to 31": softened(lambda n: 17 <= n <= 31),
    "temperature from 33 to 63": softened(lambda n: 33 <= n <= 63),
    "temperature at the longest": softened(lambda n: n == 64),
    "zero tokens as padding": without(lambda tokens: ~np.any(tokens, axis=-1)),
    "repeated tokens counted once": without(once),
    "tokens near the last merged": without(near),
    "one-hot tokens": one_hot,
    "window of 60": without(
        lambda tokens: np.tile(np.arange(tokens.shape[1]) < tokens.shape[1] - 60, (len(tokens), 1))
    ),
    "the largest 40": top(40),
    "small weights dropped": dropped,
}
BEHIND_NETS = [
    "temperature from 9 to 15",
    "temperature from 33 to 63",
    "zero tokens as padding",
    "window of 60",
    "the largest 40",
    "small weights dropped",
]


def box(weights: Weights, seed: int, outputs: int | None = None, net: bool = False) -> kh.FunctionOracle:
    rng = np.random.default_rng([seed, 77])
    score = rng.standard_normal((WIDTH, WIDTH))
    value = rng.standard_normal((WIDTH, WIDTH) if net else (WIDTH,) if outputs is None else (WIDTH, outputs))
    into, biases = rng.standard_normal((6, WIDTH)) / 2, rng.standard_normal(6)
    out = rng.standard_normal((6,) if outputs is None else (6, outputs))

    def answer(tokens: Array) -> Array:
        logits = np.einsum("nid,nd->ni", tokens, tokens[:, -1] @ score.T)
        mixed = np.einsum("ni,ni...->n...", weights(logits, tokens), tokens @ value)
        return mixed if not net else np.maximum(mixed @ into.T + biases, 0.0) @ out

    return kh.FunctionOracle(quiet(answer), width=WIDTH, name="box")


@pytest.mark.parametrize("outputs", [None, 3])
@pytest.mark.parametrize("weights", WRONG.values(), ids=WRONG)
def test_a_head_that_differs_on_a_class_of_inputs_is_not_certified(weights: Weights, outputs: int | None) -> None:
    for seed in SEEDS:
        oracle = box(weights, seed, outputs)
        result = kh.recover(oracle, seed=seed, throw=False)
        if result.certified:  # only as what it is
            assert result.params.attention == Attention(position_bias=Window(60)), f"seed {seed}: {result.message}"
            tokens = np.random.default_rng(seed).standard_normal((50, 64, WIDTH)) / 2
            np.testing.assert_allclose(result.params(tokens), oracle(tokens), atol=1e-10)


@pytest.mark.parametrize("name", BEHIND_NETS)
def test_attention_that_differs_is_not_certified_behind_a_net(name: str) -> None:
    for seed in SEEDS:
        for outputs in (None, 3):
            result = kh.recover(box(WRONG[name], seed, outputs, net=True), seed=seed, throw=False)
            assert not result.certified, f"seed {seed}, {outputs} outputs: {result.message}"


@pytest.mark.parametrize("net", [False, True])
def test_a_softmax_is_certified(net: bool) -> None:
    for seed in SEEDS:
        for outputs in (None, 3):
            result = kh.recover(box(plain, seed, outputs, net), seed=seed, throw=False)
            assert result.certified, f"seed {seed}, {outputs} outputs: {result.message}"
            assert result.certificate.untested == ()


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> kh.Recovery:
    return kh.recover(box(plain, 0), domain=lambda rng, count: rng.standard_normal((count, 5, WIDTH)))


def test_the_bound_is_binomial(result: kh.Recovery) -> None:
    """A box that errs on a share x of the queries passes n of them with (1 − x)ⁿ: at the bound with 5 %."""
    assert result.certificate.tested
    for each in result.certificate.tested:
        if each.informative:
            assert (1 - each.bound) ** each.informative == pytest.approx(0.05)
        else:
            assert each.bound == 1


def test_classes_of_lengths_add_up(result: kh.Recovery) -> None:
    everything, *classes, own = result.certificate.tested
    assert (everything.label, own.label) == ("all", "domain")
    assert everything.queries == sum(each.queries for each in classes) == 120
    assert everything.informative == sum(each.informative for each in classes)
    assert [each.label for each in classes] == [
        "1 token",
        *(f"{range_} tokens" for range_ in ("2–3", "4–8", "9–16", "17–32", "33–64")),
    ]
    assert own.queries == own.informative == 120
    assert result.stats.heldout_queries == 240


def test_the_statement_in_words(result: kh.Recovery) -> None:
    everything, own = result.certificate.tested[0], result.certificate.tested[-1]
    assert result.certificate.statement == (
        f"{everything.informative} informative held-out queries were predicted within their radii: at 95 % confidence "
        f"at most {100 * everything.bound:.2g} % of such queries are not; 120 inputs of the domain were "
        "predicted within their radii: at 95 % confidence at most 2.5 % of inputs of the domain are not"
    )
    assert str(own) == "120 of 120 informative, at most 2.5 % mispredicted"
    assert str(recovery.Tested("1 token", 2, 0, 1.0)) == "no informative query among 2"
    limits = result.certificate.assumptions[-1]
    assert "trapdoor" in limits
    assert "more than 64 tokens" in limits
    lines = dict(describe(result, "a box"))
    assert lines["tested"] == result.certificate.statement
    assert lines["by length"].startswith("1 token: ")
    assert "domain" not in lines["by length"]


def test_the_statement_is_plain_data(result: kh.Recovery) -> None:
    told = json.loads(json.dumps(result.summary()))
    assert told["statement"] == result.certificate.statement
    assert told["untested"] == []
    assert tuple(recovery.Tested(**each) for each in told["tested"]) == result.certificate.tested


def test_a_run_keeps_the_statement(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", np.random.default_rng(0).standard_normal((40, 7, 8)))
    out = tmp_path / "run"
    command = ["recover", "demo:single-head?width=8", "--out", str(out), "--heldout", "50"]
    assert run(*command, "--domain", str(tmp_path / "inputs.npy"), "-q")[0] == 0
    kept = read_run(out).result.certificate
    assert [(each.label, each.queries) for each in kept.tested if each.label in {"all", "domain"}] == [
        ("all", 50),
        ("domain", 40),  # as many as the file has
    ]
    assert kept.statement.endswith("at most 7.2 % of inputs of the domain are not")
    page = (out / "report.html").read_text()
    assert "informative held-out queries were predicted within their radii" in page
    assert "9–16 tokens" in page


def test_inputs_of_the_domain_that_are_not_predicted() -> None:
    """A box that is a head on everything that is asked, and something else where its user uses it."""

    def far(logits: Array, tokens: Array) -> Array:
        return softmax(np.where(np.all(tokens[..., :1] > 50, axis=1), 0.5, 1.0) * logits)

    def sampler(rng: np.random.Generator, count: int) -> Array:
        return 60 + np.abs(rng.standard_normal((count, 3, WIDTH)))

    trapdoor = box(far, 0)
    assert kh.recover(trapdoor, throw=False).certified  # nobody can know
    found = kh.recover(trapdoor, domain=sampler, throw=False)
    assert found.outcome is kh.Outcome.WRONG_FAMILY


def judged(params: kh.ReluNet, **limits: Any) -> Judgement:
    """The judgement of a net that is right, and known to twelve digits."""
    radius = params.with_arrays({name: 0 * array + 1e-12 for name, array in params.arrays().items()})
    signature = Signature(width=params.width, **limits)
    steps = certify(Estimate(params, radius, 1), signature, np.random.default_rng(0), 64)
    answers = None
    while True:
        try:
            plans = steps.send(answers)
        except StopIteration as ended:
            return ended.value
        asked = [plan.tokens(0, plan.count, signature.space, params.width) for plan in plans]
        answers = [Measurements(params(tokens), 0.0) for tokens in asked]


def test_a_part_that_nobody_tests_is_named() -> None:
    """Every answer is predicted, and yet none could have shown that neuron 2 is wrong: its kink is out of reach."""
    rng = np.random.default_rng(0)
    weights, out = rng.standard_normal((3, WIDTH)), rng.standard_normal(3)
    assert judged(kh.ReluNet(weights, np.ones(3), out, np.asarray(0.5)), max_norm=2.0).outcome is kh.Outcome.CERTIFIED
    judgement = judged(kh.ReluNet(weights, np.array([1.0, -99.0, 1.0]), out, np.asarray(0.5)), max_norm=2.0)
    assert judgement.outcome is kh.Outcome.UNCERTIFIED
    assert judgement.certificate.untested == ("neuron 2",)
    assert judgement.certificate.worst_ratio <= 1
    assert "held-out queries say too little of neuron 2: raise heldout=" in judgement.message


@pytest.mark.parametrize("count", [1, 8, 100])
def test_as_many_queries_as_wanted(count: int) -> None:
    oracle = Counted(box(plain, 1))
    found = kh.recover(oracle, heldout=count, throw=False)
    assert (
        found.certificate.heldout_queries == found.stats.heldout_queries == found.certificate.tested[0].queries == count
    )
    assert oracle.queries == found.stats.queries + count


def test_few_queries_certify_little_and_say_so() -> None:
    """Whoever wants eight queries gets the statement of eight, and the lengths that none of them has."""
    for count in (1, 8, 20, 31):
        certificate = kh.recover(box(plain, 1), heldout=count).certificate
        everything, *classes = certificate.tested
        assert everything.bound == pytest.approx(1 - 0.05 ** (1 / everything.informative))
        assert sum(each.queries for each in classes) == count
        silent = [each.label for each in classes if not each.informative]
        assert bool(silent) == ("nothing is said of sequences of" in certificate.statement)
        assert certificate.statement.endswith(", ".join(silent))
    assert len(kh.recover(box(plain, 1), heldout=1).certificate.tested) == 7


def test_ordinary_tokens_stay_whatever_was_recovered() -> None:
    """Where an estimate says that weights are 0 or 1, and queries inform about no score, another box may differ."""
    rng = np.random.default_rng(3)
    score, value = 1e6 * rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH)

    def answer(tokens: Array) -> Array:
        logits = np.einsum("nid,nd->ni", tokens, tokens[:, -1] @ score.T)
        long = np.linalg.norm(tokens[:, -1:], axis=-1) > 0.5
        return np.einsum("ni,ni->n", softmax(np.where(long, 0.0, logits)), tokens @ value)

    for seed in range(10):
        found = kh.recover(kh.FunctionOracle(answer, width=WIDTH), seed=seed, throw=False)
        assert not found.certified, f"seed {seed}: {found.message}"


def test_two_heads_of_one_number_pass_for_one_behind_a_tolerance_only_if_they_are_near() -> None:
    """Radii of two parameters add up to √2 of their quadrature at most: no wider is allowed."""
    heads = kh.MultiHead([kh.SingleHead(np.array([[score]]), np.ones(1)) for score in (-1.12, -1.62)])
    for seed in range(12):
        errors = np.random.default_rng(seed)
        oracle = kh.FunctionOracle(
            lambda tokens, errors=errors: heads(tokens) + 1e-3 * errors.uniform(-1, 1, len(tokens)),
            width=1,
            max_norm=1.0,
            noise=kh.Noise.bounded(1e-3),
        )
        assert not kh.recover(oracle, "robust", seed=seed, throw=False).certified


def test_radii_behind_a_tolerance_hold_for_errors_that_conspire() -> None:
    """Errors of one sign wherever tokens lie on one side move many parameters at once, to one side."""
    width, tolerance = 8, 1e-3
    for seed in range(4):
        rng = np.random.default_rng(seed)
        head = kh.SingleHead(2 * rng.standard_normal((width, width)) / width**0.5, rng.standard_normal(width))
        side = rng.standard_normal(width)

        def answer(tokens: Array, head: kh.SingleHead = head, side: Array = side) -> Array:
            return head(tokens) + tolerance * np.sign(tokens.mean(axis=1) @ side) * np.sign(tokens[:, -1] @ side)

        oracle = kh.FunctionOracle(answer, width=width, max_norm=1.0, noise=kh.Noise.bounded(tolerance))
        result = kh.recover(oracle, "robust", seed=seed, throw=False)
        assert result.certified, result.message
        tokens = rng.standard_normal((400, 1, width))
        tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
        bars = result.params.error_bar(result.certificate.radius, tokens, 1e-15)
        assert not np.any(np.abs(result.params(tokens) - head(tokens)) > bars)


def test_top_k_is_certified_only_with_its_rule_for_equal_scores() -> None:
    """Of tokens whose scores are equal the first has a weight; an oracle in which all have one is another."""
    for seed, most in ((0, 3), (1, 40)):
        rng = np.random.default_rng(seed)
        score, value = rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal((WIDTH, 3))
        head = kh.SingleHead(score, value, attention=Attention(normaliser=TopK(most)))

        def answer(tokens: Array, score: Array = score, value: Array = value, most: int = most) -> Array:
            logits = np.einsum("nid,nd->ni", tokens, tokens[:, -1] @ score.T)
            last = np.sort(logits, axis=1)[:, -min(most, logits.shape[1])]
            kept = np.where(logits >= last[:, None], logits, -np.inf)
            return np.einsum("ni,nip->np", softmax(kept), tokens @ value)

        assert kh.recover(kh.FunctionOracle(head, width=WIDTH), seed=seed).certified
        assert not kh.recover(kh.FunctionOracle(answer, width=WIDTH), seed=seed, throw=False).certified


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["single-head", "multi-head", "residual", "normalised"])
def test_answers_at_all_positions_are_compared(method: str, causal: bool) -> None:
    rng = np.random.default_rng(4)
    first, second = (kh.SingleHead(rng.standard_normal((3, 3)) / 2, rng.standard_normal((3, 3))) for _ in range(2))
    heads = kh.MultiHead((first, second))
    layers: dict[str, Any] = {"single-head": first, "multi-head": heads, "residual": kh.Residual(heads)}
    layers["normalised"] = kh.NormBefore(first, 1e-5)
    truth = layers[method]

    def member(tokens: Array) -> Array:
        if not causal:
            return truth.at_all_positions(tokens)
        return np.stack([truth(tokens[:, : place + 1]) for place in range(tokens.shape[1])], axis=1)

    def elsewhere(tokens: Array) -> Array:  # 1.5 times too much at the first position alone
        answers = np.array(member(tokens))
        answers[:, 0] *= 1.5 if tokens.shape[1] > 1 else 1.0
        return answers

    for function, certified in ((member, True), (elsewhere, False)):
        found = kh.recover(kh.FunctionOracle(quiet(function), width=3, positions="all"), method, throw=False)
        assert found.certified == certified, found.message
