"""What a method is: a pure generator that yields plans, receives measurements and returns an estimate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from keyhole.errors import KeyholeError
from keyhole.families import F_co
from keyhole.queries import Measurements, Plan, Signature, Sketch
from keyhole.recovery import Outcome

Found = TypeVar("Found")

# Yield a plan and receive its Measurements, or yield several independent plans and receive a list of them.
Steps = Generator[Plan | Sequence[Plan], Any, Found]


class Unrecoverable(KeyholeError):
    """Raised by a method that cannot go on: becomes the outcome of the recovery."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class BiasDetected(Unrecoverable):
    """Raised by a method that reads heads without biases, when it meets one."""

    def __init__(self, message: str) -> None:
        super().__init__(Outcome.WRONG_FAMILY, message)


@dataclass(frozen=True)
class Estimate(Generic[F_co]):
    """What a method returns, before the certificate."""

    params: F_co
    radius: F_co  # container of the same type: entrywise radii
    counting_bound: int
    standard_error: F_co | None = None  # of the same type, where errors are random and their size is known
    assumptions: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def sketch(self) -> Sketch:
        """The same for people who watch, before it is checked."""
        return Sketch(self.params.matrices(), 1.0)


@dataclass(frozen=True)
class Method(Generic[F_co]):
    """A named learner. `run(signature, rng, **options)` is its generator; options are its keyword arguments."""

    name: str
    summary: str
    run: Callable[..., Steps[Estimate[F_co]]]
    options: Mapping[str, str] = field(default_factory=dict)  # name -> what it does
    # Robust learners are told what the noise is, dtype included, and how many queries they may spend.
    robust: bool = False

    def steps(
        self, signature: Signature, rng: np.random.Generator, budget: float, **options: Any
    ) -> Steps[Estimate[F_co]]:
        """The generator, told what it needs to know."""
        if self.robust:
            return self.run(signature, rng, budget=budget, **options)
        return self.run(signature.as_coarse(), rng, **options)


def target_details(target_error: float | None, error: float) -> dict[str, Any]:
    """What details say of a target, where one was set: a method may end before it, and does so with a certificate."""
    return {} if target_error is None else {"target_error": target_error, "target_reached": error <= target_error}


def map_measurements(steps: Steps[Found], change: Callable[[Measurements], Measurements]) -> Steps[Found]:
    """Run a method that is told something else than what was measured, e.g. one output of several."""
    try:
        request = next(steps)
        while True:
            reply = yield request
            request = steps.send(change(reply) if isinstance(reply, Measurements) else [change(each) for each in reply])
    except StopIteration as stop:
        found: Found = stop.value
        return found


def with_sketch(steps: Steps[Found], so_far: Callable[[], Sketch | None]) -> Steps[Found]:
    """The same questions, each with what is known when it is asked, for people who watch."""

    def shown(plan: Plan) -> Plan:
        return replace(plan, so_far=so_far)

    try:
        request = next(steps)
        while True:
            told = shown(request) if isinstance(request, Plan) else [shown(plan) for plan in request]
            try:
                reply = yield told
            except KeyholeError as error:
                request = steps.throw(error)
            else:
                request = steps.send(reply)
    except StopIteration as stop:
        found: Found = stop.value
        return found
