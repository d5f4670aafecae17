"""Queries that show every part of given parameters, whatever the oracle holds."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, to_numpy
from keyhole.families import Family, SingleHead
from keyhole.gauge.heads import into_logits
from keyhole.numerics.domain import draw_lengths, draw_structures, draw_tokens
from keyhole.queries import Alphabet, Plan, Signature, sequences

# Lengths of sequences, in the order in which they are used: three tokens tell everything that longer ones do.
LENGTHS = (3, 2, 5, 3, 8, 2, 1)
# Logits of the head a query is made for, or the norm over that of the kinks of a net.
LOGITS = (0.5, 2.0, 1.0, 5.0)
KINKS = (1.0, 3.0, 30.0)
# Every so many queries the norm is drawn from a range that the parameters have no part in.
INDEPENDENT = 5
NORMS = (0.1, 10.0)
# Every so many queries have any length up to 64, and tokens of any structure: repeated, zero, one-hot, nearly equal.
SPREAD_EVERY = 2
# Behind noise every other query has tokens of strong and opposite values, so that attention shows.
LOUD_EVERY = 2
# A gate leaves other heads this much less weight than the one it is for, as a logit; float32 has no use for more.
SHUT, SHUT_SHORT = 24.0, 12.0
AJAR = 1.0
# A gate's short token is this much shorter than its long one, so that only the long one's value shows.
SHORTER = 1e-2
# A gate whose logits miss their targets by more than this is none.
GATE_TOLERANCE = 0.5
# A gate that needs a token this many times as long as one head alone would strains the digits of the answer.
ILL_CONDITIONED = 1e3
FLOAT32 = 2.0**-23
# Gates take up to this part of all queries.
GATED = 0.5
# W·g + c is zero, but for rounding, below this part of c.
VANISHING = 1e-3
# Directions that a balanced last token is chosen from.
WAYS = 9


def plans_for(params: Family, signature: Signature, rng: np.random.Generator, count: int) -> list[Plan]:
    """`count` queries, one plan per length."""
    if signature.alphabet is not None:
        return _of_alphabet(signature.alphabet, signature, rng, count)
    chosen = gates(params, signature, rng, int(GATED * count))
    left = count - len(chosen)
    spread = dict(
        zip(range(1, left, SPREAD_EVERY), _spread(signature, rng, len(range(1, left, SPREAD_EVERY))), strict=True)
    )
    chosen += [_random(params, signature, rng, number, spread.get(number)) for number in range(left)]
    return _plans(chosen, signature)


def _of_alphabet(alphabet: Alphabet, signature: Signature, rng: np.random.Generator, count: int) -> list[Plan]:
    """Sequences of the tokens of an alphabet, of any length and with any number of copies."""
    lengths, structures = draw_lengths(rng, count, signature.max_length), draw_structures(rng, count)
    drawn = [alphabet.draw(each, rng, length) for each, length in zip(structures, lengths, strict=True)]
    return _plans(drawn, signature)


def _plans(chosen: list[Floats], signature: Signature) -> list[Plan]:
    """One plan per length."""
    plans = []
    for length in sorted({tokens.shape[0] for tokens in chosen}):
        batch = np.stack([tokens for tokens in chosen if tokens.shape[0] == length])
        plans.append(sequences("verify", signature.space.asarray(batch)))
    return plans


def _spread(signature: Signature, rng: np.random.Generator, count: int) -> list[Floats]:
    """Sequences of any length up to the longest and of any structure, their longest tokens of norm about one."""
    lengths, structures = draw_lengths(rng, count, signature.max_length), draw_structures(rng, count)
    return [draw_tokens(each, rng, length, signature.width) for each, length in zip(structures, lengths, strict=True)]


def _random(
    params: Family, signature: Signature, rng: np.random.Generator, number: int, drawn: Floats | None
) -> Floats:
    """Random tokens, or those `drawn`, of a norm at which the heads, in turn, attend neither to all nor to one."""
    anatomy = params.anatomy
    visit, place = divmod(number, max(1, len(anatomy.heads)))
    turn = visit + place  # so that every head meets every kind of query, in turn
    head = anatomy.heads[place] if anatomy.heads else None
    sizes = KINKS if head is None else LOGITS
    lengths = [length for length in LENGTHS if signature.max_length is None or length <= signature.max_length]
    length = lengths[(number + visit) % len(lengths)]
    norm = float((params if head is None else head).token_norm(sizes[turn % len(sizes)]))
    if head is not None and anatomy.net is not None and turn % 3 == 0:
        norm = max(norm, float(anatomy.net.token_norm(KINKS[turn % len(KINKS)])))
    if (number + visit) % INDEPENDENT == INDEPENDENT - 1:
        norm = float(np.exp(rng.uniform(*np.log(NORMS))))
    if drawn is None and head is not None and head.score_bias is not None and length > 1 and turn % 2:
        balanced = _balance(head, signature, rng, length, sizes[turn // 2 % len(sizes)])
        if balanced is not None:
            return balanced
    if not (np.isfinite(norm) and norm > 0):  # a head without attention: long tokens show any that the oracle has
        norm = float(np.exp(rng.uniform(0.0, np.log(signature.space.huge**0.125))))
    norm = min(norm, signature.norm_limit, signature.space.huge**0.25)
    if drawn is not None:
        longest = np.max(np.linalg.norm(drawn, axis=1))
        return np.asarray(drawn * (norm * rng.uniform(0.5, 1.0) / max(1.0, longest)))
    tokens = rng.standard_normal((length, signature.width))
    loud = head is not None and not anatomy.behind and turn % LOUD_EVERY == 0
    if loud and head is not None and signature.noise.kind != "exact":
        tokens += signature.width**0.5 * rng.choice([-1.0, 1.0], (length, 1)) * to_numpy(head.loudest())
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    tokens *= norm * rng.uniform(0.5, 1.0, (length, 1))
    if turn % 4 == 3 and signature.max_norm is None:
        tokens[-1:] = params.onto_kinks(tokens[-1:], rng)
    return tokens


def _balance(
    head: SingleHead, signature: Signature, rng: np.random.Generator, length: int, size: float
) -> Floats | None:
    """Tokens at which score and score bias of a head weigh the same, however different they are.

    A last token g with gᵀ·W·g = −g·c has the logit 0 itself, and W·g and c are alike; other tokens are as long as gives
    them logits of about `size`. Of a score matrix of rank one W·g + c is then zero; half or twice that g, whichever
    makes its own logit negative, leaves the weight to the others.
    """
    score, bias = to_numpy(head.score).astype(np.float64), to_numpy(head.score_bias).astype(np.float64)
    ways = rng.standard_normal((WAYS, signature.width))
    with np.errstate(divide="ignore", invalid="ignore"):
        lasts = -(ways @ bias / np.vecdot(ways @ score.T, ways))[:, None] * ways
        last = lasts[np.argsort(np.linalg.norm(lasts, axis=1))[WAYS // 3]]  # neither where it is long nor where short
        if np.linalg.norm(score @ last + bias) <= VANISHING * np.linalg.norm(bias):
            last = last * (0.5 if last @ score @ last > 0 else 2.0)
            length = max(length, 3)
            if signature.max_length is not None and length > signature.max_length:
                return None
        key = np.linalg.norm(score @ last + bias)
        others = rng.standard_normal((length - 1, signature.width)) * (size / key)
    tokens = np.concatenate([others, last[None, :]])
    longest = np.max(np.linalg.norm(tokens, axis=1))
    fits = np.all(np.isfinite(tokens)) and longest <= min(signature.norm_limit, signature.space.huge**0.25)
    return tokens if fits and np.any(last) else None


def gates(params: Family, signature: Signature, rng: np.random.Generator, most: int) -> list[Floats]:
    """Queries that one head alone answers, so that it shows which head is another.

    Of the tokens u + g and g, last g, head h gives the first the logit u·(W_h g + c_h), linear in g. So g is solved
    for: all heads but one turn to g, which is short and shows little of their values.
    """
    heads = params.anatomy.heads
    if (signature.max_length or 2) < 2 or len(heads) < 2:
        return []
    logits = np.stack([into_logits(head) for head in heads])  # (heads, width, width + 1)
    levels = [AJAR, None] if 2 * len(logits) <= most else [AJAR] if len(logits) <= most else []
    shut = SHUT_SHORT if signature.space.eps >= FLOAT32 else SHUT
    made = [
        _gate(logits, number, shut if level is None else level, shut, signature, rng)
        for level in levels
        for number in range(len(logits))
    ]
    return [tokens for tokens in made if tokens is not None]


def _gate(
    logits: Floats, head: int, level: float, shut: float, signature: Signature, rng: np.random.Generator
) -> Floats | None:
    """A gate for one head, with its logit at `level`; None where there is none within the norm limit."""
    width = signature.width
    way = rng.standard_normal(width)
    way /= np.linalg.norm(way)
    seen = way @ logits  # (heads, width + 1): what g does to the logits, per unit of the long token
    slopes, shifts = seen[:, :-1], seen[:, -1]
    # Rows of one size, so that faint heads are turned as well as sharp ones.
    sizes = np.linalg.norm(slopes, axis=1)
    if not np.all(sizes > 0):
        return None
    inverse = np.linalg.pinv(slopes / sizes[:, None])
    if np.linalg.norm(inverse, 2) > ILL_CONDITIONED:
        return None
    target = np.where(np.arange(len(logits)) == head, level, -shut)
    turning, standing = np.linalg.norm(inverse @ (target / sizes)), np.linalg.norm(inverse @ (shifts / sizes))
    limit = min(signature.norm_limit, signature.space.huge**0.25)
    long = min(max((turning / SHORTER) ** 0.5, standing / SHORTER), limit / (1 + 2 * SHORTER))
    if not long > 0:
        return None
    short = inverse @ ((target / long - shifts) / sizes)
    reached = long * (slopes @ short + shifts)
    open_enough = abs(reached[head] - level) <= GATE_TOLERANCE
    others = np.delete(reached, head)
    if not (open_enough and np.all(others <= GATE_TOLERANCE - shut)) or np.linalg.norm(short) > 0.5 * long:
        return None
    tokens = np.stack([long * way + short, short])
    return tokens if np.max(np.linalg.norm(tokens, axis=1)) <= limit else None
