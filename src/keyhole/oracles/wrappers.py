"""Behaviour is added by wrapping: `Rounded(Counted(oracle), decimals=6)`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyhole.arrays import Array, to_numpy
from keyhole.errors import BudgetExhausted, OracleError, UsageError
from keyhole.noise import Noise
from keyhole.oracles.base import Oracle
from keyhole.queries import Signature


class Wrapper(Oracle):
    """An oracle that passes queries on to another one; a subclass changes what it needs to.

    One that changes answers writes `change`, so that it is also done to those that arrived before an error. A
    subclass whose calls do not depend on those before says `class Name(Wrapper, stateful=False)`.
    """

    stateful: bool = False

    def __init_subclass__(cls, *, stateful: bool = True) -> None:
        cls.stateful = stateful

    def __init__(self, inner: Oracle, signature: Signature | None = None) -> None:
        self.inner = inner
        self.signature = inner.signature if signature is None else signature
        self.name = inner.name

    @property
    def lanes(self) -> int:  # type: ignore[override]
        """Those of the wrapped oracle; one of a subclass with a state, which says so."""
        return 1 if self.stateful else self.inner.lanes

    def begin_anew(self, label: str) -> None:
        """That of the wrapped oracle."""
        self.inner.begin_anew(label)

    def answer(self, tokens: Array) -> Array:
        """Pass the query on."""
        try:
            answers = self.inner(tokens)
        except OracleError as error:
            if error.box is self.inner:
                error.arrived = tuple((start, self.change(some)) for start, some in error.arrived)
                error.box = self
            raise
        return self.change(answers)

    def change(self, answers: Array) -> Array:
        """What becomes of answers."""
        return answers

    @property
    def hints(self) -> Sequence[Mapping[str, Any]]:
        """Those of the wrapped oracle."""
        return self.inner.hints

    def facts(self) -> dict[str, Any]:
        """Those of the wrapped oracle."""
        return self.inner.facts()

    def close(self) -> None:
        """Close the wrapped oracle."""
        self.inner.close()


class OnlyHere(Wrapper):
    """A wrapper that adds up what passes it, which copies of it in several processes could not."""

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{type(self).__name__} adds up what passes it, which copies of it in other processes cannot: leave it out "
            "where workers ask; budget= limits them together, and stats.queries counts"
        )


class Counted(OnlyHere):
    """Counts the sequences and the calls that reach the wrapped oracle."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner)
        self.queries = 0
        self.calls = 0

    def answer(self, tokens: Array) -> Array:
        """Count, then pass on."""
        self.calls += 1
        self.queries += tokens.shape[0]
        return super().answer(tokens)


class Budgeted(OnlyHere):
    """Refuses to pass on more than `limit` sequences in all."""

    def __init__(self, inner: Oracle, limit: int) -> None:
        super().__init__(inner)
        self.left = limit

    def answer(self, tokens: Array) -> Array:
        """Pass on what the limit allows; a batch that does not fit is refused whole."""
        if tokens.shape[0] > self.left:
            raise BudgetExhausted(f"{tokens.shape[0]} sequences asked, {self.left} left: raise the limit")
        self.left -= tokens.shape[0]
        return super().answer(tokens)


class Batched(Wrapper, stateful=False):
    """Takes at most `limit` sequences per call."""

    def __init__(self, inner: Oracle, limit: int) -> None:
        super().__init__(inner, inner.signature.with_changes(batch_limit=limit))

    def answer(self, tokens: Array) -> Array:
        """Pass on a batch within the limit."""
        limit = self.signature.batch_limit
        if limit is not None and tokens.shape[0] > limit:
            raise UsageError(f"a batch of {tokens.shape[0]} sequences exceeds the limit of {limit}")
        return super().answer(tokens)


class Rounded(Wrapper, stateful=False):
    """Rounds answers to `decimals`; `declared=False` hides that from the learner."""

    def __init__(self, inner: Oracle, decimals: int, *, declared: bool = True) -> None:
        noise = Noise.rounded(decimals) if declared else inner.signature.noise
        super().__init__(inner, inner.signature.with_changes(noise=noise))
        self.name = f"{inner.name} | rounded to {decimals} decimals"
        self.decimals = decimals

    def change(self, answers: Array) -> Array:
        """Round."""
        xp = self.signature.space.xp
        power = 10.0 ** abs(self.decimals)  # a whole number, which floats hold exactly
        up, down = (power, 1.0) if self.decimals >= 0 else (1.0, power)
        coarse = xp.abs(answers) * self.signature.space.eps >= down / up  # has no such decimals to round
        fine = xp.where(coarse, xp.zeros_like(answers), answers)
        return xp.where(coarse, answers, xp.round(fine * up / down) * down / up)


