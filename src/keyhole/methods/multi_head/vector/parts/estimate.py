"""Estimates of several heads from what was read of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Array, Floats, Space
from keyhole.families import FormHead, MultiHead, SingleHead
from keyhole.families.forms import Form
from keyhole.families.parts import (
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
from keyhole.methods.base import Estimate, Unrecoverable
from keyhole.methods.multi_head.vector.parts.first_token import FirstHeads
from keyhole.methods.multi_head.vector.parts.rotary import groups_of_keys
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.values import VectorValues
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
ASSUMPTIONS = (
    "the box adds up heads over its raw tokens, read at the last position{biases}",
    "the parts of their attention are {parts}",
    "heads whose logits differ by less than their answers show are one head",
    "answers are right up to the rounding of their dtype",
)
UNBIASED = ", without score biases"


@dataclass
class HeadsEstimate:
    """Parameters and radii of all heads."""

    queries: VectorQueries
    start: FirstHeads
    values: VectorValues
    scores: Scores
    names: Mapping[str, str]
    forms: list[tuple[Form, Form]] | None = None  # of every head, and deviations of their arrays
    biased: bool = False  # whether keys and queries have biases

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
            return estimate_of_forms(
                self.queries, self.values, self.forms, attentions, details, self._words(), biased=self.biased
            )
        heads, radii = [], []
        score_errors = ROUNDING_DEVIATIONS * (scores.errors + scores.dropped + self._by_caps())
        for head in range(self.start.heads):
            attention, wide = attentions[head]
            score, matrix = scores.matrices[head], self.values.matrices[head]
            value_error = space.asarray(ROUNDING_DEVIATIONS * self.values.spread[head] + space.spacing * np.abs(matrix))
            score_error = score_errors[head] + space.spacing * np.abs(score)
            bias, bias_error = self._score_bias(head) if self.biased else (None, None)
            heads.append(SingleHead(space.asarray(score), space.asarray(matrix), bias, attention=attention))
            radii.append(SingleHead(space.asarray(score_error), value_error, bias_error, attention=wide))
        return Estimate(
            params=MultiHead(heads, value.bias if value.has_bias else None),
            radius=MultiHead(radii, value.bias_radius if value.has_bias else None),
            counting_bound=self._bound(),
            assumptions=_assumptions(self._words(), biased=self.biased),
            details={
                "heads": self.start.heads,
                "value_ranks": [int(rank) for rank in self.values.ranks],
                **details,
            },
        )

    def _score_bias(self, head: int) -> tuple[Array, Array]:
        """The bias of one head, and its radius."""
        space, bias = self.queries.signature.space, self.scores.biases[head]
        error = ROUNDING_DEVIATIONS * (self.scores.bias_errors[head] + np.zeros_like(bias))
        return space.asarray(bias), space.asarray(error + space.spacing * np.abs(bias))

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
            window = Window(int(self.start.odds.window))
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
            numbers += (
                (width if self.biased else 0)
                + rank * (2 * width - rank)
                + inner * (width + outputs - inner)
                + self._attention(head)[0].numbers
            )
        return -(-numbers // outputs)

    def _words(self) -> str:
        usual = {kind: known[0] for kind, known in KNOWN.items()}
        others = [
            f"{kind.replace('_', ' ')} {name}"
            for kind, name in self.names.items()
            if name not in (usual[kind], "causal")
        ]
        return ", ".join(others) or "those of a softmax"


def estimate_of_forms(
    queries: VectorQueries,
    values: VectorValues,
    forms: Sequence[tuple[Form, Form]],
    attentions: Sequence[tuple[Attention, Attention]],
    details: dict[str, Any],
    words: str = "those of a softmax",
    *,
    biased: bool = False,
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
    assumed = _assumptions(words, biased=biased)
    return Estimate(
        params=MultiHead(heads, value.bias if value.has_bias else None),
        radius=MultiHead(radii, value.bias_radius if value.has_bias else None),
        counting_bound=-(-numbers // queries.outputs),
        assumptions=(
            *assumed[:2],
            f"their logits are of the form {forms[0][0].name}"
            + (", turned by the frequencies that were assumed" if forms[0][0].positional else ""),
            *assumed[2:],
        ),
        details={"heads": len(heads), "value_ranks": [int(rank) for rank in values.ranks], **positions, **details},
    )


def _assumptions(words: str, *, biased: bool) -> tuple[str, ...]:
    return tuple(each.format(parts=words, biases="" if biased else UNBIASED) for each in ASSUMPTIONS)


def _moved(form: Form, space: Space) -> Form:
    return form.with_arrays({name: space.asarray(array) for name, array in form.arrays().items()})
