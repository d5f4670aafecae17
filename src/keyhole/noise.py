"""How answers err: a type, not a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from keyhole.errors import UsageError

# A Gaussian answer lies within this many standard deviations of the truth, but for one in 1.7 million.
GAUSSIAN_DEVIATIONS = 5.0
# Decimals that a number can be rounded to.
MOST_DECIMALS = 300
# Labels that are wrong more often say nothing, or the opposite; those that are more often than the second, too little.
MOST_FLIPS, HOPELESS_FLIPS = 0.5, 0.45
# Name of a rounding to decimals that may be upwards, downwards, towards zero or to the nearest.
CUT = "cut"
# Binary digits of the dtypes that answers may be rounded to.
DIGITS = {"float32": 24, "float16": 11, "bfloat16": 8}
# Half the spacing of their smallest numbers.
SMALLEST = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


@dataclass(frozen=True)
class Noise:
    """How an answer may differ from the true value, beyond the rounding of the oracle's own arithmetic."""

    kind: Literal["exact", "gaussian", "bounded", "rounded", "dtype", "flipped", "measure"]
    # Standard deviation, tolerance, half a unit of the last decimal, half a relative spacing, or rate of wrong labels.
    scale: float = 0.0
    name: str = ""  # of the dtype answers are rounded to, or CUT

    @classmethod
    def exact(cls) -> Noise:
        """Answers are right up to the rounding of the dtype."""
        return cls("exact")

    @classmethod
    def gaussian(cls, s: float) -> Noise:
        """Independent normal errors of standard deviation `s`."""
        return cls("gaussian", _positive("s", s))

    @classmethod
    def bounded(cls, tau: float) -> Noise:
        """Any error of at most `tau`."""
        return cls("bounded", _positive("tau", tau))

    @classmethod
    def rounded(cls, decimals: int) -> Noise:
        """Answers are rounded to this many decimals; negative ones are tens, hundreds and so on."""
        if isinstance(decimals, bool) or not isinstance(decimals, int | np.integer) or abs(decimals) > MOST_DECIMALS:
            raise UsageError(f"decimals must be a whole number within ±{MOST_DECIMALS}, not {decimals!r}")
        return cls("rounded", 0.5 * 10.0 ** -int(decimals))

    @classmethod
    def cut(cls, decimals: int) -> Noise:
        """Answers have this many decimals; others were cut off or rounded, nobody says in which direction."""
        return replace(cls.rounded(decimals), name=CUT)

    @classmethod
    def dtype(cls, name: str) -> Noise:
        """Answers are rounded to the nearest number of a floating-point dtype, whatever they were computed in."""
        if name not in DIGITS:
            raise UsageError(f"unknown dtype {name!r} for noise; known: {', '.join(DIGITS)}")
        return cls("dtype", 2.0 ** -DIGITS[name], name)

    @classmethod
    def flipped(cls, rate: float) -> Noise:
        """Labels that are wrong at random, each with this probability."""
        if not 0 < rate < MOST_FLIPS:
            raise UsageError(f"rate must be a number above 0 and below {MOST_FLIPS}, not {rate}")
        return cls("flipped", float(rate))

    @classmethod
    def of(cls, noise: Noise | str | None) -> Noise:
        """What users may write: a Noise, its words as on a command line, or None for exact answers."""
        if noise is None:
            return cls.exact()
        if isinstance(noise, str):
            return cls.parse(noise)
        if not isinstance(noise, cls):
            raise UsageError(f"noise must be a Noise such as Noise.gaussian(0.1), or 'rounded:3', not {noise!r}")
        return noise

    @classmethod
    def parse(cls, text: str) -> Noise:
        """What users write: exact, measure, gaussian:S, bounded:TAU, rounded:N, cut:N, flipped:RATE, or a dtype."""
        word, colon, number = text.partition(":")
        try:
            if word in READ and colon:
                return READ[word](number)
            if word in DIGITS and not colon:
                return cls.dtype(word)
            if word in ("exact", "measure") and not colon:
                return cls("exact" if word == "exact" else "measure")
        except ValueError:
            pass
        possible = f"exact, measure, gaussian:1e-3, bounded:1e-3, rounded:3, cut:3, {', '.join(DIGITS)}, flipped:0.1"
        raise UsageError(f"cannot read the noise {text!r}; possible: {possible}")

    @property
    def text(self) -> str:
        """What `parse` reads as this noise."""
        if self.kind in ("exact", "measure"):
            return self.kind
        kind = CUT if self.is_cut else self.kind
        if self.kind == "dtype":
            return self.name
        return f"{kind}:{self.decimals if self.kind == 'rounded' else repr(self.scale)}"

    @property
    def is_cut(self) -> bool:
        """Whether answers are rounded to decimals in a direction that is not known."""
        return self.name == CUT

    def as_wide(self) -> Noise:
        """Rounding to the nearest of a coarser unit, whose standard deviation is the largest error of this one."""
        return replace(self, scale=3**0.5 * self.radius, name="")

    def as_found(self) -> Noise:
        """The same where it was seen in the digits of answers: they do not show the direction of rounding."""
        return replace(self, name=CUT) if self.kind == "rounded" else self

    @property
    def hides_families(self) -> bool:
        """Whether errors are of a size that no method allows for in all families: float32 is what most models have."""
        return self.kind in ("gaussian", "bounded", "rounded") or self.scale > 2.0 ** -DIGITS["float32"]

    @property
    def decimals(self) -> int:
        """Decimals kept, of rounded answers."""
        return round(-math.log10(2 * self.scale))

    @property
    def relative(self) -> float:
        """Largest error over the size of the answer."""
        return self.scale if self.kind == "dtype" else 0.0

    @property
    def smallest(self) -> float:
        """Largest error of an answer near zero, where a dtype has no more digits."""
        return SMALLEST[self.name] if self.kind == "dtype" else 0.0

    @property
    def radius(self) -> float:
        """Half-width of an interval around an answer that holds the true value, whatever its size."""
        if self.kind in ("dtype", "flipped"):
            return 0.0
        if self.is_cut:
            return 2.0 * self.scale
        return GAUSSIAN_DEVIATIONS * self.scale if self.kind == "gaussian" else self.scale

    def __str__(self) -> str:
        return {
            "exact": "exact",
            "gaussian": f"normal errors of standard deviation {self.scale:.3g}",
            "bounded": f"errors of at most {self.scale:.3g}",
            "rounded": f"rounded to {self.decimals if self.kind == 'rounded' else 0} decimals"
            + (", in some direction" if self.is_cut else ""),
            "dtype": f"rounded to {self.name}",
            "flipped": f"labels wrong at a rate of {self.scale:.3g}",
            "measure": "to be measured",
        }[self.kind]

    def radius_of_mean(self, repeats: int) -> float:
        """The radius of the mean of so many answers to one query: only independent errors average out."""
        return self.radius / repeats**0.5 if self.kind == "gaussian" else self.radius

    @property
    def may_conspire(self) -> bool:
        """Whether errors of many answers may all point the same way, so that nothing but their sum bounds them."""
        return self.kind == "bounded" or self.is_cut

    @property
    def spread(self) -> float:
        """Half-width to use where errors of many answers are added in quadrature as independent ones.

        Rounding errors are uniform, so that their bound is only √3 standard deviations.
        """
        return self.radius if self.kind in ("bounded", "dtype") else GAUSSIAN_DEVIATIONS * self.deviation

    @property
    def deviation(self) -> float:
        """Standard deviation of an error; of a bounded one at most."""
        if self.kind == "flipped":
            return 0.0
        return self.scale / 3**0.5 if self.kind == "rounded" else self.scale


# Kinds of noise that have a number, and how to make them of its text.
READ: dict[str, Callable[[str], Noise]] = {
    "gaussian": lambda text: Noise.gaussian(float(text)),
    "bounded": lambda text: Noise.bounded(float(text)),
    "rounded": lambda text: Noise.rounded(int(text)),
    "flipped": lambda text: Noise.flipped(float(text)),
    CUT: lambda text: Noise.cut(int(text)),
}


def _positive(name: str, number: float) -> float:
    if not (np.isfinite(number) and number > 0):
        raise UsageError(f"{name} must be a positive number, not {number}; use Noise.exact() for none")
    return float(number)
