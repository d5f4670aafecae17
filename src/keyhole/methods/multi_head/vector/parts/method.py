"""Several heads whose attention has other parts than a softmax, from several outputs and tokens of any length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import UsageError
from keyhole.families import MultiHead
from keyhole.families.forms import Rotary
from keyhole.families.parts import SOFTMAX, Attention, Window
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.multi_head.vector.parts.added_lengths import ask_added_lengths
from keyhole.methods.multi_head.vector.parts.biased.method import ask_biased_heads
from keyhole.methods.multi_head.vector.parts.bounded.method import ask_bounded_heads
from keyhole.methods.multi_head.vector.parts.estimate import KNOWN, HeadsEstimate, estimate_of_forms
from keyhole.methods.multi_head.vector.parts.first_token import ask_first_heads
from keyhole.methods.multi_head.vector.parts.long_tokens import LONG, LogitsBiased, LongQueries, ask_total
from keyhole.methods.multi_head.vector.parts.normed_forms import solve_normed, solve_normed_turns
from keyhole.methods.multi_head.vector.parts.normed_scores import ask_normed_scores
from keyhole.methods.multi_head.vector.parts.normed_values import ask_normed_values
from keyhole.methods.multi_head.vector.parts.position_biases import ask_slopes, ask_table, ask_window
from keyhole.methods.multi_head.vector.parts.rotary import (
    angles_of,
    ask_turned,
    room_between,
    solve_turns,
    with_deviations,
)
from keyhole.methods.multi_head.vector.parts.values import ask_long_values
from keyhole.methods.multi_head.vector.parts.zero_pencil import ask_normed_token
from keyhole.methods.multi_head.vector.scores_last import ScoreReader, ask_forms
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Position biases by which a neighbour weighs otherwise than the last token, and which stand beside few other parts.
SLOPING = ("alibi", "table")
FORMS = ("bilinear", "rotary", "qk-norm", "qk-norm-rotary")
# What stands beside normed keys and queries.
NORMED = ("window", "causal")
# Long and short tokens of normed heads: the short ones are so long that what is added to sums of squares is nothing.
NORMED_LONG, NORMED_SHORT = 2.0**220, 2.0**60


def ask_heads(
    signature: Signature,
    rng: np.random.Generator,
    names: Mapping[str, str],
    form: str = "bilinear",
    frequencies: Array | None = None,  # angles per position, of rotary forms; None: those of base 10000
) -> Steps[Estimate[MultiHead]]:
    """All heads of f(X) = Σ_h Σ_i weight_hi·x_iᵀ·V_h + b, for p ≥ H outputs, weights by the named parts of attention.

    Constants of parts (caps, sinks, slopes) may differ from head to head. Long tokens before a short last one have
    weights that depend on one bilinear form and nothing else (`LongQueries`). One of them, at the end of all weights
    and in between, tells the number of heads, its values in each and the constants (`ask_first_heads`); beside it all
    other tokens tell theirs, one query for each head (`ask_long_values`); then many tokens a query tell the logits, as
    those of softmax heads do (`ask_scores`). About 2·d + 2·H + 20 queries, H for each token whose values are asked
    for, and (d + 1)·⌈r/k⌉ + r·d/k for the logits, k ≤ ¾·p/H tokens a query and rank r. Rotary positions take (r + 1)²/k
    more, at a second distance (`ask_turned`).

    Assumes what `ASSUMPTIONS` says. Raises HeadsHidden where p numbers do not tell the heads apart.
    """
    names = checked(names, form)
    if signature.max_norm is not None and "norm" not in form:
        return (yield from ask_bounded_heads(signature, rng, names, form, frequencies))
    if "norm" in form:
        return (yield from ask_normed_heads(signature, rng, form, frequencies, names["position_bias"]))
    check_reach(signature)
    token = rng.standard_normal(signature.width)
    token /= np.linalg.norm(token)
    try:
        value, noise = yield from ask_total(signature, token)
    except LogitsBiased as error:
        try:
            return (yield from ask_biased_heads(signature, rng, names, form, frequencies))
        except Unrecoverable as other:
            raise Unrecoverable(other.outcome, f"{error}; and as heads with biases: {other}") from other
    queries = LongQueries(signature, value, rng, noise=noise)
    start = yield from ask_first_heads(queries, token, names["link"], rest_known=_rest_is_known(names))
    if names["position_bias"] == "alibi":
        start = yield from ask_slopes(queries, start, sink=names["normaliser"] == "sink")
    elif names["position_bias"] == "table":
        start = yield from ask_table(queries, start)
    elif names["position_bias"] == "window":
        queries.window = yield from ask_window(queries, start.token, start.values, start.odds.rest - 1)
        start = replace(start, odds=replace(start.odds, window=queries.window))
    queries.odds = start.odds
    values = yield from ask_long_values(queries, start)
    queries.between = room_between(queries) if form == "rotary" else 0  # left free, to be filled later
    reader = ScoreReader(queries, start, values)
    queries.between = 0
    scores = yield from ask_forms(reader)
    found = HeadsEstimate(queries, start, values, scores, names)
    if form == "rotary":
        angles = angles_of(frequencies, int(np.max(scores.ranks)))
        turned = yield from ask_turned(queries, reader, scores, angles)

        def solve(head: int, errors: np.random.Generator | None) -> Rotary:
            return solve_turns(turned if errors is None else turned.drawn(errors), head, angles)

        found.forms = [with_deviations(partial(solve, head), rng) for head in range(start.heads)]
    return found.whole()


def ask_normed_heads(
    signature: Signature,
    rng: np.random.Generator,
    form: str = "qk-norm",
    frequencies: Array | None = None,
    position_bias: str = "none",
) -> Steps[Estimate[MultiHead]]:
    """All heads whose keys and queries are normed, whose attention is a softmax otherwise; with or without positions.

    They may see a window of tokens.

    No weight of theirs comes near its end, but norms of tokens do not matter to them. Zero tokens before one token
    tell the heads apart (`ask_normed_token`), tokens beside it tell their logits and, alone, their values
    (`ask_normed_values`), and many tokens a query all logits (`ask_normed_scores`), from which keys, queries and gains
    are solved for (`normed_forms`). About d + 40 queries for four heads, 2·(H + 1) for each token whose values are
    asked for, and (n + 2·d)·⌈r/k⌉ + n·r/k for logits of rank r, n the larger of d + d/r and r²/2, or 3·r/2 with
    positions, whose angles are `frequencies`, or those of base 10000.

    Assumes what `ASSUMPTIONS` says, and that a zero token has a logit of zero.
    """
    check_reach(signature)
    token = rng.standard_normal(signature.width)
    token /= np.linalg.norm(token)
    value, noise = yield from ask_total(signature, token)
    queries = LongQueries(signature, value, rng, noise=noise, long=NORMED_LONG, short=NORMED_SHORT)
    if position_bias == "window":  # the sum of values is known, each by half of the weight
        queries.window = yield from ask_window(queries, token, 2 * (token @ queries.linear)[None, :])
    start = yield from ask_normed_token(queries, token)
    values = yield from ask_normed_values(queries, start)
    turned = form == "qk-norm-rotary"
    rank = 2 * len(frequencies) if frequencies is not None else int(np.max(values.ranks))
    angles = angles_of(frequencies, rank) if turned else None
    scores = yield from ask_normed_scores(queries, values, angles)

    def solve_long(head: int, errors: np.random.Generator | None) -> Any:
        logits = scores.logits(head, errors)
        return solve_normed(logits) if angles is None else solve_normed_turns(logits, angles, scores.between)

    added = yield from ask_added_lengths(queries, values, [solve_long(head, None) for head in range(start.heads)])

    def solve(head: int, errors: np.random.Generator | None) -> Any:
        form = solve_long(head, errors)
        return form if added is None else added.form(form, head, errors)

    pairs = [with_deviations(partial(solve, head), rng) for head in range(start.heads)]
    attention = Attention(position_bias=Window(int(queries.window))) if queries.window < np.inf else SOFTMAX
    return estimate_of_forms(
        queries,
        values,
        pairs,
        [(attention, attention)] * start.heads,
        {"rank": scores.rank, "tokens_per_query": scores.per_query},
    )


def checked(names: Mapping[str, str], form: str) -> dict[str, str]:
    """Names for all parts; UsageError for parts that several heads are not read through."""
    whole = {kind: names.get(kind, known[0]) for kind, known in KNOWN.items()}
    others = [name for kind, name in whole.items() if name != KNOWN[kind][0]]
    sloping = any(name in others for name in SLOPING)
    refused = (
        (form == "rotary" and sloping) or ("norm" in form and set(others) - set(NORMED)) or others[1:] == ["table"]
    )
    if form not in FORMS or refused:
        raise UsageError(f"several heads are not read with the form {form!r} and {', '.join(whole.values())}")
    for kind, name in whole.items():
        if name not in KNOWN[kind]:
            raise UsageError(
                f"several heads are not read through the {kind.replace('_', ' ')} {name!r}: it may be one of "
                f"{', '.join(KNOWN[kind])}"
            )
    return whole


def check_reach(signature: Signature) -> None:
    """Unrecoverable where tokens may not be long, or answers err."""
    if signature.max_norm is not None or signature.noise.kind != "exact" or signature.space.huge < LONG**4:
        raise Unrecoverable(
            Outcome.TOO_NOISY,
            "several heads of such attention are read from exact answers of float64 to tokens of any norm: remove "
            "max_norm, or use an oracle of higher precision",
        )
    if signature.max_length is not None and signature.max_length < 2:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "attention on one token shows no score: allow sequences of two")


def _rest_is_known(names: Mapping[str, str]) -> bool:
    return names["normaliser"] == "sum" and names["position_bias"] not in SLOPING
