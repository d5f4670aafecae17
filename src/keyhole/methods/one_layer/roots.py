"""Where a monotone function takes a value, for many functions at once."""

from __future__ import annotations

from collections.abc import Callable

from keyhole.arrays import Array, Space

# Steps of regula falsi in its Illinois form: a bracket that does not shrink to the last digit in so many belongs to a
# function with a step, whose root is known no better than that.
MOST_STEPS = 80


def monotone_roots(
    space: Space,
    function: Callable[[Array], Array],  # (n,) -> (n,), entry by entry, each monotone on [0, 1]
    low: Array,  # (n,) function(0)
    high: Array,  # (n,) function(1)
    aim: Array,  # (n,)
) -> Array:  # (n,)
    """Arguments in [0, 1] where the functions take the values aimed at; 0 or 1 where they lie outside."""
    xp = space.xp
    left, right = xp.zeros_like(aim), xp.ones_like(aim)
    miss_left, miss_right = low - aim, high - aim
    inside = miss_left * miss_right < 0
    # An end where the value is taken, or else the nearer one.
    end = xp.where(xp.abs(miss_left) <= xp.abs(miss_right), left, right)
    root = xp.where(inside, 0.5 + 0 * aim, end)
    for _ in range(MOST_STEPS):
        guess = right - miss_right * (right - left) / _nonzero(xp, miss_right - miss_left)
        guess = xp.where((guess > left) & (guess < right), guess, 0.5 * (left + right))
        root = xp.where(inside, guess, root)
        if not bool(xp.any(inside & (right - left > 2 * space.spacing * right))):
            break
        miss = function(root) - aim
        found = inside & (miss == 0)
        same = miss * miss_right > 0
        # The end that stays counts half next time, so that both ends close in.
        miss_left = xp.where(found, 0 * miss, xp.where(same, 0.5 * miss_left, miss))
        miss_right = xp.where(found, 0 * miss, xp.where(same, miss, 0.5 * miss_right))
        left = xp.where(found | ~same, guess, left)
        right = xp.where(found | same, guess, right)
    return root


def _nonzero(xp: object, array: Array) -> Array:
    one = array * 0 + 1
    return xp.where(array == 0, one, array)  # type: ignore[attr-defined]
