"""One box: drawn, recovered, judged. The only place where the package is called."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.fuzz.boxes import Box, Kind
from benchmarks.fuzz.careless import CARELESS, MUST
from benchmarks.fuzz.corners import CORNERS, NEAR_MEMBERS
from benchmarks.fuzz.edges import EDGES
from benchmarks.fuzz.foreign import FOREIGN
from benchmarks.fuzz.judge import Found, Verdict, judge
from benchmarks.fuzz.limits import LIMITED
from benchmarks.fuzz.maps import params_of
from benchmarks.fuzz.members import MEMBERS
from benchmarks.fuzz.noisy import NOISY
from benchmarks.fuzz.rounding import ROUNDING
from benchmarks.fuzz.terms import STATE, TERMS
from benchmarks.fuzz.unusual import CHANGED, UNUSUAL

KINDS: dict[str, Kind] = {
    **MEMBERS,
    **UNUSUAL,
    **CORNERS,
    **EDGES,
    **NOISY,
    **ROUNDING,
    **FOREIGN,
    **NEAR_MEMBERS,
    **CHANGED,
    **TERMS,
    **STATE,
    **LIMITED,
    **CARELESS,
    **MUST,
}

Record = dict[str, Any]  # as JSON has it


def attempt(name: str, seed: int, recover: Callable[..., Any] | None = None) -> Record:
    """Draw the box of this kind and seed, recover it, and say what became of it."""
    kind = KINDS[name]
    box = kind.box(seed)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            found = recovered(box, name, seed, recover)
            seconds = time.perf_counter() - began
            verdict = judge(kind.group, box, found, np.random.default_rng([seed, 2]))
        except Exception as error:
            seconds, found = time.perf_counter() - began, Found("")
            verdict = Verdict("crash", f"{type(error).__name__}: {error} ({_place(error)})")
    record = {"kind": name, "seed": seed, "verdict": verdict.name, "outcome": found.outcome, "family": found.family}
    record |= {"detail": verdict.detail[:300], "ratio": verdict.ratio, "shares": dict(verdict.shares)}
    own = [str(each.message) for each in caught if "keyhole" in each.filename]
    return record | {"seconds": round(seconds, 3), "warnings": own[:3]}


def recovered(box: Box, name: str, seed: int, recover: Callable[..., Any] | None = None) -> Found:
    """What the package says of a box."""
    import keyhole as kh

    noise = box.noise if box.noise in ("", "measure") else kh.Noise.parse(box.noise)
    oracle = kh.FunctionOracle(
        box,
        width=box.width,
        max_norm=box.max_norm,
        max_length=box.max_length,
        noise=noise or None,
        like=np.zeros(1, np.float32) if box.float32 else None,
        answers="labels" if box.labels else "numbers",
        name=f"{name} {seed}",
    )
    result = (recover or kh.recover)(oracle, seed=seed % 2**32, throw=False, progress=False)
    params, radius = result.params, result.certificate.radius
    if params is None:
        return Found(result.outcome.name, result.message)
    words = params.words
    wide = None if radius is None else params_of(params.family, {**_zeros(params), **radius.arrays()}, words)
    own = params_of(params.family, params.arrays(), words)
    noise = float(result.stats.details.get("noise_radius", 0.0))
    return Found(result.outcome.name, result.message, params.family, params, own, wide, noise)


def _zeros(params: Any) -> dict[str, Any]:
    """Radii of arrays for which none is given."""
    return {name: np.zeros(np.shape(array)) for name, array in params.arrays().items()}


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "keyhole" in frame.filename]
    frame = own[-1] if own else last
    return f"{frame.filename.rpartition('keyhole/')[2]}:{frame.lineno}"
