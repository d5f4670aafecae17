"""Random one-token queries to a net behind noise: at which norms its kinks show, and how much each answer errs."""

from __future__ import annotations

import math

import numpy as np

from keyhole.arrays import FLOAT32, Floats, to_numpy
from keyhole.methods.base import Steps
from keyhole.methods.relu_net.noisy.least_squares import NetProblem
from keyhole.queries import Measurements, Signature, sequences

# Lines through the origin that are asked at norms a constant factor apart, to see where answers bend.
PROBE_LINES = 4
PROBE_STEP = 4.0
# The largest norm asked where none is forbidden, and how many smaller ones there, or below one that is the limit.
PROBE_NORM = 4.0**5
PROBE_RUNGS = 9
PROBE_RUNGS_BOUNDED = 5
# A bend shows when it is this many standard deviations of its noise.
SHOWS = 5.0
# Kinks lie about where bends, over the norm, differ by this fraction from those at the largest norm.
UNSETTLED = 0.2
# Norms of samples over that norm. Near ones see every neuron both on and off; far ones drown errors that do not grow
# with the answer, and find neurons that bend only there. Relative errors are not drowned.
NEAR = (0.5, 4.0)
FAR_ABSOLUTE = 32.0
FAR_RELATIVE = 8.0
# Far samples that a norm bound keeps from going farther have at least this part of it.
RIM = 0.7
# Samples beside a kink are at least this near to it, as a part of the norm at which kinks begin.
NEAREST = 1e-4
# Standard deviation of an answer's rounding in the oracle's arithmetic, in eps of the size of answers at that norm.
OWN_ROUNDING = 1.5
# Answers that happen to be small have errors of at least those of answers this much below the typical ones.
SMALL_ANSWER = 0.1
# ... and those of tokens near the origin, over the norm at which kinks begin, no less: the zero token weighs no more.
SMALL_NORM = 0.05


