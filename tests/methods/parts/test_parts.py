"""Heads of parts that are named: right within their radii at the counting bound, or admitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.support.parts import ATTENTIONS, names_of, random_head
from keyhole.arrays import floats
from keyhole.errors import UsageError
from keyhole.families.parts import Alibi, Attention, LengthTable, NoNormaliser, Sigmoid, Sink, Softcap
from keyhole.recovery import Outcome

MOST_EXTRA = 13  # queries beyond as many as there are unknown numbers, that of the output bias among them


def recover(truth: kh.SingleHead, seed: int = 0, named: Attention | None = None, **facts: Any) -> kh.Recovery:
    oracle = kh.FunctionOracle(facts.pop("function", truth), width=truth.width, **facts)
    names = names_of(truth.attention if named is None else named)
    return kh.recover(oracle, "parts", seed=seed, throw=False, **names)


def assert_right(result: kh.Recovery, truth: kh.SingleHead, worst: float) -> None:
    assert result.certified, result.message
    assert kh.distance(result.params, truth) <= worst
    true, radius = truth.arrays(), result.certificate.radius.arrays()
    for name, array in result.params.arrays().items():
        assert array.shape == true[name].shape, name
        assert np.all(np.abs(floats(array) - floats(true[name])) <= floats(radius[name])), name


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_part_is_recovered_at_the_counting_bound(kind: str, fixed_seed: int) -> None:
    for width in (5, 16):
        truth = random_head(kind, width, fixed_seed)
        result = recover(truth, fixed_seed)
        assert_right(result, truth, 1e-12)
        assert result.stats.counting_bound == truth.counting_bound
        assert result.stats.queries <= truth.counting_bound + MOST_EXTRA


@pytest.mark.parametrize(
    ("kind", "width", "seed"),
    [("softcap and sink", 16, 3), ("sink", 16, 11), ("sparsemax", 16, 14), ("1/sqrt n", 8, 3)],
)
def test_a_weight_that_vanishes_is_asked_for_again(kind: str, width: int, seed: int) -> None:
    """The first forms may be far smaller than the others, which are then asked for at logits of minus forty."""
    truth = random_head(kind, width, seed)
    assert_right(recover(truth, seed), truth, 1e-12)


@pytest.mark.parametrize("kind", ["softcap", "sink", "sigmoid", "sparsemax", "softcap and ALiBi", "table by length"])
def test_output_bias_several_outputs_low_rank_and_short_sequences(kind: str, fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    plain = random_head(kind, 8, fixed_seed, scale=1.0)
    assert_right(
        recover(replace(plain, output_bias=np.asarray(0.7))), replace(plain, output_bias=np.asarray(0.7)), 1e-11
    )
    several = replace(plain, value=rng.standard_normal((8, 3)))
    assert_right(recover(several), several, 1e-11)
    thin = replace(plain, score=np.outer(rng.standard_normal(8), rng.standard_normal(8)))
    low = recover(thin)
    assert_right(low, thin, 1e-11)
    assert low.stats.queries < plain.counting_bound - 20
    if kind != "table by length":
        assert_right(recover(plain, max_length=2), plain, 1e-11)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_answers_of_float32_are_right_within_the_certificate(kind: str, fresh_seed: int) -> None:
    truth = random_head(kind, 8, fresh_seed, scale=1.0)
    result = recover(
        truth, function=lambda tokens: truth(tokens).astype(np.float32).astype(float), noise=kh.Noise.dtype("float32")
    )
    if result.certified:
        assert_right(result, truth, 1e-4)
    assert result.certified or result.outcome is not Outcome.INCONSISTENT


@pytest.mark.parametrize("kind", ["softcap", "sink", "sparsemax", "ALiBi", "window", "log n"])
def test_a_score_bias_is_read_beside_other_parts(kind: str) -> None:
    truth = replace(random_head(kind, 6, 1, scale=1.0), score_bias=np.random.default_rng(1).standard_normal(6))
    found = recover(truth)
    assert found.params.score_bias is not None
    assert_right(found, truth, 1e-8)


@pytest.mark.parametrize("kind", ["softcap", "sigmoid", "top-k", "softcap and sink", "softcap and ALiBi"])
def test_constants_beside_a_score_bias_show_in_the_largest_logits_beside_a_zero_token(kind: str) -> None:
    for seed, size in ((0, 1.0), (2, 30.0)):  # scores far larger than their bias bend at the bound of others
        truth = random_head(kind, 6, seed, scale=size)
        truth = replace(truth, score_bias=np.random.default_rng(seed).standard_normal(6))
        assert_right(recover(truth, seed), truth, 1e-6)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_what_is_not_read_is_admitted(kind: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth = random_head(kind, 6, fresh_seed, scale=1.0)
    biased = replace(truth, score_bias=rng.standard_normal(6))
    found = recover(biased)
    if found.certified:
        assert_right(found, biased, 1e-4)
    assert found.outcome is not Outcome.ARITHMETIC_FAILED, found.message
    several = recover(replace(biased, value=rng.standard_normal((6, 3))))
    assert several.outcome in (Outcome.WRONG_FAMILY, Outcome.NOT_IDENTIFIABLE)
    silent = recover(replace(truth, score=0 * truth.score))
    assert silent.certified or silent.outcome is Outcome.NOT_IDENTIFIABLE
    bounded = recover(truth, max_norm=3.0)
    if bounded.certified:
        assert_right(bounded, truth, 1e-8)
    wrong = recover(truth, named=Attention(link=Softcap(3.0), normaliser=Sink(0.0)))
    assert not wrong.certified or kind == "softcap and sink"
    softmax = kh.SingleHead(truth.score, truth.value)
    plain = recover(softmax, named=truth.attention)
    if plain.certified:  # a slope of zero adds nothing
        tokens = rng.standard_normal((20, 5, 6))
        np.testing.assert_allclose(plain.params(tokens), softmax(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "kind", ["softcap", "sink", "sigmoid", "ALiBi", "window", "log n", "sink and table", "table by length", "top-k"]
)
def test_tokens_of_bounded_norm_are_right_or_admitted(kind: str, fresh_seed: int) -> None:
    truth = random_head(kind, 6, fresh_seed, scale=2.0)
    result = recover(truth, max_norm=3.0)
    if result.certified:
        assert_right(result, truth, 1e-8)
    known = random_head(kind, 6, 1, scale=2.0)
    assert_right(recover(known, max_norm=3.0), known, 1e-8)


def signs(answers: Any) -> Any:
    """Errors that conspire: all of them follow the sign of the answer."""
    return np.where(np.asarray(answers) < 0, -1.0, 1.0)


ERRORS = {
    "bounded:1e-6": lambda answers, _: answers + 1e-6 * signs(answers),
    "gaussian:1e-4": lambda answers, rng: answers + 1e-4 * rng.standard_normal(answers.shape),
    "cut:6": lambda answers, _: np.floor(answers * 1e6) / 1e6,
    "rounded:5": lambda answers, _: np.round(answers, 5),
}


@pytest.mark.parametrize("noise", ERRORS)
@pytest.mark.parametrize(
    ("kind", "max_norm"),
    [("softcap", None), ("sparsemax", None), ("softcap and ALiBi", None), ("sink", 3.0), ("ALiBi", 3.0)],
)
def test_behind_noise_radii_hold_or_it_is_admitted(
    kind: str, max_norm: float | None, noise: str, fresh_seed: int
) -> None:
    hidden = np.asarray(5e-7)
    for seed in (2, fresh_seed):
        truth = random_head(kind, 4, seed, scale=2.0)
        biased, rng = replace(truth, output_bias=hidden), np.random.default_rng(seed)
        result = recover(truth, function=lambda x: ERRORS[noise](biased(x), rng), noise=noise, max_norm=max_norm)  # noqa: B023
        assert result.certified or seed == fresh_seed, result.message
        if result.certified and result.params.output_bias is None:
            assert_right(result, truth, 1.0)
            assert result.certificate.radius.output_bias >= hidden
        elif result.certified:
            assert_right(result, biased, 1.0)


def test_constants_of_zero_are_recovered_too() -> None:
    for attention in (Attention(normaliser=Sink(0.0)), Attention(position_bias=Alibi(0.0))):
        truth = replace(random_head("sink", 6, 0, scale=1.0), attention=attention)
        assert_right(recover(truth), truth, 1e-12)


def test_a_link_that_folds_is_never_certified() -> None:
    class Folding(Softcap):
        """Masses 1 + z + z²/2, which fall again for logits below −1."""

        def __call__(self, logits: Any) -> Any:
            return np.log(1 + logits + logits**2 / 2)

    truth = replace(random_head("softcap", 6, 3, scale=1.0), attention=Attention(link=Folding(1.0)))
    for named in (Attention(link=Softcap(1.0)), Attention(normaliser=Sink(0.0)), Attention()):
        assert not recover(truth, named=named).certified


def test_a_sink_that_errors_hide_is_no_failed_arithmetic() -> None:
    rng = np.random.default_rng(0)
    attention = Attention(normaliser=Sink(0.5), position_bias=Alibi(0.3))
    head = kh.SingleHead(rng.standard_normal((5, 5)), rng.standard_normal(5), attention=attention)
    given = {"normaliser": "sink", "position_bias": "alibi", "noise": "rounded:6"}
    result = kh.recover(lambda tokens: np.round(head(tokens), 6), "parts", width=5, throw=False, **given)
    assert result.outcome is kh.Outcome.TOO_NOISY
    assert "a token alone" in result.message


def test_names_that_contradict_each_other_are_refused() -> None:
    truth = random_head("softcap", 4, 0)
    oracle = kh.FunctionOracle(truth, width=4)
    for options, match in (
        ({"link": "softcup"}, "unknown link 'softcup'; known: exp, softcap"),
        ({"link": "sigmoid", "normaliser": "sum"}, "sigmoid weights"),
        ({"link": "linear", "normaliser": "sparsemax"}, "takes no link"),
    ):
        with pytest.raises(UsageError, match=match):
            kh.recover(oracle, "parts", **options)


# --- what is identifiable -------------------------------------------------------------------------------------------


def jacobian_rank(head: kh.SingleHead, rng: np.random.Generator) -> int:
    """The rank of the derivative of answers to random sequences by all parameters."""
    tokens = [0.7 * rng.standard_normal((60, length, head.width)) for length in range(1, 7)]
    named = {name: floats(array) for name, array in head.arrays().items()}
    columns = []
    for name, array in named.items():
        for entry in np.eye(array.size):
            change = 1e-6 * entry.reshape(array.shape)
            plus, minus = (head.with_arrays({**named, name: array + way * change}) for way in (1, -1))
            columns.append(np.concatenate([plus(some) - minus(some) for some in tokens]) / 2e-6)
    matrix = np.stack(columns, axis=1)
    matrix = matrix / np.linalg.norm(matrix, axis=0)
    return int(np.sum(np.linalg.svd(matrix, compute_uv=False) > 1e-7))


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        (Attention(), 0),
        (Attention(link=Softcap(2.0)), 1),
        (Attention(normaliser=Sink(0.3)), 1),
        (Attention(link=Sigmoid(0.2), normaliser=NoNormaliser()), 1),
        (Attention(normaliser=ATTENTIONS["entmax-1.5"](np.random.default_rng(0)).normaliser), 0),
        (ATTENTIONS["ALiBi"](np.random.default_rng(0)), 1),
        (
            Attention(
                position_bias=type(ATTENTIONS["table by distance"](np.random.default_rng(0)).position_bias)(
                    np.array([0.5, -0.3, 0.2])
                )
            ),
            3,
        ),
        (Attention(length_law=LengthTable(np.array([0.7, 0.6]))), 2),
        (Attention(normaliser=Sink(0.3), position_bias=ATTENTIONS["ALiBi"](np.random.default_rng(0)).position_bias), 2),
    ],
)
def test_the_counting_bound_is_the_rank_of_the_jacobian(attention: Attention, more: int) -> None:
    rng, d = np.random.default_rng(5), 4
    head = kh.SingleHead(rng.standard_normal((d, d)), rng.standard_normal(d), attention=attention)
    assert head.counting_bound == d * d + d + more
    assert jacobian_rank(head, rng) == head.counting_bound
