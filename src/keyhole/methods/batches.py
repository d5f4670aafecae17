"""Sequences of several lengths in few batches, for predictions: small ones cost by the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Generic, NamedTuple

import numpy as np

from keyhole.arrays import Array, Integers, Space, namespace
from keyhole.families import F, F_co

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


def in_batches(params: F, groups: Iterable[tuple[Integers, Array]]) -> Iterator[Batch[F]]:
    """Places and sequences (n, length, width) of one length each, some lengths together where the family allows it.

    Single tokens stay by themselves: families know more of these.
    """
    joined: list[tuple[Integers, Array]] = []
    padding = 0
    for length, alike in groupby(sorted(groups, key=_length), key=_length):
        own = list(alike)
        places, tokens = own[0] if len(own) == 1 else _together(own)
        numbers = PADDING_NUMBERS if Space.of(tokens).on_cpu else DEVICE_PADDING
        room = PADDING_TOKENS + numbers // (params.width + (params.outputs or 1))
        if joined:
            before = int(joined[-1][1].shape[1])
            padding += sum(len(where) for where, _ in joined) * (length - before)
            if before == 1 < length or padding > room:
                yield from _joined(params, joined)
                joined, padding = [], 0
        joined.append((places, tokens))
    if joined:
        yield from _joined(params, joined)


def _length(group: tuple[Integers, Array]) -> int:
    return int(group[1].shape[1])


def _together(groups: list[tuple[Integers, Array]]) -> tuple[Integers, Array]:
    """One group of several whose sequences are as long."""
    xp = namespace(groups[0][1])
    return np.concatenate([where for where, _ in groups]), xp.concat([tokens for _, tokens in groups], axis=0)


def _joined(params: F, groups: list[tuple[Integers, Array]]) -> Iterator[Batch[F]]:
    """One batch of all groups, or one of each where padding shows."""
    first, longest = groups[0][1], int(groups[-1][1].shape[1])
    xp, counts = namespace(first), [len(where) for where, _ in groups]
    lengths = np.repeat([int(tokens.shape[1]) for _, tokens in groups], counts)
    padded: F | None = params
    if len(groups) > 1 and int(first.shape[1]) < longest:
        absent = np.where(np.arange(longest) < longest - lengths[:, None], -np.inf, 0.0)
        padded = params.padded(xp.asarray(absent, dtype=first.dtype, device=first.device))
    if padded is None:
        for where, tokens in groups:
            yield Batch(where, tokens, np.full(len(where), int(tokens.shape[1])), params)
        return
    tokens = xp.concat([_pad(own, longest) for _, own in groups], axis=0) if len(groups) > 1 else first
    yield Batch(np.concatenate([where for where, _ in groups]), tokens, lengths, padded)


def _pad(tokens: Array, length: int) -> Array:  # (n, own length, width) -> (n, length, width)
    missing = length - int(tokens.shape[1])
    if not missing:
        return tokens
    xp = namespace(tokens)
    ahead = xp.broadcast_to(tokens[:, :1, :], (tokens.shape[0], missing, tokens.shape[2]))
    return xp.concat([ahead, tokens], axis=1)
