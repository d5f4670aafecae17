"""The method `labels`: one head of which only a label is told, the sign of its answer or the largest of several."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.families import Labels, SingleHead
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable, target_details
from keyhole.methods.labels.bounded.method import ask_classes, ask_signs
from keyhole.methods.labels.bounded.value import BoundedValue
from keyhole.methods.labels.class_biases import ask_biases, ask_has_biases
from keyhole.methods.labels.classes import ClassReader, ClassValues
from keyhole.methods.labels.comparisons import Comparer, OtherLabel
from keyhole.methods.labels.score import ADDED, SCORE_BIAS, LabelScore, Rows, ScoreReader, ask_rows
from keyhole.methods.labels.several import ask_several, entropy_of_heads
from keyhole.methods.labels.value import LabelValue, Tokens, ask_threshold, ask_value
from keyhole.methods.options import check_positive, check_whole
from keyhole.noise import HOPELESS_FLIPS
from keyhole.queries import Signature, Term, TokenRows
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "labels are those of one softmax head without a score bias, read at the last position",
    "a label is the sign of the answer against a fixed threshold, or the largest of several outputs",
    "labels are right, but for a share that was declared or measured",
)
ASSUMPTIONS_OF_HEADS = (
    "labels are those of several softmax heads without score biases that add up to one number, read at the last one",
    "a label is the sign of the answer against a fixed threshold",
    "heads whose logits differ by less than their answers show are one head, and those whose values show nowhere none",
)
ONE_COPY = 2  # sequences of so many tokens hold one copy of each
AUTO = "auto"  # as many heads as it takes
Found = tuple[tuple[float, ...], LabelValue | ClassValues, LabelScore]  # labels, values and score
DEFAULT_ERROR = 1e-6
LARGEST_ERROR, MOST_BITS = 0.5, 60  # that can be asked for
# What a budget buys: this share of it goes into bits of entries, the rest into finding signs and scale.
ENTROPY_SHARE = 0.95
NORMAL_BITS = 1.1  # that a normal number has more than a uniform one
FINEST, COARSEST = 1e-12, 0.25
# Chance that any of all decisions is wrong where labels are.
ANY_DOUBT = 3e-3
# The longest token where norms are free but sequences have two tokens at most.
LONGEST = 2.0**10
# Dense tokens whose labels are looked at besides those of unit tokens: of any norm, and of a bounded one.
LOOKS, BOUNDED_LOOKS = 6, 8
# The same where a class turned out to be of few tokens.
MANY_LOOKS = 1000
TIES = {-1.0, 0.0, 1.0}
# What is added to every unit token where there are classes, over its norm.
MIXED = 2.0**-6


def labels(
    signature: Signature,
    rng: np.random.Generator,
    *,
    budget: float = math.inf,
    target_error: float | None = None,
    bits: int | None = None,
    classes: int | None = None,
    heads: int | str | None = None,
    places: Floats | None = None,  # (n, width) single tokens of classes that an earlier estimate did not know
) -> Steps[Estimate[Labels]]:
    """Score, value and threshold from labels by bisection, at one to two per cent above the entropy.

    *Provably Learning Attention with Queries* (arXiv 2601.16873), Appendix B, learns from membership queries by
    bisection. Here all entries are bisected at once, by null queries in whose label values do not count.
    """
    rate = signature.noise.scale if signature.noise.kind == "flipped" else 0.0
    accuracy = _accuracy(target_error, bits, _affordable(budget * (1 - entropy(rate)), signature))
    if rate > HOPELESS_FLIPS:
        raise Unrecoverable(
            Outcome.TOO_NOISY, f"labels that are wrong in {rate:.0%} of all answers say next to nothing"
        )
    if signature.max_length == 1:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, "labels of single tokens do not depend on the score: raise max_length"
        )
    width = signature.width
    _check_heads(heads, signature, rate)
    comparer = Comparer(signature, rate, ANY_DOUBT / (width * width + width), -1.0, 1.0)
    if heads not in (None, 1):
        return (yield from _ask_heads(comparer, accuracy, target_error, heads, rng))
    free = _is_free(signature)
    ask = _ask_free if free else _ask_bounded
    dense = _directions(rng, LOOKS if free else BOUNDED_LOOKS, places, width)
    try:
        kind, value, score = yield from ask(comparer, accuracy, classes, dense, rng)
    except OtherLabel as error:
        kind, value, score = yield from _ask_again(comparer, accuracy, classes, dense, rng, error)
    return _estimate(signature, kind, rate, value, score, target_error)


def _ask_again(
    comparer: Comparer, accuracy: float, classes: Any, dense: Floats, rng: np.random.Generator, error: OtherLabel
) -> Steps[Found]:
    """Once more where a label was answered that is neither of two: a class of few tokens, or of short ones."""
    comparer.ties = True
    many = np.vstack([dense, _directions(rng, MANY_LOOKS, None, dense.shape[1])])
    free = _is_free(comparer.signature)
    try:
        found = yield from (_ask_free if free else _ask_bounded)(comparer, accuracy, classes, many, rng)
    except OtherLabel:
        if free:
            raise
    else:
        if error.label in found[0]:
            return found
    if free:  # which no single token that was looked at is answered with
        raise error
    found = yield from _ask_bounded(comparer, accuracy, classes, dense, rng, biased=True)
    if error.label not in found[0]:
        raise error
    return found


def _is_free(signature: Signature) -> bool:
    """Whether null queries may be asked, of three tokens of any norm."""
    return signature.max_norm is None and (signature.max_length or 3) > 2


def _directions(rng: np.random.Generator, count: int, places: Floats | None, width: int) -> Floats:  # -> (n, width)
    """Directions in which labels are looked at: so many random ones, and those of some tokens."""
    vectors = np.vstack([rng.standard_normal((count, width)), *([] if places is None else [places])])
    norms = np.linalg.norm(vectors, axis=1)
    return np.asarray(vectors[norms > 0] / norms[norms > 0, None])


def _check_heads(heads: Any, signature: Signature, rate: float) -> None:
    """UsageError where this is no number of heads; Unrecoverable where several are not read."""
    if heads != AUTO:
        check_whole("heads", heads, 1, otherwise=f", or {AUTO!r}")
    if heads in (None, 1):
        return
    if rate:
        raise Unrecoverable(Outcome.TOO_NOISY, "several heads are not read from labels that are wrong at times")
    if signature.max_length == ONE_COPY:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, "sequences of two tokens do not determine several heads: raise max_length"
        )
    if signature.max_norm is not None:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "several heads are read from labels of tokens of any norm only: leave out max_norm if the box allows that",
        )


def _ask_heads(
    comparer: Comparer, accuracy: float, target_error: float | None, heads: int | str | None, rng: np.random.Generator
) -> Steps[Estimate[Labels]]:
    """Several heads behind one sign."""
    tokens = Tokens(comparer)
    rows, looks = yield from _ask_looks(tokens, _directions(rng, LOOKS, None, tokens.width), rng)
    kind = _kind(looks)
    if len(kind) > 2:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, f"several heads are read from two labels only, and there are {len(kind)}"
        )
    comparer.negative, comparer.positive = kind[0], kind[-1]
    yield from _check_score_bias(tokens, rng)
    finest = tokens.space.eps
    value = yield from ask_value(tokens, _signs(rows, kind), finest)
    value = yield from ask_threshold(tokens, value, finest)
    found = yield from ask_several(tokens, value, accuracy, rng)
    count = len(found.params.heads)
    if heads not in (AUTO, count):
        raise Unrecoverable(Outcome.WRONG_FAMILY, f"{count} heads explain the labels, and not {heads}: correct heads=")
    names = tuple(int(label) for label in kind)
    bits, error = entropy_of_heads(found, accuracy)
    return Estimate(
        Labels(found.params.simplest(), names),
        Labels(found.radius.simplest(), names),
        math.ceil(bits),
        assumptions=ASSUMPTIONS_OF_HEADS,
        details={
            **found.details,
            "labels": list(names),
            "threshold": bool(value.threshold),
            "entropy_bits": bits,
            "largest_radius": error,
            **target_details(target_error, error),
        },
    )


def _ask_looks(tokens: Tokens, directions: Floats, rng: np.random.Generator) -> Steps[tuple[Rows, Rows]]:
    """Labels of long tokens that are a basis, and of these and some dense ones, along `directions`.

    Unit tokens where there are two labels. Where there are more, values that are zero or whole numbers may tie at
    these, so that what is beside them decides: then every one has some of the others added.
    """
    width = tokens.width
    dense = yield from ask_rows(tokens, directions, "signs")
    basis, seen = np.eye(width), dense
    for _ in range(2):
        if len(_labels(seen)) > 2:
            basis = np.eye(width) + MIXED * rng.standard_normal((width, width)) / width**0.5
        rows = yield from ask_rows(tokens, basis, "signs")
        seen = dense.beside(rows)
        if len(_labels(seen)) <= 2 or not np.array_equal(basis, np.eye(width)):
            break
    return rows, seen


def _labels(rows: Rows) -> set[float]:
    """The labels that are classes: that of zero is none beside two signs."""
    found = set(rows.yes) | set(rows.no)
    is_sign = found == TIES and all(own == -other for own, other in zip(rows.yes, rows.no, strict=True))
    return found - {0.0} if is_sign else found


def _ask_free(
    comparer: Comparer, accuracy: float, classes: Any, dense: Floats, rng: np.random.Generator
) -> Steps[Found]:
    """Null queries of long tokens."""
    tokens = Tokens(comparer)
    rows, looks = yield from _ask_looks(tokens, dense, rng)
    kind = _kind(looks)
    comparer.negative, comparer.positive, comparer.ties = kind[0], kind[-1], _is_sign(kind)
    yield from _check_score_bias(tokens, rng)
    value: LabelValue | ClassValues
    if len(kind) == 2:
        _check_classes(kind, classes)
        value = yield from ask_value(tokens, _signs(rows, kind), accuracy)
        pivot = value.pivot
    else:
        classes_of = ClassReader(tokens, rng)
        value = yield from classes_of.ask_all(looks, accuracy)
        kind = classes_of.kind
        _check_classes(kind, classes)
        if (yield from ask_has_biases(classes_of)):
            value = yield from ask_biases(classes_of, value, accuracy)
        pivot = int(np.argmax(np.ptp(value.matrix, axis=1)))
    rows = yield from _with_values(tokens, rows, pivot)
    reader = ScoreReader(tokens, rows)
    scale = yield from reader.ask_scale(rng)
    score = yield from _ask_score(reader, scale, accuracy, _closeness(rows.vectors @ value.matrix))
    if isinstance(value, LabelValue):
        value = yield from ask_threshold(tokens, value, accuracy)
    return kind, value, score


def _ask_bounded(
    comparer: Comparer, accuracy: float, classes: Any, dense: Floats, rng: np.random.Generator, *, biased: bool = False
) -> Steps[Found]:
    """Two tokens on either side of a plane where labels change; classes are known to have biases with `biased`."""
    longest = min(comparer.signature.norm_limit, LONGEST)
    bounded = BoundedValue(comparer, longest, rng)
    yield from bounded.ask_sides(dense)
    kind = _kind(Rows(bounded.vectors, bounded.yes, bounded.no))
    comparer.ties = _is_sign(kind)
    if len(kind) == 2 and not biased:
        _check_classes(kind, classes)
        value, score = yield from ask_signs(bounded, kind[0], kind[1], accuracy, rng)
        return kind, value, score
    kind, values, score = yield from ask_classes(bounded, Tokens(comparer), accuracy, rng, biased=biased)
    _check_classes(kind, classes)
    return kind, values, score


def _affordable(queries: float, signature: Signature) -> float:
    """The error that so many right labels of two kinds bring it to; the usual one where there is no limit."""
    if math.isinf(queries):
        return DEFAULT_ERROR
    width = signature.width
    start, per_width = (150.0, 6.0) if signature.max_norm is None else (350.0, 24.0)
    each = (ENTROPY_SHARE * queries - start - per_width * width) / (width * width + width)
    return float(np.clip(2.0 ** (NORMAL_BITS - each), FINEST, COARSEST))


def _accuracy(target_error: Any, bits: Any, default: float) -> float:
    """The wanted error of an entry over the root mean square of its matrix."""
    if target_error is not None and bits is not None:
        raise UsageError("target_error and bits both say how accurate to be: give one")
    if bits is not None:
        check_whole("bits", bits, 1, MOST_BITS)
        return float(2.0**-bits)
    if target_error is None:
        return default
    check_positive("target_error", target_error, LARGEST_ERROR)
    return float(target_error)


def _kind(rows: Rows) -> tuple[float, ...]:
    """The labels of an oracle, in rising order; that of zero apart where there are signs."""
    found = _labels(rows)
    if len(found) == 1:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            f"every label is {found.pop():g}, of the longest tokens too: the threshold is beyond all answers, or the "
            "answers do not depend on the tokens, as where the values of several heads cancel; lower the threshold, or "
            "allow longer tokens (max_norm)",
        )
    return tuple(sorted(found))


def _is_sign(kind: tuple[float, ...]) -> bool:
    """Whether a third label may be that of zero, which is neither."""
    return len(kind) == 2 and kind[0] == -kind[1]


def _check_classes(kind: tuple[float, ...], classes: Any) -> None:
    """Unrecoverable where fewer classes were seen than there are said to be."""
    if classes is None:
        return
    check_whole("classes", classes, 2)
    if len(kind) < classes:
        missing = [str(label) for label in range(classes) if label not in kind][: classes - len(kind)]
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            f"only the labels {', '.join(f'{label:g}' for label in kind)} were answered, and class "
            f"{' and '.join(missing)} never: its values show in no label; leave out classes= to recover the others",
        )
    if len(kind) > classes:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, f"{len(kind)} different labels were answered, and not {classes}: correct classes="
        )


def _signs(rows: Rows, kind: tuple[float, ...]) -> Floats:  # (width,)
    """The sign of each value, 0 where the token and its negative have one label."""
    signs = np.where(rows.yes == kind[-1], 1.0, np.where(rows.yes == kind[0], -1.0, 0.0))
    return np.where(rows.yes == rows.no, 0.0, signs)


def _check_score_bias(tokens: Tokens, rng: np.random.Generator) -> Steps[None]:
    """Of long tokens x, −2x and 0 the second wins, as all weigh the same: unless a score bias decides."""
    (vector,) = rng.standard_normal((1, tokens.width)) / tokens.width**0.5
    space = tokens.space
    alone = yield from ask_rows(tokens, vector[None], "score bias")
    row = TokenRows(space.asarray(vector[None]))

    def make(some: Any, factor: float) -> list[list[Term]]:
        index, sides = space.indices(0 * some), np.array([1.0, -1.0])[some] * factor * tokens.long_norm
        return [[Term(row, index, space.asarray(sides))], [Term(row, index, space.asarray(-2 * sides))], []]

    seen = yield from tokens.comparer.ask_labels("score bias", make, 2)
    if (seen[0], seen[1]) != (alone.no[0], alone.yes[0]) and alone.yes[0] != alone.no[0]:
        raise Unrecoverable(Outcome.WRONG_FAMILY, SCORE_BIAS)


def _with_values(tokens: Tokens, rows: Rows, pivot: int) -> Steps[Rows]:
    """Tokens to read every row with: those without a value of their own have a small part of the loudest added."""
    dull = rows.yes == rows.no
    if not np.any(dull):
        return rows
    vectors = rows.vectors + ADDED * dull[:, None] * np.eye(tokens.width)[pivot]
    again = yield from ask_rows(tokens, vectors[dull], "signs")
    yes, no = rows.yes.copy(), rows.no.copy()
    yes[dull], no[dull] = again.yes, again.no
    return Rows(vectors, yes, no)


def _closeness(outputs: Floats) -> Floats:  # (rows,) or (rows, classes) -> (rows,)
    """How large outputs are over what the first or the last of them is ahead of the next: arithmetic tells no less."""
    if outputs.ndim == 1:
        return np.ones(len(outputs))
    ordered = np.sort(outputs, axis=1)
    ahead = np.minimum(ordered[:, -1] - ordered[:, -2], ordered[:, 1] - ordered[:, 0])
    return np.asarray(np.max(np.abs(outputs), axis=1) / np.maximum(ahead, np.finfo(np.float64).tiny))


def _ask_score(reader: ScoreReader, scale: float, accuracy: float, closeness: Floats) -> Steps[LabelScore]:
    """The score matrix, what was added to rows taken away again."""
    width = reader.tokens.width
    if scale == 0:  # below all that was looked for
        bound = 2.0 ** (2 - reader.tokens.range)
        return LabelScore(np.zeros((width, width)), np.full((width, width), bound), 0.0, 0.0)
    inverse = np.linalg.inv(reader.rows.vectors)
    score = yield from reader.ask_score(scale, accuracy / float(np.max(np.sum(np.abs(inverse), axis=1))))
    rounding = reader.space.eps * (closeness - 1)[:, None] * np.abs(score.matrix)
    return replace(score, matrix=inverse @ score.matrix, radius=np.abs(inverse) @ (score.radius + rounding))


def _estimate(
    signature: Signature,
    kind: tuple[float, ...],
    rate: float,
    value: LabelValue | ClassValues,
    score: LabelScore,
    target_error: float | None,
) -> Estimate[Labels]:
    """Parameters and radii, and the entropy of both over what a label can tell."""
    space, names = signature.space, tuple(int(label) for label in kind)
    head = SingleHead(space.asarray(score.matrix), space.asarray(value.matrix))
    radius = SingleHead(space.asarray(score.radius), space.asarray(value.radius))
    threshold, threshold_radius = value.threshold, value.threshold_radius
    if threshold:
        head = replace(head, output_bias=space.asarray(np.asarray(-threshold)))
    bias, bias_radius = (None, None) if isinstance(value, LabelValue) else (value.bias, value.bias_radius)
    if bias is not None and bias_radius is not None:
        head, radius = (replace(a, output_bias=space.asarray(b)) for a, b in ((head, bias), (radius, bias_radius)))
    if threshold or threshold_radius:
        radius = replace(radius, output_bias=space.asarray(np.asarray(threshold_radius)))
    bits = score.bits + value.bits
    capacity = math.log2(len(kind)) * (1 - entropy(rate))
    error = float(np.max(score.radius)) / score.scale if score.scale else 0.0
    return Estimate(
        Labels(head, names),
        Labels(radius, names),
        math.ceil(bits / capacity),
        assumptions=ASSUMPTIONS,
        details={
            "labels": list(names),
            "threshold": bool(threshold),
            "entropy_bits": bits,
            "largest_radius": error,
            **({"flip_rate": rate} if rate else {}),
            **target_details(target_error, error),
        },
    )


def entropy(rate: float) -> float:
    """Binary entropy of a rate, in bits: what a wrong answer at this rate costs of one label."""
    return 0.0 if rate in (0.0, 1.0) else -rate * math.log2(rate) - (1 - rate) * math.log2(1 - rate)


LABELS = Method(
    name="labels",
    summary="softmax heads of which only labels are told: a sign, or of one head a class",
    run=labels,
    families=("labels",),
    takes_noise=("exact", "flipped"),
    answers="labels",
    when_refuted={"heads": AUTO},
    last_only=True,
    goes_on=True,
    options={
        "target_error": "wanted error of an entry over the root mean square of its matrix; 1e-6 if left out",
        "bits": "the same as a number of binary digits",
        "classes": "how many classes there are: it is an error if one never occurs; those that occur if left out",
        "heads": "how many heads there are behind two labels, or auto; 1 if left out",
    },
)
