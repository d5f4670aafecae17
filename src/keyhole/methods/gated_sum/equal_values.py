"""Heads of equal values, whose gates answers at one last token do not tell from each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import factorial, prod

import numpy as np

from keyhole.arrays import Floats, Integers

# Heads whose values differ by less than this part are taken for each other.
SAME = 1e-2
# More orders than this are not tried.
MOST_ORDERS = 5040


def equal_groups(values: Floats) -> Integers:  # (heads, width, outputs) -> (heads,)
    """Groups, by number, of heads with nearly the same values: answers do not tell which of their gates is whose."""
    flat = values.reshape(len(values), -1)
    apart = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    same = apart <= SAME * np.linalg.norm(flat, axis=1)
    return np.unique(np.argmax(same, axis=1), return_inverse=True)[1]


def orders(groups: Integers) -> Iterator[Integers]:  # (heads,) -> (heads,) each
    """All orders of heads that change places within their group only, that of now first and, of too many, alone."""
    places = [np.flatnonzero(groups == number) for number in range(int(np.max(groups)) + 1)]
    if prod(factorial(own.size) for own in places) > MOST_ORDERS:
        yield np.arange(groups.size)
        return
    for choice in product(*(permutations(own) for own in places)):
        order = np.arange(groups.size)
        for own, changed in zip(places, choice, strict=True):
            order[own] = changed
        yield order
