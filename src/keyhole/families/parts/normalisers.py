"""Normalisers: weights from energies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.arrays import Array, namespace
from keyhole.errors import UsageError
from keyhole.families.parts.protocols import LARGEST_EXPONENT, Normaliser


def _masses(energies: Array, signs: Array | None, top: Array) -> Array:
    """Masses over exp(top)."""
    masses = namespace(energies).exp(energies - top)
    return masses if signs is None else signs * masses


def _top(energies: Array) -> Array:  # (…, n) -> (…, 1)
    return namespace(energies).max(energies, axis=-1, keepdims=True)


@dataclass(frozen=True, eq=False)
class Sum(Normaliser):
    """exp(energy) over the sum of it: weights add up to one."""

    name: ClassVar[str] = "sum"
    ignores_shifts: ClassVar[bool] = True

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:
        """The weights, along the last axis."""
        weights = _masses(energies, signs, _top(energies))
        return weights / namespace(energies).sum(weights, axis=-1, keepdims=True)

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:
        """weight·(value − answer)."""
        return weights[..., None] * (values - answers[..., None, :])

    def bound(self, energies: Array, weights: Array, values: Array, answers: Array, radii: Array) -> Array:
        """What each weight may change by, times how far its value is from the answer, which stays between values."""
        xp = namespace(weights)
        apart = xp.abs(values - answers[..., None, :])
        moved = xp.sum(weight_changes(weights, energies, radii)[..., None] * apart, axis=-2)
        return xp.minimum(moved, xp.max(apart, axis=-2))


def weight_changes(
    weights: Array,  # (..., length), one in all
    energies: Array,  # (..., length)
    radii: Array,  # (..., length)
) -> Array:  # (..., length)
    """How much each weight may change when energies are off by up to their radii e.

    A weight is at most w·exp(e)/Σ w·exp(−e), at least w·exp(−e)/Σ w·exp(e), and what some lose others win.
    """
    xp = namespace(weights)
    limits = xp.finfo(weights.dtype)
    radii = xp.clip(radii, None, float(limits.max) ** 0.5)
    # Weights that are no numbers any more still have logarithms.
    lost = energies - _top(energies)
    is_lost = weights <= limits.smallest_normal
    logs = xp.where(is_lost, lost, xp.log(xp.where(is_lost, xp.ones_like(weights), weights)))
    # The logarithms of Σ w·exp(∓e), of which one is negative and one positive.
    less, more = _log_sum(logs - radii), _log_sum(logs + radii)
    won = -xp.expm1(less - radii) * xp.exp(xp.clip(logs + radii - less, None, 0.0))
    won = xp.minimum(won, 1.0 - weights)
    return xp.maximum(won, xp.minimum(-weights * xp.expm1(-radii - more), xp.sum(won, axis=-1, keepdims=True)))


def _log_sum(logs: Array) -> Array:  # (..., length) -> (..., 1)
    """Log Σ exp(logs)."""
    xp, top = namespace(logs), _top(logs)
    return top + xp.log(xp.sum(xp.exp(logs - top), axis=-1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Sink(Sum):
    """exp(energy) over the sum of it and of exp(sink): one more token, of value zero, takes its part."""

    energy: Array  # ()

    name: ClassVar[str] = "sink"
    ignores_shifts: ClassVar[bool] = False

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:
        """The weights, along the last axis; they add up to less than one."""
        xp = namespace(energies)
        top = xp.maximum(_top(energies), self.energy)
        weights = _masses(energies, signs, top)
        return weights / (xp.sum(weights, axis=-1, keepdims=True) + xp.exp(self.energy - top))

    def bound(self, energies: Array, weights: Array, values: Array, answers: Array, radii: Array) -> Array:
        """As of a sum over one more token, of value zero, whose energy is known."""
        xp = namespace(weights)
        one = xp.zeros_like(weights[..., :1])
        left = xp.clip(1.0 - xp.sum(weights, axis=-1, keepdims=True), 0.0, None)
        parts = ((energies, one + self.energy), (weights, left), (radii, one))
        wider_energies, wider_weights, wider_radii = (xp.concat(pair, axis=-1) for pair in parts)
        wider_values = xp.concat([values, xp.zeros_like(values[..., :1, :])], axis=-2)
        return super().bound(wider_energies, wider_weights, wider_values, answers, wider_radii)


@dataclass(frozen=True, eq=False)
class PlusOne(Sum):
    """exp(energy) over one plus the sum of it: a sink of energy zero."""

    name: ClassVar[str] = "plus-one"
    ignores_shifts: ClassVar[bool] = False

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:
        """The weights, along the last axis; they add up to less than one."""
        return Sink(0 * energies[(0,) * energies.ndim])(energies, signs)

    def bound(self, energies: Array, weights: Array, values: Array, answers: Array, radii: Array) -> Array:
        """As of a sink of energy zero."""
        return Sink(0 * energies[(0,) * energies.ndim]).bound(energies, weights, values, answers, radii)


@dataclass(frozen=True, eq=False)
class NoNormaliser(Normaliser):
    """Weights are masses, whatever the others are."""

    name: ClassVar[str] = "none"

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:
        """The masses."""
        return _masses(energies, signs, 0 * _top(energies))

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:  # noqa: ARG002
        """weight·value."""
        return weights[..., None] * values


@dataclass(frozen=True, eq=False)
class Count(NoNormaliser):
    """Weights are masses over the number of tokens."""

    name: ClassVar[str] = "count"

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:
        """The masses over the length."""
        return _masses(energies, signs, 0 * _top(energies)) / energies.shape[-1]


@dataclass(frozen=True, eq=False)
class Entmax(Normaliser):
    """Entmax of order 1.5, sparse weights: (energy/2 − threshold)² where that is positive, adding up to one."""

    name: ClassVar[str] = "entmax"
    ignores_shifts: ClassVar[bool] = True
    takes_powers: ClassVar[bool] = False
    order: ClassVar[float] = 1.5

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:  # noqa: ARG002
        """The weights, along the last axis."""
        xp, share = namespace(energies), self.order - 1
        # A token that is 1/share below the largest has no weight: −inf would spoil the sums.
        heights = xp.clip(share * (energies - _top(energies)), -2.0, 0.0)
        return self._of_heights(heights - self._threshold(heights)[..., None])

    def _of_heights(self, heights: Array) -> Array:
        return namespace(heights).clip(heights, 0.0, None) ** (1 / (self.order - 1))

    def _threshold(self, heights: Array) -> Array:  # (…, n) -> (…)
        """The threshold at which weights add up to one, by trying supports of every size."""
        xp = namespace(heights)
        ordered = xp.flip(xp.sort(heights, axis=-1), axis=-1)
        counts = xp.arange(1, heights.shape[-1] + 1, dtype=heights.dtype, device=heights.device)
        means = xp.cumulative_sum(ordered, axis=-1) / counts
        thresholds = self._of_support(ordered, means, counts)
        # The support is as large as it can be with a threshold below all of its heights.
        size = xp.sum(xp.astype(ordered > thresholds, xp.int64), axis=-1, keepdims=True)
        return xp.take_along_axis(thresholds, xp.clip(size - 1, 0, None), axis=-1)[..., 0]

    def _of_support(self, ordered: Array, means: Array, counts: Array) -> Array:
        xp = namespace(means)
        scatter = xp.cumulative_sum(ordered**2, axis=-1) - counts * means**2
        return means - xp.sqrt(xp.clip((1 - scatter) / counts, 0.0, None))

    def _shares(self, weights: Array) -> Array:
        """weight^(2 − order) of the support: how much of a change of its energy a token passes on."""
        xp = namespace(weights)
        return xp.where(weights > 0, weights, xp.zeros_like(weights)) ** (2 - self.order) * (weights > 0)

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:  # noqa: ARG002
        """share·(value − mean of values by share)."""
        xp, shares = namespace(weights), self._shares(weights)[..., None]
        mean = xp.sum(shares * values, axis=-2, keepdims=True) / xp.sum(shares, axis=-2, keepdims=True)
        return shares * (values - mean)

    def bound(self, energies: Array, weights: Array, values: Array, answers: Array, radii: Array) -> Array:
        """Heights over the threshold move by up to 2·(order − 1)·radius; the support may gain tokens that are near."""
        xp, share = namespace(weights), self.order - 1
        heights = share * energies
        sizes, most = xp.clip(weights, 0.0, None) ** share, 2 * share * xp.max(radii, axis=-1, keepdims=True)
        threshold = xp.max(heights, axis=-1, keepdims=True) - xp.max(sizes, axis=-1, keepdims=True)
        near = heights - threshold > -most  # of the support, or not far below it
        moved = (sizes + most) ** (1 / share) - sizes ** (1 / share)
        moved = xp.clip(xp.where(near, moved, xp.zeros_like(moved)), None, 1.0)
        return xp.sum(moved[..., None] * xp.abs(values - answers[..., None, :]), axis=-2)


@dataclass(frozen=True, eq=False)
class Sparsemax(Entmax):
    """Sparse weights: energy − threshold where that is positive, adding up to one."""

    name: ClassVar[str] = "sparsemax"
    order: ClassVar[float] = 2.0

    def _of_support(self, ordered: Array, means: Array, counts: Array) -> Array:  # noqa: ARG002
        return means - 1 / counts


@dataclass(frozen=True, eq=False)
class TopK(Sum):
    """A softmax over the k tokens of the largest energies; of equal ones, those that come first."""

    k: int

    name: ClassVar[str] = "top-k"
    takes_powers: ClassVar[bool] = False

    def check_shapes(self) -> None:
        """UsageError unless k is a whole number of at least one."""
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise UsageError(f"k of top-k must be a whole number of at least 1, not {self.k!r}")

    @property
    def most(self) -> int:
        """The k tokens."""
        return self.k

    def _kept(self, energies: Array) -> Array:
        xp = namespace(energies)
        places = xp.argsort(xp.argsort(energies, axis=-1, descending=True, stable=True), axis=-1, stable=True)
        return places < self.k

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:
        """The weights, along the last axis."""
        xp = namespace(energies)
        if energies.shape[-1] <= self.k:
            return super().__call__(energies, signs)
        return super().__call__(xp.where(self._kept(energies), energies, -xp.inf * xp.ones_like(energies)), signs)

    def bound(self, energies: Array, weights: Array, values: Array, answers: Array, radii: Array) -> Array:
        """As of a softmax, and what it does that tokens about as high as the k-th change places."""
        bound = Normaliser.bound(self, energies, weights, values, answers, radii)
        if energies.shape[-1] <= self.k:
            return bound
        xp = namespace(energies)
        wide = 2 * xp.max(radii, axis=-1, keepdims=True)
        last = xp.sort(energies, axis=-1)[..., -self.k, None]
        near = xp.abs(energies - last) <= wide
        weight = xp.max(xp.where(near, weights, xp.zeros_like(weights)), axis=-1)
        most = xp.clip(weight * xp.exp(xp.clip(wide[..., 0], None, LARGEST_EXPONENT)), None, 1.0)
        count = xp.sum(xp.astype(near, energies.dtype), axis=-1)
        some = near[..., None]
        top = xp.max(xp.where(some, values, -xp.inf * xp.ones_like(values)), axis=-2)
        spread = top - xp.min(xp.where(some, values, xp.inf * xp.ones_like(values)), axis=-2)
        return bound + (most * count)[..., None] * spread
