"""Held-out queries: drawn from a fixed distribution, and chosen so that every part of an estimate shows in some."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from keyhole.arrays import (
    BLOCK_NUMBERS,
    ROUNDING_DEVIATIONS,
    Array,
    Booleans,
    Floats,
    floats,
    host_normals,
    like,
    namespace,
    row_blocks,
    to_numpy,
)
from keyhole.families import F, Family
from keyhole.methods.base import Estimate
from keyhole.methods.batches import apart, in_batches
from keyhole.numerics.domain import (
    LENGTH_CLASSES,
    LONGEST,
    SHORT,
    Sampler,
    class_label,
    draw_from,
    draw_lengths,
    draw_structures,
    draw_tokens,
    length_class,
)
from keyhole.queries import Plan, Signature, sequences

# Where the norm of a query comes from, in the order in which queries take them: from a size of logits (or a distance
# over that of the kinks of a net), entries of N(0, 1), which a wrong estimate has no part in, any norms around either,
# and the longest tokens whose logits are still known: heads that cancel among short tokens, or whose scores were taken
# for zero, do not there. Ordinary ones of these differ by what a head does not see: two near heads that were taken for
# one choose between them.
NORM_ORDER = ("logits", "normal", "any", "longest", "normal", "logits", "any", "normal")
# These are kept as they were drawn, whether or not they inform: where an estimate says that nothing can be seen, an
# oracle of another family may show it.
KEPT = ("normal", "any")
# Any norm is one of logits times up to this, or less by as much; where no norm has logits, one times up to the second.
# The factors are spread evenly on a logarithmic scale, as multiples of the golden ratio are modulo one.
ANY_FACTOR, ANY_NORM = 1e3, 1e6
GOLDEN = (5**0.5 - 1) / 2
# Sizes of logits, and norms over that of the kinks: near those of neurons that cancel but in a strip show the most, and
# far out every piece of a function is wide.
LOGIT_SIZES = (0.3, 8.0)
KINK_SIZES, FAR_KINK_SIZES = (0.3, 3.0), (0.3, 1000.0)
TYPICAL_LOGITS = (0.5, 2.0)  # or kinks, that any norm is a multiple of
# Mixed tokens of any norm have one each, the last one too: logits may be of order one beside tokens as long as any.
EACH = ("mixed", "any")
# Of tokens of these structures attention makes the most.
USUAL = ("ordinary", "mixed", "one-hot", "repeated")
# The longest tokens have logits known to this, or are shorter by up to this factor.
KNOWN_LOGIT, SHORTER = 1.0, 16.0
# Behind noise or a net, where radii are less sure, logits of all tokens are known to this.
SURELY_KNOWN_LOGIT = 0.1
# Behind noise every other query has tokens of strong and opposite values, so that attention shows.
LOUD_EVERY = 2
LOUD = ("ordinary", "mixed", "clusters")
# Of labels one query in so many is a single token, as long as one may be and not moved onto a boundary: what a box adds
# to its heads shows in these before tokens are averaged, and far from where heads change their label.
SINGLE = 4  # as many are of heads that weigh k tokens at most, and have one more, two of them alike about the k-th
# Behind a net those of "logits", and half of any norm, have tokens as far out as kinks are times one of these, and a
# last token by which the logits of the others differ by so much: a net that is flat around zero hides attention at
# short tokens, and at long ones logits are so large that one token has all the weight, whatever the rule. Of so many
# such sequences the first is asked whose prediction attention moves by this part.
SOFT_KINK_SIZES, SOFT_LOGITS = (0.3, 30.0), (0.3, 3.0)
SOFT_TRIES, SOFT_MOVES = 8, 1e-3
EQUAL_LOGITS = 1e-6  # they differ by this part or less where all tokens are the same
# Within a bound on norms near tokens, single ones, and all but one in so many tokens of nets, are as long as that: what
# bends just inside it shows nowhere else. All but one in so many ordinary sequences of heads, of which nothing bends,
# become near ones.
NEAR_OF = 4
RIM_EVERY = 4
PAST_RIM, BESIDE_RIM = 1.1, 1e-3  # before they are cut, so that rounding leaves none inside; and below it, by this part
# A token near a kink lies within this part of its norm of it.
AROUND_KINK = 0.1

# A query informs about a part of an estimate if its prediction moves by so many radii when the part is changed: by so
# many of its claimed radii, or by this share of its size where that is more. Behind noise less can be asked.
MOVES, MOVES_NOISY = 10.0, 3.0
CHANGE_RADII = 100.0
CHANGE, CHANGE_NOISY = 0.5, 1.0
# So many informative queries test a part, or one in so many where fewer queries were wanted; one tests a neuron, which
# may be on in a small part of the domain only.
ENOUGH, ONE_IN = 3.0, 8
# From so many queries on every class of lengths must have an informative one.
CLASSES_FROM = 32
# Of maps with poles a query is drawn again so often where it is at one, or would be at tokens longer by this part.
POLE_TRIES, NEAR_POLE = 8, 2.0**-30
# Where numbers err independently, predictions are known to so many standard deviations, as other sums of roundings are.
PREDICTED = ROUNDING_DEVIATIONS
# What parts of logits are called.
OF_LOGITS = ("score", "form ")
# Kinds of noise behind which predictions are as sharp as parameters are: a label is right or wrong, not off.
UNBIASED = ("exact", "flipped")
# A query that informs about no score is drawn again so often; then, for what is not tested yet, pools of fresh ones.
REDRAWS, POOLS, LEAST_POOL = 2, 12, 64


@dataclass(frozen=True)
class Query:
    """One held-out sequence and where it comes from."""

    tokens: Floats  # (length, width)
    norm: str  # one of NORM_ORDER; "domain" for inputs of a user
    structure: str = ""
    usual: bool = False  # whether radii are as fine there, beside what attention does, as they get
    kept: bool = False  # whether it may not be exchanged for one that informs more

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class HeldOut:
    """Held-out queries as plans, one per length, and what each of them informs about, in the order of the plans."""

    plans: list[Plan]
    tokens: list[Array]  # (length, width) of each query
    usual: Booleans  # (queries,): where radii are as fine, beside what attention does, as they get
    domain: Booleans  # (queries,): from the sampler of a user
    lengths: Array  # (queries,)
    informative: Booleans  # (queries,): their predictions move when a score is changed, or any part of a single token's
    predictions: Floats  # (numbers,): one after the other
    known: Floats  # (numbers,): what they are off by: radii, or standard errors where errors are normal
    untested: tuple[str, ...]  # parts and classes of lengths that too few queries inform about


def draw_heldout(
    estimate: Estimate, signature: Signature, rng: np.random.Generator, count: int, domain: Sampler | None = None
) -> HeldOut:
    """`count` held-out queries, and as many of a user's own inputs where a sampler is given."""
    source = _Source(estimate, signature, rng)
    queries = source.draw(count)
    evidence = _Evidence(estimate, signature)
    table = evidence.of(queries)
    for _ in range(REDRAWS):
        dull = [
            int(n)
            for n in np.flatnonzero(~table.informative)
            if not queries[n].kept and (queries[n].length > 1 or not evidence.scores)
        ]
        if not dull:
            break
        again = source.redraw([queries[n] for n in dull])
        better = evidence.of(again)
        for place, n in enumerate(dull):
            if better.informative[place]:
                queries[n] = again[place]
                table.take(n, better, place)
    _fill_up(queries, table, evidence, source)
    return _as_plans(queries, table, source.inputs(domain, count), evidence, signature)


