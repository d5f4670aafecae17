"""Features of exp: far out one feature has all the mass, so that odds of two tokens are exponentials of its key."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg

from keyhole.arrays import Floats
from keyhole.families import FormHead
from keyhole.families.forms import ExpFeatures
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.scale import ScaleSearch
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.score_forms.far_tokens import ONE_FEATURE, FarOdds, apart, ask_short_values
from keyhole.methods.parts.score_forms.readings import (
    Names,
    ask_of_one_output,
    check_box,
    check_names,
    even_rows,
    form_estimate,
    radii_of_solutions,
    refuse,
)
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one attention head over its raw tokens, read at the last position, whose weights are in "
    "proportion to sums of products of exponentials of keys and queries, no more of them than numbers per token",
    "answers are right up to the rounding of their dtype",
)
# The first probe of the scale, and a logarithm that is large and not yet saturated.
PROBE, LARGE = 2.0**-10, 8.0
# This power of the rounding of answers can be told from it by many digits.
CLEAR = 0.4
# Exponents of far tokens: enough for one feature to have all the mass, and a box of double precision does not overflow.
FAR, FARTHEST = 300.0, 600.0
# How much further out a slope is looked at again, and how often a direction is tried.
FURTHER, TRIES = 1.4, 12
# Slopes are looked at along changes that lean so far aside, since along the ray itself two features may be alike.
ASIDE = 0.75
# What one feature has more than the others in the exponent where it is read alone, and more than a last token.
MARGIN, ABOVE = 100.0, 200.0
# Exponents of last tokens of themselves are kept below this.
OWN = 100.0
# Logarithms of odds are aimed at the first size, and asked for again at shorter tokens beyond the second.
AIM, MOST = 2.0, 12.0
SHORTER = 1 / 8
# So many pairs say how long last tokens may be, in so many steps of this factor: odds of very long ones mix features.
PAIRS, MOST_PROBES, START = 3, 12, 2.0**-20
NO_SCALE = "tokens of any length weigh as much as a zero token: they have no features"
DEPENDENT = "more features than were found have a mass: their keys depend on each other, which is not read"


def ask_exp_features(signature: Signature, rng: np.random.Generator, names: Names) -> Steps[Estimate[FormHead]]:
    """Keys and queries of features of exp, and the value, at about the counting bound."""
    check_names(names)
    check_box(signature, tokens=3, free=False)
    value = yield from ask_short_values(signature, rng)

    def ask(plain: Signature, along: Value) -> Steps[tuple[ExpFeatures, dict[str, Floats]]]:
        readings = yield from _Learner(FarOdds(plain, along), even_rows(plain, along, rng), rng).ask()
        form = readings.form
        return form, radii_of_solutions(form, lambda errors: readings.with_errors(errors).form, rng)

    form, radii = yield from ask_of_one_output(signature, value, ask)
    return form_estimate(signature, value, form, radii, ASSUMPTIONS, rank=int(form.key.shape[0]))


@dataclass(frozen=True)
class _Odds:
    """Logarithms of odds of features over the first one, beside last tokens and beside a zero token."""

    tokens: Floats  # (features, width): at which one feature each has all the mass
    norms: Floats  # (features - 1, width): of the last tokens, which are rows
    logs: Floats  # (features - 1, width)
    radius: Floats
    plain: Floats | None = None  # (features - 1, 1), None where keys say it well enough
    plain_radius: float = 0.0

    def with_errors(self, rng: np.random.Generator) -> _Odds:
        """The same with random errors of the size of the radii."""
        plain = self.plain
        if plain is not None:
            plain = plain + self.plain_radius * rng.standard_normal(plain.shape)
        return replace(self, logs=self.logs + self.radius * rng.standard_normal(self.logs.shape), plain=plain)

    def queries(self, keys: Floats) -> Floats:  # (features, width) -> the same
        """Products of queries, less the first, with rows."""
        own = np.sum(keys * self.tokens, axis=1)
        plain = (own[1:] - own[0])[:, None] if self.plain is None else self.plain
        return np.concatenate([np.zeros((1, keys.shape[1])), (self.logs - plain) / self.norms])


@dataclass(frozen=True)
class _Readings:
    """What tells the form."""

    rows: Floats  # (width, width) orthonormal
    keys: Floats  # (features, width): products with rows
    radius: Floats
    odds: _Odds

    @property
    def form(self) -> ExpFeatures:
        """The form, in its gauge."""
        keys = self.keys @ self.rows
        return ExpFeatures(self.odds.queries(keys) @ self.rows, keys).canonical()

    def with_errors(self, rng: np.random.Generator) -> _Readings:
        """The same with random errors of the size of the radii."""
        keys = self.keys + self.radius * rng.standard_normal(self.keys.shape)
        return replace(self, keys=keys, odds=self.odds.with_errors(rng))


@dataclass(frozen=True)
class _Learner:
    odds: FarOdds
    rows: Floats
    rng: np.random.Generator

    def ask(self) -> Steps[_Readings]:
        """All that tells the form."""
        step = yield from self._ask_step()
        keys, radius = np.zeros((0, len(self.rows))), np.zeros((0, len(self.rows)))
        while len(keys) < len(self.rows):
            found = yield from self._ask_place(keys @ self.rows, step)
            if found is None:
                break
            products, errors = yield from self._ask_rows(found, step)
            keys, radius = np.concatenate([keys, products[None]]), np.concatenate([radius, errors[None]])
        yield from self._check_count(keys @ self.rows)
        odds = yield from self._ask_queries(keys @ self.rows)
        return _Readings(self.rows, keys, radius, odds)

    @property
    def _rounding(self) -> float:
        return self.odds.signature.space.rounding

    @property
    def _clear(self) -> float:
        return float(self._rounding**CLEAR)

    def _ask_step(self) -> Steps[float]:
        """The norm at which the largest exponent in a random direction is about one."""
        direction = self.rows[:1]
        nothing = np.zeros_like(direction)
        search = ScaleSearch(PROBE, smallest=2.0**-200, largest=2.0**200, failure=NO_SCALE)
        for norm in search:
            logs, radius = yield from self.odds.ask_logs("scale", norm * direction, nothing, nothing)
            # The zero tokens are two.
            size = float(logs[0]) + np.log(2.0)
            if not radius[0] < self._clear:
                search.lower_scale(2.0**8)
            elif abs(size) < self._clear:
                search.raise_scale(2.0**10)
            elif size > LARGE:
                return float(norm / size)
            else:
                direction = np.sign(size) * direction
                search.raise_scale(2 * LARGE / abs(size))
        raise AssertionError  # the search ends by itself

    def _ask_place(self, keys: Floats, step: float) -> Steps[Floats | None]:
        """A token at which one unknown feature has all the mass, keys known being zero there; None where none has."""
        free = scipy.linalg.null_space(keys).T if len(keys) else np.eye(keys.shape[1])
        reach = FAR * step
        for number in range(TRIES):
            mixture = self.rng.standard_normal(len(free)) @ free
            direction = (mixture / np.linalg.norm(mixture))[None, :]
            beside = self.rng.standard_normal((1, keys.shape[1]))
            # No two features are alike where one is left; and a change aside says little of how far out a token is.
            aside = ASIDE if len(free) > 1 and number % 2 == 0 else 0.0
            beside = aside * beside / np.linalg.norm(beside)
            for side in (direction, -direction):
                found = yield from self._ask_linear(side, side + beside, reach, step)
                if found is not None:
                    return found
            token = reach * direction
            odds, _ = yield from self.odds.ask("directions", token, -token, 0 * token)
            if abs(odds[0] - 1) < self._clear:
                return None
            reach = 2 * reach
        raise refuse("in no direction does one feature come to have all the mass")

    def _ask_linear(self, direction: Floats, change: Floats, reach: float, step: float) -> Steps[Floats | None]:
        """A place on a ray from which on the slope along a change stays the same; None where there is none in reach."""
        last = np.nan
        for _ in range(TRIES):
            token = reach * direction
            logs, radius = yield from self.odds.ask_logs(
                "directions", token + step * change, token, np.zeros_like(token)
            )
            slope, error = float(logs[0]) / step, float(radius[0]) / step
            if not error * reach < 1 or slope <= 0:
                return None  # the zero token has the mass
            if abs(slope - last) <= 4 * error:
                return np.asarray(FURTHER * token[0])  # where what others still add is far less
            if slope * reach > FARTHEST / FURTHER and not np.isnan(last):
                return None
            inside = FAR / 2 < slope * reach < FARTHEST / FURTHER
            last = slope if inside else np.nan
            reach = FURTHER * reach if inside else FAR / slope
        return None

    def _ask_rows(self, token: Floats, step: float) -> Steps[tuple[Floats, Floats]]:
        """Products of the key with all rows, and their radii."""
        count = len(self.rows)
        found, radius, open_ = np.zeros(count), np.zeros(count), np.arange(count)
        for _ in range(TRIES):
            many = np.repeat(token[None], len(open_), axis=0)
            logs, errors = yield from self.odds.ask_logs(
                "keys", many + step * self.rows[open_], many, np.zeros_like(many)
            )
            found[open_], radius[open_] = logs / step, errors / step
            open_ = open_[~(np.abs(logs) < MOST)]
            if not open_.size:
                own = self._rounding * np.linalg.norm(found) * np.linalg.norm(token)
                return found, radius + own / step
            step = SHORTER * step
        raise refuse("odds of near tokens stay at zero or infinity")

    def _check_count(self, keys: Floats) -> Steps[None]:
        """Refuse a box whose zero token has another mass than that of the features that were found."""
        if not len(keys):
            raise refuse(NO_SCALE)
        if len(keys) == 1:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, ONE_FEATURE)
        token = self.rng.standard_normal((1, keys.shape[1])) / np.linalg.norm(keys, axis=1).max()
        odds, radius = yield from self.odds.ask("keys", token, 0 * token, 0 * token)
        count = float(np.sum(np.exp(keys @ token[0]))) / (2 * odds[0])
        if not abs(count - len(keys)) < self._clear + 8 * count * radius[0] / odds[0]:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, DEPENDENT)

    def _ask_queries(self, keys: Floats) -> Steps[_Odds]:
        """Odds of features over the first, beside all rows, from tokens of one feature each."""
        count, width = keys.shape
        tokens, (logs, radius) = self._tokens(keys), np.zeros((2, count - 1, width))
        own = np.sum(keys * tokens, axis=1)
        norm, plainly = yield from self._ask_norm(keys, tokens, own[1:] - own[0])
        # The box rounds the exponents of both tokens.
        rounding = self._rounding * np.linalg.norm(keys, axis=1) * np.linalg.norm(tokens, axis=1)
        rounding = rounding[1:] + rounding[0]
        feature, row = (each.ravel() for each in np.indices(logs.shape))
        norms, open_ = np.full(logs.shape, norm), np.arange(logs.size)
        for _ in range(TRIES):
            place = (feature[open_], row[open_])
            first, second = tokens[1 + place[0]], np.repeat(tokens[:1], len(open_), axis=0)
            found, wide = yield from self.odds.ask_logs(
                "queries", first, second, norms[place][:, None] * self.rows[place[1]]
            )
            logs[place], radius[place] = found, np.hypot(wide, rounding[place[0]])
            open_ = open_[~(np.abs(found) < MOST)]
            if not open_.size:
                break
            norms[feature[open_], row[open_]] *= SHORTER
        else:
            raise refuse("odds of features stay at zero or infinity")
        if plainly:
            return _Odds(tokens, norms, logs, radius)
        one = np.repeat(tokens[:1], count - 1, axis=0)
        plain, wide = yield from self.odds.ask_logs("queries", tokens[1:], one, np.zeros_like(one))
        return _Odds(tokens, norms, logs, radius, plain[:, None], float(np.max(np.hypot(wide, rounding))))

    def _tokens(self, keys: Floats) -> Floats:  # -> (features, width)
        """Tokens at which one feature each has all the mass, all of about the same."""
        count, vector = len(keys), np.asarray(self.odds.value.vector, dtype=np.float64)
        found = []
        for feature in range(count):
            others = np.delete(np.arange(count), feature)
            rows = np.concatenate([keys[feature] - keys[others], keys[[feature]]])
            least = np.append(np.full(count - 1, MARGIN), ABOVE)
            token = apart(rows, least, vector, -1.0 if feature == 0 else 1.0)
            found.append(token * ABOVE / float(keys[feature] @ token))
        return np.stack(found)

    def _ask_norm(self, keys: Floats, tokens: Floats, plain: Floats) -> Steps[tuple[float, bool]]:
        """How long last tokens may be, and whether they show so much that keys tell well enough what is added."""
        longest = OWN / float(np.max(np.abs(keys @ self.rows.T)))
        norm, some = START * longest, np.arange(1, min(PAIRS + 1, len(keys)))
        for _ in range(MOST_PROBES):
            last = np.repeat(norm * self.rows[:1], len(some), axis=0)
            logs, _ = yield from self.odds.ask_logs("scale", tokens[some], np.repeat(tokens[:1], len(some), 0), last)
            size = float(np.max(np.abs(logs - plain[some - 1])))
            if size < MOST:
                wanted = AIM * norm / max(size, self._clear * START)
                return min(wanted, longest), wanted < 8 * longest
            norm *= START
        raise refuse("odds of features stay at zero or infinity")
