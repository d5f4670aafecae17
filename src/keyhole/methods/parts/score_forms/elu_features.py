"""Features of elu + 1: keys from masses of far tokens, queries from those of one feature each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.families import FormHead
from keyhole.families.forms import EluFeatures
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.scale import ScaleSearch
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.score_forms.elu_keys import DEPENDENT, FAR, Arcs, KeyLearner
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
    "proportion to sums of products of elu + 1 of keys and queries, no more of them than numbers per token",
    "answers are right up to the rounding of their dtype",
)
# The mass of a token over that of a zero token is aimed at this size, and can be told from one by many digits here.
RATIO, CLEAR = 3.0, 1e-3
# Products of last tokens with queries are aimed at this size, from ones so much shorter that odds are linear.
AIM, START = 1.5, 2.0**-20
# So many pairs say how long last tokens may be.
PAIRS = 3
# A feature below this share of the largest is not compared with it at twice the length: its mass would drown.
LEAST = 1e-2
# Of a last token whose largest feature exceeds one by less than this share the length does not show.
FLAT = 1e-3
# Odds are known to one part in so many, or asked for again at shorter last tokens.
DIGITS = 2.0**24
TRIES, SHORTER = 6, 1 / 8
NO_QUERIES = "odds of features do not go with the last token as elu + 1 does"


def ask_elu_features(signature: Signature, rng: np.random.Generator, names: Names) -> Steps[Estimate[FormHead]]:
    """Keys and queries of features of elu + 1, and the value, at not many more queries than the counting bound."""
    check_names(names)
    check_box(signature, tokens=3)
    if signature.width < 3:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "features are read from tokens of three numbers or more")
    value = yield from ask_short_values(signature, rng)

    def ask(plain: Signature, along: Value) -> Steps[tuple[EluFeatures, dict[str, Floats]]]:
        readings = yield from _Learner(FarOdds(plain, along), even_rows(plain, along, rng), rng).ask()
        form = readings.form
        return form, radii_of_solutions(form, lambda errors: readings.with_errors(errors).form, rng)

    form, radii = yield from ask_of_one_output(signature, value, ask)
    return form_estimate(signature, value, form, radii, ASSUMPTIONS, rank=int(form.key.shape[0]))


@dataclass(frozen=True)
class _Scale:
    """The mass of a token at which all features are positive, over that of a zero token."""

    token: Floats  # (width,)
    mass: float
    radius: float

    def unit(self, keys: Floats) -> float:
        """What keys are to be multiplied by."""
        return float(len(keys) * (self.mass - 1) / np.sum(keys @ self.token))


@dataclass(frozen=True)
class _Odds:
    """Odds of features over the first one beside last tokens, and those of two beside last tokens twice as long."""

    tokens: Floats  # (features, width): far tokens of one feature each
    norms: Floats  # (width,): of last tokens, with their signs
    odds: Floats  # (features - 1, width)
    radius: Floats  # of the same shape
    pairs: Integers  # (2, width): features compared at twice the length
    double: Floats  # (width,): odds of the first of them over the second
    double_radius: Floats

    def with_errors(self, rng: np.random.Generator) -> _Odds:
        """The same with random errors of the size of the radii."""
        odds = self.odds + self.radius * rng.standard_normal(self.odds.shape)
        double = self.double + self.double_radius * rng.standard_normal(self.double.shape)
        return replace(self, odds=odds, double=double)

    def queries(self, keys: Floats) -> Floats:  # (features, width) -> the same
        """Products of queries with rows."""
        masses = np.sum(keys * self.tokens, axis=1)
        shares = shares_of(self.odds, masses)
        top, low = np.take_along_axis(shares, self.pairs, 0)
        ratio = self.double * (masses[self.pairs[1]] / masses[self.pairs[0]])
        largest = _largest(ratio, low / top)
        # Features of the sizes that they have: elu + 1 backwards.
        sizes = largest * shares / top
        found = np.where(sizes >= 1, sizes - 1, np.log(np.clip(sizes, np.finfo(np.float64).tiny, 1.0)))
        return np.asarray(found / self.norms)


@dataclass(frozen=True)
class _Readings:
    """What tells the form."""

    rows: Floats  # (width, width) orthonormal
    arcs: Arcs
    scale: _Scale
    odds: _Odds

    @property
    def form(self) -> EluFeatures:
        """The form, in its gauge."""
        keys = self.arcs.keys
        keys = self.scale.unit(keys) * keys
        return EluFeatures(self.odds.queries(keys) @ self.rows, keys).canonical()

    def with_errors(self, rng: np.random.Generator) -> _Readings:
        """The same with random errors of the size of the radii."""
        scale = replace(self.scale, mass=self.scale.mass + self.scale.radius * float(rng.standard_normal()))
        return replace(self, arcs=self.arcs.with_errors(rng), scale=scale, odds=self.odds.with_errors(rng))


def shares_of(odds: Floats, masses: Floats) -> Floats:  # (features - 1, n), (features,) -> (features, n)
    """Features over the first one, from odds of tokens whose keys make these masses."""
    whole = np.concatenate([np.ones((1, odds.shape[1])), np.maximum(odds, 0.0)])
    return np.asarray(whole * (masses[0] / masses)[:, None])


def _largest(ratio: Floats, low: Floats) -> Floats:  # (n,), (n,) -> (n,)
    """The larger of two features of share `low` of each other, from their ratio at twice the length; nan below one."""
    # With both above one (2c − 1)/(2·low·c − 1), else (2c − 1)/(low·c)².
    with np.errstate(invalid="ignore", divide="ignore"):
        below = ratio * low**2
        mixed = (1 + np.sqrt(1 - below)) / below
        both = (ratio - 1) / (2 * (ratio * low - 1))
        found = np.where(ratio < 2 / low - 1, both, mixed)
    return np.asarray(np.where(below < 1 - FLAT, found, np.nan))


@dataclass(frozen=True)
class _Learner:
    odds: FarOdds
    rows: Floats
    rng: np.random.Generator

    def ask(self) -> Steps[_Readings]:
        """All that tells the form."""
        arcs = yield from KeyLearner(self.odds, self.rng).ask()
        keys = arcs.keys
        if len(keys) == 1:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, ONE_FEATURE)
        scale = yield from self._ask_scale(keys)
        tokens = self._tokens(keys)
        norm = yield from self._ask_norm(tokens, 1 / float(np.max(np.linalg.norm(scale.unit(keys) * keys, axis=1))))
        odds = yield from self._ask_odds(tokens, keys, norm)
        return _Readings(self.rows, arcs, scale, odds)

    @property
    def _vector(self) -> Floats:
        return floats(self.odds.value.vector)

    def _ask_scale(self, keys: Floats) -> Steps[_Scale]:
        """The mass of a token of all features beside zero tokens, which says how large keys are."""
        token = apart(keys, np.ones(len(keys)), self._vector, 1.0)
        token = token / np.linalg.norm(token)
        nothing = np.zeros((1, len(token)))
        search = ScaleSearch(1.0, smallest=2.0**-200, largest=2.0**200, failure="no token has a mass of its own")
        for norm in search:
            odds, radius = yield from self.odds.ask("scale", norm * token[None], nothing, nothing)
            mass = 2 * float(odds[0])  # the zero tokens are two
            if not radius[0] < CLEAR * odds[0]:
                search.lower_scale(2.0**20)
            elif mass - 1 < CLEAR:
                search.raise_scale(2.0**10 if mass - 1 < CLEAR**2 else (RATIO - 1) / (mass - 1))
            elif mass > 1 / CLEAR:
                search.lower_scale((mass - 1) / (RATIO - 1))
            else:
                scale = _Scale(norm * token, mass, 2 * float(radius[0]))
                yield from self._check_count(scale, keys)
                return scale
        raise AssertionError  # the search ends by itself

    def _check_count(self, scale: _Scale, keys: Floats) -> Steps[None]:
        """Refuse a box whose features have another mass than that of as many as were found, where all are negative."""
        token = -scale.token * min(1.0, 1 / (scale.mass - 1))
        odds, radius = yield from self.odds.ask("scale", token[None], *np.zeros((2, 1, len(token))))
        mass = float(np.mean(np.exp(scale.unit(keys) * keys @ token)))
        if not abs(2 * odds[0] - mass) < CLEAR**2 + 8 * radius[0]:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, DEPENDENT)

    def _tokens(self, keys: Floats) -> Floats:  # -> (features, width)
        """Far tokens at which one feature each has a mass, all of the same."""
        units = keys / np.linalg.norm(keys, axis=1)[:, None]
        found = []
        for feature in range(len(keys)):
            sides = np.where(np.arange(len(keys)) == feature, 1.0, -1.0)
            token = apart(sides[:, None] * units, np.ones(len(keys)), self._vector, -1.0 if feature == 0 else 1.0)
            found.append(token / float(keys[feature] @ token))
        longest = max(float(np.linalg.norm(each)) for each in found)
        return FAR / longest * np.stack(found)

    def _ask_norm(self, tokens: Floats, norm: float) -> Steps[float]:
        """How long last tokens are for their products with queries to be of the size that is aimed at."""
        some = np.arange(1, min(PAIRS + 1, len(tokens)))
        first, second = (np.concatenate([each, each]) for each in (tokens[some], np.repeat(tokens[:1], len(some), 0)))
        norm *= START
        for _ in range(TRIES):
            last = np.repeat([norm, -norm], len(some))[:, None] * self.rows[:1]
            logs, radius = yield from self.odds.ask_logs("scale", first, second, last)
            one, two = logs.reshape(2, -1)
            size = float(np.sqrt(np.mean((one - two) ** 2))) / 2
            if size < START**0.25:
                return AIM * norm / max(size, float(np.max(radius)))
            norm *= START
        raise refuse(NO_QUERIES)

    def _ask_odds(self, tokens: Floats, keys: Floats, norm: float) -> Steps[_Odds]:
        """Odds beside all rows, shorter where they drown and turned round where their length does not show."""
        count, width = keys.shape
        masses = np.sum(keys * tokens, axis=1)
        norms, pairs = np.full(width, norm), np.zeros((2, width), dtype=np.int64)
        (odds, radius), (double, double_radius) = np.zeros((2, count - 1, width)), np.zeros((2, width))
        open_ = np.arange(width)
        for _ in range(TRIES):
            lasts = norms[open_, None] * self.rows[open_]
            first = np.tile(tokens[1:], (len(open_), 1))
            second = np.repeat(tokens[:1], len(first), axis=0)
            found = yield from self.odds.ask("queries", first, second, np.repeat(lasts, count - 1, axis=0))
            odds[:, open_], radius[:, open_] = (each.reshape(len(open_), -1).T for each in found)
            bad = ~np.all(odds[:, open_] > DIGITS * radius[:, open_], axis=0)
            norms[open_[bad]] *= SHORTER
            good = open_[~bad]
            if good.size:
                shares = shares_of(odds[:, good], masses)
                pairs[:, good] = _pairs(shares)
                first, second = tokens[pairs[0, good]], tokens[pairs[1, good]]
                found = yield from self.odds.ask("queries", first, second, 2 * lasts[~bad])
                double[good], double_radius[good] = found
                top, low = np.take_along_axis(shares, pairs[:, good], 0)
                ratio = double[good] * (masses[pairs[1, good]] / masses[pairs[0, good]])
                hidden = good[~np.isfinite(_largest(ratio, low / top))]
                norms[hidden] *= -1.0
                open_ = np.sort(np.concatenate([open_[bad], hidden]))
            if not open_.size:
                return _Odds(tokens, norms, odds, radius, pairs, double, double_radius)
        raise refuse(NO_QUERIES)


def _pairs(shares: Floats) -> Integers:  # (features, n) -> (2, n)
    """The largest feature, and the smallest of those that are no tiny part of it, or else the second."""
    sizes = shares / np.max(shares, axis=0)
    top = np.argmax(sizes, axis=0)
    low = np.argmin(np.where(sizes > LEAST, sizes, 2.0), axis=0)
    second = np.argsort(sizes, axis=0)[-2]
    return np.stack([top, np.where(low == top, second, low)])