def _is_kept(query: Query) -> bool:
    """Whether a query stays however little it informs: beside a last token of zero no logit does, unless by a bias.

    A neuron that was missed is on where the estimate says that nothing is, perhaps for one axis only.
    """
    return query.norm in KEPT or query.structure == "one-hot" or not np.any(query.tokens[-1])


class _Source:
    """Draws queries for an estimate."""

    def __init__(self, estimate: Estimate, signature: Signature, rng: np.random.Generator) -> None:
        self.params, self.signature, self.rng = estimate.params, signature, rng
        self.norm_by = without_noise(estimate)  # norms are chosen by what is surely there
        self._turn = rng.uniform()
        self._axes = cycle(rng.spawn(1)[0].permutation(signature.width))  # of last tokens that have one entry
        self.normal = host_normals(signature.space, rng)
        self.sure = signature.noise.kind in UNBIASED and not self.params.anatomy.behind
        self.longest = longest_predictable(estimate, signature, KNOWN_LOGIT if self.sure else SURELY_KNOWN_LOGIT)
        self.loudest = None if signature.noise.kind in UNBIASED else self.params.loudest()
        self.has_attention = self.params.without_attention() is not None
        anatomy = self.params.anatomy
        self.behind = anatomy.net if anatomy.behind and anatomy.heads and signature.alphabet is None else None

    def draw(self, count: int, norm_by: Iterable[Family] = (), wanted: Sequence[int] = ()) -> list[Query]:
        """Queries whose lengths, structures and norms are shuffled, each for itself; norms by some family's logits.

        Of lengths that are `wanted` every other query has one.
        """
        lengths = draw_lengths(self.rng, count, self.signature.max_length)
        if wanted:
            lengths[::2] = [int(length) for length in self.rng.choice(wanted, len(lengths[::2]))]
        structures = draw_structures(self.rng, count)
        norms = [str(norm) for norm in self.rng.permutation([NORM_ORDER[n % len(NORM_ORDER)] for n in range(count)])]
        # What a family wants asked besides takes the place of short queries, so that no length goes without one.
        some = [n for n, length in enumerate(lengths) if length <= SHORT][: count // SINGLE]
        if self.params.tells_labels and not wanted:
            for n in some:
                lengths[n], norms[n] = 1, "longest"
        cut = self.signature.norm_limit < self.signature.width**0.5  # normal tokens are all as long as tokens may be
        of_heads = self.signature.max_norm is not None and self.has_attention and self.behind is None
        fewer = NEAR_OF if of_heads else 2
        for n, norm in enumerate(norms):
            if structures[n] == "ordinary" and (norm != "normal" or cut) and self.rng.integers(fewer):
                if self.signature.max_norm is not None:
                    # Mixtures of different tokens are shorter than tokens may be: near ones show what is far out.
                    structures[n] = "near"
                elif norm == "any":
                    structures[n] = "mixed"
        jumps = self.params.jumping_length
        if jumps is not None and jumps <= (self.signature.max_length or LONGEST) and not wanted:
            for n in some:
                lengths[n], structures[n] = jumps, "ordinary"
        by = list(norm_by) or [self.norm_by]
        queries = [
            self._answered(structure, length, norm, by[n % len(by)])
            for n, (structure, length, norm) in enumerate(zip(structures, lengths, norms, strict=True))
        ]
        return [replace(query, kept=count >= CLASSES_FROM and _is_kept(query)) for query in queries]

    def redraw(self, queries: list[Query]) -> list[Query]:
        """Other queries of the same lengths and structures, their norms from the size of logits."""
        return [self._answered(query.structure, query.length, "logits", self.norm_by) for query in queries]

    def inputs(self, domain: Sampler | None, count: int) -> list[Query]:
        """Inputs of a user."""
        if domain is None:
            return []
        signature = self.signature
        drawn = draw_from(domain, self.rng, count, signature.width, signature.max_norm, signature.max_length)
        return [Query(each, "domain") for each in drawn]

    def _answered(self, structure: str, length: int, norm: str, by: Family) -> Query:
        """A query whose answer is finite, of ordinary tokens where the structure leaves none."""
        query = self._query(structure, length, norm, by)
        for tries in range(POLE_TRIES if self.params.has_poles else 0):
            with np.errstate(all="ignore"):
                answer = floats(self.params(self.signature.space.asarray(query.tokens[None])))
                sure = floats(self.params(self.signature.space.asarray(query.tokens[None] * (1 + NEAR_POLE))))
            if np.all(np.isfinite(answer)) and np.all(np.isfinite(sure)):
                break
            query = self._query(structure if tries < POLE_TRIES // 2 else "ordinary", length, norm, by)
        return query

    def _query(self, structure: str, length: int, norm: str, by: Family) -> Query:
        rng, signature = self.rng, self.signature
        if signature.alphabet is not None:
            usual = norm == "logits" and structure in USUAL
            return Query(signature.alphabet.draw(structure, rng, length), norm, structure, usual)
        tokens = draw_tokens(structure, rng, length, signature.width, self.normal)
        if structure == "one-hot":
            size, tokens[-1] = np.max(tokens[-1]), 0.0
            tokens[-1, next(self._axes)] = size
        if self.loudest is not None and structure in LOUD and norm not in KEPT and rng.integers(LOUD_EVERY):
            tokens += rng.choice([-1.0, 1.0], (length, 1)) * to_numpy(self.loudest)
        if (structure, norm) == EACH:
            tokens = draw_tokens("ordinary", rng, length, signature.width, self.normal)
            scale, factor = self._typical(by)
            tokens *= factor ** rng.uniform(-1.0, 1.0, (length, 1))
        else:
            scale = self._norm(norm, by)
        soft = length > 1 and self.behind is not None and (norm == "logits" or (norm == "any" and rng.integers(2) > 0))
        if soft:
            tokens, scale = self._seen_behind(tokens), 1.0
        alike = self.has_attention and (structure == "near" or length == 1)
        rim = not soft and signature.max_norm is not None and (alike or not self.has_attention)
        rim = rim and (alike or structure == "one-hot" or (norm != "any" and bool(rng.integers(RIM_EVERY) > 0)))
        rim = rim and bool(np.any(tokens[-1]))
        if rim:
            scale = PAST_RIM * signature.norm_limit / float(np.linalg.norm(tokens[-1]))
            tokens = tokens + self._beyond_kink(tokens[-1]) - tokens[-1] if alike else tokens
        # Rounded, so that the last digits of an estimate do not make other queries of the same ones.
        tokens *= float(f"{scale:.2g}")
        alone = structure == "one-hot"
        if alone and norm == "normal" and length > 1 and signature.max_norm is None:  # what people type
            tokens = np.sign(tokens)  # single ones were asked before
        if norm == "longest" and structure == "ordinary" and self.sure and self.has_attention:
            tokens = self._undecided(tokens)
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes = np.sqrt(np.vecdot(tokens, tokens))[:, None]
            # Normal tokens end at the very rim; those of one entry beside it, since there values are read from them.
            on_rim = norm == "normal" or rim
            inside = 1.0 if on_rim and not alone else 1.0 - (BESIDE_RIM if on_rim else 0.5) * rng.uniform() ** 2
            limit = min(signature.norm_limit, longest_finite(signature)) * inside
            tokens *= np.minimum(limit / sizes, 1.0)
        if structure == "ordinary" and norm != "normal" and not soft and rng.integers(2):
            last = self.params.onto_kinks(tokens[-1:], rng)
            beside = AROUND_KINK * rng.integers(2) * np.linalg.norm(last) / signature.width**0.5
            last = last + beside * rng.standard_normal(last.shape) if np.any(last != tokens[-1:]) else last
            tokens[-1:] = last if np.linalg.norm(last) <= signature.norm_limit else tokens[-1:]
        if self.params.tells_labels and rng.integers(2) and (length > 1 or norm != "longest"):
            near = self.params.onto_boundary(tokens, rng)
            tokens = near if np.max(np.linalg.norm(near, axis=1)) <= signature.norm_limit else tokens
        if length == self.params.jumping_length and norm != "normal":
            tokens = self.params.onto_boundary(tokens, rng)
        return Query(tokens, norm, structure, norm == "logits" and structure in USUAL)

    def _beyond_kink(self, token: Floats) -> Floats:  # (width,) -> (width,)
        """Every other time a token as long, in the part of its sphere that a kink of a net behind heads cuts off."""
        if self.behind is None or self.rng.integers(2):
            return token
        foot, norm = self.params.onto_kinks(np.zeros((1, token.size)), self.rng)[0], float(np.linalg.norm(token))
        away = float(np.linalg.norm(foot))
        if not 0 < away < self.signature.norm_limit or token.size == 1:
            return token
        axis = foot / away
        across = token - axis * (axis @ token)
        angle = np.arccos(away / self.signature.norm_limit) * self.rng.uniform()
        return np.asarray(norm * (np.cos(angle) * axis + np.sin(angle) * across / np.linalg.norm(across)))

    def _seen_behind(self, tokens: Floats) -> Floats:  # (length, width)
        """Tokens as far out as the kinks of a net behind heads are, by which attention moves what the net answers."""
        candidates = [self._chosen_softly(tokens) for _ in range(SOFT_TRIES)]
        asked, even = self.signature.space.asarray(np.stack(candidates)), self.params.without_attention()
        with np.errstate(all="ignore"):
            answers = floats(self.params(asked)).reshape(SOFT_TRIES, -1)
            moved = np.abs(answers - floats(even(asked)).reshape(SOFT_TRIES, -1)) if even is not None else answers
            seen = np.any(moved > SOFT_MOVES * np.abs(answers), axis=1)
        return candidates[int(np.argmax(seen))]

    def _chosen_softly(self, tokens: Floats) -> Floats:  # (length, width)
        """Tokens about as far out as kinks, or farther, and a last one by which a head chooses softly among them."""
        rng, net, heads = self.rng, self.behind, self.params.anatomy.heads
        assert net is not None
        head = heads[int(rng.integers(len(heads)))]
        score, value = floats(head.score), floats(head.value_columns)
        gain = float(np.linalg.norm(value)) / self.signature.width**0.5
        norm = net.token_norm(float(np.exp(rng.uniform(*np.log(SOFT_KINK_SIZES))))) / (gain or 1.0)
        tokens = tokens * rng.choice([-1.0, 1.0]) * (float(f"{norm:.2g}") if 0 < norm < np.inf else 1.0)
        bias = None if head.score_bias is None else floats(head.score_bias)
        keys = score @ tokens[-1]
        logits = tokens @ keys
        spread, least = float(np.std(logits)), EQUAL_LOGITS * float(np.max(np.abs(logits)))
        factor = float(np.exp(rng.uniform(*np.log(SOFT_LOGITS)))) / spread if spread > least else 1.0
        if bias is None or not np.any(bias):
            tokens[-1] *= float(f"{factor:.2g}")
            return tokens
        tokens[-1] = np.linalg.lstsq(score, factor * keys - bias, rcond=None)[0]
        largest = float(np.max(np.abs(tokens[-1])))
        step = 10.0 ** (np.floor(np.log10(largest)) - 3) if 0 < largest < np.inf else 1.0
        tokens[-1] = step * np.round(tokens[-1] / step)
        return tokens

    def _undecided(self, tokens: Floats) -> Floats:  # (length, width)
        """Tokens between which a head of the estimate does not choose however long they are: two near heads do."""
        heads, tokens = self.params.anatomy.heads, 0.5 * tokens  # sums of two must not be too long
        if not heads:  # logits of another form
            return tokens
        head = heads[int(self.rng.integers(len(heads)))]
        bias = 0.0 if head.score_bias is None else floats(head.score_bias)
        keys = floats(head.score @ like(tokens[-1], head.score)) + bias
        size = float(np.linalg.norm(keys))
        keys = keys / size if size > 0 else 0 * keys
        others = tokens[:-1] - np.outer(tokens[:-1] @ keys, keys)
        return np.concatenate([tokens[-1] + others, tokens[-1:]])

    def _norm(self, kind: str, by: Family) -> float:
        rng, signature = self.rng, self.signature
        if kind == "normal":  # whatever was recovered
            return float(signature.width**0.5)
        # The longest tokens show the most.
        if signature.max_norm is not None and (rng.integers(2) or (kind == "longest" and self.params.tells_labels)):
            return float(signature.norm_limit * (1.0 - 0.5 * rng.uniform() ** 2))
        without_logits = not by.token_norm(1.0) < np.inf
        if kind == "any" or (kind == "logits" and without_logits and rng.integers(2)):
            self._turn += GOLDEN
            norm, factor = self._typical(by)
            return float(norm * factor ** (2.0 * (self._turn % 1.0) - 1.0))
        known = min(signature.norm_limit, longest_finite(signature), self.longest)
        sizes = LOGIT_SIZES if self.has_attention else KINK_SIZES if kind == "logits" else FAR_KINK_SIZES
        norm = by.token_norm(float(np.exp(rng.uniform(*np.log(sizes)))))
        if self.has_attention and (norm == np.inf or (self.sure and kind == "longest")):
            norm = known * SHORTER ** -(rng.uniform() + (not self.sure))
        return float(min(norm, known) if 0 < norm < np.inf else min(1.0, known))

    def _typical(self, by: Family) -> tuple[float, float]:
        """A norm of logits, or kinks, of order one, and the factor by which any norm may differ from it."""
        norm = by.token_norm(float(np.exp(self.rng.uniform(*np.log(TYPICAL_LOGITS)))))
        return (norm, ANY_FACTOR) if 0 < norm < np.inf else (1.0, ANY_NORM)


def without_noise(estimate: Estimate) -> Family:
    """The parameters with zero for every number that is within its radius of it."""
    radii = estimate.radius.arrays()
    named = estimate.params.arrays().items()
    sure = {name: _beyond(array, radii[name]) if name in radii else array for name, array in named}
    return estimate.params.with_arrays(sure)


def _beyond(array: Array, radius: Array) -> Array:
    """The numbers beyond their radius of zero, and zero for the others; the array itself where there are none."""
    if math.prod(array.shape) <= BLOCK_NUMBERS:
        return array * (abs(array) > radius)
    xp, blocks = namespace(array), row_blocks(array.shape[0], math.prod(array.shape[1:]))
    if all(bool(xp.all(abs(array[some, ...]) > radius[some, ...])) for some in blocks):
        return array
    return xp.concat([array[some, ...] * (abs(array[some, ...]) > radius[some, ...]) for some in blocks])


def prediction_radii(params: F, errors: F, tokens: Array, signature: Signature) -> Floats:  # as answers
    """What predictions are off by; infinite where what is unknown meets a zero."""
    with np.errstate(invalid="ignore"):
        radii = floats(params.error_bar(errors, tokens, signature.space.rounding))
    return np.where(np.isnan(radii), np.inf, radii)


def independent_radii(params: F, errors: F, tokens: Array, signature: Signature) -> Floats:  # as answers
    """So many standard deviations of predictions whose numbers err independently, and rounding."""
    known = params.with_arrays({name: 0 * array for name, array in errors.arrays().items()})
    with np.errstate(invalid="ignore"):
        radii = PREDICTED * floats(params.deviation(errors, tokens))
    return np.where(np.isnan(radii), np.inf, radii) + prediction_radii(params, known, tokens, signature)


def longest_finite(signature: Signature) -> float:
    """The norm up to which nothing overflows: answers that are rounded to a dtype may be computed in float32."""
    huge = signature.space.huge
    rounded = signature.noise.kind == "dtype"
    return float((min(huge, float(np.finfo(np.float32).max)) if rounded else huge) ** 0.25)


def longest_predictable(estimate: Estimate, signature: Signature, logit_radius: float) -> float:
    """The norm up to which the radii of scores leave logits known this well; infinite where there are no heads."""
    if not estimate.params.anatomy.attends:
        return float("inf")
    norm = estimate.params.logit_norm(estimate.radius, logit_radius)
    return float(min(norm, longest_finite(signature)) if norm < np.inf else longest_finite(signature) ** 0.5)


@dataclass
class _Table:
    """What queries inform about."""

    evidence: dict[str, Floats]  # per part (queries,), from 0 to 1
    informative: Booleans  # (queries,)
    predictions: list[Floats]  # of each query
    known: list[Floats]  # what they are off by: radii, or standard errors where errors are normal

    def take(self, n: int, other: _Table, place: int) -> None:
        """Replace a query."""
        for label, own in self.evidence.items():
            own[n] = other.evidence[label][place]
        self.informative[n] = other.informative[place]
        self.predictions[n], self.known[n] = other.predictions[place], other.known[place]


class _Evidence:
    """How far predictions move when a part of the estimate is changed, over their radii."""

    def __init__(self, estimate: Estimate, signature: Signature) -> None:
        self.estimate, self.signature = estimate, signature
        self.exact = signature.noise.kind in UNBIASED
        self.normal = signature.noise.kind == "gaussian" and estimate.standard_error is not None
        longest = min(longest_predictable(estimate, signature, KNOWN_LOGIT), signature.norm_limit)
        self.change = _change(estimate, CHANGE if self.exact else CHANGE_NOISY, longest)
        self.scores = estimate.params.anatomy.attends

    def of(self, queries: list[Query]) -> _Table:
        """The evidence of each query: the squared movement over what is wanted, at most 1."""
        evidence: dict[str, Floats] = {}
        informative = np.zeros(len(queries), bool)
        predictions, known = ([np.empty(0)] * len(queries) for _ in range(2))
        each = apart([query.tokens for query in queries])
        for where, tokens, lengths, params in in_batches(self.estimate.params, each, self.signature.space):
            answers, errors = self.predict(params, tokens)
            for place, n in enumerate(where):
                predictions[n], known[n] = np.ravel(answers[place]), np.ravel(errors[place])
            about = self._ratios(params, tokens, answers, errors)
            for label, ratios in about.items():
                evidence.setdefault(label, np.zeros(len(queries)))[where] = np.minimum(ratios, 1.0) ** 2
            # What is said of attention rests on queries whose scores matter.
            of_scores = [ratios for label, ratios in about.items() if label.startswith(OF_LOGITS)]
            counted = of_scores if lengths[0] > 1 and of_scores else list(about.values())
            least = 1.0 if self.exact else 1.0 / MOVES_NOISY
            informative[where] = np.max(counted, axis=0, initial=0.0) >= least if counted else True
        return _Table(evidence, informative, predictions, known)

    def predict(self, params: Family, tokens: Array) -> tuple[Floats, Floats]:  # as answers
        """Predictions, and what they are off by: radii, or standard errors where errors are normal."""
        estimate, errors = self.estimate, self.estimate.standard_error
        answers = floats(params(tokens))
        if errors is None:
            return answers, prediction_radii(params, estimate.radius, tokens, self.signature)
        radii_of = prediction_radii if self.normal else independent_radii
        return answers, radii_of(params, errors, tokens, self.signature)

    def _ratios(self, params: Family, tokens: Array, predictions: Floats, known: Floats) -> dict[str, Floats]:
        noise = self.signature.noise
        radii = known + noise.radius + noise.smallest + noise.relative * np.abs(predictions)
        if self.normal:
            radii = np.hypot(known, noise.scale)
        moves = MOVES if self.exact else MOVES_NOISY
        effects = dict(params.effects(self.change, tokens))
        if not effects:
            return {}
        with np.errstate(all="ignore"):  # all at once, since a device is waited for whenever numbers come from it
            ratios = floats(namespace(tokens).stack(list(effects.values()))) / (moves * radii)
        ratios = np.where(np.isfinite(radii) & ~np.isnan(ratios), ratios, 0.0)
        return dict(zip(effects, ratios.reshape(*ratios.shape[:2], -1).max(axis=2), strict=True))


def _change(estimate: Estimate, share: float, longest: float) -> Family:
    """A change of every number by many of its radii, or by a share of the size of its part where that is more.

    Scores that are zero are changed so that tokens of the norm `longest` have logits of about one, constants of a net
    that are zero by a share of what it answers to tokens of N(0, 1), or at which it bends, whichever are longer.
    """
    radii, changes, width = estimate.radius.arrays(), {}, estimate.params.width
    seen = {"score": width / longest**2, "score_bias": width**0.5 / longest}
    net = estimate.params.anatomy.net
    if net is not None:
        norm = min(max(net.token_norm(1.0), width**0.5), longest)
        answers = net.on_vectors(norm * np.eye(net.width))
        seen["bias_out"] = share * float(np.mean(answers**2)) ** 0.5
    several = estimate.params.anatomy.numbered
    energies = {
        f"heads.{number}.{path}" if several else path
        for number, head in enumerate(estimate.params.anatomy.heads)
        for path in head.attention.arrays()
    }
    for name, array in estimate.params.arrays().items():
        xp = namespace(array)
        size = share * (float(xp.mean(array**2)) ** 0.5 if 0 not in array.shape else 0.0)
        size = size or seen.get(name.rpartition(".")[2], 0.0)
        if name in energies:  # which have a unit of their own, by which small ones are nothing
            size = max(size, share)
        large = math.prod(array.shape) > BLOCK_NUMBERS  # then one number, seen as many
        same = xp.asarray(size, dtype=array.dtype, device=array.device)
        changes[name] = xp.broadcast_to(same, array.shape) if large else xp.zeros_like(array) + size
        if name in radii and 0 not in array.shape and CHANGE_RADII * float(xp.max(radii[name])) > size:
            many = CHANGE_RADII * radii[name]
            changes[name] = xp.where(xp.isfinite(many) & (many > size), many, changes[name])
    return estimate.params.with_arrays(changes)


def _fill_up(queries: list[Query], table: _Table, evidence: _Evidence, source: _Source) -> None:
    """Replace queries, in place, until every part and every class of lengths has enough that inform about it."""
    heads = source.params.anatomy.heads
    replaced: set[int] = set()
    for _ in range(POOLS):
        missing = _missing(queries, table, evidence)
        if not missing:
            return
        classes = {length_class(query.length) for query in queries}
        wanted = [each for number in classes if class_label(number) in missing for each in LENGTH_CLASSES[number]]
        wanted += [1] * any(name.endswith("epsilon") for name in missing)  # nothing else shows beside a single token
        most = source.signature.max_length or LONGEST
        pool = source.draw(max(LEAST_POOL, len(queries)), heads, [each for each in wanted if each <= most])
        fresh = evidence.of(pool)
        told = sum((fresh.evidence[name] for name in missing if name in fresh.evidence), 1.0 * fresh.informative)
        for place in np.argsort(-told):  # those that tell the most first: there are few to exchange
            query, number = pool[place], length_class(pool[place].length)
            gains = sum(fresh.evidence[name][place] for name in missing if name in fresh.evidence)
            gains += fresh.informative[place] and class_label(number) in missing
            if not gains > 0:
                continue
            others = [n for n, own in enumerate(queries) if length_class(own.length) == number and n not in replaced]
            others = [n for n in others if not queries[n].kept] or others
            lengths = Counter(each.length for each in queries)
            others = [n for n in others if lengths[queries[n].length] > 1] or others  # so that no length is lost
            if not others:
                continue
            n = min(others, key=lambda each: sum(part[each] for part in table.evidence.values()))
            losses = sum(table.evidence[name][n] for name in missing if name in table.evidence)
            if gains > losses:
                replaced.add(n)
                queries[n] = query
                table.take(n, fresh, place)
                missing = _missing(queries, table, evidence)


def _missing(queries: list[Query], table: _Table, evidence: _Evidence) -> list[str]:
    """Parts, and classes of lengths, that too few queries inform about."""
    enough = min(ENOUGH, len(queries) / ONE_IN)
    needed = {name: min(1.0, enough) if name.startswith("neuron") else enough for name in table.evidence}
    names = [name for name, own in table.evidence.items() if np.sum(own) < needed[name]]
    if evidence.exact and len(queries) >= CLASSES_FROM:
        classes = np.array([length_class(query.length) for query in queries])
        for number in range(len(LENGTH_CLASSES)):
            own = classes == number
            if np.any(own) and not np.any(table.informative[own]):
                names.append(class_label(number))
    return names


def by_length(queries: list[Query], signature: Signature) -> Iterable[tuple[Array, Plan]]:
    """The places of queries of one length, and the plan that asks them."""
    lengths = np.array([query.length for query in queries])
    for length in np.unique(lengths):
        (where,) = np.nonzero(lengths == length)
        alike = [queries[n].tokens for n in where]
        on_host = isinstance(signature.space.zeros(0), np.ndarray)  # then a copy of all is made when they are asked
        tokens = list(map(signature.space.asarray, alike)) if on_host else signature.space.asarray(np.stack(alike))
        yield where, sequences("held-out", tokens)


def _as_plans(
    queries: list[Query], table: _Table, inputs: list[Query], evidence: _Evidence, signature: Signature
) -> HeldOut:
    of_inputs = evidence.of(inputs)
    plans, order = [], []
    for first, some in ((0, queries), (len(queries), inputs)):
        for where, plan in by_length(some, signature):
            plans.append(plan)
            order += list(first + where)
    everything = queries + inputs
    return HeldOut(
        plans,
        [everything[n].tokens for n in order],
        usual=np.array([everything[n].usual for n in order]),
        domain=np.array([everything[n].norm == "domain" for n in order]),
        lengths=np.array([everything[n].length for n in order]),
        informative=np.append(table.informative, of_inputs.informative)[order],
        predictions=np.concatenate([(table.predictions + of_inputs.predictions)[n] for n in order]),
        known=np.concatenate([(table.known + of_inputs.known)[n] for n in order]),
        untested=tuple(_missing(queries, table, evidence)),
    )


def elsewhere(
    asked: HeldOut, places: list[list[int]], estimate: Estimate, signature: Signature, causal: bool
) -> HeldOut:
    """The same queries with another token as the last: one of `places`, which each plan has its own of.

    Where attention is causal, a token sees those before it, else all.
    """
    plans: list[Plan] = []
    moved: list[Array] = []
    lengths: list[int] = []
    source: list[int] = []
    first = 0
    for plan, own in zip(asked.plans, places, strict=True):
        tokens = plan.tokens(0, plan.count, signature.space, signature.width)
        for place in own:
            others = [n for n in range(place if causal else plan.length) if n != place]
            order = signature.space.indices([*others, place])
            taken = signature.space.xp.take(tokens, order, axis=1)
            plans.append(sequences(plan.stage, taken))
            moved += [taken[n, ...] for n in range(plan.count)]
            lengths += [len(others) + 1] * plan.count
            source += range(first, first + plan.count)
        first += plan.count
    evidence = _Evidence(estimate, signature)
    predictions, known = (np.empty((len(source), estimate.params.outputs or 1)) for _ in range(2))
    for batch in in_batches(estimate.params, apart(moved), signature.space):
        for whole, part in zip((predictions, known), evidence.predict(batch.params, batch.tokens), strict=True):
            whole[batch.places] = part.reshape(len(batch.places), -1)
    return HeldOut(
        plans,
        tokens=moved,
        usual=asked.usual[source],
        domain=asked.domain[source],
        lengths=np.array(lengths),
        informative=asked.informative[source],
        predictions=np.ravel(predictions),
        known=np.ravel(known),
        untested=(),
    )
