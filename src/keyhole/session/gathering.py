"""What is left to ask of some plans, and their answers as they come in, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from keyhole.arrays import Array
from keyhole.queries import Plan, Signature


@dataclass(frozen=True)
class Slice:
    """Sequences of one repeat of a plan."""

    plan: int  # number of the plan
    repeat: int
    start: int
    stop: int

    def cut(self, size: int) -> Iterator[Slice]:
        """Pieces of at most so many sequences."""
        for start in range(self.start, self.stop, size):
            yield replace(self, start=start, stop=min(start + size, self.stop))


@dataclass
class Gathering:
    """Answers to one plan. Repeats are added up in their order, so that a sum does not depend on who was first."""

    plan: Plan
    _pieces: dict[int, dict[int, Array]] = field(default_factory=dict)  # by repeat and start
    _first: Array | None = None
    _others: Array | None = None
    _next: int = field(init=False)

    def __post_init__(self) -> None:
        self._next = self.plan.first_repeat

    def place(self, repeat: int, start: int, answers: Array, signature: Signature) -> None:
        """Keep some answers."""
        self._pieces.setdefault(repeat, {})[start] = answers
        while self._is_whole(self._next):
            pieces = self._pieces.pop(self._next)
            whole = [pieces[each] for each in sorted(pieces)]
            values = whole[0] if len(whole) == 1 else signature.space.xp.concat(whole)
            if self._first is None:
                self._first = values
            else:
                self._others = values if self._others is None else self._others + values
            self._next += 1

    def _is_whole(self, repeat: int) -> bool:
        pieces = self._pieces.get(repeat, {})
        return bool(pieces) and sum(each.shape[0] for each in pieces.values()) == self.plan.count

    @property
    def values(self) -> Array | None:
        """The mean of all repeats; None of a plan that asks nothing."""
        if self._first is None or self.plan.repeats == 1:
            return self._first
        return (self._first + self._others) / self.plan.repeats

    def gaps(self, number: int, repeat: int, known: list[tuple[int, int]]) -> Iterator[Slice]:
        """What of a repeat lies between the slices that are known, given as (start, stop) in order."""
        done = 0
        for start, stop in [*known, (self.plan.count, self.plan.count)]:
            if done < start:
                yield Slice(number, repeat, done, start)
            done = stop
