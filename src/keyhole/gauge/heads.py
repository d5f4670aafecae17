"""Attention heads modulo what no query can tell: their order, heads of equal logits, heads that say nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, floats
from keyhole.families.form_head import FormHead
from keyhole.families.forms import Form
from keyhole.families.multi_head import MultiHead
from keyhole.families.parts import (
    Attention,
    Causal,
    Count,
    NoNormaliser,
    NoPositionBias,
    PlusOne,
    Relu,
    Sink,
    Softcap,
    Tabulated,
)
from keyhole.families.parts.links import Power
from keyhole.families.single_head import SingleHead
from keyhole.gauge.tolerance import check_shapes, relative, rounding_of, size

Heads = SingleHead | MultiHead
# Longer sequences tell nothing more of heads than those of three tokens do; two tokens tell no sign.
TWO_TOKENS = 2
# Digits by which heads are ordered: fewer than rounding leaves, more than other heads share.
LOUDNESS_DIGITS = 9


def into_logits(head: SingleHead) -> Floats:  # (width, width + 1)
    """The affine map of the last token whose product with a token is its logit."""
    bias = np.zeros(head.width) if head.score_bias is None else floats(head.score_bias)
    return np.column_stack([floats(head.score), bias])


def output_bias_of(params: Heads) -> Floats:  # () or (outputs,)
    """The output bias, zero where there is none."""
    shape = () if params.outputs is None else (params.outputs,)
    return np.zeros(shape) if params.output_bias is None else floats(params.output_bias)


def same_logits(first: Floats, second: Floats, tolerance: float) -> bool:
    """Whether two affine maps into logits agree: score and bias each for itself, since their units differ."""
    return relative(first[:, :-1], second[:, :-1]) <= tolerance and relative(first[:, -1], second[:, -1]) <= tolerance


def groups_of(logits: Sequence[Floats], tolerance: float) -> list[list[int]]:
    """Which heads have the same logits, each group in order."""
    groups: list[list[int]] = []
    for number, own in enumerate(logits):
        known = next((group for group in groups if same_logits(logits[group[0]], own, tolerance)), None)
        if known is None:
            groups.append([number])
        else:
            known.append(number)
    return groups


def merge_heads(params: Heads, tolerance: float) -> Iterator[tuple[list[int], Floats, Floats]]:
    """Groups of heads with equal logits: (numbers, logits, value), the value zero where it cancels up to rounding."""
    heads = MultiHead.of(params).heads
    logits = [into_logits(head) for head in heads]
    for group in groups_of(logits, tolerance):
        values = [floats(heads[number].value) for number in group]
        total = np.sum(values, axis=0)
        if size(total) <= tolerance * sum(size(value) for value in values):
            total = np.zeros_like(total)
        yield group, logits[group[0]], total


def canonical_heads(params: Heads, tolerance: float | None = None) -> MultiHead:
    """Heads of equal logits merged, those without a value dropped, the loudest first: the same for the same map."""
    tolerance = rounding_of(params) if tolerance is None else tolerance
    parts = MultiHead.of(params).heads[0].attention
    merged = [(logits, value) for _, logits, value in merge_heads(params, tolerance) if np.any(value)]
    # Heads that are equally loud, but for rounding, are told apart by their logits.
    merged.sort(key=lambda head: (-float(f"{size(head[1]):.{LOUDNESS_DIGITS}g}"), tuple(head[0].ravel())))
    nothing = (np.zeros((params.width, params.width + 1)), 0.0 * floats(MultiHead.of(params).heads[0].value))
    heads = [
        SingleHead(logits[:, :-1], value, logits[:, -1] if np.any(logits[:, -1]) else None, attention=parts)
        for logits, value in merged or [nothing]
    ]
    bias = output_bias_of(params)
    return MultiHead(heads, bias if np.any(bias) else None)


# --- the same map -----------------------------------------------------------------------------------------------


def equivalent_heads(first: Heads, second: Heads, tolerance: float, max_length: int | None = None) -> bool:
    """Whether two sets of heads define the same map, on sequences of up to `max_length` tokens.

    Their difference is a set of heads too, those of the second with their values negated: it is nothing iff the values
    of every group of equal logits cancel. On two tokens a head of negated logits and value differs from the head itself
    by an average, so groups are made up to that, and the sum of all values is compared by itself; one token shows no
    more than this sum.
    """
    check_shapes(first, second, "heads")
    if not _cancels([output_bias_of(first), -output_bias_of(second)], tolerance):
        return False
    pairs = [(into_logits(head), floats(head.value)) for head in MultiHead.of(first).heads]
    pairs += [(into_logits(head), -floats(head.value)) for head in MultiHead.of(second).heads]
    if not (_is_plain(first) and _is_plain(second)):
        return _equivalent_of_parts(first, second, tolerance)
    if max_length is not None and max_length <= TWO_TOKENS:
        if not _cancels([value for _, value in pairs], tolerance):
            return False
        if max_length < TWO_TOKENS:
            return True
        pairs = [pair for pair in uprighted(pairs, pairs, tolerance) if np.any(pair[0])]
    groups = groups_of([logits for logits, _ in pairs], tolerance)
    return all(_cancels([pairs[number][1] for number in group], tolerance) for group in groups)


def _is_plain(params: Heads) -> bool:
    return all(head.attention.is_softmax for head in params.anatomy.heads)


def _equivalent_of_parts(first: Heads, second: Heads, tolerance: float) -> bool:
    """Whether two single heads, of which one at least has other parts than a softmax, define the same map.

    Their short sequences tell less where parts add to nothing there; that is not counted.
    """
    one, two = (MultiHead.of(each).heads[0] for each in (first, second))
    if not np.any(floats(one.value)) and not np.any(floats(two.value)):
        return True
    if one.attention == two.attention and one.attention.link.is_power:
        return _apart_of_powers(one, two) <= tolerance
    one, two = with_links_alike(one, two)
    same = same_logits(into_logits(one), into_logits(two), tolerance)
    same = same and _cancels([floats(one.value), -floats(two.value)], tolerance)
    return same and distance_of_parts(one.attention, two.attention) <= tolerance


def distance_of_parts(first: Attention, second: Attention) -> float:
    """The largest relative distance of two constants of the parts of attention; 1 for parts of other kinds."""
    one, two = _general(first), _general(second)
    if one.words != two.words:
        return 1.0
    others = two.arrays()
    pairs = [(floats(array), floats(others[name])) for name, array in one.arrays().items()]
    if any(mine.shape != theirs.shape for mine, theirs in pairs):
        return 1.0
    # Energies have a unit of their own, by which small ones are nothing.
    sizes = [max(1.0, size(mine), size(theirs)) for mine, theirs in pairs]
    return max((size(mine - theirs) / unit for (mine, theirs), unit in zip(pairs, sizes, strict=True)), default=0.0)


def with_links_alike(first: SingleHead, second: SingleHead) -> tuple[SingleHead, SingleHead]:
    """Two heads of which one has a link by its energies: both links so, as far as both reach, of slope one at zero."""
    heads = (first, second)
    links = [head.attention.link for head in heads]
    slopes = [float(np.max(floats(link.slopes(np.zeros(1))))) for link in links]
    tables = [link for link in links if isinstance(link, Tabulated)]
    if not tables or any(link.is_power for link in links) or 0.0 in slopes:
        return heads
    reach = min(link.reach * abs(slope) for link, slope in zip(links, slopes, strict=True))
    count = max(table.coefficients.shape[0] for table in tables)
    made = []
    for head, link, slope in zip(heads, links, slopes, strict=True):
        bias = None if head.score_bias is None else slope * floats(head.score_bias)
        attention = replace(head.attention, link=Tabulated.of(link, count, reach, slope))
        made.append(replace(head, score=slope * floats(head.score), score_bias=bias, attention=attention))
    return made[0], made[1]


def _general(attention: Attention) -> Attention:
    """The parts as the last token sees them: one more is a sink, nothing comes after the query, caps are even."""
    link = attention.link
    if isinstance(link, Softcap):
        link = Softcap(abs(floats(link.cap)))
    normaliser = Sink(0.0) if attention.normaliser == PlusOne() else attention.normaliser
    position_bias = NoPositionBias() if attention.position_bias == Causal() else attention.position_bias
    return Attention(link, normaliser, position_bias, attention.length_law)


def uprighted(
    pairs: Sequence[tuple[Floats, Floats]], among: Sequence[tuple[Floats, Floats]], tolerance: float
) -> list[tuple[Floats, Floats]]:
    """Heads (logits, value) each as it is, or as its negative and an average, where the first of its kind is that."""
    found: list[tuple[Floats, Floats]] = []
    for logits, value in pairs:
        kind = next(
            known
            for known, _ in among
            if same_logits(known, logits, tolerance) or same_logits(known, -logits, tolerance)
        )
        upright = same_logits(kind, logits, tolerance)
        found += [(logits, value)] if upright else [(-logits, -value), (0 * logits, 2 * value)]
    return found


def _cancels(parts: Sequence[Floats], tolerance: float) -> bool:
    """Whether the parts add up to nothing, but for the rounding of each."""
    return size(np.sum(parts, axis=0)) <= tolerance * sum(size(part) for part in parts)


# --- distance ---------------------------------------------------------------------------------------------------


def distance_of_heads(first: Heads, second: Heads) -> float:
    """The largest relative distance of two matched heads, of logits or of values, and of the output biases.

    1 when the numbers of heads differ: no head of one then corresponds to some head of the other. Constants of parts of
    attention count too; heads of other parts are 1 apart.
    """
    check_shapes(first, second, "heads")
    if isinstance(first, SingleHead) and isinstance(second, SingleHead):
        return _apart(first, second)
    if not (_is_plain(first) and _is_plain(second)):  # one head each, then
        alone, other = (
            replace(MultiHead.of(each).heads[0], output_bias=output_bias_of(each)) for each in (first, second)
        )
        return _apart(alone, other)
    tolerance = rounding_of(first, second)
    one, two = canonical_heads(first, tolerance), canonical_heads(second, tolerance)
    biases = [output_bias_of(each) for each in (one, two)]
    # A bias is small or large beside what the values are.
    loudness = max(float(np.max(np.abs(floats(head.value)))) for head in (*one.heads, *two.heads))
    offset = float(np.max(np.abs(biases[0] - biases[1]), initial=0.0))
    scale = max(loudness, *(float(np.max(np.abs(bias), initial=0.0)) for bias in biases))
    apart = offset / scale if scale else 0.0
    if len(one.heads) != len(two.heads):
        return 1.0
    beside = largest_logits(one.heads, two.heads)
    costs = np.array([[_apart(a, b, beside) for b in two.heads] for a in one.heads])
    rows, columns = linear_sum_assignment(costs)
    return max(apart, float(np.max(costs[rows, columns])))


def largest_logits(*sets: Sequence[SingleHead]) -> float:
    """The norm of the largest affine map into logits."""
    return max(size(into_logits(head)) for heads in sets for head in heads)


def logits_apart(first: SingleHead, second: SingleHead, beside: float = 0.0) -> float:
    """The relative distance of the affine maps into logits; over what is beside them where one head has none."""
    one, two = into_logits(first), into_logits(second)
    if beside and not (np.any(one) and np.any(two)):
        return size(one - two) / beside
    return relative(one, two)


def _apart(first: SingleHead, second: SingleHead, beside: float = 0.0) -> float:
    """The larger relative distance of the affine maps into logits and into values."""

    def into_values(head: SingleHead) -> Floats:  # (width + 1, outputs)
        return np.vstack([floats(head.value).reshape(head.width, -1), output_bias_of(head).ravel()])

    values = relative(into_values(first), into_values(second))
    if not np.any(floats(first.value)) and not np.any(floats(second.value)):
        return values
    first, second = with_links_alike(first, second)
    parts = distance_of_parts(first.attention, second.attention)
    if parts < 1 and first.attention.link.is_power:
        return max(parts, _apart_of_powers(first, second))
    return max(values, logits_apart(first, second, beside), parts)


def _apart_of_powers(first: SingleHead, second: SingleHead) -> float:
    """The distance of heads whose masses are powers of logits: their scale is not told, or makes up for the value's."""
    attention = first.attention
    one, two = (into_logits(head) for head in (first, second))
    shared = attention.normaliser in (NoNormaliser(), Count())
    meeting = float(np.sum(one * two))
    signed = meeting < 0 and not (shared and attention.link == Relu())
    factors = [(-1.0 if signed and number else 1.0) / (size(each) or 1.0) for number, each in enumerate((one, two))]
    values = []
    for head, factor in zip((first, second), factors, strict=True):
        power = attention.link.exponent if isinstance(attention.link, Power) else 1.0
        grown = floats(head.value) / (np.sign(factor) * np.abs(factor) ** power if shared else 1.0)
        values.append(np.vstack([grown.reshape(head.width, -1), output_bias_of(head).ravel()]))
    return max(relative(one * factors[0], two * factors[1]), relative(*values))


