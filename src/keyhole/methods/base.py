"""What a method is: a pure generator that yields plans, receives measurements and returns an estimate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from keyhole.errors import KeyholeError
from keyhole.measure import Measurements, Plan
from keyhole.recovery import Outcome

Found = TypeVar("Found")

# Yield a plan and receive its Measurements, or yield several independent plans and receive a list of them.
Steps = Generator[Plan | Sequence[Plan], Any, Found]


class Unrecoverable(KeyholeError):
    """Raised by a method that cannot go on: becomes the outcome of the recovery."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class Estimate:
    """What a method returns, before the certificate."""

    params: Any
    radius: Any  # container of the same type: entrywise radii
    counting_bound: int
    assumptions: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A named learner. `run(signature, rng, **options)` is its generator; options are its keyword arguments."""

    name: str
    summary: str
    run: Callable[..., Steps[Estimate]]
    options: Mapping[str, str] = field(default_factory=dict)  # name -> what it does


def retold(steps: Steps[Found], change: Callable[[Measurements], Measurements]) -> Steps[Found]:
    """Run a method that is told something else than what was measured, e.g. one output of several."""
    try:
        request = next(steps)
        while True:
            reply = yield request
            request = steps.send(change(reply) if isinstance(reply, Measurements) else [change(each) for each in reply])
    except StopIteration as stop:
        found: Found = stop.value
        return found
