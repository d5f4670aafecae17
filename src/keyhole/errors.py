"""Everything Keyhole raises.

::

    KeyholeError
    ├── UsageError (ValueError)     an argument that cannot be meant: names it and the values that can
    ├── FileError                   a parameter file that is missing, damaged, foreign or from a newer version
    ├── JournalError                a journal that is broken, in use, or belongs to another box
    ├── OracleError                 the black box misbehaved
    │   ├── OracleRaised            it raised an exception (chained as the cause)
    │   ├── WrongShape              it answered with a shape or type that does not fit the question
    │   └── NonFiniteAnswer         it answered nan or inf
    ├── BudgetExhausted             the next question would exceed the budget
    └── RecoveryFailed              a recovery ended without a certificate; `.result` holds what was found
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyhole.recovery import Recovery


class KeyholeError(Exception):
    """Base of every exception that Keyhole raises on purpose."""

    partial: Any = None  # parameters found before it was raised, where a method could tell


class UsageError(KeyholeError, ValueError):
    """An argument that cannot be meant."""


class FileError(KeyholeError):
    """A parameter file that cannot be read or written."""


class JournalError(KeyholeError):
    """A journal that cannot be used: broken, locked by another run, or written for another box."""


class OracleError(KeyholeError):
    """The black box misbehaved; what it had answered before is kept in the journal."""


class OracleRaised(OracleError):
    """The black box raised an exception; it is chained as the cause."""


class WrongShape(OracleError):
    """The black box answered with a shape or type that does not fit the question."""


class NonFiniteAnswer(OracleError):
    """The black box answered nan or inf."""


class BudgetExhausted(KeyholeError):
    """The next question would exceed the budget."""


class RecoveryFailed(KeyholeError):
    """A recovery ended without a certificate. `.result` holds the outcome and whatever was found."""

    def __init__(self, result: Recovery) -> None:
        super().__init__(f"{result.outcome.name}: {result.message}")
        self.result = result
