"""The six phases of Chen and Li, *Provably Learning a Multi-Head Attention Layer*, each a step of its own.

1. `crude_sum`: the sum S of the projections, from examples whose tokens are nearly the same.
2. `sculpt`: rows on which all heads attend alike, certified by F_a = SᵀXᵀp; each is a linear constraint on every score
   matrix (`constraints`), and together they leave an affine hull.
3. `proxy`: the point of least norm in the hull.
4. `span`: the directions Θ_i − Θ_j, in which the constraints are flat.
5. `net`: points of the hull, chosen by how well the layers they make explain the examples.
6. `projections`: the projections by least squares.

The order, the certified rows, the hull, the point of least norm, the net with its certification and the least squares
are the paper's; the scores by which rows are chosen, the annealing, the Gauss–Newton steps of phase 3, the
exchange in phase 5 and the later rounds, in which rows must also be `alike` in the heads found before, are ours.
Theorem 1.2 of the paper: (dk)^O(m³) time and (kd)^Θ(m) examples for non-degenerate layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any

import numpy as np

from keyhole.arrays import ArrayTable, Floats
from keyhole.errors import UsageError
from keyhole.samples.six_phase.body import Body
from keyhole.samples.six_phase.heads import sculpt_heads
from keyhole.samples.six_phase.hull import Hull, NetCost, net
from keyhole.samples.six_phase.margins import large_margin_sum
from keyhole.samples.six_phase.rows import Rows, alike, proxy, rescore, sculpt, span
from keyhole.samples.source import Source
from keyhole.samples.variable_projection import LayerProblem, relative_error
from keyhole.samples.varpro import Progress

ASSUMPTIONS = (
    "inputs are uniform signs or normal numbers",
    "the sum of projections is not small, logits are of order one or less, and there are m(k − 1) outputs or more",
)
# Phase 1: examples with the least variance of tokens.
CRUDE_EXAMPLES = 300
# Rows that are kept, first and last in each cycle; the last a part of all, from 4·d² to 60·d² for each pair of tokens.
FIRST_ROWS, LEAST_ROWS, MOST_ROWS, LAST_PART = 100, 4, 60, 1 / 16
CYCLES, ROUNDS = 3, 4
# Rows that stay in sight within a cycle, in units of those kept at its end.
POOL = 8
# Later rounds through the phases: what part of the rows each keeps, and from how many times as many.
RETURNS, RETURN_POOL = (1 / 2, 1 / 4, 1 / 8), 8
# Phase 6: examples that projections are fitted to, or 20 numbers per parameter if that is more.
LAST_EXAMPLES = 4000
# Examples in memory that the last phases may need.
PHASE_EXAMPLES = 8000
# What is reported of the cost of phase 5 begins with this.
NET = "the six phases will make "
CRUDE, SOLVERS = ("regression", "correlation"), ("least-squares", "l1", "body")


@dataclass(frozen=True)
class SixPhase:
    """What the six phases found."""

    scores: Floats  # (m, d, d)
    projections: Floats  # (m, d, d_out)
    total: Floats  # (d, d_out): S
    hull: Hull
    error: float  # relative, of the outputs
    figures: dict[str, dict[str, Any]]  # per phase


@dataclass(frozen=True)
class PhaseSettings:
    """How phases are carried out, where there is a choice."""

    crude: str = "regression"  # phase 1: or "correlation"
    solver: str = "least-squares"  # phases 2 and 3: or "l1", or "body", the explicit polytope, by linear programs
    margins: bool = True  # phase 3: S is refined on rows of large margins
    by_head: bool = True  # ours: after the net, certified rows of one head at a time

    def __post_init__(self) -> None:
        for name, known in (("crude", CRUDE), ("solver", SOLVERS)):
            if getattr(self, name) not in known:
                raise UsageError(f"unknown {name} {getattr(self, name)!r} of the six phases; known: {', '.join(known)}")


def six_phase(
    source: Source,
    heads: int,
    seed: int = 0,
    settings: PhaseSettings = PhaseSettings(),  # noqa: B008
    progress: Progress | None = None,
) -> SixPhase:
    """All phases, one after the other; then again from the second on, with the sum and the heads that came out.

    S, rows and proxy are gone through several times before the first net. Later rounds know more and need fewer rows,
    half as many each; they are kept where they explain the examples better. What the net costs is reported first.
    """
    cost = NetCost.of(heads, source.width)  # which says where it cannot be afforded
    if progress is not None:
        progress(f"{NET}{cost}", 0, 1, float("inf"))
    rng = np.random.default_rng([seed, 0x516])
    total, exact = crude_sum(source)
    if settings.crude == "correlation" and not exact:
        total = correlated_sum(source)
    run = _Run(source, heads, settings, rng, exact)
    found = run.first(total)
    for part in RETURNS if heads > 1 else ():
        again = run.again(found, part)
        found = again if again.error < found.error else found
    return run.head_by_head(found) if settings.by_head and heads > 1 else found


@dataclass(frozen=True)
class _Run:
    """One call of the six phases."""

    source: Source
    heads: int
    settings: PhaseSettings
    rng: np.random.Generator
    exact_sum: bool  # phase 1 found S exactly

    @property
    def last(self) -> int:
        """Rows that are kept at the end of a cycle."""
        k, d = self.source.length, self.source.width
        return int(np.clip(LAST_PART * self.source.count * k, LEAST_ROWS * d**2, MOST_ROWS * d**2 * (k - 1)))

    def first(self, total: Floats) -> SixPhase:
        """Phases 2 to 6 from a crude S: cycles of ever more rows."""
        started, refined, norm = total, False, float(np.linalg.norm(total))
        for cycle in range(CYCLES):
            pool = sculpt(self.source, total, POOL * self.last)
            last = min(self.last, max(2, len(pool.scores) // 2))
            for count in (round(float(each)) for each in np.geomspace(min(FIRST_ROWS, last), last, ROUNDS)):
                rows = rescore(pool, total).best(count)
                use = (
                    "l1" if self.settings.solver == "l1" and cycle == CYCLES - 1 and count == last else "least-squares"
                )
                point, total = proxy(rows, total, self.heads, use, refine=not self.exact_sum and not refined)
            if self.settings.margins and not self.exact_sum and cycle < CYCLES - 1:
                total, better = large_margin_sum(self.source, point, total, started)
                refined |= better
        crude = {"examples": min(CRUDE_EXAMPLES, self.source.count), "norm": norm, "exact": self.exact_sum}
        return self._finish(rows, total, point, None, crude | {"rounds": 1, "large_margins": refined})

    def again(self, before: SixPhase, part: float) -> SixPhase:
        """Phases 2 to 6 from the sum of the projections that were found, on rows that the heads found agree on too."""
        total = self._sum(before, before.projections)
        count = max(LEAST_ROWS * self.source.width**2, int(part * self.last))
        pool = sculpt(self.source, total, RETURN_POOL * count)
        rows = alike(pool, before.scores).best(count)
        use = "l1" if self.settings.solver == "l1" else "least-squares"
        point, total = proxy(rows, total, self.heads, use, refine=False)
        crude = before.figures["1 crude sum"]
        return self._finish(rows, total, point, before.scores, crude | {"rounds": crude["rounds"] + 1})

    def _sum(self, before: SixPhase, projections: Floats) -> Floats:  # (m, d, d_out) -> (d, d_out)
        """The sum of projections, unless phases 1 or 3 know it better."""
        known = self.exact_sum or before.figures["1 crude sum"]["large_margins"]
        return before.total if known else np.asarray(np.sum(projections, axis=0))

    def _hull(self, rows: Rows, total: Floats, point: Floats) -> tuple[Hull, dict[str, Any]]:
        """Phases 3 and 4: from the body by linear programs, or from the flattest directions of the rows."""
        flat = span(rows, total, point, self.heads)
        if self.settings.solver != "body":
            return Hull.through(point, flat.directions), flat.figures
        body = Body.of(rows)
        directions = body.span(self.heads - 1, self.rng).reshape(-1, *point.shape)
        return Hull.through(body.least_norm().reshape(point.shape), directions), flat.figures

    def _finish(self, rows: Rows, total: Floats, point: Floats, near: Floats | None, crude: dict[str, Any]) -> SixPhase:
        """Phases 4 to 6, and the figures of all."""
        hull, flat = self._hull(rows, total, point)
        scores, tried = net(self.source, hull, self.heads, self.rng, near)
        weights, error = projections(self.source, scores)
        figures = {
            "1 crude sum": crude,
            "2 sculpt": {
                "rows": len(rows.scores),
                "of": self.source.count * self.source.length,
                "worst_score": float(rows.scores[-1]),
                "solver": self.settings.solver,
            },
            "3 proxy": {"norm": float(np.linalg.norm(hull.proxy)), "sum_norm": float(np.linalg.norm(total))},
            "4 span": flat,
            "5 net": tried,
            "6 projections": {"relative_error": error, "norms": [float(np.linalg.norm(each)) for each in weights]},
        }
        return SixPhase(scores, weights, total, hull, error, figures)

    def head_by_head(self, found: SixPhase) -> SixPhase:
        """Sculpting head by head from what the phases found, kept where it explains the examples better."""
        scores, weights, error, sweeps = sculpt_heads(self.source, found.scores)
        better = error < found.error
        figures = found.figures | {"7 head by head": {"sweeps": sweeps, "relative_error": min(error, found.error)}}
        if not better:
            return replace(found, figures=figures)
        figures["6 projections"] = figures["6 projections"] | {
            "norms": [float(np.linalg.norm(each)) for each in weights]
        }
        return SixPhase(scores, weights, self._sum(found, weights), Hull.of(scores), error, figures)


def crude_sum(source: Source, count: int = CRUDE_EXAMPLES) -> tuple[Floats, bool]:  # -> (d, d_out)
    """Phase 1: least squares of the mean output on the mean token, where tokens differ least; and whether S is exact.

    If all tokens were the same x, each row of the output would be xᵀS whatever the scores are. Signs of few tokens are
    now and then: where such examples span everything, S is exact.
    """
    rows = source.reduce(partial(_nearly_alike, count), partial(_most_alike, count))
    exact = rows.take(rows.spread == 0.0)
    spanned = len(exact.spread) > 0 and np.linalg.matrix_rank(exact.inputs) == source.width
    chosen = exact if spanned else rows
    return np.asarray(np.linalg.lstsq(chosen.inputs, chosen.outputs, rcond=None)[0]), bool(spanned)


@dataclass(frozen=True)
class AlikeExamples(ArrayTable):
    """Examples whose tokens are nearly the same."""

    inputs: Floats  # (n, d): mean tokens
    outputs: Floats  # (n, d_out): mean outputs
    spread: Floats  # (n,): variance of tokens over the size of their mean; 0 where they are all the same


def _nearly_alike(count: int, inputs: Floats, outputs: Floats) -> AlikeExamples:
    centre = np.mean(inputs, axis=1)
    variance = np.mean((inputs - centre[:, None]) ** 2, axis=(1, 2))
    # By chance all tokens may be nothing but small: what counts is the spread over the size.
    spread = variance / np.maximum(np.mean(centre**2, axis=1), 1e-12)
    spread[np.all(inputs == inputs[:, :1], axis=(1, 2))] = 0.0
    chosen = np.argsort(spread, kind="stable")[:count]
    return AlikeExamples(centre[chosen], np.mean(outputs[chosen], axis=1), spread[chosen])


def _most_alike(count: int, *parts: AlikeExamples) -> AlikeExamples:
    both = AlikeExamples.concat(*parts)
    return both.take(np.argsort(both.spread, kind="stable")[:count])


def correlated_sum(source: Source) -> Floats:  # -> (d, d_out)
    """Phase 1 by correlation: E[x̄ ⊗ F̄] over E[x̄ ⊗ x̄], which is 1/k of the identity for signs and normal numbers."""
    paired, count = source.reduce(_correlation, add), source.reduce(_count, add)
    return np.asarray(source.length * paired / count)


def _correlation(inputs: Floats, outputs: Floats) -> Floats:
    return np.asarray(np.mean(inputs, axis=1).T @ np.mean(outputs, axis=1))


def _count(inputs: Floats, outputs: Floats) -> int:  # noqa: ARG001
    return len(inputs)


def projections(source: Source, scores: Floats) -> tuple[Floats, float]:
    """Phase 6: the projections by least squares, and the relative error on examples that they were not fitted to."""
    inputs, outputs = source.some(max(LAST_EXAMPLES, 20 * scores.size // source.length))
    cut = max(1, len(inputs) - len(inputs) // 5)
    point = LayerProblem(inputs[:cut], outputs[:cut]).at(scores)
    apart = LayerProblem(inputs[cut:], outputs[cut:]) if cut < len(inputs) else point.problem
    return point.projections, relative_error(apart, point)
