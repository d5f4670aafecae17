"""A one-layer Transformer: the net from single tokens, then the attention in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace, to_numpy
from keyhole.errors import UsageError
from keyhole.families import Family, SingleHead
from keyhole.families.activations import ACTIVATIONS
from keyhole.families.one_layer import UNKNOWN_ARITHMETIC, OneLayer, OpaqueNet, as_net
from keyhole.families.relu_net import ReluNet
from keyhole.methods.arithmetic import partial_result
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.forms.columns import Draft, Score
from keyhole.methods.forms.reader import FormReader, ScoreBias
from keyhole.methods.forms.score_matrix import ask_score
from keyhole.methods.forms.value import check_length
from keyhole.methods.one_layer.cells_with_bias import BiasedCells, ask_for_score_bias
from keyhole.methods.one_layer.cells_with_residual import ResidualCells
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
from keyhole.methods.one_layer.several_heads.read_heads import HeadsBeforeNet
from keyhole.methods.one_layer.several_heads.shares import CellsContradict
from keyhole.methods.relu_net.exact.estimate import FAMILY as NET_FAMILY
from keyhole.methods.relu_net.exact.estimate import zero_biases_within
from keyhole.methods.relu_net.exact.method import relu_net
from keyhole.methods.relu_net.exact.queries import is_exact
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.numerics.svd import pseudo_inverse
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, then a net of one hidden layer, read at the last position",
    "answers are right up to the rounding of their dtype and the declared noise",
)
SEVERAL = (
    "the box adds up softmax heads over its raw tokens, then computes a net of one hidden layer, at the last position"
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
# Four of them are pairs of tokens, half of logits of about this size and more; answers that differ by less than this
# part of them, or so many radii, are no contradiction: other heads make larger ones.
CHECKED_LOGIT, SAME_PAIRS, PAIR_RADII, WIDE_BARS = 2.0, 1e-7, 16.0, 0.05
# How far out the net bends is told by biases of more radii than this: at the kinks of smaller ones most is error.
KNOWN_KINK = 64.0
# Tokens are at least so many times as long as can be read at all: kinks nearer to the origin would cost digits.
PRECISE = 2.0**16
# Within a norm bound a net is learned anew, so often at most, where some of them show that kinks were missed.
LEARNED_AGAIN = 3
# Pairs of tokens at the norm bound that are checked.
EDGE_PAIRS = 32
# Several heads are read from other last tokens, so often in all, where pairs of tokens contradict them.
SEVERAL_AGAIN = 2
# Without a residual the answers to them are those of the net, within this part of what its answers differ by.
SAME_ANSWERS = 1e-6

# How the reading of long tokens ends where a score bias saturates them.
SATURATED = (Outcome.SATURATED, Outcome.TOO_NOISY)

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
NO_SINGLE_HEAD = (
    "pairs of tokens are not answered as the recovered layer answers them: the box is not a net of one hidden layer "
    "behind one softmax head"
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
BEYOND = (
    "pairs of tokens at max_norm are not answered as the recovered layer answers them: a neuron bends for these and "
    "for no single token, or the box is no net of one hidden layer behind one softmax head"
)
BOUNDED = (
    "within max_norm one head is read before a net: several heads take tokens of any length, so lift max_norm if the "
    "box has these"
)


class _Undetected(Unrecoverable):
    """Long tokens do not show what attention does."""


class _PairsContradict(Unrecoverable):
    """Pairs of tokens are not answered as the recovered layer answers them."""


class _OtherNet(Unrecoverable):
    """Single tokens that are not answered as the learned net answers them."""

    def __init__(self, places: Floats) -> None:  # (n, width)
        super().__init__(Outcome.WRONG_FAMILY, OTHER_NET)
        self.places = places


def one_layer(
    signature: Signature,
    rng: np.random.Generator,
    *,
    residual: bool | None = None,
    ffn_learner: FfnLearner | None = None,
    activation: str = "relu",
    places: Floats | None = None,  # (n, width) single tokens where an earlier estimate was refuted
) -> Steps[Estimate[OneLayer]]:
    """All that is identifiable of f(X) = FFN(attn(X)), or FFN(x_N + attn(X)_N), attn softmax heads that are added up.

    *Provably Learning Attention with Queries* (arXiv 2601.16873) reduces this to any learner of feed-forward nets: one
    token is all of attention, so that single tokens teach the net behind the value matrix, and two tokens then teach
    the score matrix through it. Here the latter takes r(2d − r) + d queries, more or less, for a score of rank r, which
    is not known before, and behind a residual some (k + p)/p · (d + 2) more for k neurons and p outputs.

    Without a residual only the net behind the value matrix can be told, so that the value is returned as the identity.
    A layer that one head does not explain is read as one of several.
    Assumes what `ASSUMPTIONS` says.
    """
    if residual is not None and not isinstance(residual, bool):
        raise UsageError(f"residual must be true, false or left out, not {residual!r}")
    if ffn_learner is not None and not callable(ffn_learner):
        raise UsageError(f"ffn_learner must be a function of signature and rng, not {type(ffn_learner).__name__}")
    if ffn_learner is not None and activation != "relu":
        raise UsageError("an ffn_learner knows its activation: leave that out")
    check_length(signature)
    exact = ffn_learner is None and is_exact(signature)
    places = np.zeros((0, signature.width)) if places is None else places
    for left in reversed(range(LEARNED_AGAIN if exact and signature.max_norm is not None else 1)):
        # Checks far out are made below, of whatever net comes back.
        learn = ffn_learner or partial(relu_net, far_checks=False, activation=activation, places=places)
        try:
            learned = yield from learn(signature, rng)
            return (yield from _Layer(signature, rng, _as_nets(learned, signature.width), residual).run())
        except Unrecoverable as error:
            if left and isinstance(error, _OtherNet):
                places = np.concatenate([places, error.places])
                continue
            if ffn_learner is not None or exact or error.outcome is not Outcome.WRONG_FAMILY:
                raise
            raise Unrecoverable(Outcome.TOO_NOISY, f"{error}; {NOT_FOLLOWED}") from error
    raise AssertionError  # the last of them returns or raises


def _as_nets(learned: Estimate, width: int) -> Estimate[Learned]:
    """The net with biases of zero where they may be, in the space of the oracle."""
    params, radius = as_net(learned.params, width), as_net(learned.radius, width)
    net, net_radius = params.anatomy.net, radius.anatomy.net
    if net is not None and net_radius is not None:
        params, radius = zero_biases_within(net, net_radius)
    return replace(learned, params=params, radius=radius)  # type: ignore[return-value]


class _Layer:
    """A layer whose net, behind the value matrix, is learned."""

    def __init__(
        self, signature: Signature, rng: np.random.Generator, learned: Estimate[Learned], residual: bool | None
    ) -> None:
        self.signature, self.rng, self.learned, self.residual = signature, rng, learned, residual
        self.space, self.width = signature.space, signature.width
        self.net = Net(learned.params, learned.radius)
        self.neurons = learned.params.anatomy.net  # None where the net is known as a function only
        self.draft = Draft()
        # A length of tokens at which the net bends, where it says so.
        shape: Learned = learned.params
        if self.neurons is not None and (radius := learned.radius.anatomy.net) is not None:
            shape, _ = zero_biases_within(self.neurons, radius, KNOWN_KINK)
        norm = shape.token_norm(1.0)
        if self.neurons is not None:
            norm = max(norm, PRECISE * Growth.of(self.space, self.neurons).shortest)
        self.typical = float(min(norm if np.isfinite(norm) and norm > 0 else 1.0, signature.norm_limit))

    def run(self) -> Steps[Estimate[OneLayer]]:
        """Everything in front of the net; what is known of it is left behind where a run ends early."""
        with partial_result(self._partial):
            yield from self._ask_net_check()
            net = self.neurons
            if net is None:
                return (yield from self._ask_without_score_bias())
            if self.signature.max_norm is not None:
                return (yield from self._ask_within_norm(net))
            if (yield from ask_for_score_bias(self.signature, self.rng, net, self.typical)):
                return (yield from self._ask_beside_shown_bias(net))
            try:
                return (yield from self._ask_one_head())
            except Unrecoverable as error:
                # A bias that does not show around the origin saturates long tokens all the same.
                saturated = error.outcome in SATURATED and is_exact(self.signature)
                if not saturated and error.outcome is not Outcome.WRONG_FAMILY and not isinstance(error, _Undetected):
                    raise
                return (yield from self._ask_after(error, net))

    def _partial(self, _: Family | None) -> OneLayer:
        """What is known of the score so far, in front of the net."""
        score = self.draft.matrix()
        score = self.space.zeros(self.width, self.width) if score is None else score
        return OneLayer(SingleHead(score, self.space.eye(self.width)), self.learned.params)

    def _ask_within_norm(self, net: ReluNet) -> Steps[Estimate[OneLayer]]:
        """One head: from the inverse of the net if it can be, from linear cells beside a score bias or a residual."""
        try:
            in_cells = yield from ask_for_score_bias(self.signature, self.rng, net, self.typical)
            if not in_cells:
                in_cells = (yield from self._ask_for_residual()) if self.residual is None else self.residual
            if not in_cells:
                try:
                    return (yield from self._ask_before_net())
                except Unrecoverable as error:
                    if error.outcome is not Outcome.WRONG_FAMILY:
                        return (yield from self._ask_near_kinks(error, net))
            estimate = yield from self._ask_beside_score_bias(net)
            yield from self._ask_edge_check(estimate)
        except Unrecoverable as error:
            if error.outcome is not Outcome.WRONG_FAMILY:
                raise
            raise Unrecoverable(error.outcome, f"{error}; {BOUNDED}") from error
        return estimate

    def _ask_near_kinks(self, failure: Unrecoverable, net: ReluNet) -> Steps[Estimate[OneLayer]]:
        """Mixtures of two random tokens may show nothing, those in a small cell all; else the failure is raised."""
        if failure.outcome not in (Outcome.TOO_NOISY, Outcome.NOT_IDENTIFIABLE):
            raise failure
        try:
            return (yield from self._ask_beside_score_bias(net))
        except Unrecoverable:
            raise failure from None

    def _ask_beside_shown_bias(self, net: ReluNet) -> Steps[Estimate[OneLayer]]:
        """Everything beside a score bias, of one head or of several."""
        estimate: Estimate[OneLayer] | None = None
        try:
            estimate = yield from self._ask_beside_score_bias(net)
            yield from self._ask_pair_check(estimate)
        except Unrecoverable as error:
            if error.outcome is not Outcome.WRONG_FAMILY:
                raise
            several = yield from self._ask_several_heads(net)
            if several is None and estimate is None:
                raise
            return several or estimate  # type: ignore[return-value]
        return estimate

    def _ask_several_heads(self, net: ReluNet) -> Steps[Estimate[OneLayer] | None]:
        """Several heads; None where one explains the answers in one cell, nothing can be seen there, or no net is."""
        radius = self.learned.radius.anatomy.net
        assert radius is not None
        if self.width < 2 or not np.any(floats(net.weights_in)):  # the cells of one number are its two sides
            return None
        several = HeadsBeforeNet(self.signature, self.rng, net, radius)
        if not (yield from several.ask_whether_several()):
            return None
        # Heads that saturate at one last token may be taken for others: then another tells.
        for left in reversed(range(SEVERAL_AGAIN)):
            try:
                *layers, details = yield from several.run(self.residual)
                estimate = self._estimate_of_several((layers[0], layers[1]), details)
                if left:
                    yield from self._ask_pair_check(estimate)
            except (CellsContradict, _PairsContradict):
                if not left:
                    raise
                continue
            return estimate
        raise AssertionError  # the last of them returns or raises

    def _ask_after(self, failure: Unrecoverable, net: ReluNet) -> Steps[Estimate[OneLayer]]:
        """A second way; where it fails too, the first failure is raised, unless only the second had a response."""
        several = yield from self._ask_several_heads(net)
        if several is not None:
            return several
        try:
            return (yield from self._ask_beside_score_bias(net))
        except Unrecoverable as second:
            if failure.outcome is Outcome.NOT_IDENTIFIABLE and second.outcome is Outcome.WRONG_FAMILY:
                raise
            raise failure from None

    def _ask_net_check(self) -> Steps[None]:
        """Held-out single tokens, near and far: a deeper net may agree with one of one layer nearby.

        Half of them are those of many to which the net answers least or most: a further layer bends there first.
        """
        space, xp = self.space, self.space.xp
        chosen = []
        for norm in np.minimum(np.asarray(CHECKED_NORMS) * self.typical, self.signature.norm_limit):
            rows = space.normal(self.rng, CHECKED_AMONG, self.width)
            rows = rows * (float(norm) / xp.linalg.vector_norm(rows, axis=1))[:, None]
            answers = self.net(rows)
            order = xp.argsort(answers @ space.normal(self.rng, answers.shape[1]))
            quarter = CHECKED_TOKENS // 4
            ends = xp.concat([order[:quarter], order[-quarter:]])
            chosen += [rows[: 2 * quarter - self.checks_pairs, :], xp.take(rows, ends, axis=0)]
        tokens = xp.concat(chosen)
        asked: Measurements = yield Plan("checks", int(tokens.shape[0]), [[Term(TokenRows(tokens))]])
        other = self._have_other_answers(tokens, asked)
        if bool(xp.any(other)):
            raise _OtherNet(floats(tokens)[to_numpy(other)])

    @property
    def checks_pairs(self) -> bool:
        """Whether some held-out queries are pairs of tokens: where there is more to try if these contradict."""
        return self.neurons is not None and self.signature.max_norm is None

    def _ask_pair_check(self, estimate: Estimate[OneLayer]) -> Steps[None]:
        """Pairs of tokens with moderate and large logits: of several heads, one may explain all that was read."""
        space, xp, params = self.space, self.space.xp, estimate.params
        norm = params.attention.token_norm(CHECKED_LOGIT)
        norm = norm if 0 < norm < np.inf else self.typical
        norms = space.asarray(np.array([norm, CHECKED_NORMS[1] * norm, self.typical, CHECKED_NORMS[1] * self.typical]))
        rows = [TokenRows(space.normal(self.rng, 4, self.width) * norms[:, None] / self.width**0.5) for _ in range(2)]
        asked: Measurements = yield Plan("checks", 4, [[Term(each)] for each in rows])
        pairs = xp.stack([each.vectors for each in rows], axis=1)
        rounding = UNKNOWN_ARITHMETIC * space.rounding
        bars = params.error_bar(estimate.radius, pairs, rounding) + asked.radius
        nothing = {name: xp.zeros_like(each) for name, each in estimate.radius.arrays().items()}
        least = params.error_bar(estimate.radius.with_arrays(nothing), pairs, rounding) + asked.radius
        sizes = abs(asked.values - self.net(0 * pairs[:1, 0, :])[0, ...].reshape(asked.values.shape[1:]))
        sizes = sizes if sizes.ndim == 1 else xp.max(sizes, axis=1)[:, None]
        # Radii as large as answers say nothing; where the net is flat, answers differ by their rounding and its bias's.
        most = WIDE_BARS * sizes + SAME_PAIRS * xp.abs(asked.values)
        bars = xp.maximum(xp.minimum(PAIR_RADII * bars, most), least)
        if bool(xp.any(xp.abs(params(pairs) - asked.values) > SAME_PAIRS * sizes + bars)):
            raise _PairsContradict(Outcome.WRONG_FAMILY, NO_SINGLE_HEAD)

    def _ask_edge_check(self, estimate: Estimate[OneLayer]) -> Steps[None]:
        """Pairs of tokens as long as they may be, half of them those that lead furthest beyond single tokens.

        Beside a residual neurons see a last token and a mixture, which may be longer in their eyes than any one token.
        """
        params = estimate.params
        if not params.residual:
            return
        space, xp = self.space, self.space.xp
        rows = space.normal(self.rng, 2 * CHECKED_AMONG, self.width)
        rows = rows * (self.signature.norm_limit / xp.linalg.vector_norm(rows, axis=1))[:, None]
        pairs = xp.reshape(rows, (CHECKED_AMONG, 2, self.width))
        mixed = floats(params.attention(pairs))
        both = np.eye(self.width) + floats(params.heads[0].value)
        alike = (floats(pairs[:, -1, :]) + mixed) @ pseudo_inverse(both)  # the one token that neurons see as these two
        chosen = np.argsort(np.linalg.norm(alike, axis=1))[-EDGE_PAIRS // 2 :]
        chosen = np.unique(np.concatenate([chosen, np.arange(EDGE_PAIRS // 2)]))
        pairs = xp.take(pairs, space.indices(chosen), axis=0)
        terms = [[Term(TokenRows(pairs[:, place, :]))] for place in (0, 1)]
        asked: Measurements = yield Plan("checks", len(chosen), terms)
        bars = params.error_bar(estimate.radius, pairs, UNKNOWN_ARITHMETIC * space.rounding) + asked.radius
        sizes = xp.max(xp.abs(asked.values), axis=0)
        if bool(xp.any(xp.abs(params(pairs) - asked.values) > SAME_PAIRS * sizes + PAIR_RADII * bars)):
            raise Unrecoverable(Outcome.WRONG_FAMILY, BEYOND)

    def _have_other_answers(self, tokens: Array, answers: Measurements) -> Array:  # (n, width) -> (n,)
        """Which answers are clearly not those of the net to these tokens."""
        xp, net = self.space.xp, self.net
        values = answers.values if answers.values.ndim == 2 else answers.values[:, None]
        expected = net(tokens)
        changes = xp.linalg.vector_norm(expected - net(0 * tokens), axis=1)
        radius = net.answer_radius(tokens, UNKNOWN_ARITHMETIC * self.space.rounding) + answers.radius
        radius = SAME_ANSWERS * changes + 4 * xp.linalg.vector_norm(radius, axis=1)
        return xp.linalg.vector_norm(values - expected, axis=1) > radius

    def _ask_one_head(self) -> Steps[Estimate[OneLayer]]:
        """Everything, if one head without a score bias explains it."""
        estimate = yield from self._ask_without_score_bias()
        yield from self._ask_pair_check(estimate)
        return estimate

    def _ask_without_score_bias(self) -> Steps[Estimate[OneLayer]]:
        """Everything, from the score matrix that long tokens show through the net."""
        residual = self.residual
        if residual is None:
            residual = yield from self._ask_for_residual()
        return (yield from self._ask_past_residual() if residual else self._ask_before_net())

    def _ask_before_net(self) -> Steps[Estimate[OneLayer]]:
        """The same, without residual."""
        score = yield from self._ask_score(self._make_reader())
        return self._in_front_of_net(score, None)

    def _ask_beside_score_bias(self, net: ReluNet) -> Steps[Estimate[OneLayer]]:
        """Everything, from short tokens in linear cells of the net."""
        score, bias, has_residual = yield from BiasedCells(self.signature, self.rng, net, self.typical).run()
        bias = bias.zero_within_radius() if self.signature.noise.kind == "exact" else bias
        if has_residual if self.residual is None else self.residual:
            return (yield from self._ask_behind_residual(score, bias))
        return self._in_front_of_net(score, bias)

    def _ask_for_residual(self) -> Steps[bool]:
        """Beside a last token of zero both tokens weigh the same: the net of half the other, without a residual."""
        xp, net = self.space.xp, self.net
        norms = np.minimum(np.asarray(RESIDUAL_NORMS) * self.typical, self.signature.norm_limit / 2)
        rows = random_orthogonal(self.space, self.rng, self.width)
        rows = xp.concat([rows, -rows])
        telling = []
        for norm in norms:  # where the net answers something else than to nothing at all
            changes = xp.linalg.vector_norm(net(float(norm) * rows) - net(0 * rows), axis=1)
            telling.append(float(norm) * rows[int(xp.argmax(changes)), :])
        halves = xp.stack(telling)
        answers: Measurements = yield Plan("residual", int(norms.size), [[Term(TokenRows(halves), None, 2.0)], []])
        return bool(xp.any(self._have_other_answers(halves, answers)))

    def _in_front_of_net(self, score: Score, bias: ScoreBias | None) -> Estimate[OneLayer]:
        """The layer without residual: its net has the value matrix inside."""
        space, width, learned = self.space, self.width, self.learned
        head = SingleHead(score.matrix, space.eye(width), bias.shown if bias else None)
        radius = SingleHead(score.radius, space.zeros(width, width))
        if bias is not None or score.hidden_bias > 0:
            radius = replace(radius, score_bias=bias.radius if bias else space.full((width,), score.hidden_bias))
        layers = OneLayer(head, learned.params), OneLayer(radius, learned.radius)
        return self._estimate(layers, score, bias, 0, residual=False, value="part of the net")

    def _make_reader(self) -> FormReader:
        """How to read forms behind this net: far out where it grows evenly, else through its inverse."""
        signature, space, net, params = self.signature, self.space, self.net, self.neurons
        if params is not None and signature.max_norm is None:
            growth = Growth.of(space, params)
            if growth.gain > 0:
                guide = self._guide(odd_growth_of_net(space, params, growth), growth.gain)
                rows = growth.length * random_orthogonal(space, self.rng, self.width)
                there, back = (_sizes(params.on_vectors(sign * rows)) for sign in (1.0, -1.0))
                least = float(space.xp.min(space.xp.maximum(there, back))) / growth.length
                if least > EVEN_GROWTH * growth.gain:
                    return RayReader(signature, guide, rays_of_net(signature, params, growth), growth)
        for norm in (self.typical, signature.norm_limit):  # the former may be that of the only kink
            unit = min(norm, space.huge**0.25) * space.eye(self.width)
            difference = (net(unit) - net(-unit)) / (2 * unit[0, 0])
            if bool(space.xp.any(net(unit) != net(0 * unit)) or space.xp.any(difference != 0)):
                break
        else:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, NO_CHANGE)
        return PathReader(signature, self._guide(difference), net, self.typical)

    def _guide(self, odd: Array, gain: float | None = None) -> Array:  # (width,)
        """What rows share evenly: the odd growth, or where there is none any direction."""
        xp, guide = self.space.xp, guide_of(odd)
        if float(xp.linalg.vector_norm(guide)) > (0.0 if gain is None else EVEN_GROWTH * gain):
            return guide
        other = self.space.normal(self.rng, self.width)
        return other * ((1.0 if gain is None else gain) / xp.linalg.vector_norm(other))

    def _ask_score(self, reader: FormReader) -> Steps[Score]:
        score = yield from ask_score(reader, self.rng, self.draft)
        if score is None:
            raise Unrecoverable(Outcome.WRONG_FAMILY, SCORE_BIAS)
        return score

    def _ask_past_residual(self) -> Steps[Estimate[OneLayer]]:
        """The score matrix, and the neurons' composites with the value, beside a residual."""
        signature, space = self.signature, self.space
        if self.neurons is None:
            raise UsageError(
                "behind a residual the net must be a ReluNet, not one that is known as a function only: what attention "
                "adds to it is told apart neuron by neuron"
            )
        growth = Growth.of(space, self.neurons)
        far = yield from ask_growth(signature, growth)
        # The value matrix may be larger than what single tokens show of it, and so is the rounding then.
        growth = replace(growth, gain=growth.gain + VALUE_MAY_CANCEL * far.largest)
        if far.largest <= UNKNOWN_ARITHMETIC * space.rounding * growth.gain + 2 * growth.level / growth.length:
            raise _Undetected(Outcome.NOT_IDENTIFIABLE, UNDETECTED)
        rays = rays_past_residual(signature, far.odd, growth)
        score = yield from self._ask_score(RayReader(signature, self._guide(far.odd, growth.gain), rays, growth))
        estimate = yield from self._ask_behind_residual(score, None)
        if not far.has_growth_of(estimate.params, growth):
            raise Unrecoverable(Outcome.WRONG_FAMILY, NO_GROWTH)
        return estimate

    def _ask_behind_residual(self, score: Score, bias: ScoreBias | None) -> Steps[Estimate[OneLayer]]:
        """The net and the value matrix, once attention is known."""
        net, radius = self.neurons, self.learned.radius.anatomy.net
        assert net is not None
        assert radius is not None
        cells = ResidualCells(self.signature, self.rng, net, radius, self.typical, score, bias)
        *layers, details = yield from cells.run()
        more = -(-net.neurons * self.width // (net.outputs or 1))
        return self._estimate((layers[0], layers[1]), score, bias, more, residual=True, **details)

    def _estimate_of_several(self, layers: tuple[OneLayer, OneLayer], details: dict[str, Any]) -> Estimate[OneLayer]:
        """Several heads before the net."""
        params, radius = layers
        own = [each for each in self.learned.assumptions if each != NET_FAMILY]
        assumptions = tuple(dict.fromkeys((SEVERAL, *ASSUMPTIONS[1:], *own)))
        details = {**details, **self.learned.details}
        return Estimate(params, radius, params.counting_bound, assumptions=assumptions, details=details)

    def _estimate(
        self, layers: tuple[OneLayer, OneLayer], score: Score, bias: ScoreBias | None, more: int, **details: Any
    ) -> Estimate[OneLayer]:
        """Parameters and radii, with the counting bound."""
        params, radius = layers
        learned, size = self.learned, {} if self.neurons is None else {"neurons": self.neurons.neurons}
        has_bias = bias is not None and bias.shown is not None
        forms = score.rank * (2 * self.width - score.rank) + self.width * has_bias
        bound = learned.counting_bound + -(-forms // (learned.params.outputs or 1)) + more
        # That the oracle is a net on its last token is what single tokens are read with, and no more than that.
        own = [each for each in learned.assumptions if each != NET_FAMILY]
        assumptions = tuple(dict.fromkeys((*ASSUMPTIONS, *own)))
        details |= {"rank": score.rank, "score_bias": has_bias, **learned.details, **size}
        return Estimate(params, radius, bound, assumptions=assumptions, details=details)


def _sizes(answers: Array) -> Array:  # (n,) or (n, outputs) -> (n,)
    return abs(answers) if answers.ndim == 1 else namespace(answers).linalg.vector_norm(answers, axis=1)


ONE_LAYER = Method(
    name="one-layer",
    summary="softmax heads and a net of one hidden layer behind them, with or without a residual",
    run=one_layer,
    last_only=True,
    goes_on=True,
    families=("one-layer",),
    options={
        "residual": "whether the last token passes attention by; found out where it is left out",
        "ffn_learner": "learns the net from single tokens in place of relu-net",
        "activation": f"one of {', '.join(ACTIVATIONS)}, smooth (any but relu), or auto to find out (default: relu)",
    },
)
