"""How often labels are wrong, from single tokens that are asked over and over."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.noise import HOPELESS_FLIPS
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

STAGE = "noise"
# Tokens, and how often each is asked: then, if no label was wrong, a second time.
TOKENS, REPEATS, ROUNDS = 8, 32, (1, 4)
# The longest token where norms are free, and the most copies of one: they are answered like one, and are another query.
LONG, MOST_COPIES = 2.0**20, 8
# Rates are taken for larger by so many standard deviations: labels trusted less cost little, trusted more they mislead.
CAUTION = 1.0


def ask_flip_rate(signature: Signature, rng: np.random.Generator) -> Steps[tuple[float, str]]:
    """The rate of wrong labels, 0 where none was, and what it rests on, from 256 queries, or 1,280 where none is wrong.

    Copies of one token are answered like the token, so that errors that repeat with a query are seen too.
    """
    space = signature.space
    vectors = rng.standard_normal((TOKENS, signature.width))
    norm = min(LONG, signature.norm_limit)
    vectors *= norm * (1 - 2**-20) / np.linalg.norm(vectors, axis=1, keepdims=True)
    rows, index = TokenRows(space.asarray(vectors)), space.indices(np.arange(TOKENS))
    copies = min(MOST_COPIES, signature.max_length or MOST_COPIES)
    seen: list[np.ndarray] = []
    for rounds in ROUNDS:
        for turn in range(len(seen), len(seen) + rounds * REPEATS):
            positions = [[Term(rows, index)]] * (1 + turn % copies)
            answers: Measurements = yield Plan(STAGE, TOKENS, positions, first_repeat=turn // copies)
            seen.append(floats(answers.values).reshape(TOKENS, -1)[:, -1])
        labels = np.stack(seen)  # (repeats, tokens)
        usual = [np.max(np.unique(column, return_counts=True)[1]) for column in labels.T]
        wrong, count = labels.size - int(np.sum(usual)), labels.size
        if wrong:
            break
    evidence = f"{TOKENS} tokens asked {len(seen)} times each: {wrong} of {count} labels are not the usual one"
    if not wrong:
        return 0.0, evidence
    rate = wrong / count
    rate += CAUTION * (rate * (1 - rate) / count) ** 0.5
    if rate > HOPELESS_FLIPS:
        raise Unrecoverable(Outcome.TOO_NOISY, f"{evidence}: they say next to nothing")
    return float(rate), evidence
