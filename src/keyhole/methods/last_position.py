"""Methods that know only the last position, on oracles that show all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

import numpy as np

from keyhole.methods.base import Found, Steps, map_measurements
from keyhole.queries import Measurements, Signature

Options = ParamSpec("Options")


def last_only(steps: Steps[Found]) -> Steps[Found]:
    """Run a method on the answers at the last position."""
    return map_measurements(steps, lambda answers: Measurements(answers.values[:, -1, ...], answers.radius))


def at_last_position(
    run: Callable[Concatenate[Signature, np.random.Generator, Options], Steps[Found]],
) -> Callable[Concatenate[Signature, np.random.Generator, Options], Steps[Found]]:
    """A method for oracles that show the last position, made to run on those that show all of them as well."""

    @wraps(run)
    def steps(
        signature: Signature, rng: np.random.Generator, /, *args: Options.args, **options: Options.kwargs
    ) -> Steps[Found]:
        if signature.positions == "all":
            return last_only(run(signature.with_changes(positions="last"), rng, *args, **options))
        return run(signature, rng, *args, **options)

    return steps
