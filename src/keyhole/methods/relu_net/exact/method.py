"""Networks of one hidden layer from queries: kinks on one line, cells between them, wide cells, orientation."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families.activations import ACTIVATIONS
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Estimate, Steps, Unrecoverable, with_sketch
from keyhole.methods.relu_net.exact.checks import FULL, LEAN, WITHOUT_FRESH, checked
from keyhole.methods.relu_net.exact.estimate import estimated
from keyhole.methods.relu_net.exact.kink_search import OPEN_AT_FIRST, NotPiecewiseLinear
from keyhole.methods.relu_net.exact.learn import learn
from keyhole.methods.relu_net.exact.queries import Box
from keyhole.methods.relu_net.exact.smooth import learn_smooth
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Lines tried before a box is said to be of another family. On each further one tolerances are wider.
LINES = 4
PATIENCE = 5.0
SMOOTH = tuple(name for name in ACTIVATIONS if name != "relu")
# Intervals of a line that may bend at once before it is taken for a curve, where that is to be found out.
CURVES = 100


def relu_net(
    signature: Signature,
    rng: np.random.Generator,
    *,
    polish: bool = True,
    activation: str = "relu",
    skip: bool | None = None,
    far_checks: bool = True,
) -> Steps[Estimate[ReluNet]]:
    """Width, weights and biases of f(x) = C·act(A·x + b) + c (+ S·x), the width k unknown, for one or more outputs.

    Every neuron kinks exactly once on a random line. About six queries find a kink, d a cell between two; adjacent
    cells differ by one neuron (Milli et al. 2019, Carlini et al. 2020 for the idea). `polish` measures again in wide
    cells, for as many queries more, and gains four digits. Which way a neuron points follows from the affine remainder:
    by least squares for k ≤ p·d, else by lattice reduction; with a skip term it cannot be known: the result has one.

    Scalar answers take about k·(d + 6) + d + 14 queries, and 13/12·(k + 2)·(d + 1) more with `polish`; p outputs about
    6k + d·k/(0.7p), and 2/p for each parameter more. Checks are 2k + 26 more, with `polish` 8k + 54, and 2k + 6 without
    `far_checks`, for callers that make some of their own. The counting bound is the number of identifiable parameters,
    k·(d + p) + p, over the p numbers of an answer. Assumes what `ASSUMPTIONS` in relu_estimate says.
    """
    _refuse_options(polish, activation, skip, signature)
    box = Box(signature)
    reason, depth = "", (FULL if polish else LEAN) if far_checks else WITHOUT_FRESH
    for attempt in range(LINES):
        smooth = _smooth(activation, attempt, signature)
        # Of a smooth box a line is all curves: where one is to be expected they are not followed far.
        crowd = CURVES if activation == "auto" and attempt == 0 else OPEN_AT_FIRST
        try:
            if smooth:
                estimate, scale = yield from learn_smooth(box, rng, smooth, skip)
            else:
                found = yield from learn(box, rng, polish=polish, patience=PATIENCE**attempt, crowd=crowd)
                details = {"lines": attempt + found.lines, "polished": polish}
                estimate, scale = estimated(box, found.pieces, found.bars, skip, details), found.scale
        except NotPiecewiseLinear as error:
            reason = str(error)
            continue
        estimate, reason = yield from with_sketch(checked(box, estimate, scale, rng, depth), estimate.sketch)
        if not reason:
            return estimate
        # What was refuted once is looked at closely: a box of another kind must not get through by trying again.
        depth = FULL
    raise Unrecoverable(
        Outcome.WRONG_FAMILY, f"{LINES} lines did not show a network of one hidden layer ({activation}): {reason}"
    )


def _smooth(activation: str, attempt: int, signature: Signature) -> tuple[str, ...]:
    """The smooth activations to try, none for ReLU; where it is to be found out, in turn."""
    if activation == "auto":
        return SMOOTH if attempt % 2 == 1 and signature.max_norm is None else ()
    if activation == "smooth":
        return SMOOTH
    return () if activation == "relu" else (activation,)


def _refuse_options(polish: Any, activation: Any, skip: Any, signature: Signature) -> None:
    if not isinstance(polish, bool):
        raise UsageError(f"polish must be true or false, not {polish!r}")
    if activation not in (*ACTIVATIONS, "smooth", "auto"):
        raise UsageError(f"activation must be auto, smooth or one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    if activation in (*SMOOTH, "smooth") and signature.max_norm is not None:
        raise UsageError(f"{activation} neurons are seen from afar only: activation must be relu or auto with max_norm")
    if skip is not None and not isinstance(skip, bool):
        raise UsageError(f"skip must be true, false or None, not {skip!r}")
