"""Any Python function as an oracle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

from keyhole.arrays import Array, Space, numpy_space
from keyhole.errors import UsageError
from keyhole.noise import Noise
from keyhole.oracles.base import Oracle
from keyhole.queries import Alphabet, Signature, digest


class FunctionOracle(Oracle):
    """A function from tokens (batch, length, width) to answers (batch,) or (batch, outputs).

    `like` is an example array that says which array library, dtype and device the function wants
    (NumPy float64 if left out). `answers="labels"` says that an answer is a label, a whole number such as a sign or the
    number of a class. `alphabet` has as rows (m, width) the only tokens that are ever sent. `name` says what the oracle
    is; a journal belongs to one name.
    """

    def __init__(
        self,
        function: Callable[[Array], Array],
        width: int,
        max_norm: float | None = None,
        max_length: int | None = None,
        positions: Literal["last", "all"] = "last",
        noise: Noise | str | None = None,
        *,
        like: Array | None = None,
        batch_limit: int | None = None,
        answers: Literal["numbers", "labels"] = "numbers",
        alphabet: Array | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(function):
            raise UsageError(f"function must be callable, not {type(function).__name__}")
        self.function = function
        self.name = name or _name(function)
        space = numpy_space() if like is None else Space.of(like)
        letters = None if alphabet is None else Alphabet.of(alphabet, space, width)
        self.signature = Signature(
            width, space, max_norm, max_length, positions, Noise.of(noise), batch_limit, answers, letters
        )

    def answer(self, tokens: Array) -> Array:
        """Call the function."""
        return self.function(tokens)


def _name(function: Callable[[Array], Array]) -> str:
    """What a function is called; parameters that are called themselves are told apart by their numbers."""
    arrays = getattr(function, "arrays", None)
    if arrays is None:
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    words = getattr(function, "words", None)  # what parameters say besides numbers
    numbers = b"".join(digest(array) for array in arrays().values()) + (repr(words).encode() if words else b"")
    return f"{type(function).__qualname__} {hashlib.sha256(numbers).hexdigest()[:16]}"
