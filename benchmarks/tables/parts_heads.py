"""Several heads of other attention than a softmax: caps, sinks, slopes, windows, rotary, normed keys; real modules."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.attention_modules import KINDS, WIDTH, module
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.families.forms import QKNorm, QKNormRotary, Rotary, geometric
from keyhole.families.parts import Alibi, Attention, DistanceTable, PlusOne, Sink, Softcap, Window
from keyhole.gauge.compare import align

SEEDS, MODULE_SEEDS, NAMED_SEEDS = 20, 10, 5
KEY = 8
CAPS, SINKS, SLOPES = (50.0, 30.0, 10.0, 3.0), (0.5, 1.0, -1.0, 3.0), (0.5, 0.25, 0.125, 0.0625)
# The parts of head h, and the options that read them.
CASES: dict[str, tuple[Callable[[int], Attention], dict[str, str]]] = {
    "softcap, one cap": (lambda _: Attention(link=Softcap(30.0)), {"link": "softcap"}),
    "softcap, a cap per head": (lambda h: Attention(link=Softcap(CAPS[h])), {"link": "softcap"}),
    "sinks": (lambda h: Attention(normaliser=Sink(SINKS[h])), {"normaliser": "sink"}),
    "plus one": (lambda _: Attention(normaliser=PlusOne()), {"normaliser": "plus-one"}),
    "ALiBi, a slope per head": (lambda h: Attention(position_bias=Alibi(SLOPES[h])), {"position_bias": "alibi"}),
    "window": (lambda _: Attention(position_bias=Window(20)), {"position_bias": "window"}),
    "softcap and sinks": (
        lambda h: Attention(link=Softcap(30.0), normaliser=Sink(SINKS[h])),
        {"link": "softcap", "normaliser": "sink"},
    ),
    "ALiBi and sinks": (
        lambda h: Attention(normaliser=Sink(SINKS[h]), position_bias=Alibi(SLOPES[h])),
        {"normaliser": "sink", "position_bias": "alibi"},
    ),
    "rotary": (lambda _: Attention(), {"form": "rotary"}),
    "rotary, softcap": (lambda _: Attention(link=Softcap(30.0)), {"form": "rotary", "link": "softcap"}),
    "rotary, sinks": (lambda h: Attention(normaliser=Sink(SINKS[h])), {"form": "rotary", "normaliser": "sink"}),
    "normed keys and queries": (lambda _: Attention(), {"form": "qk-norm"}),
    "normed, rotary": (lambda _: Attention(), {"form": "qk-norm-rotary"}),
}
# The same with biases of keys and queries, which nothing names.
BIASED: dict[str, tuple[Callable[[int], Attention], dict[str, str]]] = {
    "ALiBi, biases": CASES["ALiBi, a slope per head"],
    "table by distance, biases": (
        lambda h: Attention(position_bias=DistanceTable(np.sin(np.arange(12.0) + h))),
        {"position_bias": "table"},
    ),
    "rotary, biases": CASES["rotary"],
    "rotary, window, biases": (
        lambda _: Attention(position_bias=Window(4)),
        {"form": "rotary", "position_bias": "window"},
    ),
}
# Read with as few outputs as heads, all of full rank.
AT_LEAST = ("softcap, one cap", "sinks")
# Added to mean squares, so that a zero token has a norm and no other sees it.
TINY = 1e-300
COLUMNS = (
    "certified and right",
    "queries",
    "counting bound",
    "error, most",
    "error over radius, most",
    "seconds, most",
)


def table(kept: Kept) -> str:
    wide = {name: (lambda name=name: _row(name, 32, KEY)) for name in CASES}
    biased = {name: (lambda name=name: _row(name, 32, KEY)) for name in BIASED}
    few = {name: (lambda name=name: _row(name, 4, WIDTH)) for name in AT_LEAST}
    unnamed = {name: (lambda name=name: _unnamed_row(name)) for name in CASES}
    modules = [(kind, keys, True) for kind in KINDS for keys in (4, 2)]
    modules += [(kind, keys, False) for kind in KINDS if "norm" in KINDS[kind]["form"] for keys in (4, 2)]
    real = {_title(*each): (lambda each=each: _module_row(*each)) for each in modules}
    return "\n\n".join(
        [
            f"Four heads, tokens of width 32, 32 outputs, keys and values of rank {KEY}, scales from 1e-2 to 1e2, "
            f"{SEEDS} seeds each, every other with an output bias:",
            markdown(("heads", *COLUMNS), kept.rows_of("wide", wide)),
            "The same with biases of keys and queries, of the size of what they are added to:",
            markdown(("heads", *COLUMNS), kept.rows_of("biased", biased)),
            "Those of the first table with four outputs, and scores of full rank:",
            markdown(("heads", *COLUMNS), kept.rows_of("few", few)),
            f"The heads of the first table with nothing named, {NAMED_SEEDS} other seeds each: by `parts` with "
            "heads=several, which finds the parts, and by `auto`, which tries other families first:",
            markdown(
                ("heads", "by parts", "queries", "by auto", "queries", "error, most", "error over radius, most"),
                kept.rows_of("unnamed", unnamed),
            ),
            f"Attention modules of transformers in float64, random weights without biases, four heads of {KEY} that "
            f"share four or two keys, {MODULE_SEEDS} seeds each. Norms of Qwen3 and Gemma3 add 1e-6 to mean squares "
            "as they come, which is read too:",
            markdown(("module", *COLUMNS, "groups found"), kept.rows_of("real", real)),
        ]
    )


def truth(name: str, outputs: int, rank: int, rng: np.random.Generator, *, biased: bool) -> kh.MultiHead:
    """Four heads of a case."""
    attention, options = (CASES | BIASED)[name]
    heads: list[Any] = []
    scale = 10 ** rng.uniform(-2, 2)
    gains = 1 + 0.3 * rng.standard_normal((2, rank))
    shared = [rng.standard_normal((rank, WIDTH)) for _ in range(2)]
    for head in range(4):
        query, key = rng.standard_normal((2, rank, WIDTH)) / WIDTH**0.25
        inner = min(rank, outputs)
        value = rng.standard_normal((WIDTH, inner)) @ rng.standard_normal((inner, outputs)) / inner**0.5
        form, strength = options.get("form", "bilinear"), rank**0.5
        if form == "bilinear":
            score = scale * key.T @ query / strength
            bias = scale**0.5 * (key.T @ rng.standard_normal(rank)) / strength if name in BIASED else None
            heads.append(kh.SingleHead(score, value, bias, attention=attention(head)))
            continue
        made: Any
        if form == "rotary":
            made = Rotary(scale * query / strength, shared[head // 2], geometric(rank // 2))
            if name in BIASED:  # tokens have a norm at which logits are of order one
                one, two = rng.standard_normal((2, rank))
                made = replace(made, query_bias=scale**0.5 * one / strength, key_bias=two / scale**0.5)
        elif form == "qk-norm":
            made = QKNorm(query, key, strength * np.abs(np.prod(gains, axis=0)))
        else:
            made = QKNormRotary(query, key, strength * gains[0], gains[1], geometric(rank // 2))
        heads.append(kh.FormHead(made, value, attention=attention(head)))
    return kh.MultiHead(heads, rng.standard_normal(outputs) if biased else None)


def judged(result: kh.Recovery, true: kh.MultiHead) -> tuple[float, float]:
    """The distance from the truth, and the largest error of an entry over its radius."""
    if not isinstance(result.params, kh.MultiHead) or result.certificate.radius is None:
        return np.inf, np.inf
    found, radius = result.params.arrays(), result.certificate.radius.arrays()
    known = align(result.params, true)
    worst = 0.0 if known else np.inf
    for name, array in known.items():
        error = np.abs(found[name] - array)
        if name.endswith("frequencies"):  # given, and said to be: compared for the distance
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            worst = max(worst, float(np.max(np.where(error == 0, 0.0, error / radius[name]))))
    return kh.distance(result.params, true), worst


def _row(name: str, outputs: int, rank: int) -> Row:
    results = []
    for seed in range(SEEDS):
        true = truth(name, outputs, rank, np.random.default_rng([seed, outputs, rank]), biased=seed % 2 == 1)
        results.append(_recovered(true, true, seed, (CASES | BIASED)[name][1]))
    return [name, *_summary(results)]


def _unnamed_row(name: str) -> Row:
    """Certified and right, and queries, by the method that names the parts and by the one that names the family."""
    cells: list[object] = [name]
    errors = []
    for method, options in (("parts", {"heads": "several"}), ("auto", {})):
        results = []
        for seed in range(NAMED_SEEDS):
            true = truth(name, 32, KEY, np.random.default_rng([seed, 32, KEY, 1]), biased=seed % 2 == 1)
            result = kh.recover(kh.FunctionOracle(true, width=WIDTH), method, seed=seed, throw=False, **options)
            results.append((result, *judged(result, true), 0.0))
        cells += _summary(results)[:2]
        errors += [(distance, worst) for result, distance, worst, _ in results if result.certified]
    return [*cells, f"{max(error for error, _ in errors):.0e}", f"{max(worst for _, worst in errors):.2f}"]


def _title(kind: str, keys: int, as_it_comes: bool) -> str:
    return f"{kind}, {keys} keys" + ("" if as_it_comes else ", nothing added")


def _module_row(kind: str, keys: int, as_it_comes: bool) -> Row:
    results, groups = [], 0
    for seed in range(MODULE_SEEDS):
        made = module(kind, keys, seed, small=None if as_it_comes else TINY)
        options = {**KINDS[kind], "frequencies": made.frequencies}
        results.append(_recovered(made.answer, made.heads, seed, options))
        found = results[-1][0].stats.details.get("groups", [])
        groups += len(found) == keys and len({len(group) for group in found}) == 1
    return [_title(kind, keys, as_it_comes), *_summary(results), f"{groups}/{len(results)}"]


Result = tuple[kh.Recovery, float, float, float]


def _recovered(box: Any, true: kh.MultiHead, seed: int, options: dict[str, Any]) -> Result:
    start = time.perf_counter()
    result = kh.recover(
        kh.FunctionOracle(box, width=WIDTH), "parts", seed=seed, throw=False, heads="several", **options
    )
    return result, *judged(result, true), time.perf_counter() - start


def _summary(results: list[Result]) -> list[object]:
    right = sum(result.certified and worst <= 1 for result, _, worst, _ in results)
    queries = sorted({result.stats.queries for result, *_ in results})
    bounds = sorted({result.stats.counting_bound for result, *_ in results if result.certified})
    return [
        f"{right}/{len(results)}",
        f"{queries[0]:,} to {queries[-1]:,}" if len(queries) > 1 else f"{queries[0]:,}",
        f"{bounds[-1]:,}" if bounds else "",
        f"{max(distance for _, distance, _, _ in results):.0e}",
        f"{max(worst for _, _, worst, _ in results):.2f}",
        f"{max(seconds for *_, seconds in results):.1f}",
    ]
