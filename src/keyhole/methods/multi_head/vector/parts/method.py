"""Several heads whose attention has other parts than a softmax, from several outputs and tokens of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Array, Floats, Space
from keyhole.errors import UsageError
from keyhole.families import FormHead, MultiHead, SingleHead
from keyhole.families.forms import Form, QKNorm, QKNormRotary, Rotary
from keyhole.families.parts import (
    SOFTMAX,
    Alibi,
    Attention,
    DistanceTable,
    Exp,
    NoPositionBias,
    Normaliser,
    PlusOne,
    PositionBias,
    Sink,
    Softcap,
    Sum,
    Window,
)
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.multi_head.vector.parts.first_token import FirstHeads, ask_first_heads
from keyhole.methods.multi_head.vector.parts.long_tokens import LONG, LongQueries, ask_total
from keyhole.methods.multi_head.vector.parts.normed_forms import solve_normed, solve_normed_turns
from keyhole.methods.multi_head.vector.parts.normed_scores import ask_normed_scores
from keyhole.methods.multi_head.vector.parts.normed_values import ask_normed_values
from keyhole.methods.multi_head.vector.parts.position_biases import ask_slopes, ask_table, ask_window
from keyhole.methods.multi_head.vector.parts.rotary import (
    angles_of,
    ask_turned,
    groups_of_keys,
    room_between,
    solve_turns,
    with_deviations,
)
from keyhole.methods.multi_head.vector.parts.values import ask_long_values
from keyhole.methods.multi_head.vector.parts.zero_pencil import ask_normed_token
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.scores_last import ScoreReader, ask_forms
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# A sink that is not heavier than so many times what it may be off by does not show.
LEAST_SINK = 2.0
# The parts that heads may have, by their kind.
KNOWN = {
    "link": ("exp", "softcap"),
    "normaliser": ("sum", "sink", "plus-one"),
    "position_bias": ("none", "alibi", "window", "causal", "table"),
    "length_law": ("none",),
}
# Position biases by which a neighbour weighs otherwise than the last token, and which stand beside few other parts.
SLOPING = ("alibi", "table")
FORMS = ("bilinear", "rotary", "qk-norm", "qk-norm-rotary")
# Long and short tokens of normed heads: the short ones are so long that what is added to sums of squares is nothing.
NORMED_LONG, NORMED_SHORT = 2.0**220, 2.0**60
SOFTMAXES = [(SOFTMAX, SOFTMAX)]
ASSUMPTIONS = (
    "the box adds up heads over its raw tokens, read at the last position, without score biases",
    "the parts of their attention are {parts}",
    "heads whose logits differ by less than their answers show are one head",
    "answers are right up to the rounding of their dtype",
)


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
    if "norm" in form:
        return (yield from ask_normed_heads(signature, rng, form, frequencies))
    check_reach(signature)
    token = rng.standard_normal(signature.width)
    token /= np.linalg.norm(token)
    value, noise = yield from ask_total(signature, token)
    queries = LongQueries(signature, value, rng, noise=noise)
    start = yield from ask_first_heads(queries, token, names["link"], rest_known=_rest_is_known(names))
    if names["position_bias"] == "alibi":
        start = yield from ask_slopes(queries, start, sink=names["normaliser"] == "sink")
    elif names["position_bias"] == "table":
        start = yield from ask_table(queries, start)
    elif names["position_bias"] == "window":
        queries.window = yield from ask_window(queries, start)
    queries.odds = start.odds
    values = yield from ask_long_values(queries, start)
    queries.between = room_between(queries) if form == "rotary" else 0  # left free, to be filled later
    reader = ScoreReader(queries, start, values)
    queries.between = 0
    scores = yield from ask_forms(reader)
    found = _Estimate(queries, start, values, scores, names)
    if form == "rotary":
        angles = angles_of(frequencies, int(np.max(scores.ranks)))
        turned = yield from ask_turned(queries, reader, scores, angles)

        def solve(head: int, errors: np.random.Generator | None) -> Rotary:
            return solve_turns(turned if errors is None else turned.drawn(errors), head, angles)

        found.forms = [with_deviations(partial(solve, head), rng) for head in range(start.heads)]
    return found.whole()


def ask_normed_heads(
    signature: Signature, rng: np.random.Generator, form: str = "qk-norm", frequencies: Array | None = None
) -> Steps[Estimate[MultiHead]]:
    """All heads whose keys and queries are normed, whose attention is a softmax otherwise; with or without positions.

    No weight of theirs comes near its end, but norms of tokens do not matter to them. Zero tokens before one token
    tell the heads apart (`ask_normed_token`), tokens beside it tell their logits and, alone, their values
    (`ask_normed_values`), and many tokens a query all logits (`ask_normed_scores`), from which keys, queries and gains
    are solved for (`normed_forms`). About d + 40 queries for four heads, 2·(H + 1) for each token whose values are
    asked for, and (n + 2·d)·⌈r/k⌉ + n·r/k for logits of rank r, n the larger of d + d/r and r²/2, or 3·r/2 with
    positions, whose angles are `frequencies`, or those of base 10000.

    Assumes what `ASSUMPTIONS` says, and that a zero token has a logit of zero.
    """
    checked({}, form)
    check_reach(signature)
    token = rng.standard_normal(signature.width)
    token /= np.linalg.norm(token)
    value, noise = yield from ask_total(signature, token)
    queries = LongQueries(signature, value, rng, noise=noise, long=NORMED_LONG, short=NORMED_SHORT)
    start = yield from ask_normed_token(queries, token)
    values = yield from ask_normed_values(queries, start)
    turned = form == "qk-norm-rotary"
    rank = 2 * len(frequencies) if frequencies is not None else int(np.max(values.ranks))
    angles = angles_of(frequencies, rank) if turned else None
    scores = yield from ask_normed_scores(queries, values, angles)

    def solve(head: int, errors: np.random.Generator | None) -> QKNorm | QKNormRotary:
        logits = scores.logits(head, errors)
        return solve_normed(logits) if angles is None else solve_normed_turns(logits, angles, scores.between)

    pairs = [with_deviations(partial(solve, head), rng) for head in range(start.heads)]
    return _of_forms(
        queries, values, pairs, SOFTMAXES * start.heads, {"rank": scores.rank, "tokens_per_query": scores.per_query}
    )


def checked(names: Mapping[str, str], form: str) -> dict[str, str]:
    """Names for all parts; UsageError for parts that several heads are not read through."""
    whole = {kind: names.get(kind, known[0]) for kind, known in KNOWN.items()}
    others = [name for kind, name in whole.items() if name != KNOWN[kind][0]]
    sloping = any(name in others for name in SLOPING)
    if form not in FORMS or (form == "rotary" and sloping) or ("norm" in form and others) or others[1:] == ["table"]:
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


@dataclass
class _Estimate:
    """Parameters and radii of all heads."""

    queries: LongQueries
    start: FirstHeads
    values: VectorValues
    scores: Scores
    names: Mapping[str, str]
    forms: list[tuple[Form, Form]] | None = None  # of every head, and deviations of their arrays

    def whole(self) -> Estimate[MultiHead]:
        """The estimate."""
        space, value, scores = self.queries.signature.space, self.queries.value, self.scores
        attentions = [self._attention(head) for head in range(self.start.heads)]
        details = {
            "parts": self._words(),
            "score_ranks": [int(rank) for rank in scores.ranks],
            "tokens_per_query": scores.per_query,
            "logit_condition": scores.condition,
        }
        if self.forms is not None:
            return _of_forms(self.queries, self.values, self.forms, attentions, details, self._words())
        heads, radii = [], []
        score_errors = ROUNDING_DEVIATIONS * (scores.errors + scores.dropped + self._by_caps())
        for head in range(self.start.heads):
            attention, wide = attentions[head]
            score, matrix = scores.matrices[head], self.values.matrices[head]
            value_error = space.asarray(ROUNDING_DEVIATIONS * self.values.spread[head] + space.spacing * np.abs(matrix))
            heads.append(SingleHead(space.asarray(score), space.asarray(matrix), attention=attention))
            score_error = score_errors[head] + space.spacing * np.abs(score)
            radii.append(SingleHead(space.asarray(score_error), value_error, attention=wide))
        return Estimate(
            params=MultiHead(heads, value.bias if value.has_bias else None),
            radius=MultiHead(radii, value.bias_radius if value.has_bias else None),
            counting_bound=self._bound(),
            assumptions=tuple(each.format(parts=self._words()) for each in ASSUMPTIONS),
            details={
                "heads": self.start.heads,
                "value_ranks": [int(rank) for rank in self.values.ranks],
                **details,
            },
        )

    def _by_caps(self) -> Floats:  # (heads,)
        """Errors of scores by those of caps, which bend logits of up to two: few are larger."""
        cap, errors = self.start.odds.cap, self.start.errors.cap
        if cap is None or errors is None:
            return np.zeros(self.start.heads)
        sizes = np.sqrt(np.mean(self.scores.matrices**2, axis=(1, 2)))
        bend = np.minimum(1.0, (2.0 / cap) ** 2)
        return np.asarray(sizes * bend * errors / cap)

    def _attention(self, head: int) -> tuple[Attention, Attention]:
        """The parts of one head, and the radii of their constants."""
        bias, wide_bias = self._position_bias(head)
        normaliser, wide_normaliser = self._normaliser(head)
        cap, error = self.start.odds.cap, self.start.errors.cap
        if cap is None or error is None:
            return Attention(Exp(), normaliser, bias), Attention(Exp(), wide_normaliser, wide_bias)
        link, wide_link = Softcap(cap[head]), Softcap(ROUNDING_DEVIATIONS * error[head])
        return Attention(link, normaliser, bias), Attention(wide_link, wide_normaliser, wide_bias)

    def _position_bias(self, head: int) -> tuple[PositionBias, PositionBias]:
        falls, error = self.start.odds.falls, self.start.errors.falls
        if falls is not None and error is not None:
            return Alibi(falls[head]), Alibi(ROUNDING_DEVIATIONS * error[head])
        table, off = self.start.odds.table, self.start.errors.table
        if table is not None and off is not None:
            return DistanceTable(table[head]), DistanceTable(ROUNDING_DEVIATIONS * off[head])
        if self.names["position_bias"] == "window":
            window = Window(int(self.queries.window))
            return window, window
        return NoPositionBias(), NoPositionBias()

    def _normaliser(self, head: int) -> tuple[Normaliser, Normaliser]:
        if self.names["normaliser"] == "sum":
            return Sum(), Sum()
        if self.names["normaliser"] == "plus-one":
            return PlusOne(), PlusOne()
        odds, errors = self.start.odds, self.start.errors
        falls = 0.0 if odds.falls is None else float(odds.falls[head])
        off = 0.0 if errors.falls is None else float(errors.falls[head])
        # The rest is 1 + exp(energy), over the factor by which a neighbour weighs less.
        rest = float(odds.rest[head]) * float(np.exp(-falls))
        weight, error = rest - 1, ROUNDING_DEVIATIONS * (float(errors.rest[head]) * float(np.exp(-falls)) + rest * off)
        if not weight > LEAST_SINK * error:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                f"the sink of a head weighs {max(weight, 0.0):.2g} of a token or less: take the normaliser 'sum'",
            )
        return Sink(np.log(weight)), Sink(-np.log1p(-error / weight))

    def _bound(self) -> int:
        """Numbers that determine the heads, over numbers per answer."""
        width, outputs = self.queries.width, self.queries.outputs
        numbers = outputs if self.queries.value.has_bias else 0
        for head in range(self.start.heads):
            rank, inner = int(self.scores.ranks[head]), int(self.values.ranks[head])
            numbers += rank * (2 * width - rank) + inner * (width + outputs - inner) + self._attention(head)[0].numbers
        return -(-numbers // outputs)

    def _words(self) -> str:
        usual = {kind: known[0] for kind, known in KNOWN.items()}
        others = [
            f"{kind.replace('_', ' ')} {name}"
            for kind, name in self.names.items()
            if name not in (usual[kind], "causal")
        ]
        return ", ".join(others) or "those of a softmax"


def _of_forms(
    queries: LongQueries,
    values: VectorValues,
    forms: Sequence[tuple[Form, Form]],
    attentions: Sequence[tuple[Attention, Attention]],
    details: dict[str, Any],
    words: str = "those of a softmax",
) -> Estimate[MultiHead]:
    """Heads of forms, their deviations known to a fifth or so from draws of errors."""
    space, value = queries.signature.space, queries.value
    heads: list[Any] = []
    radii: list[Any] = []
    for head, ((form, deviations), (attention, wide)) in enumerate(zip(forms, attentions, strict=True)):
        matrix = values.matrices[head]
        value_error = ROUNDING_DEVIATIONS * values.spread[head] + space.spacing * np.abs(matrix)
        errors = {name: ROUNDING_DEVIATIONS * array for name, array in deviations.arrays().items()}
        errors = {name: errors[name] + space.spacing * np.abs(array) for name, array in form.arrays().items()}
        if "frequencies" in errors:  # they were not read: they are what was assumed
            errors["frequencies"] = 0.0 * errors["frequencies"]
        heads.append(FormHead(_moved(form, space), space.asarray(matrix), attention=attention))
        radii.append(FormHead(_moved(form.with_arrays(errors), space), space.asarray(value_error), attention=wide))
    numbers = sum(form.numbers for form, _ in forms) + (queries.outputs if value.has_bias else 0)
    numbers += sum(int(rank) * (queries.width + queries.outputs - int(rank)) for rank in values.ranks)
    numbers += sum(attention.numbers for attention, _ in attentions)
    positions = {"groups": groups_of_keys(*zip(*forms, strict=True))} if forms[0][0].positional else {}
    return Estimate(
        params=MultiHead(heads, value.bias if value.has_bias else None),
        radius=MultiHead(radii, value.bias_radius if value.has_bias else None),
        counting_bound=-(-numbers // queries.outputs),
        assumptions=(
            *(each.format(parts=words) for each in ASSUMPTIONS[:2]),
            f"their logits are of the form {forms[0][0].name}"
            + (", turned by the frequencies that were assumed" if forms[0][0].positional else ""),
            *ASSUMPTIONS[2:],
        ),
        details={"heads": len(heads), "value_ranks": [int(rank) for rank in values.ranks], **positions, **details},
    )


def _moved(form: Form, space: Space) -> Form:
    return form.with_arrays({name: space.asarray(array) for name, array in form.arrays().items()})
