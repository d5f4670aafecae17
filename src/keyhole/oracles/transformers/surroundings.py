"""What a model's own code gives a module besides tokens: masks, positions, rotary tables."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from keyhole.errors import OracleError, UsageError
from keyhole.optional import extra
from keyhole.oracles.transformers.own_run import USER, Reached, hidden_place, own_inputs, run
from keyhole.queries import digest

# Lengths at which it is seen whether a module is given sequences of the length that was asked for.
LENGTHS = (3, 5)
# Lengths whose arguments are kept.
KEPT = 256
# What a model says of its limit is tried up to so many tokens.
LONG = 1024


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a module, and where among them its tokens belong."""

    args: tuple[Any, ...]
    given: dict[str, Any]
    place: int | str

    def of(self, tokens: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tokens."""
        args, given = [_fresh(each) for each in self.args], {name: _fresh(each) for name, each in self.given.items()}
        if isinstance(self.place, str):
            given[self.place] = tokens
        else:
            args[self.place] = tokens
        return tuple(args), given

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        vectors = self.given[self.place] if isinstance(self.place, str) else self.args[self.place]
        return int(vectors.shape[1])


class Surroundings:
    """The arguments that a model gives a module, by the batch and the length of its sequences.

    They are seen in runs of the model on one sequence and on two of each length; what grows with the batch is repeated.
    """

    def __init__(self, model: Any, module: Any) -> None:
        self._model, self._module = model, module
        self._seen = lru_cache(KEPT)(self._see)
        self.fixed = self._seen(LENGTHS[0])[0].length == self._seen(LENGTHS[1])[0].length
        if self.fixed and self._depends_on_length():
            raise UsageError(
                f"{type(module).__name__} is given tables for the {self._seen(LENGTHS[0])[0].length} tokens that "
                f"{type(model).__name__} makes of every input: it cannot be asked sequences of another length"
            )

    def of(self, batch: int, length: int) -> Call:
        """The arguments for so many sequences of so many tokens."""
        try:
            one, two = self._seen(LENGTHS[0] if self.fixed else length)
        except (IndexError, RuntimeError, ValueError) as error:
            raise OracleError(
                f"{type(self._model).__name__} cannot be run on {length} tokens "
                f"({type(error).__name__}: {' '.join(str(error).split())[:160]}): say max_length="
            ) from error
        return Call(
            tuple(_repeated(a, b, batch) for a, b in zip(one.args, two.args, strict=True)),
            {name: _repeated(each, two.given[name], batch) for name, each in one.given.items()},
            one.place,
        )

    def longest(self) -> int | None:
        """How many tokens the model has positions for; None where it does not say."""
        said = getattr(self._model.config, "max_position_embeddings", None)
        if self.fixed or not isinstance(said, int):
            return None
        if said > LONG:
            return said
        for length in (said, said - 1, said - 2):  # some number their positions from 2 on
            try:
                self._see(length)
            except (IndexError, RuntimeError, ValueError):
                continue
            return length
        return None

    @property
    def words(self) -> str:
        """A text that is another where arguments are; empty where a module is given tokens alone."""
        seen = [tensor for length in LENGTHS for tensor in _tensors(self._seen(length)[0])]
        return ", given " + hashlib.sha256(b"".join(map(_digest, seen))).hexdigest()[:16] if seen else ""

    def _see(self, length: int) -> tuple[Call, Call]:
        return self._call(1, length), self._call(2, length)

    def _call(self, batch: int, length: int) -> Call:
        caught: list[Call] = []

        def hook(_module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            place = hidden_place(args, given)
            if place is not None:
                caught.append(Call(args, given, place))
                raise Reached

        run(
            self._model,
            own_inputs(self._model, batch, length),
            lambda: [self._module.register_forward_pre_hook(hook, with_kwargs=True)],
        )
        if not caught:
            raise UsageError(
                f"{type(self._module).__name__} is not given vectors when {type(self._model).__name__} runs"
            )
        return caught[0]

    def _depends_on_length(self) -> bool:
        call = self._seen(LENGTHS[0])[0]
        return any(call.length in tuple(tensor.shape) for tensor in _tensors(call))


def _tensors(call: Call) -> list[Any]:
    """All tensors among arguments but the tokens."""
    torch = extra("torch", "transformers", USER)
    left: list[Any] = [each for number, each in enumerate(call.args) if number != call.place]
    left += [each for name, each in sorted(call.given.items()) if name != call.place]
    found = []
    while left:
        each = left.pop(0)
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            left = [*each, *left]
        elif isinstance(each, dict):
            left = [*each.values(), *left]
    return found


def _fresh(argument: Any) -> Any:
    """The argument; of a cache, which every call would add keys to, a copy."""
    cache = extra("transformers", "transformers", USER).Cache
    return copy.deepcopy(argument) if isinstance(argument, cache) else argument


def _digest(tensor: Any) -> bytes:
    return digest(tensor.double() if tensor.is_floating_point() else tensor)


def _repeated(one: Any, two: Any, batch: int) -> Any:
    """An argument for `batch` sequences, from those for one and for two."""
    torch = extra("torch", "transformers", USER)
    if isinstance(one, tuple | list):
        return type(one)(_repeated(a, b, batch) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict):
        return {name: _repeated(each, two[name], batch) for name, each in one.items()}
    if not isinstance(one, torch.Tensor) or one.shape == two.shape:
        return one
    (grown,) = [place for place, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    if one.shape[grown] == 1:
        return one.expand(*(batch if place == grown else -1 for place in range(one.ndim)))
    return one.repeat(*(batch if place == grown else 1 for place in range(one.ndim)))
