"""A one-layer Transformer: the net from single tokens, then the attention in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import Array, namespace
from keyhole.errors import KeyholeError, UsageError
from keyhole.families import SingleHead
from keyhole.families.one_layer import UNKNOWN_ARITHMETIC, OneLayer, as_net
from keyhole.families.opaque_net import OpaqueNet
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.forms.columns import Draft, Score
from keyhole.methods.forms.reader import FormReader, ScoreBias
from keyhole.methods.forms.score_matrix import ask_score
from keyhole.methods.forms.value import check_length
from keyhole.methods.one_layer.cells_with_bias import ask_beside_score_bias, ask_for_score_bias
from keyhole.methods.one_layer.cells_with_residual import ask_behind_residual
from keyhole.methods.one_layer.paths import Net, PathReader
from keyhole.methods.one_layer.rays import (
    EVEN_GROWTH,
    Growth,
    RayReader,
    ask_growth,
    guide_of,
    odd_growth_of_net,
    rays_of_net,
    rays_past_residual,
)
from keyhole.methods.relu_net.exact.method import relu_net
from keyhole.methods.relu_net.exact.queries import is_exact
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, then a net of one hidden layer, read at the last position",
    "answers are right up to the rounding of their dtype and the declared noise",
)

# Learns a net from queries of one token. Its estimate's params are called with tokens (batch, 1, width), answer
# (batch,) or (batch, outputs), and have error_bar(radius, tokens, rounding) like every family, the radius being the
# estimate's own.
FfnLearner = Callable[[Signature, np.random.Generator], Steps[Estimate]]
# What it has learned, as a family.
Learned = ReluNet | OpaqueNet

# Tokens that tell whether something passes attention by, of norms so many times that of a typical kink.
RESIDUAL_NORMS = (1.0, 4.0, 64.0)
# New tokens that the net must answer before attention is read: norms likewise, how many of each, and among how many
# the extreme ones are chosen, which costs no query.
CHECKED_NORMS, CHECKED_TOKENS, CHECKED_AMONG = (1.0, 4.0, 16.0, 256.0), 16, 1024
# Without a residual the answers to them are those of the net, within this part of what its answers differ by.
SAME_ANSWERS = 1e-6

# The value matrix behind a residual may cancel against what passes it by, in the weights that single tokens show.
VALUE_MAY_CANCEL = 4.0

OTHER_NET = (
    "fresh single tokens are not answered as the learned net answers them: the net behind attention is another one, "
    "deeper perhaps"
)
NOT_FOLLOWED = (
    "folds cannot be followed through declared noise or float32: ask for exact float64 answers, or pass an ffn_learner"
)
NO_GROWTH = (
    "long tokens are not answered as the recovered layer answers them: the box is not a net of one hidden layer behind "
    "one softmax head"
)
NO_CHANGE = (
    "the answers to single tokens are all the same, so that no query tells attention anything: nothing to recover"
)
UNDETECTED = (
    "what attention adds does not change the answers, however long its tokens, so that the score matrix cannot be known"
)
SCORE_BIAS = (
    "a logit does not scale with its tokens: the head in front of the net is none, or has a score bias that could not "
    "be read beside this net"
)


class _Undetected(Unrecoverable):
    """Long tokens do not show what attention does."""


def one_layer(
    signature: Signature,
    rng: np.random.Generator,
    *,
    residual: bool | None = None,
    ffn_learner: FfnLearner | None = None,
) -> Steps[Estimate[OneLayer]]:
    """All that can be told of f(X) = FFN(attn(X)), or FFN(x_N + attn(X)_N), attn one softmax head.

    *Provably Learning Attention with Queries* (arXiv 2601.16873) reduces this to any learner of feed-forward nets: one
    token is all of attention, so that single tokens teach the net behind the value matrix, and two tokens then teach
    the score matrix through it. Here the latter takes r(2d − r) + d queries, more or less, for a score of rank r, which
    is not known before, and behind a residual some (k + p)/p · (d + 2) more for k neurons and p outputs.

    Without a residual only the net behind the value matrix can be told, so that the value is returned as the identity.
    Assumes what `ASSUMPTIONS` says.
    """
    if residual is not None and not isinstance(residual, bool):
        raise UsageError(f"residual must be true, false or left out, not {residual!r}")
    if ffn_learner is not None and not callable(ffn_learner):
        raise UsageError(f"ffn_learner must be a function of signature and rng, not {type(ffn_learner).__name__}")
    check_length(signature)
    # Checks far out are made below, of whatever net comes back.
    learn = ffn_learner or partial(relu_net, far_checks=False)
    try:
        learned = _as_nets((yield from learn(signature, rng)), signature.width)
    except Unrecoverable as error:
        if ffn_learner is not None or is_exact(signature) or error.outcome is not Outcome.WRONG_FAMILY:
            raise
        raise Unrecoverable(Outcome.TOO_NOISY, f"{error}; {NOT_FOLLOWED}") from error
    draft = Draft()
    try:
        yield from _ask_net_check(signature, rng, Net(learned.params, learned.radius))
        if not (yield from _ask_for_score_bias(signature, rng, learned)):
            try:
                return (yield from _ask_without_score_bias(signature, rng, learned, residual, draft))
            except Unrecoverable as error:
                # A bias that does not show around the origin saturates long tokens all the same.
                saturated = error.outcome is Outcome.WRONG_FAMILY or isinstance(error, _Undetected)
                if not saturated or not _is_bias_readable(signature, learned):
                    raise
                return (yield from _ask_otherwise(_ask_beside_score_bias(signature, rng, learned, residual), error))
        return (yield from _ask_beside_score_bias(signature, rng, learned, residual))
    except KeyholeError as error:
        error.partial = _partial(signature, learned, draft)
        raise


def _as_nets(learned: Estimate, width: int) -> Estimate[Learned]:
    """The estimate of a learner, its params and radius as families."""
    return replace(learned, params=as_net(learned.params, width), radius=as_net(learned.radius, width))  # type: ignore


def _ask_net_check(signature: Signature, rng: np.random.Generator, net: Net) -> Steps[None]:
    """Fresh single tokens, near and far: a deeper net may look like one of one layer wherever its learner looked.

    Half of them are those of many to which the learned net answers least or most: a further layer bends there first.
    """
    space, xp = signature.space, signature.space.xp
    chosen = []
    for norm in np.minimum(np.asarray(CHECKED_NORMS) * _typical_norm(signature, net), signature.norm_limit):
        rows = space.normal(rng, CHECKED_AMONG, signature.width)
        rows = rows * (float(norm) / xp.linalg.vector_norm(rows, axis=1))[:, None]
        answers = net(rows)
        order = xp.argsort(answers @ space.normal(rng, answers.shape[1]))
        quarter = CHECKED_TOKENS // 4
        ends = xp.concat([order[:quarter], order[-quarter:]])
        chosen += [rows[: 2 * quarter, :], xp.take(rows, ends, axis=0)]
    tokens = xp.concat(chosen)
    asked: Measurements = yield Plan("checks", int(tokens.shape[0]), [[Term(TokenRows(tokens))]])
    if _has_other_answers(signature, net, tokens, asked):
        raise Unrecoverable(Outcome.WRONG_FAMILY, OTHER_NET)


def _has_other_answers(signature: Signature, net: Net, tokens: Array, answers: Measurements) -> bool:  # (n, width)
    """Whether answers are clearly not those of the net to these tokens."""
    xp, space = signature.space.xp, signature.space
    values = answers.values if answers.values.ndim == 2 else answers.values[:, None]
    expected = net(tokens)
    changes = xp.linalg.vector_norm(expected - net(0 * tokens), axis=1)
    bar = net.bar(tokens, UNKNOWN_ARITHMETIC * space.rounding) + answers.radius
    bar = SAME_ANSWERS * changes + 4 * xp.linalg.vector_norm(bar, axis=1)
    return bool(xp.any(xp.linalg.vector_norm(values - expected, axis=1) > bar))


def _ask_otherwise(steps: Steps[Estimate[OneLayer]], failure: Unrecoverable) -> Steps[Estimate[OneLayer]]:
    """A second way to go; where it fails too, the first one says why, unless it saw nothing and the second did."""
    try:
        return (yield from steps)
    except Unrecoverable as second:
        if failure.outcome is Outcome.NOT_IDENTIFIABLE and second.outcome is Outcome.WRONG_FAMILY:
            raise
        raise failure from None


def _is_bias_readable(signature: Signature, learned: Estimate[Learned]) -> bool:
    """Whether a score bias could be read: in linear cells, from tokens of any length."""
    return learned.params.anatomy.net is not None and signature.max_norm is None


def _ask_for_score_bias(signature: Signature, rng: np.random.Generator, learned: Estimate[Learned]) -> Steps[bool]:
    """Whether a score bias shows, where it can be read."""
    net = learned.params.anatomy.net
    if net is None or not _is_bias_readable(signature, learned):
        return False
    return (yield from ask_for_score_bias(signature, rng, net))


def _ask_without_score_bias(
    signature: Signature, rng: np.random.Generator, learned: Estimate[Learned], residual: bool | None, draft: Draft
) -> Steps[Estimate[OneLayer]]:
    if residual is None:
        residual = yield from _ask_for_residual(signature, rng, Net(learned.params, learned.radius))
    read = _ask_past_residual if residual else _ask_through_net
    return (yield from read(signature, rng, learned, draft))


def _ask_beside_score_bias(
    signature: Signature, rng: np.random.Generator, learned: Estimate[Learned], residual: bool | None
) -> Steps[Estimate[OneLayer]]:
    """Everything, from short tokens in linear cells of the net."""
    net = learned.params.anatomy.net
    assert net is not None  # a bias is looked for behind nets of neurons only
    found = yield from ask_beside_score_bias(signature, rng, net)
    residual = found.residual if residual is None else residual
    if residual:
        return (yield from _ask_behind_residual(signature, rng, learned, found.score, found.bias))
    return _in_front_of_net(signature, learned, found.score, found.bias)


def _ask_for_residual(signature: Signature, rng: np.random.Generator, net: Net) -> Steps[bool]:
    """Beside a last token of zero both tokens weigh the same: the net of half the other, unless something passes by."""
    space, xp, width = signature.space, signature.space.xp, signature.width
    norms = np.minimum(np.asarray(RESIDUAL_NORMS) * _typical_norm(signature, net), signature.norm_limit / 2)
    rows = random_orthogonal(space, rng, width)
    rows = xp.concat([rows, -rows])
    telling = []
    for norm in norms:  # where the net answers something else than to nothing at all
        changes = xp.linalg.vector_norm(net(float(norm) * rows) - net(0 * rows), axis=1)
        telling.append(float(norm) * rows[int(xp.argmax(changes)), :])
    halves = xp.stack(telling)
    answers: Measurements = yield Plan("residual", int(norms.size), [[Term(TokenRows(halves), None, 2.0)], []])
    return _has_other_answers(signature, net, halves, answers)


def _typical_norm(signature: Signature, net: Net) -> float:
    """A length of tokens at which the net bends, where it says so."""
    norm = net.params.token_norm(1.0)
    norm = norm if np.isfinite(norm) and norm > 0 else 1.0
    return float(min(norm, signature.norm_limit))


def _ask_through_net(
    signature: Signature, rng: np.random.Generator, learned: Estimate[Learned], draft: Draft
) -> Steps[Estimate[OneLayer]]:
    """The score matrix where nothing passes attention by."""
    reader = _make_reader(signature, rng, Net(learned.params, learned.radius))
    score = yield from _ask_score(reader, rng, draft)
    return _in_front_of_net(signature, learned, score, None)


def _in_front_of_net(
    signature: Signature, learned: Estimate[Learned], score: Score, bias: ScoreBias | None
) -> Estimate[OneLayer]:
    """The layer without residual: its net has the value matrix inside."""
    space, width = signature.space, signature.width
    head = SingleHead(score.matrix, space.eye(width), bias.vector if bias else None)
    bars = SingleHead(score.radius, space.zeros(width, width))
    if bias is not None or score.hidden_bias > 0:
        bars = replace(bars, score_bias=bias.radius if bias else space.full((width,), score.hidden_bias))
    details = {"residual": False, "value": "part of the net", **_details(learned, score, bias)}
    return _estimate(OneLayer(head, learned.params), OneLayer(bars, learned.radius), learned, score, bias, 0, details)


def _make_reader(signature: Signature, rng: np.random.Generator, net: Net) -> FormReader:
    """How to read forms behind this net: far out where it grows evenly, else through its inverse."""
    space, params = signature.space, net.params.anatomy.net
    if params is not None and signature.max_norm is None:
        growth = Growth.of(space, params)
        if growth.gain > 0:
            odd = odd_growth_of_net(space, params, growth)
            guide = _some_guide(signature, rng, odd, growth)
            rows = growth.length * random_orthogonal(space, rng, signature.width)
            there, back = (_sizes(params.on_vectors(sign * rows)) for sign in (1.0, -1.0))
            least = float(space.xp.min(space.xp.maximum(there, back))) / growth.length
            if least > EVEN_GROWTH * growth.gain:
                return RayReader(signature, guide, rays_of_net(signature, params, growth), growth)
    length = _typical_norm(signature, net)
    unit = length * space.eye(signature.width)
    difference = (net(unit) - net(-unit)) / (2 * length)
    if not bool(space.xp.any(net(unit) != net(0 * unit)) or space.xp.any(difference != 0)):
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, NO_CHANGE)
    return PathReader(signature, _some_guide(signature, rng, difference, None), net, length)


def _some_guide(signature: Signature, rng: np.random.Generator, odd: Array, growth: Growth | None) -> Array:  # (width,)
    """What rows share evenly: the odd growth, or where there is none any direction."""
    space, xp = signature.space, signature.space.xp
    guide = guide_of(odd)
    size = float(xp.linalg.vector_norm(guide))
    if size > (EVEN_GROWTH * growth.gain if growth else 0.0):
        return guide
    other = space.normal(rng, signature.width)
    return other * ((growth.gain if growth else 1.0) / xp.linalg.vector_norm(other))


def _sizes(answers: Array) -> Array:  # (n,) or (n, outputs) -> (n,)
    return abs(answers) if answers.ndim == 1 else namespace(answers).linalg.vector_norm(answers, axis=1)


def _ask_score(reader: FormReader, rng: np.random.Generator, draft: Draft) -> Steps[Score]:
    score = yield from ask_score(reader, rng, draft)
    if score is None:
        raise Unrecoverable(Outcome.WRONG_FAMILY, SCORE_BIAS)
    return score


def _ask_past_residual(
    signature: Signature, rng: np.random.Generator, learned: Estimate[Learned], draft: Draft
) -> Steps[Estimate[OneLayer]]:
    """The score matrix, and what neurons see of attention, where the last token passes it by."""
    net, space = learned.params.anatomy.net, signature.space
    if net is None:
        raise UsageError(
            "behind a residual the net must be a ReluNet, not one that is known as a function only: what attention "
            "adds to it is told apart neuron by neuron"
        )
    if signature.max_norm is not None:
        raise Unrecoverable(Outcome.TOO_NOISY, "behind a residual attention is read with long tokens: lift max_norm")
    growth = Growth.of(space, net)
    far = yield from ask_growth(signature, growth)
    odd, largest = far.odd, far.largest
    # The value matrix may be larger than what single tokens show of it, and so is the rounding then.
    growth = replace(growth, gain=growth.gain + VALUE_MAY_CANCEL * largest)
    if largest <= UNKNOWN_ARITHMETIC * space.rounding * growth.gain + 2 * growth.level / growth.length:
        raise _Undetected(Outcome.NOT_IDENTIFIABLE, UNDETECTED)
    rays = rays_past_residual(signature, odd, growth)
    reader = RayReader(signature, _some_guide(signature, rng, odd, growth), rays, growth)
    score = yield from _ask_score(reader, rng, draft)
    estimate = yield from _ask_behind_residual(signature, rng, learned, score, None)
    if not far.has_growth_of(estimate.params, growth):
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_GROWTH)
    return estimate


def _ask_behind_residual(
    signature: Signature, rng: np.random.Generator, learned: Estimate[Learned], score: Score, bias: ScoreBias | None
) -> Steps[Estimate[OneLayer]]:
    """The net and the value matrix, once attention is known."""
    net, radius = learned.params.anatomy.net, learned.radius.anatomy.net
    assert net is not None
    assert radius is not None
    behind = yield from ask_behind_residual(signature, rng, net, radius, score, bias)
    more = -(-net.neurons * signature.width // (net.outputs or 1))
    details = {"residual": True, **behind.details, **_details(learned, score, bias)}
    return _estimate(behind.params, behind.radius, learned, score, bias, more, details)


def _details(learned: Estimate[Learned], score: Score, bias: ScoreBias | None) -> dict[str, Any]:
    """What was found out, by the learner of the net too; and the size of the net where it is one of neurons."""
    net = learned.params.anatomy.net
    own = {} if net is None else {"neurons": net.neurons}
    return {"rank": score.rank, "score_bias": bias is not None, **learned.details, **own}


def _estimate(
    params: OneLayer,
    radius: OneLayer,
    learned: Estimate[Learned],
    score: Score,
    bias: ScoreBias | None,
    more: int,
    details: dict[str, Any],
) -> Estimate[OneLayer]:
    """Parameters and radii, with the fewest queries that could tell so many numbers."""
    outputs = learned.params.outputs or 1
    forms = score.rank * (2 * params.width - score.rank) + (params.width if bias else 0)
    return Estimate(
        params=params,
        radius=radius,
        counting_bound=learned.counting_bound + -(-forms // outputs) + more,
        assumptions=tuple(dict.fromkeys((*ASSUMPTIONS, *learned.assumptions))),
        details=details,
    )


def _partial(signature: Signature, learned: Estimate[Learned], draft: Draft) -> OneLayer:
    """What is known when a run ends early: the net, and the score as far as it was read."""
    space, width = signature.space, signature.width
    score = draft.matrix()
    return OneLayer(SingleHead(space.zeros(width, width) if score is None else score, space.eye(width)), learned.params)


ONE_LAYER = Method(
    name="one-layer",
    summary="a softmax head and a net of one hidden layer behind it, with or without a residual",
    run=one_layer,
    last_only=True,
    families=("one-layer",),
    options={
        "residual": "whether the last token passes attention by; found out where it is left out",
        "ffn_learner": "learns the net from single tokens in place of relu-net",
    },
)
