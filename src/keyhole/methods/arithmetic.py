"""How arithmetic between two queries may end but by a result: it fails, or it takes longer than allowed.

Methods are pure and look at no clock. A thread does so for them, and once their time is over raises `TimeExhausted`
where they are, as Ctrl-C would: any loop of Python ends there, a single call into a library when it returns.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from types import TracebackType

import numpy as np

from keyhole.arrays import is_out_of_memory
from keyhole.errors import ComputeError, KeyholeError, NumericalError, TimeExhausted, UsageError
from keyhole.families import Family
from keyhole.methods.base import Found, Steps, adapt
from keyhole.queries import Plan

# Words of a ValueError that numbers are to blame for, not code: what NumPy, SciPy and Python say of nan and inf.
NOT_FINITE = re.compile(r"\b(nans?|infs?|infinity|infinite|(non-?)?finite|infeasible|math domain)\b", re.IGNORECASE)
# Seconds between two looks at the clock, and from one exception to the next where the first was not the end.
LOOK, AGAIN = 0.05, 1.0
# Steps of Python among which an exception that another thread has raised comes up.
STEPS = 1000
# Seconds that arithmetic may take where nobody sets a limit: to begin with, for every query, and for every query times
# the numbers of a token and of an answer. The slowest method takes a tenth of it.
BASE, EACH, EACH_NUMBER = 60.0, 0.05, 2.0**-12


def default_limit(queries: int, width: int, outputs: int) -> float:
    """Seconds of arithmetic that so many queries are worth, generously."""
    return BASE + queries * (EACH + EACH_NUMBER * width * outputs)


def check_seconds(seconds: float | None) -> float | None:
    """The limit that a user sets; UsageError where it is none."""
    number = isinstance(seconds, int | float | np.number) and not isinstance(seconds, bool)
    if seconds is not None and not (number and seconds > 0):
        raise UsageError(f"max_seconds must be a positive number, not {seconds!r}")
    return None if seconds is None else float(seconds)


def is_arithmetic(error: BaseException) -> bool:
    """Whether numbers are to blame for an error: a singular matrix, a division by zero, an overflow, nan or inf."""
    if isinstance(error, ArithmeticError) or type(error).__name__ in ("LinAlgError", "_LinAlgError"):  # PyTorch's too
        return True
    return isinstance(error, ValueError) and not isinstance(error, KeyholeError) and bool(NOT_FINITE.search(str(error)))


def as_ending(error: Exception) -> KeyholeError | None:
    """What an error inside a method amounts to; None for an error in its code, which is nobody's outcome."""
    if isinstance(error, KeyholeError):
        return error
    if is_out_of_memory(error):
        return NumericalError(f"what the method works out does not fit into memory ({type(error).__name__}: {error})")
    return NumericalError(f"the arithmetic failed ({type(error).__name__}: {error})") if is_arithmetic(error) else None


@contextmanager
def partial_result(params: Callable[[Family | None], Family | None]) -> Iterator[None]:
    """Attach what is known to whatever ends a method early, failed arithmetic included.

    `params` receives what an inner part has attached. Errors in the code itself stay what they are.
    """
    try:
        yield
    except Exception as error:
        ended = as_ending(error)
        if ended is None:
            raise
        with suppress(ArithmeticError, ValueError, KeyholeError):  # what failed once may fail again
            ended.partial = params(ended.partial)
        raise ended from (error.__cause__ if ended is error else error)


def check_arithmetic(steps: Steps[Found]) -> Steps[Found]:
    """Run a generator, and raise NumericalError where its arithmetic fails, with the stage that it was in."""
    stage = ""

    def remember(plan: Plan) -> Plan:
        nonlocal stage
        stage = plan.stage
        return plan

    try:
        with partial_result(lambda known: known):
            return (yield from adapt(steps, outgoing=remember))
    except ComputeError as error:
        error.stage = error.stage or stage
        raise


class ComputeLimit:
    """Adds up the seconds spent inside `with limit:`; TimeExhausted is raised there once they are more than allowed."""

    def __init__(self, allowed: Callable[[], float]) -> None:
        self.allowed = allowed  # looked at whenever arithmetic begins
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._ended: threading.Event | None = None  # ends the thread; None while there is none
        self._due: float | None = None  # when the exception is to be raised; None outside of `with`
        self._began = 0.0
        self._owner = 0
        self._raised = False  # whether an exception is on its way

    def check(self) -> None:
        """TimeExhausted where the time is over."""
        if self.seconds > self.allowed():
            raise TimeExhausted

    def __str__(self) -> str:
        return f"{self.seconds:.3g} of {self.allowed():.3g} s"

    def close(self) -> None:
        """End the thread; the next `with` begins another one."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def __enter__(self) -> ComputeLimit:
        self._owner, self._began = threading.get_ident(), perf_counter()
        self._due = self._began + self.allowed() - self.seconds
        if self._ended is None and sys.implementation.name == "cpython":
            self._ended = threading.Event()
            threading.Thread(target=self._watch, args=(self._ended,), name="keyhole compute limit", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._due = None
            self.seconds += perf_counter() - self._began
            late, self._raised = self._raised, False
        if late:  # one that has not come up yet does so here, and `check` says the same
            with suppress(TimeExhausted):
                for _ in range(STEPS):
                    pass

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK):
            with self._lock:
                if self._due is not None and perf_counter() > self._due:
                    self._raised = True
                    _raise_in(self._owner)
                    self._due += AGAIN


def _raise_in(thread: int) -> None:
    """Raise TimeExhausted in a thread, at its next step."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeExhausted))
