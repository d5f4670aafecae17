"""Are sequences with every token twice answered as with every token once? Softmax attention does that.

The test holds for any number of heads and for any net behind them, so that a costly search for heads can be left out
where order, length or repetitions of tokens count.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Pairs that are asked: one may happen to lie where a window or a position does not show.
DOUBLES = 2
# Changes of so many errors are no rounding: a search for nothing costs less than a refused member.
CHANGED = 50.0
CHANGES = (
    "sequences with every token twice are answered otherwise than with every token once, which no softmax attention "
    "does: order, length or repetitions of tokens count"
)
ORDERS = ((0, 1), (0, 0, 1, 1), (0, 1, 0, 1))  # 0 is the first token of a pair, 1 its last


def check_token_doubles(
    signature: Signature,
    stage: str,
    firsts: Floats,  # (n, width)
    lasts: Floats,  # (n, width)
    error: float,  # of an answer
) -> Steps[None]:
    """Raise Unrecoverable where answers to pairs of tokens change when both are there twice, if that many may be."""
    longest = signature.max_length
    if longest is not None and longest < len(ORDERS[-1]):
        return
    space = signature.space
    tokens = [[Term(TokenRows(space.asarray(each)))] for each in (firsts, lasts)]
    parts: list[Measurements] = yield [Plan(stage, len(firsts), [tokens[each] for each in order]) for order in ORDERS]
    once, *twice = [part.by_output for part in parts]
    if max(np.max(np.abs(answers - once)) for answers in twice) > CHANGED * error:
        raise Unrecoverable(Outcome.WRONG_FAMILY, CHANGES)
