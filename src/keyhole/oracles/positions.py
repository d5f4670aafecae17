"""Where the outputs of a model are read: found out by a few sequences of different lengths and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import array_api_compat
import numpy as np

from keyhole.arrays import Array, namespace
from keyhole.errors import KeyholeError, UsageError, WrongShape
from keyhole.queries import Signature

Positions = Literal["last", "all"] | int

# What a model is tried on before it is asked anything: two sequences of each of these lengths.
TRIAL_LENGTHS = (3, 4)
TRIAL_BATCH = 2


@dataclass(frozen=True)
class Observed:
    """Which of a model's outputs an answer is.

    A method calls the token whose output it reads the last one. So where another position is read, the last token of a
    query is moved there, and those behind it move back by one.
    """

    place: int | None  # the position that is read; None: all of them
    everywhere: bool  # whether the model has an output at every position, or one per sequence

    def question(self, tokens: Array) -> Array:  # (batch, length, width)
        """The tokens in the order in which the model sees them."""
        if self.place in (None, -1) or not self.everywhere:
            return tokens
        length, place = tokens.shape[1], self.place
        assert place is not None
        if not -length <= place < length:
            raise WrongShape(
                f"position {place} is read, but a sequence has {length} token{'s' * (length > 1)}: "
                "methods ask single tokens too, so read positions 'last', 0 or 'all'"
            )
        place %= length
        parts = [tokens[:, :place, :], tokens[:, -1:, :], tokens[:, place:-1, :]]
        return namespace(tokens).concat(parts, axis=1)

    def answer(self, outputs: Array) -> Array:  # -> (batch[, outputs]), or (batch, length[, outputs])
        """What of the outputs is read."""
        return outputs[:, self.place, ...] if self.everywhere and self.place is not None else outputs


def place_of(positions: Positions) -> int | None:
    """The position that is read: -1 for the last, None for all."""
    if isinstance(positions, int) and not isinstance(positions, bool):
        return positions
    if positions not in ("last", "all"):
        raise UsageError(f"positions must be 'last', 'all' or the number of a position, not {positions!r}")
    return -1 if positions == "last" else None


def observe(
    positions: Positions,
    model: Callable[[Array], Any],  # (batch, length, width) -> outputs
    signature: Signature,
    who: str,
    lengths: Sequence[int] = TRIAL_LENGTHS,
    remedy: str = (
        "If it wants more than tokens, such as a mask, say how to ask it: call=lambda module, tokens: ..., "
        "with a mask for tokens.shape[1] tokens"
    ),
) -> Observed:
    """Try a model on a few sequences, to see where it has outputs; an error says what is wrong with them.

    `remedy` is said where the model raises an exception.
    """
    place = place_of(positions)
    lengths = [min(length, signature.max_length or length) for length in lengths]
    tokens = [_trial(signature, length) for length in lengths]
    outputs = [_ask(model, each, who, remedy) for each in tokens]
    shapes = [tuple(each.shape) for each in outputs]
    everywhere = all(shape[1:2] == (length,) for shape, length in zip(shapes, lengths, strict=True))
    everywhere &= len(shapes[0]) == 3 or len(set(lengths)) > 1  # a matrix may be one row of outputs per sequence
    answers = {shape[2:] if everywhere else shape[1:] for shape in shapes}
    if len(answers) > 1 or any(len(answer) > 1 for answer in answers):
        raise WrongShape(
            f"{who} answered shapes {' and '.join(map(str, shapes))} to sequences of "
            f"{' and '.join(map(str, lengths))} tokens: it must have one row of outputs per token, or one per sequence"
        )
    if not everywhere and positions != "last":
        raise UsageError(f"{who} has one answer per sequence, not one per position: leave positions at 'last'")
    if signature.noise.kind == "exact":
        if _apart(outputs[0], _ask(model, tokens[0], who, remedy), signature):
            raise UsageError(
                f"{who} answers the same question differently each time: switch off dropout and sampling, "
                "or declare the noise, e.g. noise=Noise.gaussian(0.1)"
            )
        if _apart(outputs[0][:1, ...], _ask(model, tokens[0][:1, ...], who, remedy), signature):
            raise UsageError(
                f"{who} answers a sequence differently when others are in its batch: if it wants "
                "(length, batch, width), say so of a module (batch_first=False), or export it with the batch in front; "
                "no method expects a box that mixes sequences"
            )
    return Observed(place, everywhere)


def _apart(first: Array, second: Array, signature: Signature) -> bool:
    """Whether outputs differ by more than another order of the same sums explains."""
    space = signature.space
    if tuple(first.shape) != tuple(second.shape):
        return True
    one, two = space.asarray(first), space.asarray(second)
    scale = float(space.xp.max(space.xp.abs(one)))
    return not float(space.xp.max(space.xp.abs(one - two))) <= space.eps**0.5 * scale


def _trial(signature: Signature, length: int) -> Array:  # -> (batch, length, width)
    """Sequences of tokens with entries of about one."""
    tokens = np.random.default_rng(length).standard_normal((TRIAL_BATCH, length, signature.width))
    longest = float(np.max(np.linalg.norm(tokens, axis=-1)))
    return signature.space.asarray(tokens * min(1.0, signature.norm_limit / longest))


def _ask(model: Callable[[Array], Any], tokens: Array, who: str, remedy: str) -> Array:
    """The outputs of a model, if they are one array that fits the query."""
    batch, length, width = tokens.shape
    try:
        outputs = model(tokens)
    except KeyholeError:
        raise
    except Exception as error:
        raise UsageError(
            f"{who} raised {type(error).__name__} when asked {batch} sequences of {length} tokens of width {width}: "
            f"{' '.join(str(error).split())}. Is the width right? {remedy}"
        ) from error
    if not array_api_compat.is_array_api_obj(outputs):
        kind = f"a {type(outputs).__name__}"
        kind += f" of {len(outputs)}" if isinstance(outputs, tuple | list | dict) else ""
        raise WrongShape(
            f"{who} returned {kind}, not one array: say which part is the answer, "
            "e.g. call=lambda module, tokens: module(tokens)[0]"
        )
    shape = tuple(outputs.shape)
    if not shape or shape[0] != batch or len(shape) > 3 or (len(shape) == 3 and shape[1] != length):
        raise WrongShape(
            f"{who} answered shape {shape} to tokens of shape {tuple(tokens.shape)}: "
            f"it must answer ({batch}, {length}, outputs), or one row per sequence"
        )
    return outputs
