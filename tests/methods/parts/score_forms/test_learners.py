"""Heads of other score forms: right within their radii, at about the counting bound, or admitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.support.score_forms import FORMS
from keyhole.arrays import floats
from keyhole.errors import UsageError
from keyhole.families import FormHead
from keyhole.families.forms import EluFeatures, ExpFeatures, QKNorm, Rotary
from keyhole.families.parts import PARTS, Attention, Sink, Softcap
from keyhole.gauge import align
from keyhole.recovery import Outcome
from keyhole.targets.forms import random_form_head

CAPPED = Attention(Softcap(20.0), Sink(0.5))


def recover(head: Any, **options: Any) -> kh.Recovery:
    return kh.recover(kh.FunctionOracle(head, width=head.width), "parts", seed=3, throw=False, **options)


def check_right(result: kh.Recovery, truth: FormHead, most: float = 1e-8) -> None:
    """Certified, and every entry of the truth within its radius."""
    assert result.certified, result.message
    assert kh.distance(result.params, truth) < most
    radius, found = result.certificate.radius.arrays(), result.params.arrays()
    aligned = align(result.params, truth)
    assert set(aligned) >= {"value", *(name for name in found if name.startswith("form."))}
    for name, array in aligned.items():
        assert np.all(np.abs(floats(found[name]) - array) <= floats(radius[name])), name


# (form, width, rows of the key, outputs) and the most queries above the counting bound.
CASES = {
    ("rotary", 8, 8, None): 10,
    ("rotary", 8, 4, 3): 200,  # the bound counts three numbers per answer
    ("qk-norm", 6, 6, None): 12,
    ("qk-norm", 8, 3, None): 20,
    ("qk-norm", 4, 6, None): 8,  # more rows than numbers per token
    ("qk-norm-rotary", 8, 4, None): 32,
    ("gaussian", 6, None, None): 12,
    ("elu-features", 6, 4, None): 50,
    ("elu-features", 5, 5, 2): 100,  # the bound counts two numbers per answer
    ("exp-features", 6, 4, None): 50,
    ("exp-features", 5, 5, None): 40,
}


@pytest.mark.parametrize(("case", "extra"), CASES.items(), ids=str)
def test_forms_are_read_at_about_the_counting_bound(case: tuple[str, int, int | None, int | None], extra: int) -> None:
    form, width, rows, outputs = case
    truth = random_form_head(form, width, rows=rows, outputs=outputs, norm=0.7, seed=4)
    result = recover(truth, form=form)
    check_right(result, truth)
    assert result.stats.queries <= truth.counting_bound + extra


@pytest.mark.parametrize(
    "attention", [CAPPED, Attention(Softcap(4.0)), Attention(normaliser=PARTS["normaliser", "plus-one"]())]
)
def test_rotary_beside_caps_and_sinks(attention: Attention) -> None:
    truth = random_form_head("rotary", 6, rows=4, seed=5, attention=attention)
    names = {kind: part.name for kind, part in attention.parts.items()}
    result = recover(truth, form="rotary", link=names["link"], normaliser=names["normaliser"])
    check_right(result, truth)
    for name, constant in attention.arrays().items():
        assert abs(float(result.params.arrays()[name]) - float(constant)) <= 1e-10
    assert result.stats.queries <= truth.counting_bound + 12


@pytest.mark.parametrize("noise", ["bounded:1e-3", "gaussian:1e-3", "rounded:4"])
@pytest.mark.parametrize(
    ("form", "link"), [("rotary", "exp"), ("rotary", "softcap"), ("qk-norm", "exp"), ("qk-norm-rotary", "exp")]
)
def test_behind_noise_radii_hold(form: str, link: str, noise: str) -> None:
    """Rotary scores are read beside zero tokens, where weights and errors of answers count for more."""
    attention = Attention(Softcap(10.0)) if link == "softcap" else Attention()
    truth = random_form_head(form, 6, rows=4, norm=3.0, seed=70, attention=attention)
    errors, rng = kh.Noise.parse(noise), np.random.default_rng(0)

    def answer(tokens: Any) -> Any:
        answers = truth(tokens)
        if errors.kind == "rounded":
            return np.round(answers, errors.decimals)
        signs = np.sign(answers)
        return answers + errors.scale * (signs if errors.kind == "bounded" else rng.standard_normal(signs.shape))

    result = kh.recover(kh.FunctionOracle(answer, 6, noise=noise), "parts", throw=False, form=form, link=link)
    check_right(result, truth, 1e-3)


def test_an_output_bias_and_other_frequencies() -> None:
    rng = np.random.default_rng(6)
    truth = FormHead(
        Rotary(*(rng.standard_normal((4, 6)) for _ in range(2)), np.array([2.1, 0.3])),
        rng.standard_normal(6),
        np.asarray(0.7),
    )
    check_right(recover(truth, form="rotary", frequencies=np.array([2.1, 0.3])), truth)
    assert recover(truth, form="rotary").outcome is Outcome.WRONG_FAMILY
    normed = FormHead(
        QKNorm(*(rng.standard_normal((3, 4)) for _ in range(2)), 1 + np.arange(3.0)),
        rng.standard_normal(4),
        np.asarray(-2.0),
    )
    check_right(recover(normed, form="qk-norm"), normed)


@pytest.mark.parametrize(
    ("link", "normaliser"),
    [
        ("linear", "sum"),
        ("squared", "sum"),
        ("linear", "none"),
        ("linear", "count"),
        ("relu", "none"),
        ("relu", "count"),
    ],
)
def test_powers_of_logits(link: str, normaliser: str) -> None:
    rng, width = np.random.default_rng(7), 6
    attention = Attention(PARTS["link", link](), PARTS["normaliser", normaliser]())
    truth = kh.SingleHead(rng.standard_normal((width, width)), rng.standard_normal(width), attention=attention)
    result = recover(truth, link=link, normaliser=normaliser)
    assert result.certified, result.message
    assert kh.distance(result.params, truth) < 1e-9
    assert kh.equivalent(result.params, truth, 1e-9)
    assert result.stats.queries <= width**2 + width - 1 + (5 if normaliser == "sum" else width + 2)


@pytest.mark.parametrize("link", ["linear", "squared"])
def test_an_output_bias_much_larger_than_values_beside_a_sum_of_powers(link: str) -> None:
    """It hid the weights of tokens of the usual size, and error bars did not know that."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        score, value = rng.standard_normal((5, 5)), 0.05 * rng.standard_normal(5)
        head = kh.SingleHead(score, value, None, np.asarray(30.0), Attention(PARTS["link", link]()))
        result = recover(head, link=link)
        assert result.certified, result.message
        assert kh.distance(result.params, head) < 1e-9


