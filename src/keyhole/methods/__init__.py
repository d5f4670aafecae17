"""Learners: a folder each, all of them pure generators. None of them touches an oracle."""

from keyhole.errors import UsageError
from keyhole.methods.attempt import Attempt, Task, attempt_twice, ending, stream
from keyhole.methods.auto import NAME, auto, check_options
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.registry import METHODS

__all__ = [
    "METHODS",
    "Attempt",
    "Estimate",
    "Method",
    "Steps",
    "Task",
    "Unrecoverable",
    "ending",
    "recovery_steps",
    "stream",
]


def recovery_steps(name: str, task: Task) -> Steps[Attempt]:
    """The generator of a recovery by a named method; UsageError where name or options are unknown."""
    if name == NAME:
        check_options(task.options)
        return auto(task)
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known: {NAME}, {', '.join(METHODS)}")
    method = METHODS[name]
    unknown = sorted(set(task.options) - set(method.options))
    if unknown:
        known = ", ".join(method.options) or "none"
        raise UsageError(f"method {name!r} has no option {unknown[0]!r}; its options: {known}")
    return attempt_twice(method, task)
