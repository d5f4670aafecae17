"""Answers behind a residual and LayerNorm, as what attention adds: the norms that LayerNorm took off are solved for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.first_token import LARGEST, FirstToken
from keyhole.methods.multi_head.vector.probe import (
    COARSE,
    FEWEST_TOKENS,
    LESS,
    PAIRS,
    PRECISE,
    PRECISION_QUERIES,
    Shares,
    Spans,
    VectorQueries,
)
from keyhole.methods.normalised.after.affine import Affine
from keyhole.methods.normalised.after.descale import fit_norms, norms_of_reflections, norms_outside
from keyhole.methods.normalised.after.split import Split
from keyhole.numerics.svd import svd
from keyhole.queries import Measurements, Plan, Position, Term, TokenRows
from keyhole.recovery import Outcome

Added = list[tuple[Floats, Integers, Floats]]
# Norms are solved for where what is left over is at most so many errors.
MISFIT = 64.0
# The part of the outputs that weights may take up: the others tell norms.
FILLED = 0.75
# Errors of the affine part over those of single answers.
WITHIN = 4.0
# The last token in the middle of the others is so long, over the scale.
ORIGIN = 0.5


@dataclass
class NormedQueries(VectorQueries):
    """Vectors of answers inside the norm, of width − 1 numbers, less what the last token makes of itself."""

    on_device: ClassVar[bool] = False

    affine: Affine = field(kw_only=True)
    first_round: int = 8
    copies: tuple[tuple[int, int, int], ...] | None = ((0, 1, 1), (4, 1, 1))
    filled: float = FILLED
    start: FirstToken | None = None
    span: Floats | None = None  # (heads, outputs) orthonormal: of the first token's values
    token: Floats | None = None  # the first token
    expected: Floats | None = None  # (heads, width, outputs) values

    def expect(self, values: Floats) -> None:
        """Say what values of all heads are expected: they tell norms where answers alone do not."""
        self.expected = values

    def origin(self, width: int) -> Floats:  # noqa: ARG002 - (1, width)
        """A token that is not zero, as norms are told by what it makes of itself."""
        return ORIGIN * self.directions(1)

    def _ask_directions(
        self, stage: str, last: Floats, index: Integers, added: Added, plain: int
    ) -> Steps[Floats]:  # (n, outputs)
        """Directions of what is normalised in answer to [added_1 + g; …; g; …; g]."""
        space = self.signature.space
        ends = Term(TokenRows(space.asarray(last)), space.indices(index))
        positions: list[Position] = [
            [Term(TokenRows(space.asarray(rows)), space.indices(which), space.asarray(scale)), ends]
            for rows, which, scale in added
        ]
        self.asked = max(self.asked, len(positions) + plain)
        answers: Measurements = yield Plan(stage, index.size, [*positions, *([[ends]] * plain)])
        return self.affine.sphere.directions(floats(answers.values))

    def ask(
        self,
        stage: str,
        last: Floats,
        index: Integers,
        added: Added,
        plain: int = 1,
        places: tuple[int, ...] = (-1,),  # noqa: ARG002 - there is one
    ) -> Steps[Floats]:  # (n, 1, outputs)
        """What the added tokens add to the answers, their values being expected to be what `expect` says."""
        directions = yield from self._ask_directions(stage, last, index, added, plain)
        known = self.affine.images(last)[index]
        if not added:
            return self._scaled(directions, known, np.sum(directions * known, axis=1))
        norms = np.zeros(index.size)
        members, group = np.unique(np.stack([which for _, which, _ in added]).T, axis=0, return_inverse=True)
        for number, rows in enumerate(members):
            some = np.flatnonzero(group.ravel() == number)
            tokens = np.stack([each[0][row] for each, row in zip(added, rows, strict=True)])
            norms[some] = norms_outside(directions[some], known[some], self._span_of(tokens))
        return self._scaled(directions, known, norms)

    def _scaled(self, directions: Floats, known: Floats, norms: Floats) -> Floats:
        return np.asarray(norms[:, None] * directions - known)[:, None]

    def _span_of(self, tokens: Floats) -> Floats:  # (k, width) -> (r, outputs)
        """What values of these tokens span in all heads together, as expected."""
        if self.expected is None:
            return np.zeros((0, self.outputs))
        flat = (tokens @ self.expected).reshape(-1, self.outputs)
        _, sizes, right = svd(flat)
        return right[: int(np.sum(sizes > self.signature.space.eps * max(flat.shape) * sizes[0]))]

    def ask_each(
        self, stage: str, last: Floats, index: Integers, each: list[tuple[Added, int]]
    ) -> Steps[Floats]:  # (n, 1, k, outputs)
        """Answers with several numbers of copies, from which norms are solved for together."""
        if self.start is None:
            return (yield from self._ask_first(stage, last, index, each))
        return (yield from self._ask_new(stage, last, index, each))

    # --- the first token: beside its reflection, whose copies are those of the last token

    def _ask_first(self, stage: str, last: Floats, index: Integers, each: list[tuple[Added, int]]) -> Steps[Floats]:
        above: list[Floats] = []
        below: list[Floats] = []
        for added, plain in each:
            rows, which, scale = added[0]
            above.append((yield from self._ask_directions(stage, last, index, added, plain)))
            turned = [(-rows, which, scale)] * plain
            below.append((yield from self._ask_directions(stage, last, index, turned, len(added))))
        self.token = np.asarray(added[0][0][0])
        known = np.tile(self.affine.images(last)[index], (2 * len(each), 1))
        directions = np.concatenate([*above, *below])
        own = np.broadcast_to(self.token @ self.linear, (len(directions) // 2, self.outputs))
        ups, downs = np.split(directions, 2)
        norms = np.concatenate(norms_of_reflections(ups, downs, own))
        norms = self._solve_first(directions, known, norms) if self.span is None else norms
        if self.span is not None:
            norms = norms_outside(directions, known, self.span)
        answers = self._scaled(directions, known, norms)[: len(directions) // 2, 0]
        return answers.reshape(len(each), index.size, self.outputs).transpose(1, 0, 2)[:, None]

    def _solve_first(self, directions: Floats, known: Floats, guess: Floats) -> Floats:
        """The norms for which answers span the fewest dimensions: one for each head."""
        for rank in range(1, min(len(directions) - 2, self.outputs - 2)):
            norms, span, misfit = fit_norms(directions, known, rank, guess)
            if misfit <= MISFIT * self.noise:
                self.span = span
                self.noise = max(self.noise, misfit)
                return norms
        return guess

    # --- other tokens: alone beside the last one and its reflection, then beside the first token too

    def _ask_new(self, stage: str, last: Floats, index: Integers, each: list[tuple[Added, int]]) -> Steps[Floats]:
        assert self.start is not None
        assert self.span is not None
        known = self.affine.images(last)[index]
        (alone, plain), *beside = each
        rows, which, scale = alone[0]
        up = yield from self._ask_directions(stage, last, index, alone, plain)
        down = yield from self._ask_directions(stage, last, index, [(-rows, which, scale)], plain)
        own = (rows @ self.linear)[which]
        norms = np.stack(norms_of_reflections(up, down, own))
        spans = []
        for number in range(len(rows)):
            (some,) = np.nonzero(which == number)
            both, same = np.concatenate([up[some], down[some]]), np.tile(known[some], (2, 1))
            fitted, span, _ = fit_norms(both, same, self.start.heads, norms[:, some].ravel())
            norms[:, some] = fitted.reshape(2, -1)
            spans.append(np.linalg.qr(np.concatenate([self.span, span]).T)[0].T)
        columns = [self._scaled(up, known, norms[0])]
        for added, more in beside:
            directions = yield from self._ask_directions(stage, last, index, added, more)
            outside = np.zeros(index.size)
            for number, span in enumerate(spans):
                (some,) = np.nonzero(which == number)
                outside[some] = norms_outside(directions[some], known[some], span)
            columns.append(self._scaled(directions, known, outside))
        return np.stack(columns, axis=2)

    def ask_shares(self, spans: Spans) -> Steps[Shares | None]:
        """The values of tokens as combinations of what heads span, where that is little more than there are outputs.

        Each direction that is missing leaves the sum of the heads' values one number of freedom a token, which its
        answer beside one last token tells.
        """
        heads, excess = len(spans.directions), max(spans.total - self.outputs, 0)
        if (1 + excess) * heads + 1 > FILLED * self.outputs or self.start is None:
            return None
        split = Split.of(spans.directions, self.linear)
        if excess:
            tokens = self.on_grid(self.scale * np.linalg.qr(self.rng.standard_normal((self.width, self.width)))[0])
            every = np.arange(self.width, dtype=np.int64)
            last = self.start.last[np.argmax(np.ptp(np.clip(self.start.logits, -LARGEST, LARGEST), axis=1))][None]
            added: Added = [(tokens, every, np.ones(self.width))]
            directions = yield from self._ask_directions("values", last, 0 * every, added, 1)
            split = split.told_by(tokens, directions, self.affine.images(last)[0], self.noise)
        return Shares(split.shares, split.spread(spans.tilts, self.linear, self.rng))

    # --- scale and precision

    def ask_probes(self) -> Steps[None]:
        """Settle scale and precision."""
        if self.longest < FEWEST_TOKENS:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "sequences of two tokens do not tell heads apart")
        yield from self._ask_scale()
        yield from self._ask_precision()

    def _ask_effect(self, ways: Floats, norm: float, plain: int = 1) -> Steps[float]:
        """What attention does but take the mean, across the direction of the answer, over the norm of tokens."""
        self.scale, every = norm, np.arange(PAIRS, dtype=np.int64)
        tokens = self.on_grid(norm * ways)
        added: Added = [(tokens[:PAIRS], every, np.ones(PAIRS))]
        directions = yield from self._ask_directions("scale", tokens[PAIRS:], every, added, plain)
        mean = self.affine.images(tokens[PAIRS:]) + tokens[:PAIRS] @ self.linear / (plain + 1)
        across = mean - np.sum(mean * directions, axis=1, keepdims=True) * directions
        self._effects = np.maximum(self._effects, np.sqrt(np.mean((tokens[:PAIRS] @ self.linear) ** 2, axis=0)) / norm)
        return float(np.linalg.norm(across)) / norm

    def _ask_precision(self) -> Steps[None]:
        """Errors at tokens of the chosen norm, across the directions of their answers."""
        last = self.on_grid(self.scale * self.directions(max(PRECISION_QUERIES, 1)))
        every = np.arange(last.shape[0], dtype=np.int64)
        rest = (yield from self.ask("precision", last, every, []))[:, 0]
        size = float(np.sqrt(np.mean(self.affine.images(last) ** 2)))
        rounded = self.signature.space.eps * size
        self.noise = max(WITHIN * float(np.sqrt(np.mean(rest**2))), rounded)
        self.patience = max(1.0, 1 + (math.log10(self.noise / size) - PRECISE) / LESS) if size > 0 else 1.0
        self.coarse = self.patience > COARSE
