"""Queries [m×(g + u); n×g]: what both tokens share drops out of the softmax, and copies shift all logits by ln(m/n)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Floats, Integers, floats
from keyhole.methods.base import Steps
from keyhole.methods.forms.value import Value
from keyhole.methods.gated_sum.joint import JointHeads, JointQueries
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum
from keyhole.methods.gated_sum.radii import AnswerErrors
from keyhole.methods.gated_sum.search import loudness
from keyhole.methods.multi_head.scalar.queries import columns
from keyhole.noise import GAUSSIAN_DEVIATIONS
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows

# Copies of the first token and of the last.
COPIES = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (8, 1), (1, 8))
# Roundings of an answer, over the sizes of what it adds up: their root mean square, as far as it can be told before.
ROUNDINGS = 8.0
# Single tokens are at most this much longer than rows: longer ones would drown the others in a fit of all.
LONG = 64.0


class AnswerReader(Protocol):
    """Another way to the answers to pairs of tokens, where the oracle does not tell them."""

    error: float  # root mean square of the errors of answers, over what the heads add to them

    def read(self, stage: str, lasts: Floats, rows: Floats, copies: Integers) -> Steps[GatedQueries]:
        """As many raw answers as rows (n, width), to these or to others, with as many copies (n, 2) of both tokens."""

    def read_finer(self, queries: Sequence[GatedQueries], factor: float) -> Steps[Sequence[GatedQueries] | None]:
        """The same answers with errors that much smaller at least; None where they are as small as they can be."""


@dataclass(frozen=True)
class TokenPairs:
    """The oracle and its affine part."""

    signature: Signature
    total: Value  # the sum of all values, and the output bias
    rng: np.random.Generator
    reader: AnswerReader | None = None  # None: the oracle tells its answers

    @property
    def linear(self) -> Floats:  # (width, outputs)
        """The sum of all values."""
        return columns(floats(self.total.vector))

    @property
    def constant(self) -> Floats:  # (outputs,)
        """The output bias."""
        return np.ravel(floats(self.total.bias))

    @property
    def copies(self) -> Integers:  # (kinds, 2)
        """Copies of the two tokens that sequences have room for."""
        longest = self.signature.max_length or np.inf
        return np.array([pair for pair in COPIES if sum(pair) <= longest])

    def ask(self, stage: str, lasts: Floats, rows: Floats, kinds: Integers) -> Steps[GatedQueries]:
        """Raw answers to queries of last tokens (n, width), rows (n, width) and the number of their copies (n,)."""
        if self.reader is not None:
            return (yield from self.reader.read(stage, lasts, rows, self.copies[kinds]))
        space = self.signature.space
        last = space.asarray(lasts)
        first = space.asarray(floats(last) + rows)
        plans, order = [], []
        for kind, (some, others) in enumerate(self.copies):
            index = np.flatnonzero(kinds == kind)
            if index.size:
                order.append(index)
                part = space.indices(index)
                one, two = ([Term(TokenRows(space.xp.take(each, part, axis=0)))] for each in (first, last))
                plans.append(Plan(stage, int(index.size), [one] * some + [two] * others))
        parts: list[Measurements] = yield plans
        answers = np.empty((lasts.shape[0], self.constant.size))
        answers[np.concatenate(order)] = np.concatenate([part.by_output for part in parts])
        offsets = np.log(self.copies[kinds, 0] / self.copies[kinds, 1])
        return GatedQueries(floats(first) - floats(last), offsets, answers, floats(last))

    def bare(self, queries: GatedQueries) -> GatedQueries:
        """The same without what the last tokens and the output bias add."""
        bases = np.zeros_like(queries.rows) if queries.bases is None else queries.bases
        return GatedQueries(queries.rows, queries.offsets, queries.answers - bases @ self.linear - self.constant)

    def bare_of_one(self, queries: GatedQueries) -> GatedQueries:
        """The same of queries of one last token: behind errors, what that adds is better not known than wrong."""
        bare = self.bare(queries)
        return bare.without_mean() if self.noise > 0 else bare

    def floor(self, queries: GatedQueries, heads: GatedSum | None = None) -> float:
        """Root mean square of the errors of raw answers without their affine part, at most; heads may cancel."""
        tokens = queries.rows if queries.bases is None else np.hypot(queries.rows, queries.bases)
        norm = float(np.sqrt(np.mean(tokens**2) * tokens.shape[1]))
        own = norm * float(np.linalg.norm(self.linear)) + float(np.linalg.norm(self.constant)) + queries.size
        own = own if heads is None else max(own, loudness(queries, heads))
        if self.noise == 0:
            known = norm * float(np.max(floats(self.total.radius))) + float(np.max(floats(self.total.bias_radius)))
            if self.reader is not None:
                known += self.reader.error * self.bare(queries).size
            return self.rounding * own + known
        return float(np.hypot(self.noise, self.rounding * own))

    @property
    def rounding(self) -> float:
        """Root mean square of the rounding of answers, over what they add up, at most."""
        return ROUNDINGS * self.signature.space.eps

    @property
    def noise(self) -> float:
        """Root mean square of the errors of answers beyond their rounding, at most."""
        return self.signature.noise.deviation

    def together(self, groups: Sequence[GatedQueries]) -> JointQueries:
        """Raw queries by last token beside the single tokens that the affine part came from."""
        width, norm = self.signature.width, self._plain_norm(groups)
        zero = np.zeros((int(self.has_constant), width))
        tokens = np.concatenate([norm * np.eye(width), zero])
        answers = tokens @ self.linear + self.constant
        plain = GatedQueries(np.zeros_like(tokens), np.zeros(tokens.shape[0]), answers, tokens)
        return JointQueries(groups, plain, has_constant=self.has_constant)

    @property
    def has_constant(self) -> bool:
        """Whether a constant is fitted: behind errors it may be there without showing."""
        return self.total.has_bias or self.noise > 0

    def _plain_norm(self, groups: Sequence[GatedQueries]) -> float:
        """The norm of single tokens at which the errors of values are about those of answers."""
        size = float(max(np.max(np.linalg.norm(group.rows, axis=1)) for group in groups))
        radius = float(np.max(floats(self.total.radius)))
        return float(np.clip(self.signature.noise.radius / radius if radius > 0 else size, size, LONG * size))

    def errors(self, queries: JointQueries, heads: JointHeads, rms: float) -> AnswerErrors:
        """How the answers of a joint fit err: roundings of all they add up, as large as the residual at least."""
        eps, noise = self.signature.space.eps, self.signature.noise
        normal = noise.kind == "gaussian"
        scatter = noise.scale if normal else rms if noise.kind == "exact" else 0.0
        bias_radius = np.ravel(floats(self.total.bias_radius))
        unknown = bias_radius * (not queries.has_constant) + noise.radius * (not normal)
        values = np.linalg.norm(heads.values, axis=1)  # (heads, outputs)
        bound, deviation = [], []
        for group, gates in zip(queries.groups, heads.gates, strict=True):
            tokens = np.linalg.norm(group.rows, axis=1)
            bases = 0.0 if group.bases is None else np.linalg.norm(group.bases, axis=1)
            logits = 1 + tokens[:, None] * np.linalg.norm(gates, axis=1)  # (n, heads)
            size = (tokens + bases)[:, None] * (logits @ values) + np.abs(group.answers)
            bound.append(np.broadcast_to(unknown, size.shape).ravel())
            read = 0.0 if self.reader is None else self.reader.error * np.abs(self.bare(group).answers)
            deviation.append(np.hypot(eps / 2 * size + read, scatter).ravel())
        norm = self._plain_norm(queries.groups)
        own = (norm * columns(floats(self.total.radius)) + bias_radius).ravel()
        zero = bias_radius if queries.has_constant else bias_radius[:0]
        bound.append(np.concatenate([np.zeros_like(own) if normal else own, zero]))
        deviation.append(np.concatenate([own / GAUSSIAN_DEVIATIONS if normal else np.zeros_like(own), 0 * zero]))
        deviations = GAUSSIAN_DEVIATIONS if normal else ROUNDING_DEVIATIONS
        return AnswerErrors(np.concatenate(bound), np.concatenate(deviation), deviations)
