"""Sequences of several lengths in few batches, for predictions: small ones cost by the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Generic, NamedTuple

import numpy as np

from keyhole.arrays import Array, Integers, Space, namespace
from keyhole.families import F, F_co, Family

# Tokens that pad a batch, at most: a batch more costs as much as numbers of so many tokens, and beside large arrays, of
# which squares are made for every batch, as much as some products of a token with them.
PADDING_NUMBERS, PADDING_TOKENS = 2**14, 16
# The same on a device, where some hundred launches of a batch take about 1 ms, in which so many numbers are worked out.
DEVICE_PADDING = 2**22


class Batch(NamedTuple, Generic[F_co]):
    """Sequences of one length, or made so, and parameters that answer them as if they were not."""

    places: Integers  # (n,) among all sequences
    tokens: Array  # (n, length, width), of shorter sequences behind copies of their first token
    lengths: Integers  # (n,) of the sequences themselves
    params: F_co  # for these tokens only


def in_batches(params: F, groups: Iterable[tuple[Integers, Array]], space: Space) -> Iterator[Batch[F]]:
    """Places and sequences (n, length, width) of one length each, some lengths together where the family allows it.

    Single tokens stay by themselves: families know more of these. A batch is made where the one before was: fresh
    memory costs more than what is written to it.
    """
    batches = []
    for some in _within_padding(params, sorted(groups, key=_length), space.on_cpu):
        padded = _padded(params, some, space)
        apart = [some] if padded is not None else [list(same) for _, same in groupby(some, key=_length)]
        batches += [(padded or params, own, _shape(own)) for own in apart]
    size = max((math.prod(shape) for _, _, shape in batches), default=0)
    room: Array | None = None
    for own_params, own, shape in batches:
        tokens = own[0][1]
        if len(own) > 1:
            room = namespace(tokens).empty(size, dtype=tokens.dtype, device=tokens.device) if room is None else room
            tokens = room[: math.prod(shape)].reshape(shape)
            _pad_into(tokens, [each for _, each in own])
        lengths = np.repeat([_length(each) for each in own], [len(where) for where, _ in own])
        yield Batch(np.concatenate([where for where, _ in own]), space.asarray(tokens), lengths, own_params)


def apart(
    tokens: list[Array], some: Integers | None = None
) -> Iterator[tuple[Integers, Array]]:  # (length, width) each
    """Places and sequences, all or some, as groups of one each."""
    for place in range(len(tokens)) if some is None else some:
        yield np.array([place]), tokens[int(place)][None, ...]


def _length(group: tuple[Integers, Array]) -> int:
    return int(group[1].shape[1])


def _shape(groups: list[tuple[Integers, Array]]) -> tuple[int, int, int]:
    """Of all sequences, made as long as the last ones."""
    return sum(len(where) for where, _ in groups), _length(groups[-1]), int(groups[0][1].shape[2])


def _within_padding(
    params: Family, groups: list[tuple[Integers, Array]], on_cpu: bool
) -> Iterator[list[tuple[Integers, Array]]]:
    """Groups, short ones first, in lists that take little padding."""
    numbers = PADDING_NUMBERS if on_cpu else DEVICE_PADDING
    room = PADDING_TOKENS + numbers // (params.width + (params.outputs or 1))
    joined: list[tuple[Integers, Array]] = []
    count = padding = 0
    for group in groups:
        if joined:
            before, length = _length(joined[-1]), _length(group)
            padding += count * (length - before)
            if before == 1 < length or padding > room:
                yield joined
                joined, count, padding = [], 0, 0
        joined.append(group)
        count += len(group[0])
    if joined:
        yield joined


def _padded(params: F, groups: list[tuple[Integers, Array]], space: Space) -> F | None:
    """Parameters that answer the groups made as long as the last as if they were not; None where there are none."""
    longest = _length(groups[-1])
    if _length(groups[0]) == longest:
        return params
    lengths = np.repeat([_length(group) for group in groups], [len(where) for where, _ in groups])
    absent = np.where(np.arange(longest) < longest - lengths[:, None], -np.inf, 0.0)
    return params.padded(space.asarray(absent))


def _pad_into(room: Array, groups: list[Array]) -> None:
    """Sequences behind copies of their first token, which make them as long as there is room."""
    begin = 0
    for tokens in groups:
        missing, end = room.shape[1] - tokens.shape[1], begin + tokens.shape[0]
        room[begin:end, :missing, :] = tokens[:, :1, :]
        room[begin:end, missing:, :] = tokens
        begin = end
