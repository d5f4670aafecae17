"""A score matrix of low rank from one batch of random measurements: the non-adaptive way to learn a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, Floats, namespace
from keyhole.errors import UsageError
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.forms.outputs import ask_along, choose_outputs, most_informative
from keyhole.methods.forms.reader import PairReader, ScoreBias
from keyhole.methods.forms.score_bias import ask_for_bias, ask_score_bias
from keyhole.methods.forms.value import Value, ask_value, check_nonzero
from keyhole.methods.sensing.request import FormData, Request
from keyhole.methods.sensing.solvers import SensingSolution, factored, nuclear_norm, parameter_count, standard_error
from keyhole.queries import Signature, TokenRows
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position",
    "answers are right up to the rounding of their dtype and the declared noise",
    "what the random measurements do not explain of the score matrix is no larger than they show",
)
# The first of the measurements are asked before the others, in four small rounds, to find the scale of all.
PILOT = 15
# Up to so many measurements reweighted least squares is cheap; it takes the cube of their number.
FEW = 1500
# So many times as many as recommended make a local search succeed, also when the rank is lower than it assumes.
EASE = 1.5
# Steps of the nuclear-norm solver while there may be more measurements to come.
BRIEF_ITERATIONS = 500
# Radii hold to first order, which of answers of few digits is not all: errors of 1.09 radii have been seen.
FLOAT32, SECOND_ORDER = 2.0**-23, 1.25
# Residuals are errors too: so many standard deviations of them are added to the radius of a measurement ...
RESIDUAL_DEVIATIONS = 4.0
# ... and a part of the score matrix that hides in them is at most so many times as large as they suggest.
HIDDEN_FACTOR = 2.0


@dataclass(frozen=True)
class ScoreEstimate:
    """The estimated score matrix."""

    matrix: Floats  # (d, d)
    radius: Floats  # (d, d)
    rank: int
    residual: float
    readings: int
    batches: int


def sensing(
    signature: Signature,
    rng: np.random.Generator,
    *,
    rank: int | None = None,
    solver: str = "factored",
    measurements: int | None = None,
    ensemble: str = "even",
) -> Steps[Estimate[SingleHead]]:
    """Score matrix of rank r and value vector of f(X) = Σ softmax(X·W·x_N)_i (x_i·v), by low-rank sensing.

    The randomised, non-adaptive route of *Provably Learning Attention with Queries* (arXiv 2601.16873), low-rank
    section: O(r·d) random rank-one measurements uᵀWg, one query each, determine W by compressed sensing.
    Here d + 1 queries for v, a probe or a few for the scale, and m measurements: m = r(2d − r) + d + 16 for a given
    rank and the factored solver. Of these the first `PILOT` come in small rounds that settle the scale, all others
    in one batch. An unknown rank doubles the batch until the solution predicts measurements it was not fitted to,
    never beyond d² (30 where d ≤ 5) nor the larger of 4096 and four times the first batch. A saturated
    measurement is read again: stage "measurements" less `details["measurements"]` says how often. A score bias
    that shows costs d and a few queries more.

    Tokens of the Gaussian `ensemble` are those of the theorem, of independent normal entries: some of their answers say
    little, as u·v is small. Those of the even one all say as much. Of several outputs the combination that says most
    is read, one form a query. Assumes what `ASSUMPTIONS` says; v = 0 is reported as not identifiable.
    """
    request = Request(rank, solver, measurements, ensemble)
    if rank is not None and rank > signature.width:
        raise UsageError(f"rank must be at most the width {signature.width}, not {rank}")
    value = yield from ask_value(signature, nonzero=False)
    check_nonzero(signature, value)

    def ask(plain: Signature, along: Value) -> Steps[tuple[ScoreBias, ScoreEstimate]]:
        return _Sensing(plain, along, rng, request, value.vector).run()

    if value.vector.ndim == 1:
        bias, estimate = yield from ask(signature, value)
        return _estimate(signature, request, value, bias, estimate)
    exact = signature.noise.kind == "exact"
    outputs = choose_outputs(signature.space, value.vector, even=exact, radius=value.radius)
    bias, estimate = yield from ask_along(signature, value, most_informative(outputs), ask)
    return _estimate(signature, request, value, bias, estimate, outputs.rank)


# First measurements, whether any responds (else the score is zero), and whether they are bilinear (else a bias shows).
Pilot = tuple[FormData, bool, bool]


class _Sensing:
    def __init__(
        self, signature: Signature, value: Value, rng: np.random.Generator, request: Request, whole: Array
    ) -> None:
        self.signature, self.value, self.rng, self.request = signature, value, rng, request
        self.whole = whole  # (width,) or (width, outputs): the value of which this may be one combination
        self.solver_rng = np.random.default_rng(rng.integers(2**63))

    def run(self) -> Steps[tuple[ScoreBias, ScoreEstimate]]:
        totals = self.request.totals(self.signature.width)
        bias, reader, (readings, responds, _) = yield from self._ask_start(min(PILOT, totals[0]))
        if not responds:
            return bias, _zero(readings, 0)
        for number, total in enumerate(totals):
            if total > readings.count:
                rows, columns = self._pairs(total - readings.count)
                forms = yield from reader.ask_batch("measurements", rows, columns)
                readings = FormData.concat(readings, FormData.of(rows.vectors, columns.vectors, forms))
            if readings.silent:
                return bias, _zero(readings, number + 1)
            solution = self._solution(readings, only=len(totals) == 1)
            if solution.converged:
                return bias, _scale_back(readings, solution, number + 1)
        raise self._failure(readings, solution)

    def _ask_start(self, count: int) -> Steps[tuple[ScoreBias, PairReader, Pilot]]:
        """The score bias where one shows, a reader that knows the scale, and the first measurements."""
        signature, value = self.signature, self.value
        biased, hidden = False, 0.0
        if signature.max_norm is not None or signature.noise.kind != "exact":
            biased, hidden = yield from ask_for_bias(signature, value, self.rng)
        if not biased:
            reader = PairReader(signature, value, hidden_bias=hidden)
            try:
                pilot = yield from self._ask_pilot(reader, count)
            except Unrecoverable:
                pilot = None  # a score bias may saturate every probe
            if pilot is not None and pilot[2]:
                nothing = signature.space.zeros(signature.width)
                return ScoreBias(nothing, nothing + hidden), reader, pilot
        bias = yield from ask_score_bias(signature, value, self.rng)
        reader = PairReader(signature, value, bias)
        return bias, reader, (yield from self._ask_pilot(reader, count))

    def _ask_pilot(self, reader: PairReader, count: int) -> Steps[Pilot]:
        """The first measurements, the first of them twice: at another scale it shows a score bias."""
        space = self.signature.space
        rows, columns = self._pairs(count)
        probe = yield from reader.ask_probe(rows, columns)
        order = space.indices([probe.number, *(n for n in range(count) if n != probe.number)])
        order = order if probe.responds else order[:1]
        first, second = (space.xp.take(side.vectors, order, axis=0) for side in (rows, columns))
        if not probe.responds:
            return FormData.of(first, second, probe.forms), False, True
        forms = yield from reader.ask_forms("measurements", rows, columns, order, order)
        bilinear = not reader.negligible_last or probe.is_same(forms)
        return FormData.of(first, second, forms), True, bilinear

    def _pairs(self, count: int) -> tuple[TokenRows, TokenRows]:  # (count, width) each
        """Random unit vectors; the first all of equal overlap with the value, the second of negative overlap.

        A first vector has the overlap |v|/√d with v, as a random one has on average, so that its query shows the
        softmax weight well. The sign of the second keeps the values of the two tokens apart. In the Gaussian ensemble
        both are directions of independent normal vectors; their lengths would only weigh the measurements.
        """
        space, xp, width = self.signature.space, self.signature.space.xp, self.signature.width
        if self.request.ensemble == "gaussian":
            rows, columns = (TokenRows(_units(space.normal(self.rng, count, width))) for _ in range(2))
            return rows, columns
        value = self.value.vector / xp.max(xp.abs(self.value.vector))  # so that squares neither overflow nor vanish
        value = value / xp.linalg.vector_norm(value)
        rows, columns = (_units(space.normal(self.rng, count, width)) for _ in range(2))
        if width > 1:
            rows = _units(rows - (rows @ value)[:, None] * value[None, :])
        rows = _units(rows * (1 - 1 / width) ** 0.5 + value[None, :] * width**-0.5)
        columns = xp.where((columns @ value > 0)[:, None], -columns, columns)
        return TokenRows(rows), TokenRows(columns)

    def _solution(self, readings: FormData, *, only: bool) -> SensingSolution:
        """The matrix that the measurements determine; a thorough search at the last batch."""
        even, request, width = readings.even(), self.request, self.signature.width
        data: dict[str, Any] = {"U": even.left, "G": even.right, "b": even.values}
        data |= {"noise": even.noise, "rng": self.solver_rng}
        if request.solver == "nuclear-norm":
            if only:
                return nuclear_norm(**data, max_rank=request.rank)
            most = max(1, request.largest_rank(width, readings.count))
            return nuclear_norm(**data, max_rank=most, max_iterations=BRIEF_ITERATIONS)
        if only:
            return factored(**data, rank=request.rank)
        if readings.count <= FEW:
            return factored(**data, max_rank=max(1, request.largest_rank(width, readings.count)), starts=1)
        # One local search at the largest rank that so many settle with ease also finds the lower ones.
        return factored(**data, rank=max(1, request.largest_rank(width, int(readings.count / EASE))), starts=0)

    def _failure(self, readings: FormData, solution: SensingSolution) -> Unrecoverable:
        """Says how many measurements are recommended, and what else may be wrong."""
        request, width, count = self.request, self.signature.width, readings.count
        enough = request.largest_rank(width, count)
        rank = request.rank or min(enough + 1, width)
        wanted = request.recommended(width, rank)
        if request.rank is None and request.measurements is None:
            cause = f"as many as the batches may grow to at width {width}, and enough up to rank {enough}"
        elif count < wanted:
            cause = f"for width {width} and rank {rank}, {wanted} are recommended"
            cause += f"; so many are enough up to rank {enough}" if request.rank is None and enough else ""
        else:
            cause = f"{wanted} are recommended for width {width} and rank {rank}, so the rank is higher"
        error = Unrecoverable(
            Outcome.TOO_FEW_MEASUREMENTS,
            f"{count} measurements did not determine the score matrix: {cause}. They are uncertain by "
            f"{readings.noise:.1g} of their size, and the best fit leaves {solution.residual:.1g} of it; if neither "
            "number nor noise is to blame, the box is not one softmax head. Ask for more `measurements`, or "
            f"use single-head, which does with {width**2 + width + 2} queries whatever the rank",
        )
        error.partial = SingleHead(self.signature.space.asarray(solution.matrix), self.whole)
        return error


def _units(vectors: Array) -> Array:  # (n, width) -> (n, width)
    """The vectors scaled to length one."""
    return vectors / namespace(vectors).linalg.vector_norm(vectors, axis=1)[:, None]


def _scale_back(readings: FormData, solution: SensingSolution, batches: int) -> ScoreEstimate:
    """The solution with its radius: errors of the measurements, and the part that their residual may hide."""
    even, width = readings.even(), readings.left.shape[1]
    miss = ((even.left @ solution.matrix) * even.right).sum(axis=1) - even.values
    spare = readings.count - parameter_count(width, solution.rank)
    deviation = float(np.linalg.norm(miss)) / max(spare, 1) ** 0.5
    form_radius = even.radius.min() + RESIDUAL_DEVIATIONS * deviation
    spread = standard_error(even.left, even.right, solution.matrix, solution.rank)
    # Random unit vectors see a matrix as its Frobenius norm over the width; at worst it is a single entry.
    seen = float(np.sqrt(np.mean(np.sum(even.left**2, axis=1))))
    hidden = HIDDEN_FACTOR * width * deviation / seen
    return ScoreEstimate(
        solution.matrix, form_radius * spread + hidden, solution.rank, solution.residual, readings.count, batches
    )


def _zero(readings: FormData, batches: int) -> ScoreEstimate:
    """No measurement can be told from zero: neither can the score matrix."""
    width = readings.left.shape[1]
    nothing = np.zeros((width, width))
    most = float(np.sqrt(np.mean((np.abs(readings.values) + readings.radius) ** 2)))
    return ScoreEstimate(nothing, nothing + 4 * width * most, 0, 0.0, readings.count, batches)


def _estimate(
    signature: Signature,
    request: Request,
    value: Value,
    bias: ScoreBias,
    estimate: ScoreEstimate,
    output_rank: int = 1,
) -> Estimate[SingleHead]:
    space, width, rank = signature.space, signature.width, estimate.rank
    biased = bool(space.xp.any(bias.vector != 0))
    score = space.asarray(estimate.matrix)
    # The matrix was found in double precision and is handed back in that of the oracle.
    radius = space.asarray(estimate.radius) * (SECOND_ORDER if space.spacing >= FLOAT32 else 1.0)
    radius = radius + space.eps * space.xp.abs(score)
    params = SingleHead(score, value.vector, bias.vector if biased else None, value.bias if value.has_bias else None)
    radii = SingleHead(radius, value.radius, bias.radius, value.bias_radius if value.has_bias else None)
    return Estimate(
        params=params,
        radius=radii,
        counting_bound=-(-(parameter_count(width, rank) + width * biased) // output_rank) + width + value.has_bias,
        assumptions=ASSUMPTIONS,
        details={
            "rank": rank,
            "measurements": estimate.readings,
            "recommended": request.recommended(width, max(rank, 1)),
            "batches": estimate.batches,
            "solver": request.solver,
            "ensemble": request.ensemble,
            "residual": estimate.residual,
            "score_bias": biased,
            "output_bias": value.has_bias,
        },
    )


SENSING = Method(
    name="sensing",
    last_only=True,
    summary="one softmax head of low rank, from one batch of random measurements",
    run=sensing,
    families=("single-head",),
    options={
        "rank": "rank of the score matrix; found where it is not given, by doubling the batch",
        "solver": "factored (default) or nuclear-norm",
        "ensemble": "even (default) or gaussian, tokens of independent normal entries as in the theorem",
        "measurements": "how many, in one batch; as many as are recommended where it is not given",
    },
)
