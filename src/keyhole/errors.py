"""Everything Keyhole raises.

::

    KeyholeError
    ├── UsageError (ValueError)     an argument that cannot be meant: names it and the values that can
    ├── FileError                   a parameter file that is missing, damaged, foreign or from a newer version
    ├── JournalError                a journal that is broken, in use, or belongs to another oracle
    ├── OracleError                 the oracle misbehaved
    │   ├── OracleRaised            it raised an exception (chained as the cause)
    │   │   └── OutOfMemory         a batch did not fit into memory, however small
    │   ├── WrongShape              it answered with a shape or type that does not fit the query
    │   ├── NonFiniteAnswer         it answered nan or inf
    │   └── ServerError             a server could not be asked, or did not answer as its protocol says
    │       ├── ServerUnreachable   no connection: wrong host or port, nobody listening, or a proxy in the way
    │       ├── ServerUntrusted     no secure connection: its certificate was not accepted, or it speaks no TLS
    │       ├── ConnectionLost      the connection ended before the answer did
    │       ├── ServerTimeout       no answer in time
    │       ├── ServerBusy          it asks to wait (429, 503) for longer than allowed, or is not ready
    │       ├── AccessDenied        it wants other credentials (401, 403)
    │       ├── UnknownModel        it has no such model
    │       ├── QuestionRefused     it says that the query is wrong (other 4xx)
    │       ├── ServerFailed        it says that it failed (5xx)
    │       └── BadAnswer           no answer of the protocol: no JSON, cut short, or that of another query
    ├── BudgetExhausted             the next query would exceed the budget
    ├── WorkerError                 workers that share the work died, hang, were lost or lack something
    ├── ComputeError                the arithmetic between two queries ended without a result
    │   ├── NumericalError          it failed: a singular matrix, a division by zero, an overflow, nan or inf
    │   └── TimeExhausted           it took longer than allowed
    └── RecoveryFailed              a recovery ended without a certificate; `.result` holds what was found
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyhole.families import Family
    from keyhole.recovery import Recovery


class KeyholeError(Exception):
    """Base of every exception that Keyhole raises on purpose."""

    partial: Family | None = None  # parameters found before it was raised, where a method could tell


class UsageError(KeyholeError, ValueError):
    """An argument that cannot be meant."""


class FileError(KeyholeError):
    """A parameter file that cannot be read or written."""


class JournalError(KeyholeError):
    """A journal that cannot be used: broken, locked by another run, or written for another oracle."""


class OracleError(KeyholeError):
    """The oracle misbehaved; what it had answered before is kept in the journal.

    Where part of a batch was answered before the rest failed, `arrived` holds that part as (first sequence, answers)
    and `box` the oracle whose answers they are, so that a journal can keep them.
    """

    arrived: tuple[tuple[int, Any], ...] = ()
    box: Any = None


class OracleRaised(OracleError):
    """The oracle raised an exception; it is chained as the cause."""


class OutOfMemory(OracleRaised):
    """A batch of queries, or its answers, did not fit into memory; a smaller one may."""


class WrongShape(OracleError):
    """The oracle answered with a shape or type that does not fit the query."""


class NonFiniteAnswer(OracleError):
    """The oracle answered nan or inf."""


class ServerError(OracleError):
    """A server could not be asked, or did not answer as its protocol says."""


class ServerUnreachable(ServerError):
    """No connection to the server could be made."""


class ServerUntrusted(ServerError):
    """No secure connection could be made: a certificate was not accepted, or the server speaks no TLS."""


class ConnectionLost(ServerError):
    """The connection ended before the answer did."""


class ServerTimeout(ServerError):
    """The server did not answer in time."""


class ServerBusy(ServerError):
    """The server asks to wait for longer than allowed, or is not ready."""


class AccessDenied(ServerError):
    """The server wants other credentials."""


class UnknownModel(ServerError):
    """The server has no such model."""


class QuestionRefused(ServerError):
    """The server says that the query is wrong."""


class ServerFailed(ServerError):
    """The server says that it failed."""


class BadAnswer(ServerError):
    """What came back is no answer of the protocol, or that of another query."""


class BudgetExhausted(KeyholeError):
    """The next query would exceed the budget."""


class WorkerError(KeyholeError):
    """Workers that share the work died too often, hang, were lost, or lack what it takes."""


class ComputeError(KeyholeError):
    """The arithmetic between two queries ended without a result, after the queries of a `stage`."""

    stage: str = ""

    def __str__(self) -> str:
        where = f" after the queries of stage {self.stage!r}" if self.stage else ""
        return f"{self.args[0]}{where}"


class NumericalError(ComputeError):
    """Arithmetic failed: a singular matrix, a division by zero, an overflow, or numbers that are not finite."""


class TimeExhausted(ComputeError):
    """Arithmetic took longer than allowed."""

    def __init__(self, message: str = "the arithmetic took longer than allowed, and was ended") -> None:
        super().__init__(message)


class RecoveryFailed(KeyholeError):
    """A recovery ended without a certificate. `.result` holds the outcome and whatever was found."""

    def __init__(self, result: Recovery) -> None:
        super().__init__(f"{result.outcome.name}: {result.message}")
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result,), {"partial": self.partial}
