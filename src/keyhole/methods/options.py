"""Checks of the options of methods, which come from Python and from the command line."""

from __future__ import annotations

import math
from typing import Any

from keyhole.errors import UsageError


def check_whole(name: str, given: Any, least: int, most: float = math.inf, otherwise: str = "") -> None:
    """UsageError where an option is no whole number within bounds; None stands for its default."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and least <= given <= most):
        return
    bounds = f"of at least {least}" if math.isinf(most) else f"from {least} to {most:.0f}"
    raise UsageError(f"{name} must be a whole number {bounds}{otherwise}, not {given!r}")


def check_positive(name: str, given: Any, most: float = math.inf) -> None:
    """UsageError where an option is no positive number, or larger than it may be; None stands for its default."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is None or (is_number and math.isfinite(given) and 0 < given <= most):
        return
    bound = "a positive number" if math.isinf(most) else f"a number above 0 and at most {most:g}"
    raise UsageError(f"{name} must be {bound}, not {given!r}")