def test_the_sign_of_positive_logits_is_told() -> None:
    """Masses of −W are of other tokens: (W, v) and (−W, −v) are two maps, and each is read."""
    rng, width = np.random.default_rng(8), 5
    attention = Attention(PARTS["link", "relu"](), PARTS["normaliser", "count"]())
    score, value = rng.standard_normal((width, width)), rng.standard_normal(width)
    for sign in (1.0, -1.0):
        truth = kh.SingleHead(sign * score, sign * value, attention=attention)
        result = recover(truth, link="relu", normaliser="count")
        assert result.certified
        assert kh.distance(result.params, truth) < 1e-9
    assert kh.distance(result.params, kh.SingleHead(score, value, attention=attention)) > 0.1


@pytest.mark.parametrize("form", ["qk-norm", "qk-norm-rotary"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_what_norms_add_to_mean_squares_is_read(form: str, epsilon: float) -> None:
    truth = random_form_head(form, 6, rows=4, seed=11, epsilon=epsilon)
    result = recover(truth, form=form)
    check_right(result, truth)
    assert np.allclose(result.params.form.epsilon, truth.form.canonical().epsilon, rtol=1e-9, atol=0.0)
    plain = random_form_head(form, 6, rows=4, seed=11)
    assert recover(plain, form=form).stats.queries <= result.stats.queries
    bounded = kh.recover(kh.FunctionOracle(truth, width=6, max_norm=3.0), "parts", form=form, throw=False)
    assert bounded.outcome is Outcome.NOT_IDENTIFIABLE


WRONG = ["rotary", "qk-norm", "gaussian", "qk-norm-rotary"]


@pytest.mark.parametrize("form", WRONG)
def test_boxes_of_another_form_are_refused(form: str) -> None:
    for other in (random_form_head(each, 6, rows=4, seed=9) for each in WRONG if each != form):
        assert not recover(other, form=form).certified


@pytest.mark.parametrize("form", ["elu-features", "exp-features"])
def test_features_that_are_not_read_are_admitted_by_name(form: str) -> None:
    """More features than numbers per token, keys that depend on each other, one feature, bounded tokens, float32."""
    rng = np.random.default_rng(12)
    made: type[EluFeatures] | type[ExpFeatures] = EluFeatures if form == "elu-features" else ExpFeatures
    dependent = rng.standard_normal((4, 2)) @ rng.standard_normal((2, 5))
    for key in (
        rng.standard_normal((7, 5)),
        dependent,
        np.diag([1.0, 1.0, 0.0]) @ rng.standard_normal((3, 5)),
        dependent[:1],
    ):
        head = FormHead(made(rng.standard_normal(key.shape), key), rng.standard_normal(5))
        result = recover(head, form=form)
        assert result.outcome is Outcome.NOT_IDENTIFIABLE, result.message
    head = random_form_head(form, 5, seed=3)
    bounded = kh.FunctionOracle(head, width=5, max_norm=3.0)
    assert kh.recover(bounded, "parts", form=form, throw=False).outcome is Outcome.NOT_IDENTIFIABLE
    coarse = kh.FunctionOracle(head, width=5, noise="float32")
    assert kh.recover(coarse, "parts", form=form, throw=False).outcome is Outcome.TOO_NOISY


def test_features_of_uneven_size_and_typed_keys() -> None:
    rng = np.random.default_rng(13)
    uneven = np.array([[3.0], [1.0], [0.5], [0.1]]) * rng.standard_normal((4, 5))
    for form in (EluFeatures, ExpFeatures):
        for key in (uneven, np.eye(4, 5)):
            head = FormHead(form(rng.standard_normal((4, 5)), key), rng.standard_normal(5), np.asarray(0.7))
            check_right(recover(head, form=form.name), head, 1e-5)


def test_what_does_not_go_together_is_said() -> None:
    truth = random_form_head("qk-norm", 4, seed=1)
    with pytest.raises(UsageError, match="frequencies"):
        recover(truth, form="qk-norm", frequencies=np.ones(2))
    refused = recover(truth, form="qk-norm", normaliser="sink")
    assert refused.outcome is Outcome.NOT_IDENTIFIABLE
    assert "sink" in refused.message
    assert refused.stats.queries == 0


@pytest.mark.parametrize(("form", "limits"), [("qk-norm", {"max_length": 2}), ("gaussian", {"max_norm": 3.0})])
def test_short_sequences_and_tokens_are_enough_for_some(form: str, limits: dict[str, Any]) -> None:
    truth = random_form_head(form, 5, seed=2)
    check_right(kh.recover(kh.FunctionOracle(truth, width=5, **limits), "parts", form=form, throw=False), truth)


@pytest.mark.parametrize("limits", [{"max_length": 2}, {"max_norm": 3.0}])
@pytest.mark.parametrize("form", ["rotary", "qk-norm-rotary"])
def test_distances_take_three_tokens_of_any_norm(form: str, limits: dict[str, Any]) -> None:
    truth = random_form_head(form, 4, seed=2)
    refused = kh.recover(kh.FunctionOracle(truth, width=4, **limits), "parts", form=form, throw=False)
    assert refused.outcome is Outcome.NOT_IDENTIFIABLE
    assert next(iter(limits)) in refused.message


def test_tiny_weights_of_capped_logits_are_no_other_family() -> None:
    """A weight far below that at zero drowns in what the last token adds, which a radius once left out."""
    make, options, _ = FORMS["rotary, softcap"]
    truth = make(8, 8, np.random.default_rng([2, 8, 8, *b"rotary, softcap"]))
    result = kh.recover(kh.FunctionOracle(truth, width=8), "parts", seed=2, throw=False, **options)
    check_right(result, truth)


@pytest.mark.parametrize(
    ("name", "width", "extra", "error"), [("Gaussian", 16, 16, 1e-9), ("squared over its sum", 32, 16, 1e-9)]
)
def test_pairs_of_odd_size_cost_few_queries_and_no_digits(name: str, width: int, extra: int, error: float) -> None:
    make, options, _ = FORMS[name]
    for seed in (1, 4, 6):
        truth = make(width, width, np.random.default_rng([seed, width, width, *name.encode()]))
        oracle = kh.FunctionOracle(truth, width=width)
        result = kh.recover(oracle, "parts", seed=seed, throw=False, **options)
        assert result.certified, result.message
        assert kh.distance(result.params, truth) < error
        assert result.stats.queries <= truth.counting_bound + extra
