"""Several heads whose answers are added up to fewer numbers than there are heads, one number included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Floats, floats
from keyhole.families import MultiHead, SingleHead
from keyhole.methods.base import Estimate, Steps, Unrecoverable, adapt, together
from keyhole.methods.forms.columns import Draft
from keyhole.methods.forms.outputs import choose_outputs
from keyhole.methods.forms.value import Value, check_nonzero
from keyhole.methods.multi_head.scalar.constant_head import ask_constant_head
from keyhole.methods.multi_head.scalar.gated_reader import GatedReader
from keyhole.methods.multi_head.scalar.normals_and_values import ScalarValues, ask_normals, ask_unexplained, ask_values
from keyhole.methods.multi_head.scalar.queries import Scope, columns
from keyhole.methods.multi_head.scalar.scores import Columns, HeadReader, HeadScore
from keyhole.methods.multi_head.scalar.search import JumpSearch, NoSwitch, ask_for_bias, ask_jumps
from keyhole.methods.single_head.method import ask_score_along, head_estimate
from keyhole.numerics.svd import pseudo_inverse
from keyhole.queries import Measurements, Plan, Signature, Sketch, sequences
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box adds up softmax heads over its raw tokens, read at the last position",
    "answers are right up to the rounding of their dtype",
    "no two heads have proportional logits, but equal ones count as one",
    "no head is so quiet beside the others that its share of an answer is lost in their rounding",
)
# Other rows and half-circles are tried when heads do not show one by one.
ATTEMPTS = 3
# Two heads of opposite values that choose the same token say nothing, half of the time: so often in a row nothing says
# that there are none.
MOST_SILENT = 10
# Queries that tell one head of tokens of one number from several.
DOUBLED_QUERIES = 4
# Elsewhere two will do, and where the only head has no logits they are of norms from one to this.
DOUBLED_ONLY, FAR_DOUBLED = 2, 2.0**40
# Values are read at this many times the scale that saturates all heads but one near each jump.
SATURATING = 2.0**6
# Heads that fail are said to be near each other if their jumps are nearer than this; most others can be read.
NEAR = 1e-4
# Where heads turn out to be larger than thought, they are read again, with this much more room.
ROOMIER, MOST_READINGS = 8.0, 3

PROPORTIONAL = (
    "some heads have proportional logits, or are nearer to each other than answers can tell: they change their minds "
    "at the very same tokens and cannot be read one by one"
)
SINGLE_NUMBERS = (
    "tokens are single numbers, so that all heads have proportional logits: several of them behind fewer numbers are "
    "not told apart; or the box is no sum of softmax heads"
)
SEVERAL_CONSTANT = (
    "several heads have a score bias but no score: they weigh tokens the same whatever the last one is, and behind "
    "fewer numbers than heads they are not told apart; or the box is no sum of softmax heads"
)
HIDDEN = (
    "the heads found do not explain all answers: others do not show because they cancel, e.g. two with opposite logits "
    "and the same value, or the box is no sum of softmax heads"
)


class HeadsTooNear(Unrecoverable):
    """Raised where two heads are so near to each other that no way of asking tells them apart."""


@dataclass(frozen=True)
class _JumpHeads:
    """Heads as jumps: their hyperplanes, and how many heads weigh all tokens the same."""

    search: JumpSearch
    normals: Floats  # (heads, size)
    normal_errors: Floats  # (heads,) their relative errors
    uniform: int


def ask_scalar_heads(signature: Signature, rng: np.random.Generator, total: Value) -> Steps[Estimate[MultiHead]]:
    """Score matrices, values and biases of f(X) = Σ_h Σ_i softmax_i(x_iᵀ·W_h·x_N + x_iᵀ·c_h) · x_iᵀ·V_h + b.

    With a long row u₀ in the first token every head but one is saturated near the hyperplane u₀ᵀ(W_h·g + c_h) = 0 of
    that one, and there it is read as a single head is. A half-circle of g meets every hyperplane once, which counts
    the heads; doubling a token moves the logit of a jump by ln 2 if and only if it is one head. Takes some
    H·(d² + 3d + 25) queries, for scores of rank r about H·(r(2d − r) + 3d + 25).

    Assumes what `ASSUMPTIONS` says.
    """
    _check_signature(signature)
    if signature.width == 1:
        check_nonzero(signature, total)
        return (yield from _ask_single_numbers(signature, total, rng))
    try:
        jump_heads = yield from _ask_heads(signature, total, rng)
    except NoSwitch as error:
        return (yield from _ask_beside_constant_head(signature, rng, total, error))
    if jump_heads is None:
        check_nonzero(signature, total)
    if jump_heads is None or (jump_heads.normals.shape[0] == 1 and not jump_heads.uniform):
        only = yield from _ask_only_head(signature, total, rng)
        yield from _ask_doubled(signature, only, rng, DOUBLED_ONLY, HIDDEN)
        return only
    try:
        values, heads = yield from _ask_all_heads(jump_heads, rng)
    except (Unrecoverable, np.linalg.LinAlgError) as error:
        closest = jump_heads.search.closest
        if closest > NEAR and isinstance(error, Unrecoverable):
            raise
        cause = error if isinstance(error, Unrecoverable) else "some heads answer alike wherever they can be asked"
        near = f"{cause}; the nearest two change their minds {closest:.1g} of a radian apart, which is too near to read"
        raise HeadsTooNear(Outcome.SATURATED, near) from error
    return _estimate(jump_heads, values, heads)


def _ask_beside_constant_head(
    signature: Signature, rng: np.random.Generator, total: Value, cause: NoSwitch
) -> Steps[Estimate[MultiHead]]:
    """The head with a score bias but no score, and from answers without its share all others."""
    head = yield from ask_constant_head(signature, total, rng)
    if head is None:
        raise cause
    space, flat = signature.space, total.vector.ndim == 1
    value, value_radius = (space.asarray(part[:, 0] if flat else part) for part in (head.value, head.value_radius))
    score = space.zeros(signature.width, signature.width)
    own = SingleHead(score, value, space.asarray(head.bias))
    radius = SingleHead(score + head.score_radius, value_radius, space.asarray(head.bias_radius))
    rest = Value(total.vector - value, total.radius + value_radius, total.bias, total.bias_radius)
    unknown = float(np.linalg.norm(head.value_radius)) / float(np.linalg.norm(head.value))
    inner = signature.with_changes(space=replace(space, coarse=max(space.eps, 2 * unknown / ROUNDING_DEVIATIONS)))

    def without(plan: Plan, answers: Measurements) -> Measurements:
        tokens = plan.tokens(0, plan.count, space, signature.width)
        return replace(answers, values=answers.values - own(tokens))

    try:
        others = yield from adapt(ask_scalar_heads(inner, rng, rest), incoming=without)
    except NoSwitch as error:
        raise Unrecoverable(Outcome.WRONG_FAMILY, SEVERAL_CONSTANT) from error
    except Unrecoverable as error:
        if error.outcome is not Outcome.NOT_IDENTIFIABLE:
            raise
        return _with_output_bias(total, [own], [radius], 2 * signature.width, {"heads": 1, "ranks": [0]})
    details = {**others.details, "heads": others.details["heads"] + 1, "ranks": [*others.details["ranks"], 0]}
    bound = others.counting_bound + -(-signature.width // head.value.shape[1]) + signature.width
    heads, radii = [*others.params.heads, own], [*others.radius.heads, radius]
    return _with_output_bias(total, heads, radii, bound, {**details, "score_bias": True})


def _check_signature(signature: Signature) -> None:
    if signature.max_length is not None and signature.max_length < 3:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "sequences of two tokens do not determine several heads: allow sequences of three (max_length)",
        )
    if signature.max_norm is not None:
        raise Unrecoverable(
            Outcome.SATURATED,
            "heads that share an output are told apart by tokens long enough to saturate them: leave out max_norm",
        )
    if signature.noise.kind != "exact":
        raise Unrecoverable(
            Outcome.TOO_NOISY, f"heads that share an output need exact answers, and these are {signature.noise}"
        )


def _ask_heads(signature: Signature, total: Value, rng: np.random.Generator) -> Steps[_JumpHeads | None]:
    """The heads, from one half-circle or, where that shows them badly, another; None when nothing ever responds."""
    trouble: Unrecoverable | None = None
    sizes = np.linalg.norm(columns(floats(total.vector)), axis=0)
    attempts, silent = 0, 0
    while attempts < ATTEMPTS and silent < MOST_SILENT:
        # A random row, and a random combination of the outputs, each brought to about one size.
        row = rng.standard_normal(signature.width)
        mix = rng.standard_normal(sizes.size) / np.where(sizes > 0, sizes, np.max(sizes, initial=1.0))
        scope = Scope(signature, total, row / np.linalg.norm(row), mix / np.linalg.norm(mix))
        scope = yield from ask_for_bias(scope, rng)
        search = yield from ask_jumps(scope, rng)
        if search is None:
            silent += 1
            continue
        attempts += 1
        if search.joint:
            trouble = Unrecoverable(Outcome.WRONG_FAMILY, PROPORTIONAL)
            continue
        scope, jumps = search.scope, search.jumps
        uniform = int(scope.uniform != 0)
        own = np.append(jumps.shares, [scope.uniform] * uniform)
        rest = float(scope.row @ scope.vector @ scope.mix) - float(np.sum(own))
        trouble = Unrecoverable(Outcome.WRONG_FAMILY, HIDDEN)
        if abs(rest) > 24 * own.size**0.5 * scope.level_radius or not len(jumps):
            continue
        if own.size == 1:
            return _JumpHeads(search, np.zeros((1, scope.size)), np.zeros(1), 0)
        normals, normal_errors = yield from ask_normals(scope, jumps, rng)
        scale = SATURATING * float(np.max(jumps.scales))
        if (yield from ask_unexplained(scope, normals, own, scale, rng)) <= 1:
            return _JumpHeads(search, normals, normal_errors, uniform)
    if trouble is not None:
        raise trouble
    return None


def _ask_all_heads(jump_heads: _JumpHeads, rng: np.random.Generator) -> Steps[tuple[ScalarValues, list[HeadScore]]]:
    """Values and scores of all heads; read again with larger margins where some are larger than expected."""
    search, normals = jump_heads.search, jump_heads.normals
    scale, lean = SATURATING * float(np.max(search.jumps.scales)), 1.0
    for _ in range(MOST_READINGS):
        values = yield from ask_values(search.scope, normals, jump_heads.uniform, scale, lean, rng)
        read = dict[int, Columns]()
        so_far = partial(_sketch, read, normals.shape[0])
        reader = HeadReader(search.scope, normals, jump_heads.normal_errors, values, rng, so_far)
        heads = yield from _ask_scores(reader, read)
        if heads is not None and not values.is_disturbed(np.stack([head.score for head in heads]), normals):
            return values, heads
        lean /= ROOMIER**2
    raise Unrecoverable(
        Outcome.SATURATED, "some heads are so much larger than others that they cannot be held while those are read"
    )


def _sketch(columns: dict[int, Columns], heads: int) -> Sketch | None:
    """The scores of the heads so far on their hyperplanes, for people who watch."""
    matrices = {
        f"score of head {number}": (read.forms @ pseudo_inverse(read.points.T))[:, : read.forms.shape[0]]
        for number, read in sorted(columns.items())
    }
    known = sum(read.points.shape[0] / read.points.shape[1] for read in columns.values()) / heads
    return Sketch(matrices, known) if matrices else None


def _ask_scores(reader: HeadReader, columns: dict[int, Columns]) -> Steps[list[HeadScore] | None]:
    """The scores of all heads; None when some change sides however much room they are given."""
    count = reader.normals.shape[0]
    room = np.ones(count)
    checks: dict[int, GatedReader] = {}
    for _ in range(MOST_READINGS):
        missing = [number for number in range(count) if number not in columns]
        read = yield from together([reader.ask_on_hyperplane(number, room[number]) for number in missing])
        for number, (found, check) in zip(missing, read, strict=True):
            columns[number], checks[number] = found, check
        every = [columns[number] for number in range(count)]
        off = [reader.ask_off_hyperplane(number, every, checks[number], room[number]) for number in range(count)]
        heads, last = map(list, zip(*(yield from together(off)), strict=True))
        scores, radii = (np.stack([getattr(head, name) for head in heads]) for name in ("score", "radius"))
        disturbed = [
            number
            for number in range(count)
            if any(each[number].has_unsaturated(scores, radii) for each in (checks, last))
        ]
        if not disturbed:
            return heads
        for number in disturbed:
            room[number] *= ROOMIER
            del columns[number]
    return None


def _estimate(jump_heads: _JumpHeads, values: ScalarValues, heads: list[HeadScore]) -> Estimate[MultiHead]:
    scope = jump_heads.search.scope
    space, width = scope.signature.space, scope.signature.width
    flat = scope.total.vector.ndim == 1
    params, radii = [], []
    for number in range(values.vectors.shape[0]):
        vector, radius = values.vectors[number], values.radius[number]
        value, value_radius = (space.asarray(part[:, 0] if flat else part) for part in (vector, radius))
        if number == len(heads):  # the head of equal weights
            params.append(SingleHead(space.zeros(width, width), value))
            radii.append(SingleHead(space.zeros(width, width), value_radius))
            continue
        score, radius = heads[number].score, heads[number].radius
        own, wide = None, None
        if scope.radius is not None:
            bias, errors = (scope.radius * part[:, width] for part in (score, radius))
            shows = bool(np.any(np.abs(bias) > errors))
            own = space.asarray(bias) if shows else None
            wide = space.asarray(
                errors if shows else errors + np.abs(bias)
            )  # taken for none, it is off by what was read
        params.append(SingleHead(space.asarray(score[:, :width]), value, own))
        radii.append(SingleHead(space.asarray(radius[:, :width]), value_radius, wide))
    ranks = [head.rank for head in heads]
    outputs = values.vectors.shape[2]
    numbers = sum(rank * (2 * width - rank) for rank in ranks) + width * len(heads) * (scope.radius is not None)
    bound = -(-(numbers + outputs * (width * len(params) + scope.total.has_bias)) // outputs)
    jumps = jump_heads.search.jumps
    details = {
        "heads": len(params),
        "ranks": ranks,
        "uniform_heads": jump_heads.uniform,
        "score_bias": scope.radius is not None,
        "output_bias": scope.total.has_bias,
        "closest": jump_heads.search.closest,
        "told_apart": float(np.max(np.sqrt(8 * jumps.errors) / np.abs(jumps.slopes))),
    }
    return _with_output_bias(scope.total, params, radii, bound, details)


def _with_output_bias(
    total: Value, params: list[SingleHead], radii: list[SingleHead], bound: int, details: dict[str, Any]
) -> Estimate[MultiHead]:
    return Estimate(
        params=MultiHead(params, total.bias if total.has_bias else None),
        radius=MultiHead(radii, total.bias_radius if bool((total.bias_radius > 0).any()) else None),
        counting_bound=bound,
        assumptions=ASSUMPTIONS,
        details=details,
    )


def _ask_single_numbers(signature: Signature, total: Value, rng: np.random.Generator) -> Steps[Estimate[MultiHead]]:
    """The only head of tokens of one number; ends where there are several, since all are proportional there."""
    try:
        estimate = yield from _ask_only_head(signature, total, rng)
    except Unrecoverable as error:
        if error.outcome is not Outcome.WRONG_FAMILY:
            raise
        raise Unrecoverable(Outcome.WRONG_FAMILY, f"{error}: {SINGLE_NUMBERS}") from error
    yield from _ask_doubled(signature, estimate, rng, DOUBLED_QUERIES, SINGLE_NUMBERS)
    return estimate


def _ask_doubled(
    signature: Signature, estimate: Estimate[MultiHead], rng: np.random.Generator, count: int, message: str
) -> Steps[None]:
    """End where a token twice beside another is not answered as by the only head found: there are others beside it."""
    space, params = signature.space, estimate.params
    norm = params.token_norm(1.0)
    norms = np.full(count, norm) if np.isfinite(norm) else np.geomspace(1.0, FAR_DOUBLED, count)
    tokens = rng.standard_normal((count, 3, signature.width))
    tokens *= (
        norms[:, None, None] * rng.uniform(0.5, 1.5, (count, 3, 1)) / np.linalg.norm(tokens, axis=2, keepdims=True)
    )
    tokens[:, 1] = tokens[:, 0]
    plan = sequences("one head", space.asarray(tokens))
    answers: Measurements = yield plan
    asked = plan.tokens(0, plan.count, space, signature.width)
    errors = np.abs(floats(answers.values) - floats(params(asked)))
    if not np.all(errors <= floats(params.error_bar(estimate.radius, asked, space.rounding))):
        raise Unrecoverable(Outcome.WRONG_FAMILY, message)


def _ask_only_head(signature: Signature, total: Value, rng: np.random.Generator) -> Steps[Estimate[MultiHead]]:
    """The only head there is, as a single head."""
    draft = Draft()
    outputs = choose_outputs(signature.space, total.vector, even=True) if total.vector.ndim == 2 else None
    bias, score = yield from ask_score_along(signature, total, rng, draft, outputs)
    estimate = head_estimate(signature, total, bias, score, {})
    head, radius = (SingleHead(p.score, p.value, p.score_bias) for p in (estimate.params, estimate.radius))
    details = {**estimate.details, "heads": 1, "ranks": [score.rank]}
    return _with_output_bias(total, [head], [radius], estimate.counting_bound, details)
