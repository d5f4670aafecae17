"""`verify`: alarms for boxes that are the same in another arithmetic, and changes of 1e-6 in one part of one head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from benchmarks.tables.gauge import layer, net
from keyhole.gauge.factored import FactoredHeads, Factors

RUNS = 2000
CHANGE = 1e-6
QUERIES = 64
WORKERS = 4
Random = np.random.Generator


def table() -> str:
    with ProcessPoolExecutor(WORKERS) as pool:
        return f"{_equal_table(pool)}\n\n{_larger_table(pool)}\n\n{_changed_table(pool)}"


def _equal_run(number: int) -> tuple[str, str, kh.Verdict]:
    family, dtype = FAMILIES[number % len(FAMILIES)], ("float64", "float32")[number // len(FAMILIES) % 2]
    oracle, params = equal(family, dtype, np.random.default_rng([number, 0]))
    return family, dtype, kh.verify(oracle, params, QUERIES, seed=number)


def _changed_run(number: int) -> tuple[str, int | None, kh.Verdict]:
    oracle, params, part, head = changed(CHANGE, np.random.default_rng([number, 1]))
    return part, None if part == "output_bias" else head, kh.verify(oracle, params, QUERIES, seed=number)


def _larger_run(number: int) -> tuple[str, str, str] | None:
    """The same net or layer in a gauge that adds larger numbers, which cancel; None where it has none."""
    rng, dtype = np.random.default_rng([number, 2]), ("float64", "float32")[number % 2]
    params = _scaled(layer(rng) if number % 4 < 2 else net(rng), rng)
    kinds = [kind for kind in kh.kinds(params) if kind in LARGER]
    if not kinds:
        return None
    kind, like = str(rng.choice(kinds)), np.zeros(1, dtype)
    other = kh.witness(params, kind, seed=number).params.like(like)
    oracle = kh.FunctionOracle(other, params.width, like=like, name=kind)
    return kind, dtype, kh.verify(oracle, params, QUERIES, seed=number).conclusion


def _larger_table(pool: ProcessPoolExecutor) -> str:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for found in pool.map(_larger_run, range(RUNS // 2), chunksize=20):
        if found is not None:
            counts.setdefault(found[:2], Counter())[found[2]] += 1
    words = ("same", "inconclusive", "different")
    rows = [[*key, *(tally[word] for word in words)] for key, tally in sorted(counts.items())]
    alarms = sum(tally["different"] for tally in counts.values())
    total = sum(sum(tally.values()) for tally in counts.values())
    return (
        "Equal boxes whose own numbers may be far larger than those of the parameters, and cancel; these are not among "
        f"the {RUNS} above: {alarms} alarms in {total}.\n\n{markdown(['gauge', 'dtype', *words], rows)}"
    )


def _equal_table(pool: ProcessPoolExecutor) -> str:
    tallies: dict[tuple[str, str], list[kh.Verdict]] = {}
    for family, dtype, found in pool.map(_equal_run, range(RUNS), chunksize=20):
        tallies.setdefault((family, dtype), []).append(found)
    rows = [
        [
            family,
            dtype,
            len(found),
            sum(each.conclusion == "different" for each in found),
            sum(each.conclusion == "inconclusive" for each in found),
            f"{max(each.worst_ratio for each in found):.2f}",
            f"{np.median([each.resolution for each in found]):.0e}",
        ]
        for (family, dtype), found in tallies.items()
    ]
    alarms = sum(row[3] for row in rows)
    columns = ["box", "dtype", "runs", "alarms", "inconclusive", "largest error over its bar", "resolution, median"]
    return f"Equal boxes in another arithmetic: {alarms} alarms in {RUNS}.\n\n{markdown(columns, rows)}"


def _changed_table(pool: ProcessPoolExecutor) -> str:
    counts: dict[str, Counter[str]] = {}
    for part, head, found in pool.map(_changed_run, range(RUNS), chunksize=20):
        tally = counts.setdefault(part, Counter())
        tally["runs"] += 1
        tally["queries"] = max(tally["queries"], found.queries)
        if found.conclusion == "different":
            tally["found"] += 1
            for named in found.differing:
                right = named.head == head
                tally["right head" if right else "wrong head"] += 1
                tally["right part"] += right and named.part == part
    names = ("runs", "found", "right head", "wrong head", "right part", "queries")
    rows = [[part, *(tally[name] for name in names)] for part, tally in sorted(counts.items())]
    total = sum(tally["found"] for tally in counts.values())
    columns = ["changed", "runs", "found", "right head named", "wrong head named", "right part named", "most queries"]
    return (
        f"One part of one of 1 to 12 heads changed by {CHANGE:g} of its norm, float64: {total} of {RUNS} found.\n\n"
        f"{markdown(columns, rows)}"
    )


# --- boxes --------------------------------------------------------------------------------------------------------


def _scale(rng: Random) -> float:
    return float(10 ** rng.uniform(-3, 3))


def factored_heads(rng: Random, spread: float = 1.0) -> FactoredHeads:
    """Heads as implementations hold them, of scales from a thousandth to a thousand, spread over heads as well."""
    count, width = int(rng.integers(1, 13)), int(rng.integers(4, 33))
    inner, outputs = int(rng.integers(1, width + 1)), None if rng.random() < 0.5 else int(rng.integers(1, 17))
    scores, values, biases = _scale(rng), _scale(rng), _scale(rng) if rng.random() < 0.5 else 0.0
    heads = []
    for _ in range(count):
        own = 10 ** (spread * rng.uniform(-0.5, 0.5, 2))
        key, query = rng.standard_normal((2, width, inner)) * (scores * own[0] / inner**0.5 / width**0.5) ** 0.5
        value = rng.standard_normal((width, inner)) * values * own[1] / inner**0.5
        output = rng.standard_normal((inner,) if outputs is None else (inner, outputs))
        bias = biases * rng.standard_normal(inner) if biases else None
        heads.append(Factors(key, query, value, output, bias))
    shape = () if outputs is None else (outputs,)
    return FactoredHeads(tuple(heads), np.asarray(values * rng.standard_normal(shape)) if biases else None)


def _cast(factored: FactoredHeads, dtype: str) -> FactoredHeads:
    def short(array: Any) -> Any:
        return None if array is None else np.asarray(array, dtype=dtype)

    names = ("key", "query", "value", "output", "query_bias")
    heads = [Factors(*(short(getattr(head, name)) for name in names)) for head in factored.heads]
    return FactoredHeads(tuple(heads), short(factored.output_bias))


def _one_head(factored: FactoredHeads) -> FactoredHeads:
    return FactoredHeads(factored.heads[:1], factored.output_bias)


def _in_torch(factored: FactoredHeads, dtype: str) -> Callable[[Any], Any]:
    """The same as torch computes it, all heads in one product."""
    import torch

    torch.set_num_threads(1)

    def moved(array: Any) -> Any:
        return torch.asarray(np.asarray(array), dtype=getattr(torch, dtype))

    key, query, value = (
        torch.stack([moved(getattr(head, name)) for head in factored.heads]) for name in ("key", "query", "value")
    )
    outer = torch.stack([moved(head.output.reshape(head.output.shape[0], -1)) for head in factored.heads])
    biases = [head.query_bias for head in factored.heads]
    shift = None if biases[0] is None else torch.stack([moved(bias) for bias in biases])[:, None, :]
    scalar = factored.heads[0].output.ndim == 1

    def box(tokens: Any) -> Any:
        tokens = tokens[:, None]  # (batch, 1, length, width)
        asked = tokens[:, :, -1:] @ query + (0 if shift is None else shift)
        mixed = torch.nn.functional.scaled_dot_product_attention(asked, tokens @ key, tokens @ value, scale=1.0)
        answers = (mixed @ outer)[:, :, 0].sum(dim=1)
        answers = answers[:, 0] if scalar else answers
        return answers if factored.output_bias is None else answers + moved(factored.output_bias)

    return box


def equal(family: str, dtype: str, rng: Random) -> tuple[kh.FunctionOracle, Any]:
    """A box and its parameters, which it uses in another way."""
    like = np.zeros(1, dtype)
    if family in {"one head, in factors", "heads, in factors", "heads, torch"}:
        factored = factored_heads(rng)
        factored = _one_head(factored) if family.startswith("one") else factored
        factored = _cast(_cast(factored, dtype), "float64")  # the numbers that the box holds
        params: Any = factored.joined()
        if family == "heads, torch":
            import torch

            torch_like = torch.zeros(1, dtype=getattr(torch, dtype))
            return kh.FunctionOracle(_in_torch(factored, dtype), params.width, like=torch_like, name=family), params
        short = _cast(factored, dtype)
        if family.startswith("one"):
            (head,), bias = params.heads, params.output_bias
            params = kh.SingleHead(head.score, head.value, head.score_bias, bias)
        return kh.FunctionOracle(short, params.width, like=like, name=family), params
    params = net(rng) if family.startswith("net") else layer(rng)
    params = _scaled(params, rng)
    kinds = [kind for kind in kh.kinds(params) if not kind.startswith("length") and kind not in LARGER]
    other = kh.witness(params, str(rng.choice(kinds)), seed=int(rng.integers(2**31))).params
    return kh.FunctionOracle(other.like(like), params.width, like=like, name=family), params


# Gauges with numbers far larger than those of the parameters, which cancel in the box: no bar can know of them.
LARGER = ("constant neuron", "unseen value", "bias trade")


def _scaled(params: Any, rng: Random) -> Any:
    """Nets and layers of other scales."""
    if isinstance(params, kh.OneLayer):
        score, value = _scale(rng), _scale(rng)
        heads = [replace(head, score=score * head.score, value=value * head.value) for head in params.heads]
        attention = kh.MultiHead(heads, params.attention.output_bias).simplest()
        return replace(params, attention=attention, ffn=_scaled(params.ffn, rng))
    inner, outer = _scale(rng), _scale(rng)
    return replace(
        params,
        weights_in=inner * params.weights_in,
        bias_in=inner * params.bias_in,
        weights_out=outer * params.weights_out,
        bias_out=np.asarray(outer * params.bias_out),
    )


FAMILIES = (
    "one head, in factors",
    "heads, in factors",
    "heads, torch",
    "net, in another gauge",
    "layer, in another gauge",
)


def changed(size: float, rng: Random) -> tuple[kh.FunctionOracle, kh.MultiHead, str, int]:
    """A box of 1 to 12 heads, the parameters it should have, what is different and in which head."""
    params = factored_heads(rng).joined()
    head = int(rng.integers(len(params.heads)))
    parts = ["score", "value"]
    parts += ["score_bias", "output_bias"] if params.output_bias is not None else []
    part = str(rng.choice(parts))
    old = params.output_bias if part == "output_bias" else getattr(params.heads[head], part)
    step = np.asarray(rng.standard_normal(old.shape))
    new = np.asarray(old + step * (size * np.linalg.norm(old) / np.linalg.norm(step)))
    heads = list(params.heads)
    if part == "output_bias":
        other = kh.MultiHead(heads, new)
    else:
        heads[head] = replace(heads[head], **{part: new})
        other = kh.MultiHead(heads, params.output_bias)
    return kh.FunctionOracle(other, params.width, name="changed"), params, part, head
