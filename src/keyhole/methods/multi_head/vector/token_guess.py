"""A first guess of a token's logits in all heads, by linear algebra alone, where outputs are twice as many as heads.

Beside a known token of odds o the weights of the known and of the new one obey y = 1 − (1 + 1/o)·x. Both are linear in
the answer: x = ξ + f·ζ and y = k·ζ, where ξ are its coordinates along the known values and ζ is what lies outside them.
So every answer is one linear equation for (f, k) of each head, and the sum of the new token's values over heads is two.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.multi_head.vector.token_fit import Asked

# Weights are kept this far from 0 and 1 before their logits are taken.
LEAST = 1e-12


def guess_logits(asked: Asked, groups: int) -> Floats | None:  # (groups, heads)
    """Logits of the new token; None where answers are too few for it."""
    heads, outputs = asked.known.shape
    count = asked.answers.shape[0]
    if outputs < 2 * heads or count + 2 < 2 * heads or not np.all(asked.odds > 0):
        return None
    inverse = np.linalg.pinv(asked.known)  # (outputs, heads)
    answers = np.vstack([asked.answers, asked.total[None, :]])
    along = answers @ inverse  # ξ
    outside = answers - along @ asked.known
    turn = np.linalg.svd(outside, full_matrices=False)[2][:heads]
    coordinates = outside @ turn.T
    sizes = np.maximum(np.sqrt(np.mean(coordinates**2, axis=0)), 1e-300)
    coordinates = coordinates / sizes  # ζ
    own, sums, share = coordinates[:-1], coordinates[-1], 1 + 1 / asked.odds
    logits = np.zeros((count, heads))
    for head in range(heads):
        factor = share[:, head]
        # Divided by the factor, so that no equation drowns the others.
        system = np.hstack([own / factor[:, None], own])
        ends = np.array([np.concatenate([sums, 0 * sums]), np.concatenate([0 * sums, sums])])
        right = np.concatenate([1 / factor - along[:-1, head], [1.0, -along[-1, head]]])
        solved = np.linalg.lstsq(np.vstack([system, ends]), right, rcond=None)[0]
        new = np.clip(own @ solved[:heads], LEAST, 1 - LEAST)
        rest = (1 - new) / (1 + asked.odds[:, head])  # of the last token
        logits[:, head] = np.log(new / rest / asked.copies)
    member = (np.arange(groups)[:, None] == asked.group).astype(float)
    found: Floats = (member @ logits) / np.sum(member, axis=1, keepdims=True)
    return found
