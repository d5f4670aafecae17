"""Keys of features of elu + 1: far out masses are Σ max(key·x, 0), of which gradients jump by a key at its kink."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.parts.score_forms.far_tokens import FarOdds
from keyhole.methods.parts.score_forms.readings import refuse
from keyhole.recovery import Outcome

# Tokens so long are far out: what a feature has but for its linear part is nothing.
FAR = 2.0**60
# Two places on a half-circle so near each other have no kink between them, but for one pair in a thousand or so.
NEAR = 2.0**-20
# So many errors of a prediction are no kink.
SURE = 16.0
# Steps from a place beside a kink take this share of the way to the nearest, were keys as large as the largest looks.
SHARE = 1 / 4
# How often a half-circle, or a step, is tried.
TRIES = 4
# How far shares of gradients may be off whole numbers.
WHOLE = 0.1
NOT_CONVEX = "masses of far tokens are no sums of positive parts of linear functions"
DEPENDENT = (
    "there are more features than numbers per token, or their keys depend on each other, which is not read; or the box "
    "has none"
)


class _CrossedError(Exception):
    """Two places that were taken to be on one arc have a kink between them."""


@dataclass(frozen=True)
class Arcs:
    """Places between the kinks of a half-circle, and masses near them; first and last are on both sides of all."""

    places: Floats  # (features + 1, width)
    steps: Floats  # (features + 1,)
    turns: Floats  # (features + 1, width): signs of the steps along the axes
    masses: Floats  # (features + 1, width): at place + step·turn·axis
    radius: Floats  # of the same shape

    def with_errors(self, rng: np.random.Generator) -> Arcs:
        """The same with random errors of the size of the radii."""
        return replace(self, masses=self.masses + self.radius * rng.standard_normal(self.masses.shape))

    @property
    def gradients(self) -> Floats:  # (features + 1, width)
        """Gradients of the mass, which is linear near each place."""
        # mass = G·place + step·turn·G: with c = G·place, turn·mass summed over the axes ties c to itself.
        sizes = np.sum(np.abs(self.places), axis=1) + self.steps
        own = np.sum(self.places * self.turns * self.masses, axis=1) / sizes
        return np.asarray(self.turns * (self.masses - own[:, None]) / self.steps[:, None])

    @property
    def keys(self) -> Floats:  # (features, width)
        """Keys in the unit of the masses: jumps of the gradient, turned so that their sums are gradients."""
        gradients = self.gradients
        jumps = np.diff(gradients, axis=0)
        if len(jumps) > jumps.shape[1]:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, DEPENDENT)
        # Before all kinks those features have a mass that lose it at theirs.
        shares, *_ = np.linalg.lstsq(-jumps.T, gradients[0], rcond=None)
        losing = np.round(shares)
        if np.max(np.abs(shares - losing)) > WHOLE or not np.all((losing == 0) | (losing == 1)):
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, DEPENDENT)
        return np.asarray(np.where(losing == 1, -1.0, 1.0)[:, None] * jumps)


@dataclass(frozen=True)
class KeyLearner:
    """Asks for masses of far tokens over that of one of them."""

    odds: FarOdds
    rng: np.random.Generator

    def ask(self) -> Steps[Arcs]:
        """Masses near places between all kinks of a half-circle."""
        for _ in range(TRIES):
            plane = self._plane()
            against = yield from self._ask_against(plane)
            circle = _Circle(self.odds, plane, against)
            try:
                angles, lines = yield from circle.ask_kinks()
            except _CrossedError:
                continue
            if len(angles) > plane.shape[1]:
                raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, DEPENDENT)
            return (yield from circle.ask_arcs(angles, lines))
        raise refuse(NOT_CONVEX)

    @property
    def _vector(self) -> Floats:
        return np.asarray(self.odds.value.vector, dtype=np.float64)

    def _plane(self) -> Floats:  # (2, width)
        """Two directions of value zero."""
        drawn = self.rng.standard_normal((len(self._vector), 2))
        return np.asarray(np.linalg.qr(np.column_stack([self._vector, drawn]))[0].T[1:])

    def _ask_against(self, plane: Floats) -> Steps[Floats]:  # -> (width,)
        """A token of about the mass of those of the plane, and of another value."""
        lean = self._vector / np.linalg.norm(self._vector)
        first = FAR * np.array([1.0, -1.0, 1.0, -1.0])[:, None] * plane[:1]
        second = FAR * np.array([1.0, 1.0, -1.0, -1.0])[:, None] * lean
        odds, _ = yield from self.odds.ask("scale", first, second, np.zeros_like(first))
        sizes = np.array([np.max(odds[:2]), np.max(odds[2:])])
        if not np.any(sizes > 0):
            raise refuse("far tokens have no mass beside each other")
        side = int(np.nanargmin(np.where(sizes > 0, sizes, np.nan)))
        return np.asarray(sizes[side] * second[2 * side])


@dataclass(frozen=True)
class _Circle:
    """Masses on a half-circle: between kinks α·cos + β·sin of the angle."""

    odds: FarOdds
    plane: Floats  # (2, width)
    against: Floats  # (width,): the token whose mass is the unit

    def _ask(self, stage: str, tokens: Floats) -> Steps[tuple[Floats, Floats]]:
        second = np.repeat(self.against[None], len(tokens), axis=0)
        masses, radius = yield from self.odds.ask(stage, FAR * tokens, second, np.zeros_like(tokens))
        if not np.all(np.isfinite(radius)):
            raise refuse(NOT_CONVEX)
        return masses, radius

    def _ask_angles(self, angles: Floats) -> Steps[tuple[Floats, Floats]]:
        return (yield from self._ask("directions", _units(angles) @ self.plane))

    def ask_kinks(self) -> Steps[tuple[Floats, Floats]]:
        """Angles (n,) of the kinks in [0, π], and lines (n + 1, 2) between them."""
        ends = np.array([0.0, NEAR, np.pi - NEAR, np.pi])
        masses, radius = yield from self._ask_angles(ends)
        error = SURE * float(np.max(radius))  # of masses: of lines at an angle of one it is over NEAR
        lines = [_line(ends[:2], masses[:2]), _line(ends[2:], masses[2:])]
        open_, kinks = [(0.0, lines[0], np.pi, lines[1])], []
        while open_:
            open_ = [each for each in open_ if np.linalg.norm(each[3] - each[1]) > error / NEAR]
            if not open_:
                break
            angles = np.array([_meeting(*each) for each in open_])
            masses, radius = yield from self._ask_angles(angles)
            # Lines are known best at the angle that they touch.
            touched = [
                each[:2] if angle - each[0] < each[2] - angle else each[2:]
                for angle, each in zip(angles, open_, strict=True)
            ]
            above = masses - np.array([_units(angle) @ line for angle, (_, line) in zip(angles, touched, strict=True)])
            errors = error * (
                1 + np.array([abs(angle - at) for angle, (at, _) in zip(angles, touched, strict=True)]) / NEAR
            )
            if np.any(above < -errors):
                raise _CrossedError
            kinks += [(angle, each) for angle, each, up in zip(angles, open_, above <= errors, strict=True) if up]
            (left,) = np.nonzero(above > errors)
            if not left.size:
                break
            beside, wide = yield from self._ask_angles(angles[left] + NEAR)
            error = max(error, SURE * float(np.max(wide)))
            new = []
            for place, mass in zip(left, beside, strict=True):
                start, first, end, second = open_[place]
                angle = angles[place]
                line = _line(np.array([angle, angle + NEAR]), np.array([masses[place], mass]))
                new += [(start, first, angle, line), (angle, line, end, second)]
            open_ = new
            if len(kinks) + len(open_) > 2 * self.plane.shape[1] + 2:
                raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, DEPENDENT)
        if not kinks:
            raise refuse(NOT_CONVEX)
        kinks.sort(key=lambda each: each[0])
        found = [kinks[0][1][1], *(each[1][3] for each in kinks)]
        return np.array([each[0] for each in kinks]), np.stack(found)

    def ask_arcs(self, kinks: Floats, lines: Floats) -> Steps[Arcs]:
        """Masses at steps from the middles of all arcs that stay within them."""
        edges = np.concatenate([[kinks[-1] - np.pi], kinks, [kinks[0] + np.pi]])
        middles = (edges[1:] + edges[:-1]) / 2
        places = _units(middles) @ self.plane
        # How far each key is from changing its side at a place, if it is as large as the largest one that shows.
        strengths = np.linalg.norm(np.diff(lines, axis=0), axis=1)
        ways = np.abs(np.sin(middles[:, None] - kinks)) * strengths / np.max(strengths)
        steps = SHARE * np.min(ways, axis=1)
        turns = np.where(places < 0, -1.0, 1.0)
        arcs = Arcs(places, steps, turns, *np.zeros((2, *places.shape)))
        open_ = np.arange(len(places))
        for _ in range(TRIES):
            arcs = yield from self._ask_near(arcs, open_)
            # In the plane gradients are known from the search already.
            gradients = arcs.gradients
            miss = np.max(np.abs(gradients @ self.plane.T - lines), axis=1)
            errors = np.max(arcs.radius, axis=1) / arcs.steps + np.max(arcs.radius) / NEAR
            open_ = np.flatnonzero(miss > SURE * errors)
            if not open_.size:
                return arcs
            arcs.steps[open_] *= SHARE
        raise refuse(NOT_CONVEX)

    def _ask_near(self, arcs: Arcs, some: Integers) -> Steps[Arcs]:
        width = self.plane.shape[1]
        steps = (arcs.steps[:, None] * arcs.turns)[some]
        tokens = arcs.places[some, None, :] + steps[:, :, None] * np.eye(width)
        masses, radius = yield from self._ask("keys", tokens.reshape(-1, width))
        arcs.masses[some], arcs.radius[some] = (each.reshape(-1, width) for each in (masses, radius))
        return arcs


def _units(angles: Floats) -> Floats:  # (…) -> (…, 2)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def _line(angles: Floats, masses: Floats) -> Floats:  # (2,), (2,) -> (2,)
    """What α·cos + β·sin passes through two points."""
    middle, half = np.mean(angles), (angles[1] - angles[0]) / 2
    along = np.sum(masses) / (2 * np.cos(half))
    across = (masses[1] - masses[0]) / (2 * np.sin(half))
    one, two = np.cos(middle), np.sin(middle)
    return np.array([along * one - across * two, along * two + across * one])


def _meeting(start: float, first: Floats, end: float, second: Floats) -> float:
    """The angle between two at which two lines have one mass."""
    change = second - first
    angle = float(np.arctan2(-change[0], change[1])) % np.pi
    if not start < angle < end:
        raise _CrossedError
    return angle
