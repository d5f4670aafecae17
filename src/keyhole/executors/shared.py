"""What all pieces of some work have in common: sent to a worker once, and made anew in each of its threads."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from time import perf_counter
from typing import Any, NamedTuple

from keyhole.errors import UsageError, WorkerError

# Bytes that travel with every piece; what is larger travels once to each worker that asks for it.
SMALL = 2**14
# So many of them are kept in a thread of a worker.
KEPT = 4


class Ticket(NamedTuple):
    """Names what is shared, and holds it where it is small or was asked for."""

    digest: bytes
    payload: bytes | None


class Missing:
    """What a worker returns that was told a name only, and does not know it."""


class Shared:
    """A value that many pieces of work need, such as an oracle. Every thread that does some of them has its own copy.

    UsageError where it cannot be sent, which says what else to do: `instead`.
    """

    def __init__(self, value: Any, instead: str) -> None:
        self.value = value
        self.payload = _dumps(value, instead)
        self.digest = hashlib.sha256(self.payload).digest()

    def ticket(self, *, whole: bool) -> Ticket:
        """What is sent with a piece."""
        return Ticket(self.digest, self.payload if whole or len(self.payload) <= SMALL else None)


def carry_out(work: Callable[..., Any], ticket: Ticket | None, piece: Any) -> tuple[float, Any]:
    """Do a piece of work, in a worker: the seconds it took, and the result."""
    began = perf_counter()
    if ticket is None:
        result = work(piece)
        return perf_counter() - began, result
    known = _known()
    if ticket.digest not in known:
        if ticket.payload is None:
            return 0.0, Missing()
        known[ticket.digest] = _loads(ticket.payload)
        while len(known) > KEPT:
            known.popitem(last=False)
    known.move_to_end(ticket.digest)
    began = perf_counter()
    result = work(known[ticket.digest], piece)
    return perf_counter() - began, result


_LOCAL = threading.local()


def _known() -> OrderedDict[bytes, Any]:
    found: OrderedDict[bytes, Any] = _LOCAL.__dict__.setdefault("known", OrderedDict())
    return found


def _dumps(value: Any, instead: str) -> bytes:
    """With cloudpickle where it is installed, which Dask brings: it knows functions of scripts and notebooks."""
    try:
        dumps = import_module("cloudpickle").dumps
    except ImportError:
        dumps = pickle.dumps
    try:
        return bytes(dumps(value))
    except UsageError:
        raise
    except Exception as error:  # whatever the objects of others raise
        raise UsageError(f"a {type(value).__name__} cannot be sent to workers ({error}): {instead}") from error


def _loads(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise WorkerError(
            f"a worker cannot open what it was sent ({type(error).__name__}: {error}): install there what is installed "
            "here, the extras of keyhole included, and give it the same files"
        ) from error
