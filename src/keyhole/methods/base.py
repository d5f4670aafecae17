"""What a method is: a pure generator that yields plans, receives measurements and returns an estimate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from keyhole.errors import KeyholeError
from keyhole.families import F_co
from keyhole.noise import Noise
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
        self.told = False  # whether it was of the right family, so that no other method does better


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
    # Of the same type, where errors are random and their size is known. Behind answers that are not noisy predictions
    # are known to eight of their standard deviations, as if numbers erred independently; the radius is for entries.
    standard_error: F_co | None = None
    assumptions: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def sketch(self) -> Sketch:
        """The estimate for people who watch, before it is checked."""
        return Sketch(self.params.anatomy.matrices(), 1.0)


@dataclass(frozen=True)
class Method(Generic[F_co]):
    """A named learner. `run(signature, rng, **options)` is its generator; options are its keyword arguments.

    `auto` considers a method for the families and the kinds of noise that it declares, from that alone.
    """

    name: str
    summary: str
    run: Callable[..., Steps[Estimate[F_co]]]
    options: Mapping[str, str] = field(default_factory=dict)  # name -> what it does
    families: tuple[str, ...] = ()  # whose parameters it recovers
    # Kinds of noise that it allows for. A method that takes more than exact answers also receives, as `budget=`, how
    # many queries it may spend; to one that does not, answers rounded to a dtype are exact ones of fewer digits.
    takes_noise: tuple[str, ...] = ("exact",)
    answers: Literal["numbers", "labels"] = "numbers"  # what it learns from; answers it takes are declared to be so
    # Options under which it may recover what was refuted without them: `auto` then tries it once more; of numbers,
    # where an answer is several.
    when_refuted: Mapping[str, Any] = field(default_factory=dict)
    last_only: bool = False  # whether it knows the last position only: where all are observed, the others are left out
    of_alphabet: bool = False  # whether it asks no tokens but those of an alphabet, which it needs
    goes_on: bool = False  # whether it takes `places`, single tokens (n, width) where an earlier estimate was refuted

    def takes(self, noise: Noise) -> bool:
        """Whether it recovers its families behind such errors; the rounding of a dtype is taken by every method."""
        return noise.kind in (*self.takes_noise, "dtype")

    def steps(
        self, signature: Signature, rng: np.random.Generator, budget: float, **options: Any
    ) -> Steps[Estimate[F_co]]:
        """The generator of one run, at most `budget` queries long where the method can limit itself."""
        if self.takes_noise != ("exact",):
            options = {"budget": budget, **options}
        elif signature.noise.kind == "dtype":
            signature = signature.as_coarse()
        if self.last_only and signature.positions == "all":
            return last_only(self.run(signature.with_changes(positions="last"), rng, **options))
        return self.run(signature, rng, **options)


def target_details(target_error: float | None, error: float) -> dict[str, Any]:
    """Details of a target error, where one was set: a method may end before it, and does so with a certificate."""
    return {} if target_error is None else {"target_error": target_error, "target_reached": error <= target_error}


def adapt(
    steps: Steps[Found],
    outgoing: Callable[[Plan], Plan] | None = None,
    incoming: Callable[[Plan, Measurements], Measurements] | None = None,
) -> Steps[Found]:
    """Run a generator with its plans changed on the way out and their measurements on the way in.

    `incoming` receives the plan as the inner generator made it. What goes wrong outside is raised inside it.
    """

    def send(plan: Plan) -> Plan:
        return plan if outgoing is None else outgoing(plan)

    def receive(plan: Plan, answers: Measurements) -> Measurements:
        return answers if incoming is None else incoming(plan, answers)

    try:
        request = next(steps)
        while True:
            try:
                reply = yield send(request) if isinstance(request, Plan) else [send(plan) for plan in request]
            except KeyholeError as error:
                request = steps.throw(error)
                continue
            if isinstance(request, Plan):
                reply = receive(request, reply)
            else:
                reply = [receive(plan, each) for plan, each in zip(request, reply, strict=True)]
            request = ()  # what made tokens is not held while the inner generator works
            request = steps.send(reply)
    except StopIteration as stop:
        result: Found = stop.value
        return result


def together(steps: Sequence[Steps[Found]]) -> Steps[list[Found]]:
    """Run generators that do not depend on each other in step, so that their plans are asked in the same rounds."""
    found: dict[int, Found] = {}
    requests: dict[int, Plan | Sequence[Plan]] = {}

    def advance(number: int, reply: Any) -> None:
        requests.pop(number, None)
        try:
            requests[number] = steps[number].send(reply)
        except StopIteration as stop:
            found[number] = stop.value

    for number in range(len(steps)):
        advance(number, None)
    while requests:
        asked = dict(requests)
        plans = {number: [each] if isinstance(each, Plan) else list(each) for number, each in asked.items()}
        replies: list[Measurements] = yield [plan for each in plans.values() for plan in each]
        rest = iter(replies)
        for number, request in asked.items():
            own = list(islice(rest, len(plans[number])))
            advance(number, own[0] if isinstance(request, Plan) else own)
    return [found[number] for number in range(len(steps))]


def map_measurements(steps: Steps[Found], change: Callable[[Measurements], Measurements]) -> Steps[Found]:
    """Run a generator on a function of the measurements, e.g. on one output of several."""
    return adapt(steps, incoming=lambda _, answers: change(answers))


def last_only(steps: Steps[Found]) -> Steps[Found]:
    """Run a generator on the answers at the last position."""
    return map_measurements(steps, lambda answers: replace(answers, values=answers.values[:, -1, ...]))


def with_sketch(steps: Steps[Found], so_far: Callable[[], Sketch | None]) -> Steps[Found]:
    """Offer what is known with every plan, for people who watch."""
    return adapt(steps, outgoing=lambda plan: replace(plan, so_far=so_far))
