"""A second norm, of what attention makes of normalised tokens: undone as the first one is, by its epsilon.

RMSNorm leaves of an answer a its direction, and of its length what its epsilon shows: γ·a/√(mean a² + ε). So n, of mean
square below one, is the norm of n·√(ε/(1 − mean n²)). Single tokens tell γ and both epsilons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Array, Floats, like
from keyhole.families.norms.normalise import undone
from keyhole.methods.base import Found, Steps, Unrecoverable, adapt
from keyhole.numerics.svd import least_squares, pseudo_inverse, svd
from keyhole.queries import Measurements, Plan, Signature
from keyhole.recovery import Outcome

# Answers to tokens without their last one, (n, width) -> (n, outputs).
Ask = Callable[[Floats], Steps[Floats]]
# Tokens beyond a basis, and tokens of which little is left to normalise.
SPARE, NEARLY_NOTHING = 6, 6
# Lengths of a token, over that at which its answer is about half as long as that of a long one.
LENGTHS = (0.5, 4.0)
# Lengths along one direction that show whether answers stay in a plane.
LINE = (1.0, 2.0**-8, 2.0**-16)
# Tokens are read at this part of the largest norm that they are normalised to.
READ = 0.5
# A token is shorter by this factor each, so often, until its answer is shorter by this part.
RUNG, MOST_RUNGS, LESS = 2.0**4, 30, 0.7
# Answers are those of a norm where they are off by no more than so many roundings, relatively.
FITS = 2.0**26


@dataclass(frozen=True)
class Outer:
    """The norm behind attention, up to a common factor of √epsilon and values."""

    gain: Floats  # (outputs,)
    gain_radius: Floats
    epsilon: float
    epsilon_radius: float
    loss: float  # how many times more than directions the lengths of answers err

    def undo(self, answers: Array) -> Array:  # (n, outputs) -> the same
        """What was normalised."""
        return undone(answers / like(self.gain, answers), self.epsilon)

    def steps(self, inner: Steps[Found], signature: Signature) -> Steps[Found]:
        """Run a generator on answers before the norm."""

        def incoming(_plan: Plan, answers: Measurements) -> Measurements:
            xp = signature.space.xp
            with np.errstate(all="ignore"):
                values = self.undo(answers.values)
            if not bool(xp.all(xp.isfinite(values))):
                raise Unrecoverable(
                    Outcome.TOO_NOISY, "answers are so much longer than the epsilon of their norm that it shows in none"
                )
            return replace(answers, values=values, radius=answers.radius * self.loss)

        return adapt(inner, incoming=incoming)


@dataclass(frozen=True)
class _Rows:
    """Σ_i squares_i/γ_i² + rest·share = 1, one row for each answer."""

    squares: Floats  # (n, outputs)
    share: Floats  # (n,)

    def solve(self, eps: float) -> tuple[Floats, Floats, float, float]:
        """The gains and the rest, and their radii."""
        design = np.column_stack([self.squares, self.share])
        sizes = np.linalg.norm(design, axis=0)
        if not np.all(sizes > 0):
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "some output is zero: its norm has no gain there")
        solved = least_squares(design / sizes, np.ones(len(design))) / sizes
        off = float(np.sqrt(np.mean((design @ solved - 1) ** 2)))
        if not np.all(solved > 0) or not off <= FITS * eps:
            raise Unrecoverable(Outcome.WRONG_FAMILY, f"answers are {off:.2g} off the ellipsoid of a norm")
        inverse = np.linalg.norm(pseudo_inverse(design / sizes), axis=1) / sizes
        radii = ROUNDING_DEVIATIONS * max(off, eps) * inverse
        gain = solved[:-1] ** -0.5
        return gain, gain * radii[:-1] / solved[:-1] / 2, float(solved[-1]), float(radii[-1])


@dataclass(frozen=True)
class Sides:
    """The norms on both sides of attention."""

    outer: Outer
    epsilon: float  # of the norm before
    radius: float


def ask_sides(ask: Ask, signature: Signature, basis: Floats, rng: np.random.Generator, longest: float) -> Steps[Sides]:
    """Both norms of f(x) = γ·a/√(mean a² + ε₂), a = V·n(x) + b, from single tokens x: about 2·d + 45 queries.

    Values and √ε₂ have a common factor that shows in no answer: it is taken such that both epsilons are equal.
    Unrecoverable WRONG_FAMILY where answers are others.
    """
    probe = _Sides(ask, signature, basis, rng, longest)
    yield from probe.check_line()
    if probe.has_offset:
        return (yield from probe.ask_with_offset())
    return (yield from probe.ask_without())


class _Sides:
    def __init__(self, ask: Ask, signature: Signature, basis: Floats, rng: np.random.Generator, longest: float) -> None:
        self.ask, self.eps, self.rng, self.longest = ask, signature.space.eps, rng, longest
        self.basis, self.width = basis, len(basis)
        seen = basis.shape[1]
        drawn = rng.standard_normal((seen + SPARE, seen))
        drawn[:seen] = np.linalg.qr(drawn[:seen])[0]
        self.ways = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)) @ basis.T  # (n, width)

    def check_line(self) -> Steps[None]:
        """Unrecoverable where answers to tokens along one direction leave a plane."""
        lengths = self.longest * np.array([sign * part for part in LINE for sign in (1.0, -1.0)])
        answers = yield from self.ask(np.append(lengths, 0.0)[:, None] * self.ways[0])
        sizes = svd(answers)[1]
        self.zero = answers[-1]
        self.has_offset = float(np.max(np.abs(self.zero))) > FITS * self.eps * float(np.max(np.abs(answers)))
        rank = 2 if self.has_offset else 1
        if not (sizes[0] > 0 and float(np.max(sizes[rank:], initial=0.0)) <= FITS * self.eps * sizes[0]):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "answers to tokens along one direction leave a plane: no norm is behind heads"
            )

    # --- without an offset: answers are L·x/√(xᵀQx + e), Q = LᵀL/d with gains + ε₂/d, e = ε₁·ε₂

    def ask_without(self) -> Steps[Sides]:
        """Two lengths of every direction tell L·x/√e and xᵀQx/e."""
        norm = yield from self._ask_half(self.ways[:1])
        lines, forms, ways = yield from self._ask_lengths(self.ways, np.full(len(self.ways), norm))
        linear = self._linear(ways, lines)
        for _ in range(2):  # the second time with directions of which least is left to normalise
            rows = _Rows(lines**2 / lines.shape[1] / forms[:, None], 1 / forms)
            gain, wide, rest, off = rows.solve(self.eps)
            if len(ways) > len(self.ways):
                break
            few = self._nearly_nothing(linear / gain, (lines.shape[1] * rest) ** 0.5)
            sizes = np.sum((few @ linear / gain) ** 2, axis=1) / lines.shape[1] + rest
            more = yield from self._ask_lengths(few, np.minimum(sizes**-0.5, self.longest / LENGTHS[1]))
            lines, forms, ways = (np.concatenate(pair) for pair in zip((lines, forms, ways), more, strict=True))
        before, wide_before = 1 / (self.width * rest), off / (self.width * rest**2)
        loss = float(np.median(forms)) / rest
        return Sides(Outer(gain, wide, before, wide_before, loss), before, wide_before)

    def _nearly_nothing(self, linear: Floats, size: float) -> Floats:  # (width, outputs) -> (n, width)
        """Directions with values of about this size, or the least there are."""
        left, sizes, _ = svd(self.basis.T @ linear, full_matrices=True)
        rank = int(np.sum(sizes > FITS * self.eps * sizes[0]))
        some = slice(max(rank - NEARLY_NOTHING, 0), rank)
        parts = np.minimum(size / sizes[some], 1.0) if rank < len(left) else np.ones(rank)[some]
        silent = left[:, -1] * np.sqrt(1 - parts**2)[:, None]
        return np.asarray((left[:, some].T * parts[:, None] + silent) @ self.basis.T)

    def _ask_half(self, way: Floats) -> Steps[float]:
        """The length at which a token's answer is shorter than that of a long one."""
        norm = self.longest
        whole = float(np.linalg.norm((yield from self.ask(norm * way))[0]))
        for _ in range(MOST_RUNGS):
            norm /= RUNG
            part = float(np.linalg.norm((yield from self.ask(norm * way))[0])) / whole
            if 0 < part <= LESS:
                return float(norm * (1 / part**2 - 1) ** 0.5)
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, f"tokens of norm {norm:.2g} are normalised like longer ones: epsilon is zero"
        )

    def _ask_lengths(self, ways: Floats, norms: Floats) -> Steps[tuple[Floats, Floats, Floats]]:
        """L·way/√e and wayᵀ·Q·way/e for every direction, and the directions."""
        near, far = (part * norms for part in LENGTHS)
        answers = yield from self.ask(np.concatenate([near[:, None] * ways, far[:, None] * ways]))
        one, two = np.split(answers, 2)
        # 1/|y|² = (q + e/r²)/|L·way|²
        with np.errstate(all="ignore"):
            first, second = (1 / np.sum(each**2, axis=1) for each in (one, two))
            rest = (first - second) / (near**-2.0 - far**-2.0)
        if not np.all((rest > 0) & np.isfinite(rest)):
            raise Unrecoverable(Outcome.WRONG_FAMILY, "answers to single tokens do not shorten as those of norms")
        form = (second - rest / far**2) / rest
        lines = two / np.linalg.norm(two, axis=1, keepdims=True) / rest[:, None] ** 0.5
        return lines, form, ways

    def _linear(self, ways: Floats, lines: Floats) -> Floats:  # (width, outputs)
        linear = least_squares(ways, lines)
        off = float(np.max(np.abs(ways @ linear - lines))) / float(np.max(np.abs(lines)))
        if not off <= FITS * self.eps:
            raise Unrecoverable(Outcome.WRONG_FAMILY, f"values behind a norm are {off:.2g} off a linear map")
        return linear

    # --- with an offset: t₊·y₊ + t₋·y₋ = 2·y₀ for opposite tokens, t = √(mean a² + ε₂) over that of the zero token

    def ask_with_offset(self) -> Steps[Sides]:
        """Opposite tokens tell what their answers were divided by, and so a, of which half the difference is V·n(x)."""
        before, wide_before = yield from self._ask_epsilon()
        inside = READ * self.width**0.5 * self.ways
        odd, answers, sizes = yield from self._ask_odd(undone(inside, before))
        linear = self._linear(inside, odd)
        rows = _Rows(answers**2 / answers.shape[1], sizes**-2.0)
        gain, wide, rest, off = rows.solve(self.eps)
        nothing = -self.zero @ pseudo_inverse(linear)
        nothing *= min(1.0, READ * self.width**0.5 / float(np.linalg.norm(nothing)))
        few = self.rng.standard_normal((NEARLY_NOTHING, self.basis.shape[1])) @ self.basis.T
        lengths = np.sqrt(np.mean((few @ linear / gain) ** 2, axis=1))
        close = nothing + few * (rest**0.5 / lengths)[:, None]
        near = yield from self.ask(undone(close, before))
        left = np.linalg.norm(self.zero + close @ linear, axis=1) / np.linalg.norm(near, axis=1)
        rows = _Rows(np.concatenate([rows.squares, near**2 / near.shape[1]]), np.concatenate([rows.share, left**-2.0]))
        gain, wide, rest, off = rows.solve(self.eps)
        loss = float(np.median(sizes**2)) / rest
        outer = Outer(gain, wide, before, before * off / rest, loss)
        return Sides(outer, before, wide_before)

    def _ask_odd(self, tokens: Floats) -> Steps[tuple[Floats, Floats, Floats]]:
        """V·n(x)·γ of every token, the answers to it and its opposite, and what these were divided by."""
        answers = yield from self.ask(np.concatenate([tokens, -tokens]))
        up, down = np.split(answers, 2)
        found = [least_squares(np.stack(pair).T, 2 * self.zero) for pair in zip(up, down, strict=True)]
        sizes = np.array(found).T  # (2, n)
        if not np.all(sizes > 0):
            raise Unrecoverable(Outcome.WRONG_FAMILY, "answers to opposite tokens are not those of one norm")
        odd = (sizes[0][:, None] * up - sizes[1][:, None] * down) / 2
        return odd, answers, sizes.ravel()

    def _ask_epsilon(self) -> Steps[tuple[float, float]]:
        """Epsilon of the norm before, and its radius."""
        way, norm = self.ways[:1], self.longest
        whole = (yield from self._ask_odd(norm * way))[0][0]
        part = 1.0
        for _ in range(MOST_RUNGS):
            norm /= RUNG
            part = float((yield from self._ask_odd(norm * way))[0][0] @ whole / (whole @ whole))
            if 0 < part <= LESS:
                break
        else:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE, f"tokens of norm {norm:.2g} are normalised like longer ones: epsilon is zero"
            )
        square = norm**2 * (1 / part**2 - 1)
        near, far = (each * square**0.5 for each in LENGTHS)
        odd = (yield from self._ask_odd(np.array([[near], [far]]) * way))[0]
        with np.errstate(all="ignore"):
            first, second = 1 / (odd @ whole) ** 2  # (1 + d·ε/r²)·const
            slope = (first - second) / (near**-2.0 - far**-2.0)
            square = float(slope / (second - slope / far**2))
        if not 0 < square < np.inf:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "single tokens do not shorten as LayerNorm or RMSNorm would have it"
            )
        epsilon = square / self.width
        return epsilon, ROUNDING_DEVIATIONS * 8 * self.eps * epsilon
