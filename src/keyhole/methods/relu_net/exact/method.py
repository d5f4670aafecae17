"""Networks of one hidden layer from queries: kinks on one line, cells between them, wide cells, orientation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.errors import UsageError
from keyhole.families.activations import ACTIVATIONS
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Estimate, Steps, Unrecoverable, with_sketch
from keyhole.methods.relu_net.exact.bounded_norm import ask_in_ball
from keyhole.methods.relu_net.exact.cells import (
    EXTRA_CELLS,
    CellEquations,
    allow_for_cancelling,
    ask_wide_cells,
    pieces_of,
    rows_of_line,
    solve_neurons,
    typical_distance,
)
from keyhole.methods.relu_net.exact.checks import FULL, LEAN, WITHOUT_HELDOUT, ask_checks
from keyhole.methods.relu_net.exact.estimate import PieceErrors, estimate_net
from keyhole.methods.relu_net.exact.kink_search import CUT, OPEN_AT_FIRST, NotPiecewiseLinear
from keyhole.methods.relu_net.exact.line import ask_cells, ask_line, random_line
from keyhole.methods.relu_net.exact.queries import Pieces, TokenQueries
from keyhole.methods.relu_net.exact.several_outputs import ask_several_outputs
from keyhole.methods.relu_net.exact.smooth import FARTHER, FARTHEST, ask_smooth
from keyhole.methods.relu_net.exact.strips import HIDDEN, Strip, ask_strip
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Lines tried before an oracle is said to be of another family. On each further one tolerances are wider.
LINES = 4
# Lines through a strip that was found.
AFTER_STRIP = 3
PATIENCE = 5.0
# Exact answers tell the directions of kinks to more digits than these, unless a line met few of them well.
VAGUE = 1e-3
SMOOTH = tuple(name for name in ACTIVATIONS if name != "relu")
# Intervals of a line that may bend at once before it is taken for a curve, where that is to be found out.
CURVES = 100
# Lean results measure again the cells between close kinks where the expected error of the function is above this part
# of its size, up to this part of all cells.
LEAN_ERROR = 1e-8
LEAN_EXTRA = 1 / 24
# Radii are about this many times the errors.
PESSIMISM = 10.0


def relu_net(
    signature: Signature,
    rng: np.random.Generator,
    *,
    polish: bool = True,
    activation: str = "relu",
    skip: bool | None = None,
    far_checks: bool = True,
    places: Floats | None = None,  # (n, width) where an earlier estimate was refuted
) -> Steps[Estimate[ReluNet]]:
    """Width, weights and biases of f(x) = C·act(A·x + b) + c (+ S·x), the width k unknown, for one or more outputs.

    Every neuron kinks exactly once on a random line. About six queries find a kink, d a cell between two; adjacent
    cells differ by one neuron (Milli et al. 2019, Carlini et al. 2020 for the idea). `polish` measures again in wide
    cells, for as many queries more, and gains four digits. Which way a neuron points follows from the affine remainder:
    by least squares for k ≤ p·d, else by lattice reduction; with a skip term it cannot be known: the result has one.

    Scalar answers take about k·(d + 6) + d + 14 queries, and 13/12·(k + 2)·(d + 1) more with `polish`; p outputs about
    6k + d·k/(0.7p), and 2/p for each parameter more. Checks are 2k + 26 more, with `polish` 8k + 54, and 2k + 6 without
    `far_checks`, for callers that make some of their own. The counting bound is the number of identifiable parameters,
    k·(d + p) + p, over the p numbers of an answer. Assumes what `ASSUMPTIONS` in estimate.py says.
    """
    _check_options(polish, activation, skip, signature)
    queries = TokenQueries(signature)
    reason, depth = "", (FULL if polish else LEAN) if far_checks else WITHOUT_HELDOUT
    place: Floats | None = None  # where the last estimate was refuted
    room: float | None = None  # around it without a kink, where that is known
    inside: list[Floats] = []  # of a norm bound, where estimates were refuted
    vague: Estimate[ReluNet] | None = None  # the last estimate of wide radii
    strip: Strip | None = None  # the last that was met
    if places is not None and len(places):
        inside, depth, place = list(places), FULL, places[np.argmin(np.linalg.norm(places, axis=1))]
    farther = FARTHER
    attempt, most = -1, LINES
    while (attempt := attempt + 1) < most:
        smooth = _smooth(activation, attempt, signature)
        # Of a smooth oracle a line is all curves: where one is to be expected they are not followed far.
        crowd = CURVES if activation == "auto" and attempt == 0 else OPEN_AT_FIRST
        try:
            if smooth:
                farther = FARTHER / farther  # in turn usual lengths and longer ones
                afar = TokenQueries(signature, farther * FARTHEST)
                far, _, _, lines = yield from _ask_pieces(afar, rng, polish=False)
                estimate, scale = yield from ask_smooth(queries, rng, far, farther, smooth, skip, lines)
            else:
                asked = _ask_pieces(
                    queries, rng, polish, PATIENCE**attempt, crowd, through=place, room=room, places=inside
                )
                pieces, radii, scale, lines = yield from asked
                estimate = estimate_net(queries, pieces, radii, skip, {"lines": attempt + lines, "polished": polish})
        except NotPiecewiseLinear as error:
            reason = str(error)
            continue
        checks = ask_checks(queries, estimate, scale, rng, depth)
        estimate, reason, place = yield from with_sketch(checks, estimate.sketch)
        room = None
        if not reason and not smooth and (attempt or depth.strips):
            met = yield from ask_strip(queries, pieces, scale, rng)
            if met is not None:
                strip, reason, place, room = met, HIDDEN, met.token, met.apart
                most = max(most, attempt + 1 + AFTER_STRIP)
        if not reason and (smooth or queries.noise or not _is_vague(estimate)):
            return estimate
        vague = vague if reason else estimate
        inside += [] if place is None else [place]
        depth = FULL  # an oracle of another kind must not get through by trying again
    if vague is not None:
        return vague
    if strip is not None:
        raise Unrecoverable(Outcome.TOO_NOISY, f"{HIDDEN} were met, and are too close to be read: {reason}")
    raise Unrecoverable(
        Outcome.WRONG_FAMILY, f"{most} lines did not show a network of one hidden layer ({activation}): {reason}"
    )


def _is_vague(estimate: Estimate[ReluNet]) -> bool:
    """Whether planes of kinks are known to so few digits that another line may tell more."""
    inner = floats(estimate.params.weights_in)
    tilts = np.max(floats(estimate.radius.weights_in), axis=1, initial=0.0) / np.linalg.norm(inner, axis=1)
    return bool(np.any(tilts > VAGUE))


def _smooth(activation: str, attempt: int, signature: Signature) -> tuple[str, ...]:
    """The smooth activations to try, none for ReLU; where it is to be found out, in turn."""
    if activation == "auto":
        return SMOOTH if attempt % 2 == 1 and signature.max_norm is None else ()
    if activation == "smooth":
        return SMOOTH
    return () if activation == "relu" else (activation,)


def _check_options(polish: Any, activation: Any, skip: Any, signature: Signature) -> None:
    if not isinstance(polish, bool):
        raise UsageError(f"polish must be true or false, not {polish!r}")
    if activation not in (*ACTIVATIONS, "smooth", "auto"):
        raise UsageError(f"activation must be auto, smooth or one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    if activation in (*SMOOTH, "smooth") and signature.max_norm is not None:
        raise UsageError(f"{activation} neurons are seen from afar only: activation must be relu or auto with max_norm")
    if skip is not None and not isinstance(skip, bool):
        raise UsageError(f"skip must be true, false or None, not {skip!r}")


def _ask_pieces(
    queries: TokenQueries,
    rng: np.random.Generator,
    polish: bool,
    patience: float = 1.0,
    crowd: int = OPEN_AT_FIRST,
    *,
    through: Floats | None = None,
    room: float | None = None,
    places: Sequence[Floats] = (),
) -> Steps[tuple[Pieces, PieceErrors, float, int]]:
    """Pieces, their radii, the typical distance of a kink from the origin and the number of lines that were asked.

    Kinks on a line, then gradients between them, then wide cells; NotPiecewiseLinear where that fails.
    """
    if queries.signature.max_norm is not None:
        inside = yield from ask_in_ball(queries, rng, patience, np.stack(places) if places else None)
        rows, towards, lines = inside.rows, inside.towards, inside.lines
        unit = queries.signature.norm_limit
    else:
        # What was refuted at some token has kinks beside it that cancel farther away.
        line, lines = random_line(queries, rng, through), 1
        unit = line.unit
        cut = 0.0 if through is None else room or CUT * unit
        kinked = yield from ask_line(queries, line, rng, patience=patience, crowd=crowd, cut=cut)
        if kinked.slope.shape[1] > 1:
            return *(yield from ask_several_outputs(queries, line, kinked, rng, polish)), lines
        cells = yield from ask_cells(queries, line, kinked, np.arange(kinked.kinks.size + 1), rng)
        rows = rows_of_line(queries, line, kinked, cells)
        towards = np.tile(line.direction, (kinked.kinks.size, 1))
    rows = allow_for_cancelling(queries, rows, pieces_of(solve_neurons(rows), towards))
    jumps = solve_neurons(rows)
    pieces = pieces_of(jumps, towards)
    scale = min(typical_distance(pieces, jumps.radii.level, unit), unit)
    count = pieces.count
    more = (
        count + 2 + int(EXTRA_CELLS * count) if polish else _count_imprecise(queries, pieces, jumps.covariance, scale)
    )
    if more and float(pieces.size(np.asarray(unit))) > 0:
        stage = "polish" if polish else "cells"
        wide = yield from ask_wide_cells(queries, pieces, jumps.covariance, scale, more, rng, stage)
        rows = CellEquations.concat(rows, wide)
        jumps = solve_neurons(rows)
        pieces = pieces_of(jumps, towards)
    return pieces, jumps.radii, scale, lines


def _count_imprecise(queries: TokenQueries, pieces: Pieces, covariance: Floats, scale: float) -> int:
    """How many cells a lean result should measure again: those whose error is far above that of the others."""
    variance = np.diag(covariance)[:-1] * (scale * queries.width**0.5) ** 2
    size = float(pieces.size(np.asarray(scale * queries.width**0.5)))
    poor = np.sum(np.sqrt(variance) > PESSIMISM * LEAN_ERROR * size)
    # A narrow cell spoils the neurons on both of its sides.
    return int(min(-(-poor // 2), np.ceil(LEAN_EXTRA * variance.size)))
