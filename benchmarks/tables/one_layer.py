"""Queries and errors of `one-layer` on random layers, with and without residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet

# (width, neurons, outputs): runs
CASES = {(8, 16, 1): 50, (16, 32, 1): 20, (32, 64, 1): 5, (16, 8, 1): 50, (32, 128, 32): 5}
# The same with a score bias of norm one, or with a score matrix of rank four.
BIASED = {(16, 32, 1): 20, (32, 64, 1): 5}
LOW_RANK, RANK = {(64, 16, 1): 5}, 4
# The model of the theorem: a net without biases.
BIAS_FREE = {(4, 3, 1): 40, (16, 32, 1): 20, (32, 64, 1): 5, (32, 64, 32): 20}
# The same of random sizes within these; also with a score bias, and within a norm, with biases and without.
SIZES, OF_SIZES, NORM = ((4, 32), (3, 64), (1, 32)), 40, 3.0
BOUNDED_SIZES = ((4, 12), (3, 12), (1, 4))
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


@dataclass(frozen=True)
class Rows:
    """Layers of one row, of given sizes or of random ones within bounds."""

    case: tuple[int, int, int] | tuple[tuple[int, int], ...]  # width, neurons, outputs
    runs: int
    more: str = ""
    max_norm: float | None = None
    biased: bool = False
    rank: int | None = None
    bias_free: bool = False

    @property
    def name(self) -> str:
        return (
            ", ".join(str(each) if isinstance(each, int) else "{}–{}".format(*each) for each in self.case) + self.more
        )

    def layer(self, seed: int, *, residual: bool) -> OneLayer:
        rng = np.random.default_rng([seed, *np.ravel(self.case)])
        sizes = [each if isinstance(each, int) else int(rng.integers(each[0], each[1] + 1)) for each in self.case]
        width, neurons, outputs = sizes
        parts = {"biased": self.biased, "rank": self.rank, "bias_free": self.bias_free}
        return random_layer(width, neurons, outputs, rng, residual=residual, **parts)  # type: ignore[arg-type]


def all_rows() -> list[Rows]:
    free, within = ", no biases in the net", f", tokens of norm ≤ {NORM:g}"
    return [
        *(Rows(case, runs) for case, runs in CASES.items()),
        *(Rows(case, runs, ", score bias", biased=True) for case, runs in BIASED.items()),
        *(Rows(case, runs, f", rank {RANK}", rank=RANK) for case, runs in LOW_RANK.items()),
        *(Rows(case, runs, free, bias_free=True) for case, runs in BIAS_FREE.items()),
        Rows(SIZES, OF_SIZES, free, bias_free=True),
        Rows(SIZES, OF_SIZES, free + ", score bias", bias_free=True, biased=True),
        Rows(BOUNDED_SIZES, OF_SIZES, free + within, NORM, bias_free=True),
        Rows(BOUNDED_SIZES, OF_SIZES, within, NORM),
        Rows(BOUNDED_SIZES, OF_SIZES, ", score bias" + within, NORM, biased=True),
    ]


def table(kept: Kept) -> str:
    columns = ["d, k, p", "residual", "runs", "queries: net + attention", "prototype's", "W error: median, worst"]
    columns += ["function error: median, worst", "certified", "radius misses", "s"]
    both = {"no": False, "yes": True}
    rows: dict[str, Callable[[], Row]] = {
        f"{each.name} {word}": lambda each=each, residual=residual: _row(each, residual=residual)  # type: ignore[misc]
        for each in all_rows()
        for word, residual in both.items()
    }
    return markdown(columns, kept.rows_of("layers", rows))


def _row(rows: Rows, *, residual: bool) -> list[object]:
    errors, function_errors, net, attention, certified, misses = [], [], [], [], 0, 0
    began = perf_counter()
    for seed in range(rows.runs):
        truth = rows.layer(seed, residual=residual)
        oracle = kh.FunctionOracle(truth, width=truth.width, max_norm=rows.max_norm)
        result = kh.recover(oracle, "one-layer", seed=seed, throw=False)
        spent = sum(count for stage, count in result.stats.stages.items() if stage in ATTENTION)
        attention.append(spent)
        net.append(result.stats.queries - spent)
        certified += result.certified
        if result.params is None:
            continue
        miss = np.abs(result.params.attention.score - truth.attention.score)
        rng = np.random.default_rng([seed, 1])
        if result.certified:
            errors.append(np.linalg.norm(miss) / np.linalg.norm(truth.attention.score))
            function_errors.append(function_error(result.params, truth, rng, rows.max_norm))
            misses += not np.all(miss <= result.certificate.radius.attention.score)
    seconds = (perf_counter() - began) / rows.runs
    plain = rows.max_norm is None and rows.more == ""
    prototype = PROTOTYPE.get((*rows.case, residual)) if plain else None  # type: ignore[arg-type]
    return [
        rows.name,
        "yes" if residual else "no",
        rows.runs,
        f"{np.median(net):,.0f} + {np.median(attention):,.0f}",
        f"{prototype[0]:,} + {prototype[1]:,}" if prototype else "",
        f"{np.median(errors):.1e}, {max(errors):.1e}",
        f"{np.median(function_errors):.1e}, {max(function_errors):.1e}",
        f"{certified}/{rows.runs}",
        misses,
        f"{seconds:.2f}",
    ]


def function_error(found: OneLayer, truth: OneLayer, rng: np.random.Generator, max_norm: float | None = None) -> float:
    """Largest error on random sequences of one to fifty tokens, over the standard deviation of the answers."""
    answers, worst = [], 0.0
    for length in LENGTHS:
        tokens = rng.standard_normal((20, length, truth.width))
        if max_norm is not None:
            tokens *= max_norm * rng.random((20, length, 1)) / np.linalg.norm(tokens, axis=2, keepdims=True)
        answers.append(truth(tokens))
        worst = max(worst, float(np.max(np.abs(found(tokens) - answers[-1]))))
    return worst / float(np.std(np.concatenate(answers)))
