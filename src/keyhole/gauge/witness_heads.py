"""Witnesses of heads: other heads with the same map."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families.multi_head import MultiHead
from keyhole.families.single_head import SingleHead
from keyhole.gauge.factored import FactoredHeads, Factors
from keyhole.gauge.heads import Heads, into_logits, merge_heads
from keyhole.gauge.tolerance import rounding_of, size

Found = tuple[MultiHead | FactoredHeads, str] | None
Random = np.random.Generator


def _plain(params: Heads) -> MultiHead:
    return MultiHead.of(params).like(np.zeros(1))


def _loudest(heads: MultiHead) -> int | None:
    """The number of the head with the largest value, of those that have any."""
    sizes = [size(floats(head.value)) for head in heads.heads]
    return int(np.argmax(sizes)) if max(sizes) > 0 else None


def _replaced(heads: MultiHead, number: int, *others: SingleHead) -> MultiHead:
    """The heads with others in the place of one, which come last."""
    kept = [head for n, head in enumerate(heads.heads) if n != number]
    return MultiHead([*kept, *others], heads.output_bias)


def _with_logits(heads: MultiHead, number: int, rng: Random) -> MultiHead:
    """The heads with random logits of one of them."""
    score, bias = _logits_like(heads.heads[number], rng)
    changed = [SingleHead(score, head.value, bias) if n == number else head for n, head in enumerate(heads.heads)]
    return MultiHead(changed, heads.output_bias)


def _logits_like(head: SingleHead, rng: Random) -> tuple[Floats, Floats | None]:
    """Random score and score bias about as large as those of a head."""
    entry = size(floats(head.score)) / head.width or 1.0
    bias = None if head.score_bias is None else rng.standard_normal(head.width) * size(floats(head.score_bias))
    return entry * rng.standard_normal((head.width, head.width)), bias


def merge(params: Heads, _: Random) -> Found:
    """Heads of equal logits as one."""
    heads = _plain(params)
    groups = merge_heads(params, rounding_of(params))
    shared, total = next(((group, value) for group, _, value in groups if len(group) > 1), (None, None))
    if shared is None:
        return None
    kept = [replace(head, value=total) if n == shared[0] else head for n, head in enumerate(heads.heads)]
    rest = [head for n, head in enumerate(kept) if n not in shared[1:]]
    said = (
        f"heads {_in_words(shared)} have the same logits, so that only the sum of their values shows: they are one head"
    )
    return MultiHead(rest, heads.output_bias), said


def split(params: Heads, rng: Random) -> Found:
    """One head as two of the same logits."""
    heads = _plain(params)
    number = _loudest(heads)
    if number is None:
        return None
    head = heads.heads[number]
    part = rng.standard_normal(head.value.shape) * size(head.value) / head.value.size**0.5
    halves = replace(head, value=part), replace(head, value=head.value - part)
    said = f"head {number} is two heads with its logits, and values that add up to its own"
    return _replaced(heads, number, *halves), said


def permutation(params: Heads, rng: Random) -> Found:
    """The same heads in another order."""
    heads = _plain(params)
    count = len(heads.heads)
    if count < 2:
        return None
    order = (np.arange(count) + rng.integers(1, count)) % count
    said = "the heads are in another order; their answers are added up"
    return MultiHead([heads.heads[n] for n in order], heads.output_bias), said


def zero_head(params: Heads, rng: Random) -> Found:
    """A head without a value beside the others."""
    heads = _plain(params)
    score, bias = _logits_like(heads.heads[0], rng)
    extra = SingleHead(score, 0.0 * heads.heads[0].value, bias)
    said = "there is one head more, which has logits but no value, and so adds nothing"
    return MultiHead([*heads.heads, extra], heads.output_bias), said


def silent_logits(params: Heads, rng: Random) -> Found:
    """Other logits of a head without a value."""
    heads = _plain(params)
    silent = next((n for n, head in enumerate(heads.heads) if not np.any(head.value)), None)
    if silent is None:
        return None
    return _with_logits(heads, silent, rng), f"head {silent} has no value, so its logits can be anything"


def factor_gauge(params: Heads, rng: Random) -> Found:
    """Key and query, value and output matrices other than the plainest ones."""
    heads = _plain(params)
    made = []
    for head in heads.heads:
        width, value = head.width, head.value.reshape(head.width, -1)
        few = min(value.shape)
        left, sizes, right = np.linalg.svd(value, full_matrices=False)
        turn, _ = np.linalg.qr(rng.standard_normal((width, width)))
        turn = turn * rng.uniform(0.5, 2.0, width)  # key · turn, query · turn⁻ᵀ: score = key · queryᵀ stays
        inner, _ = np.linalg.qr(rng.standard_normal((few, few)))
        output = inner.T @ right
        bias = None if head.score_bias is None else np.linalg.solve(turn, head.score_bias)
        shaped = output.reshape(few, *head.value.shape[1:])
        query = np.linalg.solve(turn, head.score).T
        made.append(Factors(turn, query, left * sizes @ inner, shaped, query_bias=bias, attention=head.attention))
    said = (
        "key and query matrices are multiplied by a matrix and its inverse transposed, value and output matrices by "
        "one and its inverse: only the products show"
    )
    return FactoredHeads(tuple(made), heads.output_bias), said


def length_two(params: Heads, _: Random) -> Found:
    """A head with the signs of its logits and value changed, and an average: the same for two tokens, not for three."""
    heads = _plain(params)
    loud = [n for n, head in enumerate(heads.heads) if np.any(head.value) and np.any(into_logits(head))]
    if not loud:
        return None
    number = max(loud, key=lambda n: size(heads.heads[n].value))
    head = heads.heads[number]
    bias = None if head.score_bias is None else -head.score_bias
    changed = SingleHead(-head.score, -head.value, bias), SingleHead(0.0 * head.score, 2 * head.value)
    said = (
        f"head {number} has the signs of logits and value changed, and a head that averages has twice its value: of "
        "two tokens the weight of one is one minus that of the other, of three it is not"
    )
    return _replaced(heads, number, *changed), said


def length_one(params: Heads, rng: Random) -> Found:
    """Other logits: a token alone has all the weight."""
    heads = _plain(params)
    number = _loudest(heads)
    if number is None:
        return None
    return _with_logits(heads, number, rng), f"head {number} has other logits: a token alone has all the weight"


def _in_words(numbers: list[int]) -> str:
    *most, last = (str(number) for number in numbers)
    return f"{', '.join(most)} and {last}"


HEAD_KINDS = {
    "merge": merge,
    "silent logits": silent_logits,
    "split": split,
    "permutation": permutation,
    "zero head": zero_head,
    "factor gauge": factor_gauge,
    "length-2-only": length_two,
    "length-1-only": length_one,
}
