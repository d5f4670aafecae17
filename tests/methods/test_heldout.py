"""Held-out queries: every part of an estimate shows in some of them, or is named as not tested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import floats
from keyhole.families import Family
from keyhole.methods.base import Estimate
from keyhole.methods.certificate import LEAST, MOST, heldout_count
from keyhole.methods.heldout import HeldOut, draw_heldout
from keyhole.noise import Noise
from keyhole.queries import Signature
from support.heads import layer

WIDTH = 6


def head(seed: int = 0, width: int = WIDTH, size: float = 1.0, **parts: Any) -> kh.SingleHead:
    rng = np.random.default_rng(seed)
    return kh.SingleHead(size * rng.standard_normal((width, width)), rng.standard_normal(width), **parts)


def net(seed: int = 0, width: int = WIDTH, neurons: int = 8, **parts: Any) -> kh.ReluNet:
    rng = np.random.default_rng(seed)
    weights, biases = rng.standard_normal((neurons, width)) / width**0.5, rng.standard_normal(neurons)
    return kh.ReluNet(weights, biases, rng.standard_normal(neurons), np.asarray(0.3), **parts)


def one_layer(seed: int = 0, residual: bool = False) -> kh.OneLayer:
    rng = np.random.default_rng(seed)
    value = rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5
    return kh.OneLayer(kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)), value), net(seed), residual)


def estimate(params: Family, radius: float = 1e-12) -> Estimate:
    """Parameters whose entries are known to a part of the largest."""
    sizes = {name: np.max(np.abs(array), initial=1e-3) for name, array in params.arrays().items()}
    radii = {name: np.full(array.shape, radius * sizes[name]) for name, array in params.arrays().items()}
    return Estimate(params, params.with_arrays(radii), 1)


def drawn(params: Family, count: int = 64, seed: int = 0, radius: float = 1e-12, **signature: Any) -> HeldOut:
    about = Signature(width=params.width, **signature)
    return draw_heldout(estimate(params, radius), about, np.random.default_rng([seed, 9]), count)


def tokens_of(asked: HeldOut) -> list[np.ndarray]:
    signature = Signature(width=WIDTH)
    plans = [floats(plan.tokens(0, plan.count, signature.space, WIDTH)) for plan in asked.plans]
    return [sequence for batch in plans for sequence in batch]


FAMILIES = {
    "head": head(),
    "head with biases": head(score_bias=np.full(WIDTH, 0.5), output_bias=np.asarray(0.2)),
    "heads": layer(3, WIDTH, 4, np.random.default_rng(1)),
    "residual": kh.Residual(layer(2, WIDTH, WIDTH, np.random.default_rng(2))),
    "net": net(),
    "net with a skip": net(skip=np.linspace(-1, 1, WIDTH)),
    "smooth net": net(activation="gelu"),
    "layer": one_layer(),
    "layer with a residual": one_layer(residual=True),
}


@pytest.mark.parametrize("params", FAMILIES.values(), ids=FAMILIES)
def test_effects_are_what_a_change_does(params: Family) -> None:
    """Beside differences of the forward map, over random signs, within a factor; larger where a net is behind."""
    rng = np.random.default_rng(5)
    tokens, step = rng.standard_normal((60, 5, WIDTH)), 1e-6
    arrays = params.arrays()
    effects = dict(params.effects(params.with_arrays({name: 0 * a + step for name, a in arrays.items()}), tokens))
    assert all(np.all(np.isfinite(effect)) and np.all(floats(effect) >= 0) for effect in effects.values())
    names = {_label(name): name for name in arrays}
    compared = [label for label in effects if label in names]
    assert compared
    for label in compared:
        name = names[label]
        signs = rng.choice([-step, step], (20, *arrays[name].shape))
        moves = [params.with_arrays({**arrays, name: arrays[name] + each})(tokens) - params(tokens) for each in signs]
        actual = np.sqrt(np.mean(np.square(moves), axis=0))
        seen = floats(effects[label]) > 1e-3 * step
        assert np.mean(seen) > 0.3
        ratios = floats(effects[label])[seen] / actual[seen]
        assert 0.3 < np.median(ratios) < (30 if params.anatomy.behind else 12)
        assert np.min(ratios) > 0.1


def _label(name: str) -> str:
    """How effects name an array: heads by number, the parts of a layer without its path."""
    path, _, last = name.rpartition(".")
    of_head = f" of head {int(path.rpartition('.')[2]) + 1}" if path.rpartition(".")[2].isdigit() else ""
    return last.replace("_", " ") + of_head


def test_neurons_are_parts_of_their_own() -> None:
    params, step = net(), 1e-6
    tokens = np.random.default_rng(5).standard_normal((200, 1, WIDTH))
    effects = dict(params.effects(params.with_arrays({n: 0 * a + step for n, a in params.arrays().items()}), tokens))
    for number in range(params.neurons):
        moved = params.weights_in.copy()
        moved[number] += step
        actual = np.abs(params.with_arrays({**params.arrays(), "weights_in": moved})(tokens) - params(tokens))
        effect = effects[f"neuron {number + 1}"]
        assert np.array_equal(effect > 1e-9, actual > 1e-12) or np.mean((effect > 1e-9) != (actual > 1e-12)) < 0.02
        assert np.all(actual <= 3 * effect + 1e-15)


@pytest.mark.parametrize("count", [8, 32, 64, 256])
@pytest.mark.parametrize("params", FAMILIES.values(), ids=FAMILIES)
def test_every_part_is_tested(params: Family, count: int) -> None:
    asked = drawn(params, count)
    assert asked.untested == ()
    assert len(asked.lengths) == sum(plan.count for plan in asked.plans) == count
    assert np.mean(asked.informative) > 0.8


def test_one_query_is_one_query() -> None:
    asked = drawn(head(), 1)
    assert len(asked.plans) == 1
    assert asked.plans[0].count == 1


@pytest.mark.parametrize("params", FAMILIES.values(), ids=FAMILIES)
def test_nothing_is_asked_twice(params: Family) -> None:
    for seed in range(3):
        sequences = [sequence.tobytes() for sequence in tokens_of(drawn(params, 256, seed))]
        assert len(set(sequences)) == len(sequences) == 256


def test_heads_of_very_different_sharpness_are_all_tested() -> None:
    for seed in range(4):
        heads = [head(10 * seed + number, size=10.0**power) for number, power in enumerate((-6, -3, 0, 3))]
        assert drawn(kh.MultiHead(heads), 64, seed).untested == ()


def test_a_head_without_attention_is_tested_by_long_tokens() -> None:
    params = kh.SingleHead(np.zeros((WIDTH, WIDTH)), np.ones(WIDTH))
    for noise in (Noise.exact(), Noise.rounded(6), Noise.gaussian(1e-4)):
        assert drawn(params, noise=noise).untested == ()


def test_a_kink_far_out_is_tested() -> None:
    params = net()
    for shift in (1e2, 1e4):
        biases = params.bias_in.copy()
        biases[3] = -shift
        assert drawn(params.with_arrays({**params.arrays(), "bias_in": biases})).untested == ()


def test_neurons_beyond_the_norm_bound_are_named() -> None:
    """No token may be long enough for neuron 4, so no query says anything of it."""
    params = net()
    biases = params.bias_in.copy()
    biases[3] = -1e4
    asked = drawn(params.with_arrays({**params.arrays(), "bias_in": biases}), max_norm=3.0)
    assert asked.untested == ("neuron 4",)


def test_scores_known_too_coarsely_are_named() -> None:
    """Where a radius is as large as the head, nothing moves by many radii."""
    coarse = estimate(head(), 1e-12)
    radius = coarse.radius.with_arrays({**coarse.radius.arrays(), "score": np.full((WIDTH, WIDTH), np.inf)})
    asked = draw_heldout(Estimate(coarse.params, radius, 1), Signature(width=WIDTH), np.random.default_rng(0), 64)
    assert "score" in asked.untested


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("name", ["head", "heads", "net", "layer"])
def test_no_token_is_longer_than_allowed(name: str, max_norm: float) -> None:
    for seed in range(3):
        longest = [
            np.max(np.linalg.norm(each, axis=1))
            for each in tokens_of(drawn(FAMILIES[name], 64, seed, max_norm=max_norm))
        ]
        assert max(longest) <= max_norm
        assert max(longest) > 0.5 * max_norm


@pytest.mark.parametrize("max_length", [1, 2, 5, 20])
def test_no_sequence_is_longer_than_allowed(max_length: int) -> None:
    asked = drawn(net() if max_length == 1 else head(), max_length=max_length)
    assert np.max(asked.lengths) == max_length


def test_norms_do_not_go_with_lengths() -> None:
    """Longest tokens of N(0, 1) and of logits occur at short and at long sequences alike."""
    pairs = []
    for seed in range(12):
        sequences = tokens_of(drawn(head(seed), 64, seed))
        pairs += [(len(each), np.log(np.median(np.linalg.norm(each, axis=1)) + 1e-9)) for each in sequences]
    lengths, norms = np.array(pairs).T
    assert abs(np.corrcoef(lengths, norms)[0, 1]) < 0.15


def test_some_long_tokens_are_not_chosen_between() -> None:
    """A head gives them the same weight, however long they are; so what two near heads do shows in the answers."""
    for name in ("head", "head with biases", "heads"):
        params, longest = FAMILIES[name], 0.0
        for each in tokens_of(drawn(params, 120)):
            for one in params.anatomy.heads:
                keys = floats(one.score) @ each[-1] + (0 if one.score_bias is None else floats(one.score_bias))
                logits = (each - each[-1]) @ keys
                size = np.linalg.norm(each - each[-1]) * np.linalg.norm(keys)
                if len(each) > 1 and np.max(np.abs(logits)) < 1e-12 * size:
                    longest = max(longest, size)
        assert longest > 1e6


def test_a_sum_of_two_near_heads_is_not_one_head() -> None:
    rng = np.random.default_rng(4)
    score, apart, value = (rng.standard_normal(shape) for shape in ((WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)))
    for size in (1e-6, 1e-7, 1e-8, 1e-9):
        both = kh.MultiHead([kh.SingleHead(score, value), kh.SingleHead(score + size * apart, 0.7 * value)])
        assert not kh.recover(kh.FunctionOracle(both, width=WIDTH), throw=False).certified


def test_kept_queries_are_what_was_drawn() -> None:
    """Three in eight have tokens of N(0, 1), or on the rim of the ball, also where they tell nothing of scores."""
    sharp = head(size=1e8)
    for max_norm in (None, 1.0):
        norms = np.array(
            [np.median(np.linalg.norm(each, axis=1)) for each in tokens_of(drawn(sharp, 120, max_norm=max_norm))]
        )
        usual = WIDTH**0.5 if max_norm is None else max_norm
        assert np.sum((norms > 0.5 * usual) & (norms <= 2 * usual)) >= 30


def test_single_entries_of_nets_are_asked_all_of_them_and_beside_the_rim() -> None:
    """A neuron may be on for one of them and for next to no other token of the ball."""
    last = np.array([each[-1] for each in tokens_of(drawn(net(), 120, max_norm=1.0))])
    alone = last[np.sum(last != 0, axis=1) == 1]
    assert set(np.argmax(alone, axis=1)) == set(range(WIDTH))
    sizes = np.max(alone, axis=1)
    assert np.sum((sizes > 0.999) & (sizes < 1)) >= 4  # at the rim itself values are read from them


@pytest.mark.parametrize("params", [head(), net(), one_layer(residual=True)], ids=["head", "net", "layer"])
def test_zero_last_tokens_are_asked_though_no_score_shows_beside_them(params: Family) -> None:
    zero = [each for each in tokens_of(drawn(params, 120)) if not np.any(each[-1])]
    assert sum(bool(np.any(each)) for each in zero) >= 2


def test_a_head_that_answers_nothing_to_a_zero_last_token_is_found_out() -> None:
    truth = head()

    def answer(tokens: np.ndarray) -> np.ndarray:
        return np.where(np.any(tokens[:, -1] != 0, axis=1), truth(tokens), 0.0)

    for seed in range(3):
        assert not kh.recover(kh.FunctionOracle(answer, width=WIDTH), throw=False, seed=seed).certified


@pytest.mark.parametrize("noise", ["exact", "rounded"])
def test_some_tokens_have_any_norm_each(noise: str) -> None:
    """Among longer ones by orders of magnitude the last token may be of usual size, behind errors too."""
    about = Noise.rounded(6) if noise == "rounded" else Noise.exact()
    over = [
        np.max(norms) / norms[-1]
        for each in tokens_of(drawn(head(), 120, radius=1e-9, noise=about))
        if (norms := np.linalg.norm(each, axis=1))[-1] > 0.03
    ]
    assert np.sum(np.array(over) > 100) >= 3


def test_logits_that_are_clipped_far_out_are_seen_behind_decimals() -> None:
    rng = np.random.default_rng(5)
    score, value = rng.standard_normal((3, 3)), rng.standard_normal(3)

    def answer(tokens: np.ndarray) -> np.ndarray:
        logits = np.clip(np.einsum("nid,de,ne->ni", tokens, score, tokens[:, -1]), -200, 200)
        weights = np.exp(logits - np.max(logits, axis=1, keepdims=True))
        return np.round(np.sum(weights * (tokens @ value), axis=1) / np.sum(weights, axis=1), 6)

    assert not kh.recover(kh.FunctionOracle(answer, width=3, noise="rounded:6"), throw=False).certified


def test_the_number_grows_with_the_recovery() -> None:
    assert [heldout_count(None, queries) for queries in (10, 4168, 6000, 10**6)] == [LEAST, LEAST, 150, MOST]
    assert [heldout_count(None, queries, labels=True) for queries in (10, 10**6)] == [2 * LEAST, MOST]
    assert heldout_count(7, 10**6) == 7
    assert (LEAST, MOST) == (120, 256)