# --- heads of other score forms, which say themselves what no query can tell


def canonical_form_head(params: FormHead, tolerance: float) -> FormHead:  # noqa: ARG001
    """The head with the canonical arrays of its form."""
    bias = None if params.output_bias is None else floats(params.output_bias)
    return FormHead(_shown_form(params).canonical(), floats(params.value), bias, params.attention)


def _shown_form(params: FormHead) -> Form:
    """The form without what weights do not show of it."""
    return params.form.without_shift() if params.attention.ignores_shifts else params.form


def equivalent_form_heads(first: FormHead, second: FormHead, tolerance: float, max_length: int | None) -> bool:  # noqa: ARG001
    """Whether two heads define the same map; what short sequences tell less is not counted."""
    return distance_of_form_heads(first, second) <= tolerance


def distance_of_form_heads(first: FormHead, second: FormHead) -> float:
    """The largest relative distance of what logits tell of the forms, of values with output bias, and of constants."""
    check_shapes(first, second, "heads")
    values = relative(_into_values(first), _into_values(second))
    if not np.any(floats(first.value)) and not np.any(floats(second.value)):
        return values
    parts = distance_of_parts(first.attention, second.attention)
    return max(values, parts, _distance_of_logits(first, second))


def _distance_of_logits(first: FormHead, second: FormHead) -> float:
    one, two = _shown_form(first).canonical(), _shown_form(second).canonical()
    if type(one) is not type(two):
        return 1.0
    pairs = [(one.told()[name], array) for name, array in two.aligned_to(one).told().items()]
    if any(mine.shape != theirs.shape for mine, theirs in pairs):
        return 1.0
    return max(relative(mine, theirs) for mine, theirs in pairs)


