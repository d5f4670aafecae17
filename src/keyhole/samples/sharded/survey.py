"""The first look at shards: how many examples each holds, of what sizes, and what is wrong with those that are bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.errors import FileError
from keyhole.executors.base import Crew
from keyhole.samples.examples import Examples
from keyhole.shards.shard import Shard, double

# Bad shards that a message names.
NAMED = 5


@dataclass(frozen=True)
class ShardFacts:
    """What a shard holds."""

    count: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)  # tokens, numbers of a token, numbers of an output
    eps: float = 0.0  # spacing of the dtype of outputs
    fault: str = ""  # why it cannot be used


@dataclass(frozen=True)
class Survey:
    """The shards that can be used, and why others cannot."""

    shards: tuple[Shard, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, int, int]
    eps: float
    skipped: dict[str, str]  # by name, the fault

    @property
    def count(self) -> int:
        """Examples."""
        return sum(self.counts)


def survey(crew: Crew, shards: Sequence[Shard], *, skip_bad: bool = False) -> Survey:
    """All shards, each read once; FileError names the bad ones, unless they are to be skipped."""
    facts = list(crew.map(facts_of, shards))
    known = Counter(each.sizes for each in facts if not each.fault)
    usual = known.most_common(1)[0][0] if known else (0, 0, 0)
    faults = {
        str(shard): each.fault or _other_sizes(shard, each, usual) for shard, each in zip(shards, facts, strict=True)
    }
    skipped = {name: fault for name, fault in faults.items() if fault}
    if skipped and (not skip_bad or len(skipped) == len(shards)):
        said = "; ".join(list(skipped.values())[:NAMED]) + (
            f"; and {len(skipped) - NAMED} more" * (len(skipped) > NAMED)
        )
        if len(shards) == 1:
            raise FileError(said)
        remedy = "" if len(skipped) == len(shards) else ". skip_bad=True (--skip-bad) leaves them out"
        raise FileError(f"{len(skipped)} of {len(shards)} shards cannot be used: {said}{remedy}")
    used = [(shard, each) for shard, each in zip(shards, facts, strict=True) if not faults[str(shard)]]
    eps = max(float(np.finfo(np.float64).eps), *(each.eps for _, each in used))
    return Survey(tuple(shard for shard, _ in used), tuple(each.count for _, each in used), usual, eps, skipped)


def _other_sizes(shard: Shard, facts: ShardFacts, usual: tuple[int, int, int]) -> str:
    if facts.sizes == usual:
        return ""
    k, d, p = facts.sizes
    others = "{} of {} with {}".format(*usual)
    return f"{shard} has examples of {k} tokens of {d} numbers with outputs of {p}, others have {others}"


def facts_of(shard: Shard) -> ShardFacts:
    """What one shard holds; a fault is a fact too."""
    count, sizes, eps, bad, size = 0, (0, 0, 0), 0.0, 0, 0
    try:
        for inputs, outputs in shard.blocks():
            count += len(inputs)
            sizes = (*inputs.shape[1:], outputs.shape[2])
            eps = float(np.finfo(outputs.dtype).eps) if np.issubdtype(outputs.dtype, np.floating) else 0.0
            bad += sum(int(np.sum(~np.all(np.isfinite(each), axis=(1, 2)))) for each in double((inputs, outputs)))
            size += inputs.size + outputs.size
    except FileError as error:
        return ShardFacts(fault=str(error))
    fault = f"{shard}: {bad:,} of {count:,} rows hold nan or inf" if bad else ""
    return ShardFacts(count, sizes, eps, fault)


@dataclass(frozen=True)
class _Draw:
    """Rows of one shard."""

    shard: Shard
    rows: Integers


def draw(crew: Crew, found: Survey, count: int, rng: np.random.Generator) -> Examples:
    """So many random examples of all shards, in random order."""
    many = rng.multivariate_hypergeometric(np.array(found.counts), min(count, found.count), method="marginals")
    draws = [
        _Draw(shard, np.sort(rng.choice(size, take, replace=False)))
        for shard, size, take in zip(found.shards, found.counts, many, strict=True)
        if take
    ]
    pairs = list(crew.map(_drawn, draws))
    inputs, outputs = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    order = rng.permutation(len(inputs))
    return Examples(inputs[order], outputs[order], found.eps)


def _drawn(wanted: _Draw) -> tuple[Floats, Floats]:
    parts, start = [], 0
    for inputs, outputs in wanted.shard.blocks():
        first, last = np.searchsorted(wanted.rows, [start, start + len(inputs)])
        here = wanted.rows[first:last] - start
        parts.append(double((inputs[here], outputs[here])))
        start += len(inputs)
    one, two = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return one, two
