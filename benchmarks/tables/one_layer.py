"""Queries and errors of `one-layer` on random layers, with and without residual."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet

# (width, neurons, outputs): runs
CASES = {(8, 16, 1): 50, (16, 32, 1): 20, (32, 64, 1): 5, (16, 8, 1): 50, (32, 128, 32): 5}
# The same with a score bias of norm one, or with a score matrix of rank four.
BIASED = {(16, 32, 1): 20, (32, 64, 1): 5}
LOW_RANK, RANK = {(64, 16, 1): 5}, 4
# The model of the theorem: a net without biases.
BIAS_FREE = {(4, 3, 1): 40, (16, 32, 1): 20, (32, 64, 1): 5, (32, 64, 32): 20}
# Stages that belong to attention; the others are those of the net.
ATTENTION = (
    "score bias",
    "residual",
    "rays",
    "scale",
    "directions",
    "columns",
    "rest",
    "extra columns",
    "attention cells",
)
# Queries of a prototype, for the net and for attention: what these counts are to be measured against.
PROTOTYPE = {
    (8, 16, 1, False): (549, 64),
    (32, 64, 1, False): (5194, 1056),
    (32, 128, 32, False): (2062, 1056),
    (32, 64, 1, True): (5175, 5808),
    (32, 128, 32, True): (2872, 1485),
}
LENGTHS = range(1, 51)


def random_layer(
    width: int,
    neurons: int,
    outputs: int,
    rng: np.random.Generator,
    *,
    residual: bool,
    biased: bool = False,
    rank: int | None = None,
    bias_free: bool = False,
) -> OneLayer:
    """Gaussian weights of the usual sizes; the score matrix of spectral norm one."""
    shape = () if outputs == 1 else (outputs,)
    net = ReluNet(
        rng.standard_normal((neurons, width)) / width**0.5,
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal((*shape, neurons)) / neurons**0.5,
        np.asarray(rng.standard_normal(shape)),
    )
    score = rng.standard_normal((width, width))
    value = rng.standard_normal((width, width)) / width**0.5
    if rank is not None:
        score = score[:, :rank] @ rng.standard_normal((rank, width))
    bias = rng.standard_normal(width) / width**0.5 if biased else None
    if bias_free:
        net = replace(net, bias_in=0 * net.bias_in, bias_out=0 * net.bias_out)
    return OneLayer(kh.SingleHead(score / np.linalg.norm(score, 2), value, bias), net, residual)


def table() -> str:
    columns = ["d, k, p", "residual", "runs", "queries: net + attention", "prototype's", "W error: median, worst"]
    columns += ["function error: median, worst", "certified", "radius misses", "s"]
    both = (False, True)
    rows = [_row(case, runs, residual=residual) for case, runs in CASES.items() for residual in both]
    rows += [_row(case, runs, residual=residual, biased=True) for case, runs in BIASED.items() for residual in both]
    rows += [_row(case, runs, residual=residual, rank=RANK) for case, runs in LOW_RANK.items() for residual in both]
    rows += [
        _row(case, runs, residual=residual, bias_free=True) for case, runs in BIAS_FREE.items() for residual in both
    ]
    return markdown(columns, rows)


def _row(
    case: tuple[int, int, int],
    runs: int,
    *,
    residual: bool,
    biased: bool = False,
    rank: int | None = None,
    bias_free: bool = False,
) -> list[object]:
    errors, function_errors, net, attention, certified, misses = [], [], [], [], 0, 0
    began = perf_counter()
    for seed in range(runs):
        rng = np.random.default_rng([seed, *case])
        truth = random_layer(*case, rng, residual=residual, biased=biased, rank=rank, bias_free=bias_free)
        result = kh.recover(kh.FunctionOracle(truth, width=case[0]), "one-layer", seed=seed, throw=False)
        spent = sum(count for stage, count in result.stats.stages.items() if stage in ATTENTION)
        attention.append(spent)
        net.append(result.stats.queries - spent)
        certified += result.certified
        if result.params is None:
            continue
        miss = np.abs(result.params.attention.score - truth.attention.score)
        errors.append(np.linalg.norm(miss) / np.linalg.norm(truth.attention.score))
        function_errors.append(function_error(result.params, truth, rng))
        misses += result.certified and not np.all(miss <= result.certificate.radius.attention.score)
    seconds = (perf_counter() - began) / runs
    prototype = None if biased or bias_free else PROTOTYPE.get((*case, residual))
    more = ", score bias" * biased + (f", rank {rank}" if rank else "") + ", no biases in the net" * bias_free
    return [
        ", ".join(str(number) for number in case) + more,
        "yes" if residual else "no",
        runs,
        f"{np.median(net):,.0f} + {np.median(attention):,.0f}",
        f"{prototype[0]:,} + {prototype[1]:,}" if prototype else "",
        f"{np.median(errors):.1e}, {max(errors):.1e}",
        f"{np.median(function_errors):.1e}, {max(function_errors):.1e}",
        f"{certified}/{runs}",
        misses,
        f"{seconds:.2f}",
    ]


def function_error(found: OneLayer, truth: OneLayer, rng: np.random.Generator) -> float:
    """Largest error on random sequences of one to fifty tokens, over the standard deviation of the answers."""
    answers, worst = [], 0.0
    for length in LENGTHS:
        tokens = rng.standard_normal((20, length, truth.width))
        answers.append(truth(tokens))
        worst = max(worst, float(np.max(np.abs(found(tokens) - answers[-1]))))
    return worst / float(np.std(np.concatenate(answers)))