def _into_values(head: FormHead) -> Floats:  # (width + 1, outputs)
    bias = np.zeros(head.value.shape[1:]) if head.output_bias is None else floats(head.output_bias)
    return np.vstack([floats(head.value).reshape(head.width, -1), bias.ravel()])


def align_form_heads(params: FormHead, truth: FormHead) -> dict[str, Floats]:
    """The arrays of the truth, those of the form as they are closest to the recovered ones."""
    if type(params.form) is not type(truth.form):
        return {}
    closest = replace(truth, form=_shown_form(truth).aligned_to(params.form)).arrays()
    return {
        name: floats(closest[name])
        for name, array in params.arrays().items()
        if name in closest and closest[name].shape == array.shape
    }


def hidden_by_form(params: FormHead, rng: np.random.Generator) -> tuple[FormHead, str] | None:  # noqa: ARG001
    """The head with other arrays of its form that make the same logits."""
    found = params.form.sibling()
    return None if found is None else (replace(params, form=found[0]), found[1])


# --- several heads, which are not merged: which of them are one follows from their parts, and is not looked into


def has_parts(params: Heads) -> bool:
    """Whether these are several heads of which some is no plain softmax head, or heads of other forms."""
    heads = MultiHead.of(params)
    return heads.has_forms or (len(heads.heads) > 1 and any(not head.attention.is_softmax for head in heads.heads))


