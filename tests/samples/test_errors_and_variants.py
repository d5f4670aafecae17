"""Errors within a tolerance, rounding that repeats, and layers that are nearly of the family."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from benchmarks.tables.learn_barrier import eliminate, find_parity
from keyhole.errors import UsageError
from keyhole.recovery import Outcome
from keyhole.samples.evidence import standard_errors
from keyhole.samples.examples import Examples
from keyhole.samples.variable_projection import LayerProblem
from keyhole.samples.variants import PLAIN, Trial, name_variant, nearly_even
from keyhole.samples.varpro import VarproSettings
from keyhole.targets.datasets import flipped, open_data, parity_layer, random_layer, signs


def covered(result: kh.Recovery, truth: kh.AttentionLayer) -> bool:
    """Whether the error bars hold the truth, with heads in the order that is nearest."""
    found, radius = result.params, result.certificate.radius
    return any(
        bool(
            np.all(np.abs(found.scores - truth.scores[order]) <= radius.scores)
            and np.all(np.abs(found.projections - truth.projections[order]) <= radius.projections)
        )
        for order in ([0, 1], [1, 0])
    )


@pytest.fixture
def told() -> tuple[kh.AttentionLayer, np.ndarray]:
    rng = np.random.default_rng(4)
    return random_layer(4, 2, 4, 1.0, rng), rng.standard_normal((150, 3, 4))


TOLERANCE = 1e-5


@pytest.mark.parametrize("kind", ["uniform", "all to one end", "conspiring"])
def test_errors_within_a_tolerance_are_covered(kind: str, told: tuple[kh.AttentionLayer, np.ndarray]) -> None:
    """Also errors that push one entry of the scores as far as any can, which no number of examples averages out."""
    layer, inputs = told
    outputs = layer(inputs)
    if kind == "uniform":
        errors = np.random.default_rng(0).uniform(-1, 1, outputs.shape)
    elif kind == "all to one end":
        errors = np.ones(outputs.shape)
    else:
        point = LayerProblem(inputs, outputs).at(layer.scores)
        values, vectors = np.linalg.eigh(point.gram_matrices[0])
        flattest = vectors[:, 0].reshape(4, 2, 4).transpose(1, 0, 2)
        errors = np.sign(point.products.outside(point.products.forward(flattest))).reshape(outputs.shape)
    result = kh.learn(inputs, outputs + TOLERANCE * errors, heads=2, noise=kh.Noise.bounded(TOLERANCE), throw=False)
    assert result.outcome is Outcome.CERTIFIED, result.message
    assert covered(result, layer)
    assert any("errs by at most 1e-05" in each for each in result.certificate.assumptions)
    if kind == "conspiring":  # what normal errors of that size would be allowed does not hold it
        off = np.max(np.abs(result.params.scores - layer.scores))
        allowed = TOLERANCE * np.max(standard_errors(point, np.random.default_rng(0)).scores)
        assert off > 3 * allowed or np.min(values) > 0


def test_what_a_tolerance_hides_is_said(told: tuple[kh.AttentionLayer, np.ndarray]) -> None:
    layer, inputs = told
    wide = kh.learn(inputs, layer(inputs) + 0.05, heads=2, noise=kh.Noise.bounded(0.05), throw=False)
    assert wide.outcome is Outcome.UNCERTIFIED
    assert "no number of examples averages them out" in wide.message
    auto = kh.learn(inputs, layer(inputs), noise=kh.Noise.bounded(TOLERANCE), max_heads=2, throw=False)
    assert auto.outcome is Outcome.UNCERTIFIED
    assert "may hide within it: say how many" in auto.message
    other = kh.learn(inputs, np.abs(inputs), heads=2, noise=kh.Noise.bounded(TOLERANCE), restarts=2, throw=False)
    assert not other.certified


def test_rounding_of_the_same_input_counts_once(fresh_seed: int) -> None:
    """Rounding errs alike where inputs are alike: a hundred copies say no more than one."""
    rng = np.random.default_rng(fresh_seed)
    layer, inputs = random_layer(3, 2, 3, 1.0, rng), signs(rng, 4000, 3, 3)
    result = kh.learn(inputs, np.round(layer(inputs), 3), heads=2, noise=kh.Noise.rounded(3), throw=False)
    assert result.stats.queries <= 120  # 8 kinds of tokens in 3 places, in any order
    assert not result.certified or covered(result, layer)


@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_heads_too_faint_to_be_told_apart_are_named(size: float) -> None:
    rng = np.random.default_rng(3)
    base, inputs = random_layer(5, 2, 5, 0.5, rng), signs(rng, 60, 4, 5)
    layer = kh.AttentionLayer(size * base.scores, base.projections)
    result = kh.learn(inputs, layer(inputs), heads=2, restarts=2, throw=False)
    if size < 1e-5 or not result.certified:  # at 1e-4 roundings, which machines differ in, decide
        assert result.outcome is Outcome.UNCERTIFIED
        assert "heads attend almost evenly" in result.message
    else:
        assert covered(result, layer)
    one = kh.AttentionLayer(layer.scores[:1], layer.projections[:1])
    assert kh.distance(kh.learn(inputs, one(inputs), heads=1).params, one) < 1e-8


def test_heads_of_nearly_the_same_scores_are_named(fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    layer = random_layer(4, 2, 4, 0.5, rng)
    scores = np.stack([layer.scores[0], layer.scores[0] + 1e-6 * layer.scores[1]])
    inputs = rng.standard_normal((120, 3, 4))
    outputs = kh.AttentionLayer(scores, layer.projections)(inputs)
    result = kh.learn(inputs, outputs, heads=2, restarts=2, throw=False)
    assert result.certified or "have nearly the same scores" in result.message, result.message


def test_outputs_that_hardly_show_attention_are_named(fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    truth = kh.AttentionLayer(rng.standard_normal((2, 4, 4)) * 1e-6, rng.standard_normal((2, 4, 4)))
    inputs = rng.standard_normal((60, 3, 4))
    result = kh.learn(inputs, truth(inputs), max_heads=2, restarts=3, throw=False)
    assert result.outcome is Outcome.UNCERTIFIED
    assert "attend almost evenly" in result.message
    even = nearly_even(Examples.of(inputs, truth(inputs)))
    assert even is not None
    assert "linear in the mean token but for" in even
    assert nearly_even(Examples.of(inputs, kh.AttentionLayer(1e6 * truth.scores, truth.projections)(inputs))) is None


def test_biases_and_masks_are_named() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(4, 2, bias=True, batch_first=True, dtype=torch.float64)
    for each in module.parameters():
        torch.nn.init.normal_(each, 0, 0.5)
    inputs = np.random.default_rng(0).standard_normal((120, 3, 4))
    tokens = torch.asarray(inputs)
    mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
    with torch.no_grad():
        plain, causal = (module(tokens, tokens, tokens, attn_mask=each)[0].numpy() for each in (None, mask))
    result = kh.learn(inputs, plain, heads=2, restarts=2, throw=False)
    assert result.outcome is Outcome.WRONG_FAMILY
    assert "a layer with an output bias of norm" in result.message
    assert "score biases" in result.message
    longer = np.concatenate([inputs, np.ones((120, 3, 1))], axis=2)  # as the message says
    again = kh.learn(longer, plain, heads=2, restarts=2, throw=False)
    assert again.certified
    assert any("agree in one number" in each for each in again.certificate.assumptions)
    bias = np.sum(again.params.projections[:, -1], axis=0)
    with torch.no_grad():
        value = module.in_proj_bias[8:] @ module.out_proj.weight.T + module.out_proj.bias
        queries, keys = module.in_proj_weight[:4].reshape(2, 2, 4), module.in_proj_weight[4:8].reshape(2, 2, 4)
        biased = torch.cat([queries, module.in_proj_bias[:4].reshape(2, 2, 1)], dim=2)
        scores = (biased.mT @ keys / 2**0.5).numpy()  # (2, 5, 4): the bias of keys shows nowhere
    assert np.allclose(bias, value.numpy(), atol=1e-9)
    apart = np.abs(again.params.scores[:, None, :, :4] - scores)
    assert np.all(np.min(np.max(apart, axis=(2, 3)), axis=1) < 1e-9)
    assert np.all(np.abs(again.params.scores[..., 4]) < 1e-12)
    masked = kh.learn(inputs, causal, heads=2, restarts=2, throw=False)
    assert masked.outcome is Outcome.WRONG_FAMILY
    assert "attention is causal" in masked.message


def _normed(tokens: np.ndarray) -> np.ndarray:
    return (tokens - np.mean(tokens, axis=2, keepdims=True)) / np.std(tokens, axis=2, keepdims=True)


@pytest.mark.parametrize("few", [True, False], ids=["signs", "normal tokens"])
def test_layers_of_other_families_are_named_and_no_parity(few: bool, fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    layer, n, k, d = random_layer(4, 2, 4, 1.0, rng), 120, 3, 4
    inputs = signs(rng, n, k, d) if few else rng.standard_normal((n, k, d))
    places, mixed = rng.standard_normal((k, d)), rng.standard_normal((d, d))
    suffix = np.stack([layer(inputs[:, place:])[:, 0] for place in range(k)], axis=1)
    cases = {
        "a residual connection (learn outputs − inputs)": inputs + layer(inputs),
        "a linear map of each token itself": inputs @ mixed + layer(inputs),
        "append the one-hot vector of its place": layer(inputs + places),
        "osition encoding and a": inputs + places + layer(inputs + places),
        "attention is causal in reverse": inputs + suffix,
        "they are normalised": _normed(inputs + layer(inputs)),
    }
    if few:
        cases = {said: cases[said] for said in list(cases)[:3]}
    else:
        cases["a layer of normalised tokens"] = layer(_normed(inputs))
    for said, outputs in cases.items():
        result = kh.learn(inputs, outputs, heads=2, restarts=2, throw=False)
        assert result.outcome is Outcome.WRONG_FAMILY, said
        assert said in result.message
    places = np.broadcast_to(np.eye(k), (n, k, k))  # as the message says
    assert kh.learn(np.concatenate([inputs, places], axis=2), cases["append the one-hot vector of its place"]).certified


def test_members_that_starts_miss_are_not_named_as_variants_of_themselves(fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    layer, inputs = random_layer(4, 1, 4, 1.0, rng), rng.standard_normal((60, 3, 4))
    trial = Trial(Examples.of(inputs, layer(inputs)), 1, 0.0, VarproSettings(), 0)
    assert name_variant(trial) == PLAIN


@pytest.mark.parametrize("cut", [np.floor, np.ceil, np.trunc])
def test_decimals_are_cut_in_any_direction(cut: np.ufunc, fresh_seed: int) -> None:
    """A constant of half a unit hides where tokens hold a 1: there rounding to the nearest is not believed."""
    rng = np.random.default_rng(fresh_seed)
    layer, inputs = random_layer(4, 2, 4, 1.5, rng), rng.standard_normal((150, 3, 4))
    longer = np.append(inputs[..., :3], np.ones((150, 3, 1)), axis=2)
    outputs = cut(1e4 * layer(inputs)) / 1e4
    for noise in (None, kh.Noise.cut(4)):
        result = kh.learn(inputs, outputs, heads=2, noise=noise, restarts=4, throw=False)
        assert not result.certified or covered(result, layer)
    result = kh.learn(longer, cut(1e4 * layer(longer)) / 1e4, heads=2, restarts=4, throw=False)
    if result.certified:
        bias, truth = (np.sum(each.projections[:, 3], axis=0) for each in (result.params, layer))
        assert np.all(np.abs(bias - truth) <= np.sum(result.certificate.radius.projections[:, 3], axis=0))


def test_elimination_finds_parities_and_noise_stops_it() -> None:
    rng = np.random.default_rng(1)
    for heads in (1, 3, 5):
        layer, chosen = parity_layer(10, heads, rng)
        inputs = signs(rng, 1000, 2, 10)
        outputs = layer(inputs)
        assert eliminate(inputs[:150], outputs[:150], heads) == chosen
        wrong = flipped(outputs, 0.1, rng)
        assert eliminate(inputs, wrong, heads) != chosen
        assert find_parity(inputs, wrong, heads)[0] == chosen
    with pytest.raises(UsageError, match="an odd number of heads"):
        open_data("demo:layer-hard?m=2&flips=0.1")
    data = open_data("demo:layer-hard?d=8&m=3&n=400&flips=0.25&seed=2")
    assert "wrong in 25 % of the examples" in data.label
    turned = np.sum(data.outputs * data.truth(data.inputs), axis=(1, 2)) < 0
    assert 0.15 < np.mean(turned) < 0.35
