"""What a part of attention is. Its constants are arrays, which a head names by their path, such as link.cap.

Logits and energies are (batch, length) for one query per sequence, the last token, and (batch, queries, length) for
several, which are then the tokens themselves in their order.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from keyhole.arrays import Array, namespace, to_numpy
from keyhole.errors import UsageError

LARGEST_EXPONENT = 80.0  # of what a float32 holds


class Part(Protocol):
    """A part of attention: a frozen dataclass, made with eq=False, of constants and of what is no number to be read.

    Fields that are declared as `Array` are constants; numbers given for them become arrays of no dimension. All others
    are words, which files keep as text.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for each in _constants(self):
            value = getattr(self, each)
            if not hasattr(value, "ndim"):
                object.__setattr__(self, each, np.asarray(value, dtype=np.float64))
        self.check_shapes()

    def check_shapes(self) -> None:
        """UsageError for constants of another shape than this part has; numbers, unless a part says otherwise."""
        for name, array in self.arrays().items():
            if array.ndim != 0:
                raise UsageError(f"{name} of the part {self.name!r} must be one number, not {tuple(array.shape)}")

    @property
    def numbers(self) -> int:
        """How many constants there are."""
        return sum(math.prod(array.shape) for array in self.arrays().values())

    def check(self) -> None:
        """UsageError for constants out of their range. It is for heads, not for their radii, which may be zero."""
        return

    def arrays(self) -> dict[str, Array]:
        """The constants by name."""
        return {each: getattr(self, each) for each in _constants(self)}

    @property
    def words(self) -> dict[str, object]:
        """What determines the part besides its constants."""
        constants = _constants(self)
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in constants}  # type: ignore[arg-type]

    def with_arrays(self, named: dict[str, Array]) -> Self:
        """A copy with other constants."""
        return type(self)(**named, **self.words) if named else self

    def moved(self, name: str, change: Array) -> Self:
        """A copy with one constant changed by so much."""
        return self.with_arrays(
            {each: array + (change if each == name else 0) for each, array in self.arrays().items()}
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return all(_is_same(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(self.words.items()))))


def _is_same(one: Any, other: Any) -> bool:
    return np.array_equal(to_numpy(one), to_numpy(other)) if hasattr(one, "ndim") else bool(one == other)


def _constants(part: Part) -> list[str]:
    return [each.name for each in fields(part) if each.type in ("Array", Array)]  # type: ignore[arg-type]


class Link(Part, Protocol):
    """Energies of tokens, the logarithms of their masses, which the normaliser weighs, from their logits, one by one.

    A length law is of this kind too: logits from logits, by the length of the sequence.
    """

    is_power: ClassVar[bool] = False  # whether masses are powers of logits, so that energies have poles

    def __call__(self, logits: Array) -> Array:
        """The energies."""
        ...

    def slopes(self, logits: Array) -> Array | float:
        """The derivative of each energy by its logit."""
        ...

    reach: float = math.inf  # how large logits may be for energies to be known

    def is_known(self, logits: Array) -> Array | bool:  # noqa: ARG002
        """Whether energies of these logits are known."""
        return True

    def signs(self, logits: Array) -> Array | None:  # noqa: ARG002
        """The signs of masses where these may be negative."""
        return None


class PositionBias(Part, Protocol):
    """What the distance of a token from its query adds to its energy; −inf hides the token."""

    def __call__(self, energies: Array) -> Array:
        """The energies with what is added."""
        ...


class Normaliser(Part, Protocol):
    """Weights of tokens from their energies, and from the signs of their masses where these may be negative."""

    takes_powers: ClassVar[bool] = True  # whether it weighs masses of any sign, or of size zero
    ignores_shifts: ClassVar[bool] = False  # whether the same added to all energies changes no weight

    @property
    def most(self) -> int | None:
        """How many tokens have a weight at most, where there is such a number."""
        return None

    def __call__(self, energies: Array, signs: Array | None = None) -> Array:
        """The weights, along the last axis."""
        ...

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:  # (…, n), (…, n, p), (…, p) -> (…, n, p)
        """The derivative of every answer Σ weight·value by the energy of every token."""
        ...

    def bound(  # (…, n), (…, n), (…, n, p), (…, p), (…, n) -> (…, p)
        self, energies: Array, weights: Array, values: Array, answers: Array, radii: Array
    ) -> Array:
        """How far answers move at most where energies move by up to `radii` e: weights by factors of exp(2·max e)."""
        del energies
        xp = namespace(weights)
        factor = xp.expm1(xp.clip(2 * xp.max(radii, axis=-1), None, LARGEST_EXPONENT))[..., None]
        return factor * xp.sum(xp.abs(self.pulls(weights, values, answers)), axis=-2)
