"""Which parts several heads may have, from some ten queries, and the heads by the first of these that explains them.

A long token beside a zero last one has a logit of zero in every head, wherever it stands: its share tells what
normalises the weights, and whether places count. Short last tokens then tell whether norms of tokens matter, and
whether logits turn with places. Caps show in no few queries: heads are read without them first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.families import MultiHead
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.multi_head.vector.parts.long_tokens import LONG
from keyhole.methods.multi_head.vector.parts.method import NORMED_LONG, NORMED_SHORT, ask_heads, check_reach
from keyhole.queries import Signature, sequences
from keyhole.recovery import Outcome

# Places are told apart in sequences of so many tokens, where those may be as long: most windows are shorter.
PLACES = 512
SHORTEST = 3  # what normalises weights shows beside two tokens and a zero one
NEAR = 10  # slopes leave some weight over so few
# Last tokens are turned by this part of a right angle, and short ones brought to logits of about this size.
TURN, SLIGHT = 2.0**-6, 2.0**-12
SHORT = 2.0**-10  # a token of this norm has a logit of nearly zero with itself
# Answers differ where they do by more than this many roundings, over the size of the answer to the token alone.
ROUNDINGS = 2.0**10


@dataclass(frozen=True)
class Candidate:
    """Names of parts, those left out being a softmax's, and the score form."""

    form: str
    names: Mapping[str, str]

    def __str__(self) -> str:
        named = [] if self.form == "bilinear" else [self.form]
        return ", ".join(named + [name for name in self.names.values() if name not in ("exp", "sum")]) or "softmax"


def ask_unnamed_heads(
    signature: Signature, rng: np.random.Generator, frequencies: Array | None = None
) -> Steps[Estimate[MultiHead]]:
    """All heads, by the first of the parts they may have that explains them. Assumes what `ask_heads` does."""
    check_reach(signature)
    candidates = yield from ask_candidates(signature, rng)
    said: list[str] = []
    for number, candidate in enumerate(candidates, 1):
        try:
            found = yield from ask_heads(signature, rng, candidate.names, candidate.form, frequencies)
        except Unrecoverable as error:
            said.append(f"{candidate}: {error}")
            if number == len(candidates):
                raise Unrecoverable(error.outcome, f"no parts explain several heads; {'; '.join(said)}") from error
        else:
            return replace(found, details={**found.details, "parts_tried": [str(each) for each in candidates[:number]]})
    raise Unrecoverable(Outcome.WRONG_FAMILY, "no parts of several heads fit a few first answers")


def ask_candidates(signature: Signature, rng: np.random.Generator) -> Steps[list[Candidate]]:
    """Parts that several heads may have, the likeliest first; none where what they are is not read."""
    if signature.max_length is not None and signature.max_length < SHORTEST:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            f"finding the parts of several heads takes sequences of {SHORTEST} tokens (max_length): name the parts",
        )
    token, last, way = _directions(rng, signature.width)
    probe = _Probe(signature, token)
    places = min(PLACES, signature.max_length or PLACES)
    alone, twice = yield from probe.ask([[LONG * token, 0 * token]], [[LONG * token] * 2 + [0 * token]])
    if (yield from probe.ask_places(places))[0]:
        seen = yield from probe.ask_places(min(NEAR, places))
        if not seen[0] or not seen[1]:  # within the window as everywhere in it, or beyond it
            return [Candidate("bilinear", {"position_bias": "window", "link": link}) for link in ("exp", "softcap")]
        if (yield from probe.is_level(places)):
            return [Candidate("bilinear", {"position_bias": "table"})]
        once, copied = yield from probe.ask([[SHORT * token]], [[SHORT * token] * 2])
        sums = not probe.differ(once, copied, SHORT)  # weights that add up to one do not tell copies from one token
        return [Candidate("bilinear", {"position_bias": "alibi", "normaliser": "sum" if sums else "sink"})]
    ends = (last, 2 * last, last + TURN * way, last - TURN * way)
    usual, longer, *turned = yield from probe.ask(*([[NORMED_LONG * token, NORMED_SHORT * end]] for end in ends))
    # A head that is not normed has weights at an end, which change on one side at most.
    moved = all(probe.differ(usual, each, NORMED_LONG) for each in turned)
    is_normed = moved and not probe.differ(usual, longer, NORMED_LONG)
    long, short = (NORMED_LONG, NORMED_SHORT) if is_normed else (LONG, SLIGHT / LONG)
    token, end = long * token, short * last
    turned = yield from probe.ask([[token, 0 * token, end]], [[0 * token, token, end]])
    turns = probe.differ(turned[0], turned[1], long)
    if is_normed:
        return [Candidate("qk-norm-rotary" if turns else "qk-norm", {})]
    normaliser = _normaliser(alone, twice)
    names = [{"link": link, "normaliser": normaliser} for link in ("exp", "softcap")]
    return [Candidate("rotary" if turns else "bilinear", each) for each in names]


def _directions(rng: np.random.Generator, width: int) -> Floats:  # (3, width)
    drawn = rng.standard_normal((3, width))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def _normaliser(alone: Floats, twice: Floats) -> str:
    """What beside weights of tokens takes part in their sum, by the share of one token and of two beside a zero one.

    Shares are n / (n + 1 + S), S the weight of a sink over that of a logit of zero.
    """
    for name, expected in (("sum", 4 / 3), ("plus-one", 3 / 2)):
        if np.allclose(twice, expected * alone, rtol=0, atol=1e-9 * np.linalg.norm(alone)):
            return name
    return "sink"


@dataclass
class _Probe:
    """Asks single sequences, and compares answers with what the token alone is answered."""

    signature: Signature
    token: Floats
    size: float = 0.0  # of answers, over the norm of the token

    def ask(self, *batches: list[list[Floats]]) -> Steps[list[Floats]]:
        """The answer to each batch of one sequence."""
        answers = []
        for batch in batches:
            asked = self.signature.space.asarray(np.asarray(batch))
            measured = yield sequences("naming", asked)
            values = floats(measured.values)[0]
            if values.ndim != 1:
                raise Unrecoverable(Outcome.WRONG_FAMILY, "several heads are read from several outputs: there is one")
            answers.append(values)
            norm = float(np.max(np.linalg.norm(batch[0], axis=-1)))
            if norm > 0:
                self.size = max(self.size, float(np.max(np.abs(values))) / norm)
        return answers

    def ask_places(self, length: int) -> Steps[tuple[bool, bool]]:
        """Whether the first place differs from the last but one where logits are zero, and has any weight at all."""
        token, zeros = LONG * self.token, [0 * self.token] * (length - 2)
        first, nearest = yield from self.ask([[token, *zeros, 0 * token]], [[*zeros, token, 0 * token]])
        return self.differ(first, nearest, LONG), bool(np.any(np.abs(first) > self.slack(LONG)))

    def is_level(self, length: int) -> Steps[bool]:
        """Whether the first two places weigh the same, and something, where logits are zero: far ones in a table do."""
        token, zeros = LONG * self.token, [0 * self.token] * (length - 2)
        first, second = yield from self.ask([[token, *zeros, 0 * token]], [[0 * token, token, *zeros]])
        return not self.differ(first, second, LONG) and bool(np.any(np.abs(first) > self.slack(LONG)))

    def slack(self, norm: float) -> float:
        """Largest difference of equal answers to tokens of this norm."""
        return ROUNDINGS * self.signature.space.eps * self.size * norm

    def differ(self, first: Floats, second: Floats, norm: float) -> bool:
        """Whether two answers to tokens of this norm are not the same."""
        return bool(np.max(np.abs(first - second)) > self.slack(norm))
