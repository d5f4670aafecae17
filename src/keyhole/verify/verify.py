"""`keyhole.verify`: ask an oracle a few queries that parameters predict, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import numpy as np

from keyhole.arrays import Floats, to_numpy
from keyhole.errors import ComputeError, OracleError, UsageError
from keyhole.families import F, Family
from keyhole.families.base import is_family
from keyhole.gauge.tolerance import refuse_odd_numbers
from keyhole.journal import Journal
from keyhole.methods import Steps, Unrecoverable, stream
from keyhole.methods.noise_estimation.measure import NoiseEstimate, coarseness, measure_noise
from keyhole.noise import Noise
from keyhole.oracles import Oracle
from keyhole.oracles.anything import as_oracle
from keyhole.oracles.torch import is_module
from keyhole.progress import Observer
from keyhole.queries import Measurements, Plan, Signature, sequences
from keyhole.recovery import percent, times
from keyhole.session import Session, box_of
from keyhole.targets.claims import claim_of
from keyhole.verify.comparison import AnsweredQueries, Comparison
from keyhole.verify.judge import MISS
from keyhole.verify.queries import plans_for
from keyhole.verify.verdict import Verdict

QUERIES = 64
# Queries kept back to be asked again after an alarm: an oracle that contradicts itself is not another one.
REPEATS = 2
# Answers to the same query that differ by less than this part of their error do not explain it.
CONTRADICTS = 0.1
# Fewer queries than this keep none back.
FEW = 8
# A part of which only larger changes than this would be noticed has not been verified.
COARSEST = 0.3
# Of answers of many numbers so many are looked at when it comes to what would be noticed, and where differences lie.
LOOKED_AT = 2
# Parts that a message names before it counts.
FEW_NAMES = 3


def verify(
    oracle: Any,
    params: Family | Oracle | Callable[..., object] | str | PathLike[str],
    queries: int = QUERIES,
    seed: int = 0,
    tolerance: float | None = None,
    *,
    radius: Family | None = None,
    journal: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    max_seconds: float | None = None,
) -> Verdict:
    """Find out from at most `queries` sequences whether an oracle answers like `params`, and if not, where it differs.

    `oracle` is an oracle, or anything that `keyhole.recover` takes for one, of the width of the parameters.
    `params` are parameters, or a text that names some: a file or run folder, `transformers:PATH#layer=1`, and others as
    on the command line, error bars beside them included. Another oracle, a PyTorch module or a text that names a box is
    recovered first, and what is found in it compared.
    With a `tolerance` every part (the score, value or bias of a head, an array of a net) may differ by this much,
    relatively and in the Frobenius norm; without one, by what rounding in the oracle's dtype explains. A `radius`, the
    parameters' own radii such as a recovery's `certificate.radius`, is allowed for besides. Rounding that nobody
    declared is allowed for where the digits of all answers show it; an oracle whose noise is "measure" is asked about a
    hundred queries more, or 336 where its errors are random, to find out. `max_seconds` caps the time of arithmetic.
    """
    if isinstance(params, str | PathLike | Oracle) or is_module(params):
        claim = claim_of(params)
        claimed, radius = claim.params, claim.radius if radius is None else radius
    else:
        claimed = cast(Family, params)  # which is checked below
    named = isinstance(oracle, Oracle | str | PathLike)
    oracle = as_oracle(oracle, None if named else getattr(claimed, "width", None))
    _check(oracle, claimed, queries, seed, tolerance, radius)
    with ExitStack() as stack:
        book = None if journal is None else stack.enter_context(Journal(journal, box_of(oracle)))
        session = Session(oracle, journal=book, observer=observer, max_seconds=max_seconds)
        signature, evidence = oracle.signature, None
        try:
            if signature.noise.kind == "measure":
                measured = session.run(measure_noise(signature, stream(seed, "noise")))
                signature, evidence = signature.with_changes(noise=measured.noise.as_found()), measured.evidence
            session.budget = session.queries + queries
            found = session.run(compare(claimed, signature, stream(seed, "verify"), queries, tolerance or 0.0, radius))
            if evidence is not None and found.noise is None:
                found = replace(found, noise=str(signature.noise), noise_evidence=evidence)
        except (OracleError, ComputeError) as error:
            what = "the box failed, so" if isinstance(error, OracleError) else "of these parameters"
            found = Verdict("inconclusive", f"{what} nothing can be said: {error}", session.queries)
        except Unrecoverable as error:  # errors of answers that nothing can be made of
            found = Verdict("inconclusive", str(error), session.queries)
        return replace(found, queries=session.queries, new_queries=session.new_queries, tolerance=tolerance)


def _check(oracle: Oracle, params: F, queries: int, seed: int, tolerance: float | None, radius: F | None) -> None:
    if not is_family(params) or params.positions != "last":
        raise UsageError(f"params must be parameters such as a SingleHead, not {type(params).__name__}")
    for name, number, least in (("queries", queries, 1), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, not {number!r}")
    refuse_odd_numbers(params)
    if radius is not None:
        _check_radius(params, radius)
    number = isinstance(tolerance, int | float | np.number) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 <= tolerance < 1):
        raise UsageError(f"tolerance must be a number from 0 to less than 1, not {tolerance!r}")
    if params.width != oracle.signature.width:
        raise UsageError(f"the box takes tokens of width {oracle.signature.width}, the parameters of {params.width}")


def _check_radius(params: Family, radius: Family) -> None:
    if not is_family(radius) or radius.family != params.family:
        raise UsageError(f"radius must be a {type(params).__name__} like the parameters, not {type(radius).__name__}")
    shapes = [{name: np.shape(array) for name, array in each.arrays().items()} for each in (params, radius)]
    if not shapes[0].items() <= shapes[1].items():  # a bias that is none has a radius too
        raise UsageError("radius must have the shapes of the parameters: it belongs to others, or to an older run")
    if not all(np.all(np.asarray(array) >= 0) for array in radius.arrays().values()):
        raise UsageError("radius holds negative numbers or NaN, which no error bar is")


def compare(
    params: F, signature: Signature, rng: np.random.Generator, queries: int, tolerance: float, radius: F | None = None
) -> Steps[Verdict]:
    """Ask, compare with predictions; after an alarm allow for rounding that shows, or ask the worst queries again."""
    first = queries - REPEATS if queries >= FEW else queries
    plans = plans_for(params, signature, rng, first)
    looked_at = np.sort(rng.permutation(params.outputs or 1)[:LOOKED_AT])
    answers: list[Measurements] = yield plans
    values = [_at_last(answer, signature) for answer in answers]
    if values[0].shape[1:] != (() if params.outputs is None else (params.outputs,)):
        given = "one number" if values[0].ndim == 1 else f"{values[0].shape[1]} numbers"
        expected = "one number" if params.outputs is None else f"{params.outputs} numbers"
        return Verdict("different", f"the box answers {given} per sequence, the parameters {expected}", queries)
    answered = np.concatenate([each.reshape(each.shape[0], -1) for each in values])
    tokens = [_tokens(plan, signature) for plan in plans]
    asked = AnsweredQueries(params, tokens, answered, looked_at, tolerance, radius)
    found, noise = asked.compare(signature), NoiseEstimate(Noise.exact())
    if not found.agrees:
        for coarser, rounding in _with_rounding(signature, answered):
            found, noise = asked.compare(coarser), rounding
            if found.agrees:
                break
    figures: dict[str, Any] = {"queries": queries, "miss": MISS, **found.figures}
    if noise.evidence:
        figures |= {"noise": str(noise.noise), "noise_evidence": noise.evidence}
    rounding_words = f"up to {str(noise.noise).replace('rounded', 'rounding')}, " if noise.evidence else ""
    if found.agrees:
        conclusion, message = _agreement(found, signature)
        return Verdict(conclusion, rounding_words + message, **figures)
    contradiction = yield from _ask_again(plans, values, found.errors, found.limits.radii, signature, queries - first)
    if contradiction:
        return Verdict("inconclusive", contradiction, **figures)
    differing = found.differing()
    words = f"{times(found.worst_ratio)} what the error bar allows"
    if found.wide and found.worst_ratio <= 1:
        words = "all together more than the declared noise explains"
    message = f"answers differ from their predictions by up to {found.worst_error:.2g}, {words}"
    message += f", although they are {noise.noise}" if noise.evidence else ""
    where = f"; what differs is {', '.join(map(str, differing))}" if differing else ""
    return Verdict("different", message + where, differing=differing, changes=found.changes(), **figures)


def _with_rounding(signature: Signature, answered: Floats) -> Iterator[tuple[Signature, NoiseEstimate]]:
    """Signatures that allow for rounding which the digits of answers show: of answers, then of all arithmetic."""
    if signature.noise.kind != "exact":  # as declared: rounding of answers, whatever they were computed in
        return
    if signature.answers == "labels":
        return
    found = coarseness(answered, signature.space.eps)
    signature = signature.with_changes(noise=found.noise)
    if found.evidence:
        yield signature, found
    cut = found.noise.as_found()
    if cut != found.noise:  # digits that are cut, not rounded to the nearest
        yield signature.with_changes(noise=cut), replace(found, noise=cut)
    if found.noise.kind == "dtype":
        yield signature.as_coarse(), found


def _agreement(found: Comparison, signature: Signature) -> tuple[Any, str]:
    """`same`, unless there is a part that matters to the answers and of which large changes would not be noticed."""
    parts, mattering = found.parts, found.mattering
    agree = "all answers were predicted within their error bars"
    short = "" if signature.max_length is None else f", on sequences of up to {signature.max_length} tokens"
    if not parts:
        return "same", f"{agree}{short}; what changes would be noticed is not known for such parameters"
    worst, name = max((parts[name], name) for name in mattering or parts)
    if not worst <= COARSEST:
        seen = f"a change of {percent(worst)}" if worst < 1 else "any change"
        return (
            "inconclusive",
            f"{agree}, but even {seen} in the {name} might go unnoticed: ask more queries, or allow longer tokens or "
            "more digits",
        )
    size = 1.05 * max([each for each in parts.values() if each <= COARSEST], default=worst)  # rounded up
    return (
        "same",
        f"{agree}{short}; a random change of any part by {size:.1e} of its size is missed with a "
        f"probability of at most {MISS:g}{_faint(parts)}",
    )


def _faint(parts: dict[str, float]) -> str:
    """What hardly shows in any answer, and so was not verified."""
    unseen = [name for name, each in parts.items() if not each <= COARSEST]
    if not unseen:
        return ""
    more = f" and {len(unseen) - FEW_NAMES} more" if len(unseen) > FEW_NAMES else ""
    return f", except for what hardly shows in any answer: {', '.join(unseen[:FEW_NAMES])}{more}"


def _ask_again(
    plans: list[Plan], values: list[Floats], errors: Floats, radii: Floats, signature: Signature, count: int
) -> Steps[str | None]:
    """Ask the worst queries again: what to say of an oracle that contradicts itself by as much as it was wrong."""
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = np.argsort(-np.max(np.abs(errors) / radii, axis=1), kind="stable")[:count]
    if not worst.size:
        return None
    starts = np.cumsum([0] + [plan.count for plan in plans])
    places = np.searchsorted(starts, worst, side="right") - 1
    again = [
        sequences("asked again", plans[place].tokens(one, one + 1, signature.space, signature.width))
        for place, one in zip(places, worst - starts[places], strict=True)
    ]
    # As repeats of queries of their own, so that a journal does not answer with what it knows.
    answers: list[Measurements] = yield [replace(plan, first_repeat=1) for plan in again]
    answered = np.concatenate([each.reshape(each.shape[0], -1) for each in values])
    for number, answer in zip(worst, answers, strict=True):
        apart = np.abs(_at_last(answer, signature).ravel() - answered[number])
        if np.any(apart > np.maximum(2 * radii[number], CONTRADICTS * np.abs(errors[number]))):
            return (
                f"the box contradicts itself: the same question was answered {np.max(apart):.2g} apart; declare its "
                "noise or have it measured (--noise measure), or switch off dropout and sampling in it"
            )
    return None


def _tokens(plan: Plan, signature: Signature) -> Floats:
    """The very numbers that are sent, in float64."""
    tokens = plan.tokens(0, plan.count, signature.space, signature.width)
    return np.asarray(to_numpy(tokens), dtype=np.float64)


def _at_last(answers: Measurements, signature: Signature) -> Floats:
    """What was answered at the last position."""
    values = np.asarray(to_numpy(answers.values), dtype=np.float64)
    return values if signature.positions == "last" else values[:, -1, ...]
