"""The front door: a layer from labelled examples, certified on examples held back, or an outcome that says why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.errors import RecoveryFailed, UsageError
from keyhole.executors.base import Workers
from keyhole.methods.arithmetic import check_seconds, default_limit
from keyhole.methods.noise_estimation.measure import coarseness
from keyhole.noise import Noise
from keyhole.recovery import Recovery
from keyhole.samples.examples import MOST_HELDOUT, ExampleCount, Examples, LabelErrors
from keyhole.samples.request import FITTED_PAIRS, NOISY_RATIO, Request, Shares
from keyhole.samples.sharded.method import OpenExamples, open_examples
from keyhole.samples.six_phase.method import PHASE_EXAMPLES, PhaseSettings
from keyhole.samples.varpro import INITS, MOST_HEADS, SEARCHES, Progress, VarproSettings
from keyhole.shards.shard import NAMES

METHODS = ("varpro", "six-phase")


def learn(
    inputs: Any,  # (n, k, d); or a file, a folder, a pattern, a stream, …
    outputs: Any = None,  # (n, k, d_out)
    heads: int | str = "auto",
    method: str = "auto",
    seed: int = 0,
    throw: bool = True,
    *,
    noise: Noise | str | float | None = None,
    rank: int | None = None,
    restarts: int = 10,
    init: str = "random",
    jobs: int = 1,
    search: str = "grow",
    max_heads: int = MOST_HEADS,
    heldout: int | None = None,
    polish: bool = True,
    phases: PhaseSettings | None = None,
    names: Sequence[str] = NAMES,
    skip_bad: bool = False,
    workers: int = 1,
    dask: str | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    max_seconds: float | None = None,
) -> Recovery:
    """Learn a multi-head layer F(X) = Σ softmax(X·Θ·Xᵀ)·X·W from random examples (X, F(X)), and certify it.

    Examples are two arrays, or one of: a file, a folder, a pattern such as `"shards/*.npz"`, a list of these, a stream
    of pairs or rows, a dictionary of columns. `names` are those of their two arrays. What does not fit into memory
    is worked through shard by shard, by `workers` processes, the Dask cluster at the address `dask`, or any
    `executor` of futures, who share the starts where examples are two arrays; bad shards are named and left out only
    with `skip_bad`.

    `heads` is their number, or "auto" to find it. `noise` is the standard deviation of the outputs' errors, a `Noise`,
    or "measure" where it is unknown; left out, outputs are taken for exact unless their digits show that they are
    rounded. `rank` bounds the rank of every score
    matrix. The method "varpro" makes up to `restarts` starts from `init` ("random", "spectral" or "six-phase"), which
    `jobs` processes share; `search` says whether heads are found by growing or by pruning, up to `max_heads`.
    "six-phase" is the algorithm of Chen and Li as `phases` say, followed by a descent unless `polish=False`; without it
    the layer is certified at its measured accuracy, and its parameters are not.

    `throw=False` returns every outcome; otherwise one without a certificate raises `RecoveryFailed`, which has the
    result attached. `max_seconds` caps the time it takes; left out, it is a minute and grows with examples and sizes.
    `progress` is called with (stage, starts done, starts at most, least relative residual).
    """
    count, most = _heads(heads), _whole("max_heads", max_heads, 1)
    settings = VarproSettings(
        _whole("restarts", restarts, 1),
        _one_of("init", init, INITS),
        None if rank is None else _whole("rank", rank, 1),
        _whole("jobs", jobs, 1),
        _one_of("search", search, SEARCHES),
        most,
    )
    held = None if heldout is None else _whole("heldout", heldout, 1)
    chosen = _one_of("method", method, ("auto", *METHODS))
    others = Workers(_whole("workers", workers, 1), dask, executor)
    if outputs is not None and others.several:  # no shards to share
        settings = replace(settings, others=others)
    crew, shared = others.open, others.several

    def wanted(length: int, width: int, per_token: int) -> int:
        numbers = ExampleCount(1, length, width, per_token, count or most, settings.rank)
        return max(PHASE_EXAMPLES, numbers.needed(NOISY_RATIO, FITTED_PAIRS)) + (held or MOST_HELDOUT)

    with _opened(
        inputs, outputs, names, crew, wanted, _whole("seed", seed, 0), skip_bad=skip_bad, shared=shared
    ) as given:
        examples = given.examples
        kind, details = noise, dict(given.details)
        found = coarseness(examples.outputs, examples.eps) if noise is None else None
        if found is not None:
            kind = found.noise
            if found.evidence:
                details = details | {"noise_found": str(kind), "noise_evidence": found.evidence}
        if held is not None and held >= examples.count:
            raise UsageError(f"heldout={held} leaves nothing to learn from: there are {examples.count} examples")
        limit = check_seconds(max_seconds) or default_limit(given.count, examples.width, examples.outputs_per_token)
        errors = LabelErrors.of(kind, examples)
        request = Request(
            examples=examples,
            heads=count,
            method=chosen,
            seed=seed,
            errors=errors,
            settings=replace(settings, seconds=limit, tolerance=errors.tolerance),
            heldout=held,
            polish=bool(polish),
            phases=phases or PhaseSettings(),
            progress=progress,
            limit=limit,
            shares=None if given.source is None else Shares(given.source, given.count),
            details=details,
        )
        result = request.carry_out()
        if found is not None and found.evidence:
            result = _with_assumption(result, f"outputs err as was found, not declared: {kind}")
            if not result.certified:  # few digits may be a coincidence
                exact = replace(request, errors=LabelErrors(0.0), details=dict(given.details)).carry_out()
                result = exact if exact.certified else result
    if throw and not result.certified:
        raise RecoveryFailed(result)
    return result


def _opened(
    inputs: Any,
    outputs: Any,
    names: Sequence[str],
    crew: Callable[[], Any],
    wanted: Callable[[int, int, int], int],
    seed: int,
    *,
    skip_bad: bool,
    shared: bool,
) -> Any:
    """Examples in memory, or those that `inputs` alone names."""
    if outputs is None:
        return open_examples(inputs, names, crew, wanted, seed, skip_bad=skip_bad, shared=shared)
    examples = Examples.of(inputs, outputs)
    return nullcontext(OpenExamples(examples, examples.count))


def _with_assumption(result: Recovery, assumption: str) -> Recovery:
    assumptions = (*result.certificate.assumptions, assumption)
    return replace(result, certificate=replace(result.certificate, assumptions=assumptions))


def _heads(heads: int | str) -> int | None:
    if heads == "auto":
        return None
    if isinstance(heads, str):
        raise UsageError(f"heads must be a whole number of at least 1 or 'auto', not {heads!r}")
    return _whole("heads", heads, 1)


def _whole(name: str, number: Any, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {number!r}")
    return int(number)


def _one_of(name: str, word: str, known: tuple[str, ...]) -> str:
    if word not in known:
        raise UsageError(f"unknown {name} {word!r}; known: {', '.join(known)}")
    return word