class Cast(Wrapper, stateful=False):
    """Rounds answers to a dtype (float32, float16 or bfloat16); `declared=False` hides that from the learner.

    Only the digits are those of the dtype: answers beyond its largest or below its smallest number are kept.
    """

    def __init__(self, inner: Oracle, dtype: str, *, declared: bool = True) -> None:
        noise = Noise.dtype(dtype)
        super().__init__(inner, inner.signature.with_changes(noise=noise if declared else inner.signature.noise))
        self.name = f"{inner.name} | cast to {dtype}"
        self._unit = 0.5 / noise.scale

    def change(self, answers: Array) -> Array:
        """Round to nearest, ties to even."""
        mantissa, exponent = np.frexp(to_numpy(answers).astype(np.float64))
        rounded = np.ldexp(np.round(mantissa * 2 * self._unit) / (2 * self._unit), exponent)
        return self.signature.space.asarray(rounded)


class Noisy(Wrapper):
    """Adds independent normal errors of standard deviation `scale`; `declared=False` hides that."""

    def __init__(self, inner: Oracle, scale: float, *, seed: int = 0, declared: bool = True) -> None:
        noise = Noise.gaussian(scale) if declared else inner.signature.noise
        super().__init__(inner, inner.signature.with_changes(noise=noise))
        self.name = f"{inner.name} | noise {scale:g} seed {seed}"
        self.scale, self._seed = scale, seed
        self._rng = np.random.default_rng(seed)

    def begin_anew(self, label: str) -> None:
        """Errors that belong to the label."""
        super().begin_anew(label)
        self._rng = labelled_rng(self._seed, label)

    def change(self, answers: Array) -> Array:
        """Add noise."""
        errors = self._rng.standard_normal(to_numpy(answers).shape)
        return answers + self.scale * self.signature.space.asarray(errors)


class Labelled(Wrapper, stateful=False):
    """Tells of every answer a label only: its sign, 1 above zero and else −1; of several outputs which is largest."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner, inner.signature.with_changes(answers="labels", noise=Noise.exact()))
        self.name = f"{inner.name} | labels"

    def change(self, answers: Array) -> Array:
        """The labels."""
        xp, places = self.signature.space.xp, 1 if self.signature.positions == "last" else 2
        if answers.ndim > places:
            return self.signature.space.asarray(xp.argmax(answers, axis=-1))
        return xp.where(answers > 0, xp.ones_like(answers), -xp.ones_like(answers))


class Flipped(Wrapper):
    """Replaces labels by another one of `labels`, each with probability `rate`; `declared=False` hides that."""

    def __init__(
        self, inner: Oracle, rate: float, labels: Sequence[int] = (-1, 1), *, seed: int = 0, declared: bool = True
    ) -> None:
        noise = Noise.flipped(rate) if declared else inner.signature.noise
        super().__init__(inner, inner.signature.with_changes(noise=noise))
        self.name = f"{inner.name} | flipped at a rate of {rate:g} seed {seed}"
        self.rate, self.labels, self._seed = rate, np.array(labels, dtype=np.float64), seed
        self._rng = np.random.default_rng(seed)

    def begin_anew(self, label: str) -> None:
        """Errors that belong to the label."""
        super().begin_anew(label)
        self._rng = labelled_rng(self._seed, label)

    def change(self, answers: Array) -> Array:
        """Flip some."""
        plain = to_numpy(answers).astype(np.float64)
        place = np.argmax(plain[..., None] == self.labels, axis=-1)
        step = self._rng.integers(1, self.labels.size, plain.shape)
        other = self.labels[(place + step) % self.labels.size]
        wrong = self._rng.uniform(size=plain.shape) < self.rate
        return self.signature.space.asarray(np.where(wrong, other, plain))


def labelled_rng(seed: int, label: str) -> np.random.Generator:
    """Random numbers that belong to a label, and to a seed."""
    return np.random.default_rng([seed, *hashlib.sha256(label.encode()).digest()])