class Samples:
    """All that was asked and answered."""

    def __init__(self, signature: Signature, rng: np.random.Generator) -> None:
        self.signature, self.rng, self.width = signature, rng, signature.width
        self.tokens: Floats = np.zeros((0, signature.width))
        self.answers: Floats = np.zeros((0, 1))
        self.scalar = True
        self.largest_norm = 0.0  # the largest norm that samples may have so far
        self.kinks = 0.0  # the norm at which kinks begin
        self.longest = min(signature.norm_limit, signature.space.huge**0.25)

    @property
    def count(self) -> int:
        """Queries asked so far."""
        return int(self.tokens.shape[0])

    @property
    def outputs(self) -> int:
        """Numbers per answer."""
        return int(self.answers.shape[1])

    def ask(self, stage: str, tokens: Floats) -> Steps[Floats]:  # (n, width) -> (n, outputs)
        """Ask one token each, and keep the answers."""
        sent = self.signature.space.asarray(tokens[:, None, :])
        measurements: Measurements = yield sequences(stage, sent)
        answers = to_numpy(measurements.values).astype(np.float64)
        self.scalar = answers.ndim == 1
        answers = answers.reshape(tokens.shape[0], -1)
        before = self.answers if self.count else answers[:0]
        # What the oracle is sent has the digits of its dtype.
        self.tokens = np.concatenate([self.tokens, to_numpy(sent)[:, 0, :].astype(np.float64)])
        self.answers = np.concatenate([before, answers])
        return answers

    def ask_scale(self) -> Steps[None]:
        """Find the norm at which kinks begin, by second differences around the origin."""
        top = min(PROBE_NORM, self.longest)
        rungs = PROBE_RUNGS if top == PROBE_NORM else PROBE_RUNGS_BOUNDED
        norms = top * PROBE_STEP ** -np.arange(rungs, dtype=np.float64)[::-1]
        lines = self.directions(PROBE_LINES)
        tokens = norms[:, None, None, None] * np.stack([lines, -lines])  # (rungs, 2, lines, width)
        tokens = np.concatenate([np.zeros((1, self.width)), tokens.reshape(-1, self.width)])
        answers = yield from self.ask("scale", tokens)
        centre, ends = answers[0], answers[1:].reshape(rungs, 2, PROBE_LINES, -1)
        self.offset = float(np.max(np.abs(centre)))
        self.slope = float(np.max(np.sqrt(np.mean((ends - centre) ** 2, axis=(1, 2, 3))) / norms))
        bends = ((ends[:, 0] + ends[:, 1] - 2 * centre) / norms[:, None, None]).reshape(rungs, -1)
        noise = math.sqrt(6) * float(self._deviation(norms, self._size(norms))[-1]) / top
        whole = float(np.sqrt(np.mean(bends[-1] ** 2)))
        # An affine map, or one whose kinks are lost in noise, is asked as far out as may be.
        shows = whole > SHOWS * noise
        self.kinks = _choose_scale(norms, np.sqrt(np.mean((bends - bends[-1]) ** 2, axis=1)) / whole) if shows else top

    def draw(self, count: int, *, far: bool) -> Floats:  # -> (count, width)
        """Random directions, with norms of evenly spread logarithm, and some near ones below all of these."""
        relative = self.signature.noise.kind in ("dtype", "exact")  # errors that grow with the answers
        factor = NEAR[1] if not far else FAR_RELATIVE if relative else FAR_ABSOLUTE
        high = min(factor * self.kinks, self.longest)
        # Of a ball the outermost part is the largest: kinks that cut off some of it show there only.
        low = (RIM if far and high == self.longest else NEAR[0] / NEAR[1]) * high
        self.largest_norm = max(self.largest_norm, high)
        norms = np.exp(self.rng.uniform(math.log(low), math.log(high), count))
        if not far:  # in few dimensions kinks have a place where no sphere of these meets them
            inside = self.rng.random(count) < 1 / (1 + self.width)
            norms = np.where(inside, self.rng.uniform(0.0, low, count), norms)
        return np.asarray(self.directions(count) * norms[:, None])

    def draw_beside(self, planes: Floats, side: Floats) -> Floats:  # (n, width + 1), (n,) -> (n, width)
        """A token beside each plane, on the side of this sign, at a height of evenly spread logarithm."""
        length = np.linalg.norm(planes[:, :-1], axis=1)
        normal, offset = planes[:, :-1] / length[:, None], planes[:, -1] / length
        limit = min(self.largest_norm, self.longest)
        height = side * self.kinks * np.exp(self.rng.uniform(math.log(NEAREST), 0.0, side.size))
        along = np.clip(height - offset, -limit, limit)
        tokens = self.draw(side.size, far=False)
        tokens -= np.einsum("nd,nd->n", tokens, normal)[:, None] * normal
        size = np.maximum(np.linalg.norm(tokens, axis=1), np.finfo(np.float64).tiny)
        room = np.sqrt(limit**2 - along**2) * self.rng.random(side.size) ** (1 / self.width)
        return np.asarray(tokens * np.minimum(1.0, room / size)[:, None] + along[:, None] * normal)

    def directions(self, count: int) -> Floats:  # -> (count, width)
        """Random unit vectors."""
        drawn = self.rng.standard_normal((count, self.width))
        return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))

    def _size(self, norms: Floats) -> Floats:
        """How large answers typically are."""
        return np.hypot(self.offset, self.slope * norms)

    def _deviation(self, norms: Floats, answers: Floats) -> Floats:
        """Standard deviation of the errors of answers of these sizes; of bounded errors the bound."""
        noise, size = self.signature.noise, self._size(np.maximum(norms, SMALL_NORM * self.kinks))
        eps = self.signature.space.eps
        # What is rounded to a dtype was computed in float32 or finer.
        own = OWN_ROUNDING * (max(eps, FLOAT32) if noise.kind == "dtype" else eps) * size
        declared: Floats | float = 0.0 if noise.kind == "exact" else noise.deviation
        if noise.kind == "dtype":
            declared = noise.scale / 3**0.5 * np.maximum(answers, SMALL_ANSWER * size) + noise.smallest
        return np.asarray(np.hypot(declared, np.maximum(own, np.finfo(np.float64).tiny)))

    def deviations(self) -> Floats:  # -> (count,)
        """Standard deviation of the errors of each answer."""
        sizes = np.sqrt(np.mean(self.answers**2, axis=1))
        return self._deviation(np.linalg.norm(self.tokens, axis=1), sizes)

    @property
    def near(self) -> int:
        """Samples that a fit is made to."""
        return int(np.sum(np.linalg.norm(self.tokens, axis=1) <= self.largest_norm))

    def problem(self, softened: float = 0.0) -> NetProblem:
        """What is to be explained; softened: as if errors were at least this fraction of the size of answers."""
        norms = np.linalg.norm(self.tokens, axis=1)
        over = 1 / np.hypot(self.deviations(), softened * self._size(norms))[:, None]
        rows = np.concatenate([self.tokens, np.ones((self.count, 1))], axis=1)
        used = norms <= self.largest_norm  # a few probes much farther out would drown the samples
        return NetProblem((rows * over)[used], (self.answers * over)[used])


def _choose_scale(norms: Floats, changes: Floats) -> float:  # (n,), (n,) from the smallest norm to the largest
    """The norm from which changes stay small, between those that were asked."""
    unsettled = np.nonzero(changes > UNSETTLED)[0]
    if unsettled.size == 0:
        return float(norms[0])
    last = int(unsettled[-1])
    share = (changes[last] - UNSETTLED) / (changes[last] - changes[last + 1])
    return float(norms[last] * (norms[last + 1] / norms[last]) ** share)
