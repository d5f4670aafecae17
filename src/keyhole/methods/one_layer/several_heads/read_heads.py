"""All that is identifiable of several heads before a net that is known on single tokens.

In a linear cell of the net, far out, answers are sums of gated rows, whatever the logits; so the number of heads, their
gates W_h·g and values are told at one last token, gates at others of the cell give W_h, and values in cells of other
patterns, now by linear least squares, what every neuron sees of every head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.one_layer.cells import PlainNet
from keyhole.methods.one_layer.several_heads.far_cells import FarNet
from keyhole.methods.one_layer.several_heads.heads_at_point import PointHeads, ask_heads
from keyhole.methods.one_layer.several_heads.layer import layer_before_net, layer_with_residual
from keyhole.methods.one_layer.several_heads.queries import CellQueries, PairDesign
from keyhole.methods.one_layer.several_heads.scale import STAGE, Scale, ask_scale
from keyhole.methods.one_layer.several_heads.scores import HeadsLost, Scores, ask_scores
from keyhole.methods.one_layer.several_heads.shares import CellsContradict, ShareReader
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Last tokens at which heads are looked for.
MOST_POINTS = 3
# Steps that tell whether one head explains the answers, the last of them so much shorter, as logits may be large, and
# the copies of one of the queries.
TRIED, SHORTER, COPIES = 4, 1 / 8, (2, 1)
# What differs from what is expected by more than this part of it, and so many errors, is something else.
SAME, CLEAR = 1e-6, 64.0
# The same of one head: another may be quiet, and no harm is done where it is none.
QUIET = 1e-10
# Shortest sequences that tell (W, V) from (−W, −V) and an average.
FEWEST_TOKENS = 3

NO_HEADS = (
    "what attention adds in a linear cell of the net is not explained by softmax heads: the box is no net of one "
    "hidden layer behind some, has more of them than could be told apart, or heads nearly alike"
)


class HeadsBeforeNet:
    """Heads before a net that is learned."""

    def __init__(self, signature: Signature, rng: np.random.Generator, net: ReluNet, radius: ReluNet) -> None:
        self.signature, self.net, self.radius = signature, net, radius
        self.queries, self.far = CellQueries(signature, rng, net), FarNet.of(net)
        self.scale: Scale | None = None

    def ask_whether_several(self) -> Steps[bool]:
        """Whether no single head, with or without a score bias, explains the answers in one cell."""
        if self.queries.longest < FEWEST_TOKENS:
            return False
        try:
            self.scale = yield from ask_scale(self.queries, self.far)
        except Unrecoverable:
            return False
        rows = self.queries.random_rows(TRIED, self.scale.size)
        rows[TRIED // 2 :] *= SHORTER
        copies = np.repeat(np.array([[1, 1], [1, 1], COPIES], dtype=np.int64), TRIED, axis=0)
        rows = np.concatenate([rows, -rows, rows])
        design = PairDesign(np.zeros(len(rows), dtype=np.int64), rows, copies)
        (asked,) = yield from self.queries.ask(STAGE, self.scale.cell.points, design)
        there, back, more = asked.answers.reshape(3, TRIED, -1)
        total = there - back
        share = np.sum(there * total, axis=1) / np.sum(total**2, axis=1)  # the weight of the only head
        ratio = COPIES[0] / COPIES[1]
        expected = np.concatenate(
            [share[:, None] * total, (ratio * share / (1 + (ratio - 1) * share))[:, None] * total]
        )
        error = CLEAR * float(self.queries.error(self.scale.cell.points)[0]) + QUIET * np.max(np.abs(total))
        return bool(np.any(np.abs(np.concatenate([there, more]) - expected) > error))

    def run(self, residual: bool | None) -> Steps[tuple[OneLayer, OneLayer, dict[str, Any]]]:
        """The layer, its radii, and details."""
        scale, found, scores = yield from self._ask_scores()
        has_residual = self._has_residual(scale) if residual is None else residual
        try:
            shares = yield from self._reader(scale, scores, has_residual).run(found)
        except (
            CellsContradict
        ):  # gates are linear in last tokens of one cell, but affine in all: there are score biases
            scores = yield from ask_scores(self.queries, self.far, scale, found, biased=True)
            shares = yield from self._reader(scale, scores, has_residual).run(found)
        parts = self.signature.space, self.net, self.radius, scores, shares
        details: dict[str, Any] = {"heads": len(scores.matrices), "residual": has_residual}
        details["score_bias"] = scores.biases is not None
        if not has_residual:
            return *layer_before_net(*parts), {**details, "value": "part of the net"}
        layer, radius, unique = layer_with_residual(*parts)
        return layer, radius, {**details, "value": "identified" if unique else "of least norm"}

    def _reader(self, scale: Scale, scores: Scores, residual: bool) -> ShareReader:
        return ShareReader(self.queries, self.far, scale, scores, PlainNet.of(self.radius, 1.0), residual)

    def _ask_scores(self) -> Steps[tuple[Scale, PointHeads, Scores]]:
        """Heads at one last token, and score matrices; elsewhere where these do not explain the answers."""
        failure = Unrecoverable(Outcome.WRONG_FAMILY, NO_HEADS)
        for _ in range(MOST_POINTS):
            scale = self.scale or (yield from ask_scale(self.queries, self.far))
            self.scale = None
            found = yield from ask_heads(self.queries, scale)
            if found is None:
                continue
            try:
                return scale, found, (yield from ask_scores(self.queries, self.far, scale, found))
            except HeadsLost as error:
                failure = error
        raise failure

    def _has_residual(self, scale: Scale) -> bool:
        """Whether values in the cell do not add up to the slope of the net: the rest passes attention by."""
        expected = scale.rows @ self.far.net.gradients(scale.cell.active)[0].T
        error = CLEAR * float(self.queries.error(scale.cell.points)[0])
        return bool(np.any(np.abs(scale.odd - expected) > error + SAME * np.max(np.abs(expected))))
