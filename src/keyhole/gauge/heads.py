"""Attention heads modulo what no query can tell: their order, heads of equal logits, heads that say nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, floats
from keyhole.families.multi_head import MultiHead
from keyhole.families.parts import Attention, Causal, NoPositionBias, PlusOne, Sink
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


def _general(attention: Attention) -> Attention:
    """The parts as the last token sees them: one more is a sink, and nothing comes after the query."""
    normaliser = Sink(0.0) if attention.normaliser == PlusOne() else attention.normaliser
    position_bias = NoPositionBias() if attention.position_bias == Causal() else attention.position_bias
    return Attention(attention.link, normaliser, position_bias, attention.length_law)


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
        return _apart(
            *(replace(MultiHead.of(each).heads[0], output_bias=output_bias_of(each)) for each in (first, second))
        )
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
    costs = np.array([[_apart(a, b) for b in two.heads] for a in one.heads])
    rows, columns = linear_sum_assignment(costs)
    return max(apart, float(np.max(costs[rows, columns])))


def _apart(first: SingleHead, second: SingleHead) -> float:
    """The larger relative distance of the affine maps into logits and into values."""

    def into_values(head: SingleHead) -> Floats:  # (width + 1, outputs)
        return np.vstack([floats(head.value).reshape(head.width, -1), output_bias_of(head).ravel()])

    values = relative(into_values(first), into_values(second))
    if not np.any(floats(first.value)) and not np.any(floats(second.value)):
        return values
    logits = relative(into_logits(first), into_logits(second))
    return max(values, logits, distance_of_parts(first.attention, second.attention))
