"""The interface of whoever does pieces of work that do not depend on each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from keyhole.executors.shared import Shared

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Crew(ABC):
    """Whoever does pieces of work that do not depend on each other."""

    workers: int  # pieces that are done at the same time

    @abstractmethod
    def results(
        self,
        work: Callable[..., Result],  # of a piece; of what is shared and a piece, where something is
        pieces: Iterable[Piece],
        shared: Shared | None = None,
        *,
        ordered: bool,
        size: Callable[[Piece], float]
        | None = None,  # what a piece takes is in proportion; one that does not end hangs
    ) -> Iterator[tuple[int, Result]]:
        """(number of the piece, result), in the order of the pieces or as they come."""

    def map(
        self, work: Callable[..., Result], pieces: Iterable[Piece], shared: Shared | None = None
    ) -> Iterator[Result]:
        """The results, in the order of the pieces."""
        return (result for _, result in self.results(work, pieces, shared, ordered=True))


class OneProcess(Crew):
    """Whoever calls, one piece after the other."""

    workers = 1

    def results(
        self,
        work: Callable[..., Result],
        pieces: Iterable[Piece],
        shared: Shared | None = None,
        *,
        ordered: bool,  # noqa: ARG002 - it always is
        size: Callable[[Piece], float] | None = None,  # noqa: ARG002 - nobody else could do it
    ) -> Iterator[tuple[int, Result]]:
        """Each made when it is asked for."""
        for number, piece in enumerate(pieces):
            yield number, work(piece) if shared is None else work(shared.value, piece)
