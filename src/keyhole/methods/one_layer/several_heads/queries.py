"""Queries [m×(g + u); n×g] around last tokens in linear cells of a net, and what they answer beyond [g] alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Steps
from keyhole.methods.gated_sum.model import GatedQueries
from keyhole.methods.one_layer.rays import Growth
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows

# Tokens per query at most.
LONGEST = 9
# Steps are between these parts of the size that was found for them.
SHORTEST_STEP, LONGEST_STEP = 0.6, 1.6


@dataclass(frozen=True)
class PairDesign:
    """Rows u and copies (m, n) of queries around one point each."""

    place: Integers  # (n,) of the point
    rows: Floats  # (n, width)
    copies: Integers  # (n, 2)


class CellQueries:
    """Asks around points."""

    def __init__(self, signature: Signature, rng: np.random.Generator, net: ReluNet) -> None:
        self.signature, self.rng, self.space = signature, rng, signature.space
        self.width = signature.width
        self.growth = Growth.of(signature.space, net)
        self.longest = min(signature.max_length or LONGEST, LONGEST)
        pairs = [(m, n) for m in range(1, self.longest) for n in range(1, self.longest) if m + n <= self.longest]
        pairs = [(m, n) for m, n in pairs if np.gcd(m, n) == 1]
        order = sorted(pairs, key=lambda pair: pair[0] / pair[1])
        self.ratios = np.array(order, dtype=np.int64)  # (r, 2)
        self.measured = 1.0  # errors of answers over what rounding makes one expect

    def ratios_apart(self, count: int) -> Integers:  # (count, 2)
        """Copies whose ratios are about evenly far apart, the shortest and the longest among them."""
        logs = np.log(self.ratios[:, 0] / self.ratios[:, 1])
        wanted = np.linspace(logs[0], logs[-1], min(count, len(logs)))
        chosen: list[int] = []
        for each in wanted:
            left = [place for place in range(len(logs)) if place not in chosen]
            chosen.append(min(left, key=lambda place: abs(logs[place] - each)))
        return self.ratios[sorted(chosen)]

    def usual_copies(self, count: int) -> Integers:  # (count, 2)
        """Random copies: as many of both, and some ratios apart from that."""
        usual = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (self.longest - 1, 1), (1, self.longest - 1)]
        pairs = np.array([pair for pair in usual if sum(pair) <= self.longest], dtype=np.int64)
        return pairs[self.rng.integers(len(pairs), size=count)]

    def random_rows(self, count: int, size: float) -> Floats:  # (count, width)
        """Random directions, of lengths around a size."""
        rows = self.rng.standard_normal((count, self.width))
        lengths = size * self.rng.uniform(SHORTEST_STEP, LONGEST_STEP, (count, 1))
        return np.asarray(rows * lengths / np.linalg.norm(rows, axis=1, keepdims=True))

    def error(self, points: Floats) -> Floats:  # (n, width) -> (n,)
        """Standard deviation of an answer around a point, as far as it is known."""
        growth, noise = self.growth, self.signature.noise
        size = growth.gain * np.linalg.norm(points, axis=1) + growth.level
        return np.asarray(self.measured * (self.space.eps * size + noise.radius))

    def note_error(self, points: Floats, seen: float) -> None:
        """Errors of answers around points are as large as was seen, if that is more than what was known."""
        self.measured *= max(1.0, seen / float(np.max(self.error(points))))

    def ask(self, stage: str, points: Floats, asked: PairDesign) -> Steps[list[GatedQueries]]:
        """The queries around each point, with answers less that to the point itself."""
        asarray = self.space.asarray
        tokens = asarray(points)
        together = asarray(points[asked.place]) + asarray(asked.rows)
        rows = floats(together) - floats(asarray(points))[asked.place]  # what is left of a step beside its point
        plans = [Plan(stage, len(points), [[Term(TokenRows(tokens))]])]
        kinds, kind = np.unique(asked.copies, axis=0, return_inverse=True)
        kind = kind.ravel()
        places = [np.flatnonzero(kind == number) for number in range(len(kinds))]
        for (many, few), own in zip(kinds, places, strict=True):
            first = TokenRows(asarray(floats(together)[own]))
            last = TokenRows(asarray(points[asked.place[own]]))
            plans.append(Plan(stage, own.size, [*[[Term(first)]] * int(many), *[[Term(last)]] * int(few)]))
        replies: Sequence[Measurements] = yield plans
        base, *others = [reply.by_output for reply in replies]
        answers = np.zeros((len(asked.place), base.shape[1]))
        for own, values in zip(places, others, strict=True):
            answers[own] = values
        answers -= base[asked.place]
        offsets = np.log(asked.copies[:, 0] / asked.copies[:, 1])
        found = []
        for number in range(len(points)):
            own = np.flatnonzero(asked.place == number)
            found.append(GatedQueries(rows[own], offsets[own], answers[own]))
        return found
