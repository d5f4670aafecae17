"""The method `relu-net`: from exact answers kink by kink, from noisy ones by a fit to random samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import KeyholeError, NumericalError, UsageError
from keyhole.families.activations import ACTIVATIONS
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.relu_net.exact.method import relu_net
from keyhole.methods.relu_net.exact.queries import is_exact
from keyhole.methods.relu_net.exact.strips import check_strips
from keyhole.methods.relu_net.noisy.method import relu_boost
from keyhole.queries import Signature
from keyhole.recovery import Outcome


def net(
    signature: Signature,
    rng: np.random.Generator,
    *,
    budget: float = math.inf,
    polish: bool = True,
    activation: str = "relu",
    skip: bool | None = None,
    target_error: float | None = None,
    neurons: int | None = None,
    places: Floats | None = None,
) -> Steps[Estimate[ReluNet]]:
    """A net of one hidden layer from queries of single tokens; how it is asked depends on what answers are worth."""
    options: dict[str, Any] = {"skip": skip}
    exact = is_exact(signature)
    if exact and (target_error is not None or neurons is not None):
        raise UsageError("target_error and neurons are for noisy or float32 boxes: exact answers need neither")
    if not exact and activation != "relu":
        raise Unrecoverable(Outcome.TOO_NOISY, f"behind noise only relu neurons are fitted, not {activation} ones")
    try:
        if exact:
            options |= {"activation": activation, "places": places}
            return (yield from relu_net(signature, rng, polish=polish, **options))
        if signature.noise.is_cut:  # errors towards zero follow the sign of the answer, as no independent ones do
            signature = signature.with_changes(noise=signature.noise.as_wide())
        options |= {"budget": budget, "target_error": target_error, "neurons": neurons}
        estimate = yield from relu_boost(signature, rng, **options)
    except KeyholeError:  # some of which are ValueErrors too
        raise
    except ValueError as error:  # answers of another family, or numbers that overflow, may defeat the linear algebra
        raise NumericalError(f"the arithmetic of a fit failed ({error})") from error
    if signature.noise.kind == "bounded":
        yield from check_strips(signature, estimate.params, rng)
    return estimate


NET = Method(
    name="relu-net",
    summary="one hidden layer of ReLU (GELU, SiLU) neurons, width unknown",
    run=net,
    last_only=True,
    goes_on=True,
    families=("relu-net",),
    takes_noise=("exact", "gaussian", "bounded", "rounded", "dtype"),
    options={
        "polish": "measure again in wide cells: twice the queries, four digits more (default: true)",
        "activation": f"one of {', '.join(ACTIVATIONS)}, smooth (any but relu), or auto to find out (default: relu)",
        "skip": "whether the box has an affine way past its neurons (default: find out)",
        "target_error": "behind noise: wanted error of the function, root mean square",
        "neurons": "behind noise: most neurons the net can have",
    },
)
