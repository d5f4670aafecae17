"""Several heads whose queries, keys or both have biases, beside rotary positions, slopes or tables by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import Array, floats
from keyhole.families import MultiHead
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.value import Value, ask_value
from keyhole.methods.multi_head.vector.parts.biased.first_token import ask_keys, ask_long_jumps, ask_sight
from keyhole.methods.multi_head.vector.parts.biased.offsets import ask_biased_table, slopes_of, with_key_bias
from keyhole.methods.multi_head.vector.parts.biased.scores import BiasedReader
from keyhole.methods.multi_head.vector.parts.biased.start import TokenOfHeads
from keyhole.methods.multi_head.vector.parts.estimate import HeadsEstimate
from keyhole.methods.multi_head.vector.parts.first_token import FirstHeads
from keyhole.methods.multi_head.vector.parts.long_tokens import FILLED, LongQueries, Odds
from keyhole.methods.multi_head.vector.parts.rotary import (
    angles_of,
    ask_turned,
    room_between,
    solve_turns,
    with_deviations,
)
from keyhole.methods.multi_head.vector.parts.values import ask_long_values
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.scores_last import ask_forms
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Long tokens beside last ones that reach far out: what those add is below rounding.
LONGER = 2.0**120
# Tokens of natural norms are shortened by this where weights are at their ends, down to this part of what suits one.
SHORTER, SHORTEST = 1 / 4, 1 / 64


def ask_biased_heads(
    signature: Signature,
    rng: np.random.Generator,
    names: Mapping[str, str],
    form: str,
    frequencies: Array | None = None,
) -> Steps[Estimate[MultiHead]]:
    """All heads of f(X) = Σ_h Σ_i weight_hi·x_iᵀ·V_h + b, the logit of token x at distance Δ being affine in x and g.

    Beside one last token g it is x·(W_Δ·g + c_Δ) + o_Δ(g), and differences to that of g itself are seen. Values come
    from long tokens far out, where each head takes all or nothing (`ask_long_jumps`, `ask_long_values`), logits from
    [x_1 + g; …; x_k + g; g] of natural norms, in which −x_1, …, −x_k tell o_Δ(g) once for every g (`BiasedReader`).
    Rotary heads are (W, c) at two distances turned into each other, and the key's bias is a linear function of the
    offsets. About 3·d + 4·H + 20 queries, H for each token whose values are asked for, and (d + 1)·(⌈d/k⌉ + 1) for the
    logits, k ≤ ¾·p/H, less where ranks are low; rotary ones (r + 1)²/k + r more.
    """
    if names["link"] != "exp" or names["normaliser"] != "sum":
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "beside biases of queries and keys caps and sinks of several heads are not read",
        )
    value = yield from ask_value(signature)
    if floats(value.vector).ndim == 1:
        raise Unrecoverable(Outcome.WRONG_FAMILY, "several heads are read from several outputs: the box has one")
    plain = Value(floats(value.vector), floats(value.radius), floats(value.bias), floats(value.bias_radius))
    natural = VectorQueries(signature, plain, rng, filled=FILLED)
    long = LongQueries(signature, plain, rng, long=LONGER, short=1.0)
    token = natural.on_grid(natural.directions(1)[0])
    values = yield from ask_long_jumps(long, token)
    if names["position_bias"] == "window":
        natural.window = yield from ask_sight(long, token)
    start = yield from ask_keys(natural, token, values)
    known = yield from ask_long_values(long, start.among_long(long))
    return (yield from ask_biased_scores(natural, start, known, names, form, frequencies))


def ask_biased_scores(
    natural: VectorQueries,
    start: TokenOfHeads,
    known: VectorValues,
    names: Mapping[str, str],
    form: str,
    frequencies: Array | None = None,
    *,
    rough: bool = False,
) -> Steps[Estimate[MultiHead]]:
    """Scores, biases and positions of heads whose values are known, from tokens of natural norms."""
    rng = natural.rng
    reader, scores = yield from _ask_scores(
        natural, start, known, room=room_between(natural) if form == "rotary" else 0
    )
    nothing = np.zeros(start.heads)
    odds, errors = Odds(nothing + 1, window=natural.window), Odds(nothing)
    forms = None
    if form == "rotary":
        angles = angles_of(frequencies, int(np.max(scores.ranks)))
        turned = yield from ask_turned(natural, reader, scores, angles, biased=True)

        def solve(head: int, drawn: np.random.Generator | None) -> Any:
            made = solve_turns(turned if drawn is None else turned.drawn(drawn), head, angles, rough=rough)
            offsets = [each if drawn is None else each.drawn(drawn) for each in reader.offsets.values()]
            return with_key_bias(made, offsets, reader.last, head)

        forms = [with_deviations(partial(solve, head), rng) for head in range(start.heads)]
    elif names["position_bias"] == "alibi":
        falls, off = slopes_of(reader.offsets[0])
        odds, errors = replace(odds, falls=falls), replace(errors, falls=off)
    elif names["position_bias"] == "table":
        table, wide = yield from ask_biased_table(natural, start, scores.biases, scores.bias_errors)
        odds, errors = replace(odds, table=table), replace(errors, table=wide)
    keys = np.zeros((start.heads, natural.width))
    heads = FirstHeads(start.token, start.values, keys, odds, errors, natural.noise, natural.scale)
    return HeadsEstimate(natural, heads, reader.values, scores, names, forms, biased=True).whole()


def _ask_scores(
    queries: VectorQueries, start: TokenOfHeads, values: VectorValues, room: int
) -> Steps[tuple[BiasedReader, Scores]]:
    """Forms beside last tokens so short that no weight is at its end; some room is left for tokens between."""
    while True:
        yield from queries.ask_precision()
        queries.between = room
        reader = BiasedReader(queries, start, replace(values, noise=queries.noise))
        queries.between = 0
        try:
            return reader, (yield from ask_forms(reader))
        except Unrecoverable as error:
            if error.outcome is not Outcome.SATURATED or queries.scale <= start.scale * SHORTEST:
                raise
            queries.scale *= SHORTER