def canonical_of_any(params: Heads, tolerance: float | None = None) -> MultiHead:
    """Each head as it would be alone, the loudest first."""
    if not has_parts(params):
        return canonical_heads(params, tolerance)
    heads = MultiHead.of(params)
    alone: list[Any] = [_alone(head, tolerance, forms=heads.has_forms) for head in heads.heads]
    alone.sort(key=lambda head: -size(floats(head.value)))
    return MultiHead(alone, heads.output_bias if np.any(output_bias_of(heads)) else None)


def _alone(head: Any, tolerance: float | None, *, forms: bool) -> Any:
    return canonical_form_head(head, tolerance or 0.0) if forms else canonical_heads(head, tolerance).heads[0]


def equivalent_of_any(first: Heads, second: Heads, tolerance: float, max_length: int | None = None) -> bool:
    """Whether two sets of heads define the same map; what short sequences tell less of parts is not counted."""
    if not (has_parts(first) or has_parts(second)):
        return equivalent_heads(first, second, tolerance, max_length)
    return distance_of_any(first, second) <= tolerance


def distance_of_any(first: Heads, second: Heads) -> float:
    """The largest distance of two heads that are matched one to one, and of the output biases; 1 for other numbers."""
    if not (has_parts(first) or has_parts(second)):
        return distance_of_heads(first, second)
    check_shapes(first, second, "heads")
    one, two = MultiHead.of(first), MultiHead.of(second)
    if len(one.heads) != len(two.heads) or one.has_forms != two.has_forms:
        return 1.0
    biases = [output_bias_of(each) for each in (one, two)]
    loudness = max(float(np.max(np.abs(floats(head.value)))) for head in (*one.heads, *two.heads))
    scale = max(loudness, *(float(np.max(np.abs(bias), initial=0.0)) for bias in biases)) or 1.0
    apart = float(np.max(np.abs(biases[0] - biases[1]), initial=0.0)) / scale
    costs = _costs(one, two)
    rows, columns = linear_sum_assignment(costs)
    return max(apart, float(np.max(costs[rows, columns])))


def _costs(one: MultiHead, two: MultiHead) -> Floats:
    of_pair: Any = distance_of_form_heads if one.has_forms else distance_of_heads
    return np.array([[of_pair(own, other) for other in two.heads] for own in one.heads])


def align_several(params: MultiHead, truth: MultiHead) -> dict[str, Floats]:
    """The arrays of the true heads in the order of those recovered, those of forms as close to them as gauges allow."""
    if len(params.heads) != len(truth.heads) or params.has_forms != truth.has_forms:
        return {}
    rows, columns = linear_sum_assignment(_costs(params, truth))
    order = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    found: dict[str, Floats] = {}
    for number, own in enumerate(params.heads):
        other: Any = truth.heads[order[number]]
        arrays = align_form_heads(own, other) if params.has_forms else other.arrays()  # type: ignore[arg-type]
        mine = own.arrays()
        found |= {
            f"heads.{number}.{name}": floats(array)
            for name, array in arrays.items()
            if name in mine and mine[name].shape == array.shape
        }
    if params.output_bias is not None:
        found["output_bias"] = output_bias_of(truth)
    return found
