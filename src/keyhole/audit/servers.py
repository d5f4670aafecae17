"""What servers do to answers and clients, as wrappers, and what an attacker who knows of it does about that."""

from __future__ import annotations

import hashlib

import numpy as np

from keyhole.arrays import Array, Floats, floats, to_numpy
from keyhole.errors import BudgetExhausted
from keyhole.oracles import Oracle, Wrapper
from keyhole.queries import Signature

# Newton steps for y − β(σ(y) − ½) = a, which rises at least by 1 − β/4 everywhere: the error is squared each time.
NEWTON_STEPS = 60
# Queries that differ by up to so many roundings, which no answer shows, are others to a server that remembers them.
JITTER = 2**10
# Honest sequences: so many of so many tokens at most.
HONEST, HONEST_LENGTH = 256, 8
# A client is blocked once so many of its queries are unusual, where that is so many times the usual share.
LEAST_UNUSUAL, TIMES_UNUSUAL = 10, 3.0
DETECTION_SAMPLE = 4096


def honest_tokens(signature: Signature, count: int = HONEST, seed: int = 0) -> Floats:  # (count, length, width)
    """What users send: normal tokens of norm about √width, as behind a normalisation, shorter where they must be.

    Of an alphabet, any of its tokens.
    """
    length, rng = min(HONEST_LENGTH, signature.max_length or HONEST_LENGTH), np.random.default_rng([seed, count])
    if signature.alphabet is not None:
        return floats(signature.alphabet.rows)[rng.integers(signature.alphabet.size, size=(count, length))]
    tokens: Floats = rng.standard_normal((count, length, signature.width))
    if signature.max_norm is not None:
        norms = np.linalg.norm(tokens, axis=-1, keepdims=True)
        tokens *= np.minimum(1.0, signature.max_norm * (1 - 1e-6) / norms)
    return tokens


class ReverseSigmoid(Wrapper, stateful=False):
    """Bends answers: y − β(σ(y) − ½), which keeps their order (Lee et al., 2018)."""

    def __init__(self, inner: Oracle, strength: float) -> None:
        super().__init__(inner)
        self.strength = strength

    def change(self, answers: Array) -> Array:
        """Bend."""
        plain = to_numpy(answers).astype(np.float64)
        return self.signature.space.asarray(plain - self.strength * _bend(plain))


class Unbent(Wrapper, stateful=False):
    """The attacker's side of `ReverseSigmoid`: what is known and one-to-one can be undone."""

    def __init__(self, inner: Oracle, strength: float) -> None:
        super().__init__(inner)
        self.strength = strength

    def change(self, answers: Array) -> Array:
        """Solve for the answers before they were bent."""
        bent = to_numpy(answers).astype(np.float64)
        found = bent.copy()
        for _ in range(NEWTON_STEPS):
            value = _bend(found)
            step = (found - self.strength * value - bent) / (1 - self.strength * (0.25 - value**2))
            found -= step
            if not np.any(np.abs(step) > np.spacing(np.abs(found))):
                break
        return self.signature.space.asarray(found)


def _bend(answers: Floats) -> Floats:
    """σ(y) − ½."""
    return np.asarray(np.tanh(answers / 2) / 2)


class Projected(Wrapper, stateful=False):
    """Projects tokens onto random directions, which are drawn once and stay secret: nobody is told of the others."""

    def __init__(self, inner: Oracle, directions: int) -> None:
        super().__init__(inner)
        self._onto = projection(inner.signature.width, directions)

    def answer(self, tokens: Array) -> Array:
        """Project, then ask."""
        plain = to_numpy(tokens).astype(np.float64)
        return super().answer(self.signature.space.asarray(plain @ self._onto))


def projection(width: int, directions: int) -> Floats:  # (width, width)
    """The orthogonal projection of a server onto so many random directions."""
    drawn = np.random.default_rng([width, directions]).standard_normal((width, directions))
    basis = np.linalg.qr(drawn)[0]
    return np.asarray(basis @ basis.T)


class UserNoise(Wrapper, stateful=False):
    """Adds to each answer an error that is fixed for the user and the query: to repeat a query shows nothing new."""

    def __init__(self, inner: Oracle, scale: float, *, seed: int = 0) -> None:
        super().__init__(inner)
        self.scale, self._user = scale, seed.to_bytes(8, "little")

    def answer(self, tokens: Array) -> Array:
        """Answer, then add what belongs to these tokens."""
        answers = to_numpy(super().answer(tokens)).astype(np.float64)
        digests = (hashlib.blake2b(each.tobytes() + self._user, digest_size=8) for each in to_numpy(tokens))
        seeds = (int.from_bytes(each.digest(), "little") for each in digests)
        errors = np.stack([np.random.default_rng(each).standard_normal(answers.shape[1:]) for each in seeds])
        return self.signature.space.asarray(answers + self.scale * errors)


class Fresh(Wrapper):
    """The attacker's side of `UserNoise`: no query is sent twice, but one that differs by nothing that matters."""

    def __init__(self, inner: Oracle, *, seed: int = 0) -> None:
        super().__init__(inner)
        self._rng = np.random.default_rng(seed)

    def answer(self, tokens: Array) -> Array:
        """Ask a little shorter tokens."""
        plain = to_numpy(tokens)
        shorter = 1 - self.signature.space.eps * self._rng.integers(1, JITTER, (plain.shape[0], 1, 1))
        return super().answer(self.signature.space.asarray(plain * shorter))


class Detection(Wrapper):
    """Blocks a client whose queries are unlike those of honest users: in norms, angles or sparsity of tokens."""

    def __init__(self, inner: Oracle, share: float) -> None:
        super().__init__(inner)
        usual = features(honest_tokens(inner.signature, DETECTION_SAMPLE))
        tail = share / (2 * usual.shape[1])
        self._lowest, self._highest = np.quantile(usual, [tail, 1 - tail], axis=0)
        self.share, self.seen, self.unusual = share, 0, 0

    def answer(self, tokens: Array) -> Array:
        """Count what is unusual; BudgetExhausted for a client of whose queries too many are."""
        found = features(to_numpy(tokens).astype(np.float64))
        self.seen += len(found)
        self.unusual += int(np.sum(np.any((found < self._lowest) | (found > self._highest), axis=1)))
        if self.unusual > max(LEAST_UNUSUAL, TIMES_UNUSUAL * self.share * self.seen):
            raise BudgetExhausted(f"blocked: {self.unusual} of {self.seen} queries are unlike those of honest users")
        return super().answer(tokens)


def features(tokens: Floats) -> Floats:  # (count, length, width) -> (count, 3)
    """Largest norm, nearness of neighbours to parallel or opposite, and largest part of one coordinate in a token."""
    norms = np.linalg.norm(tokens, axis=-1)
    units = tokens / np.maximum(norms, np.finfo(np.float64).tiny)[..., None]
    cosines = np.abs(np.sum(units[:, 1:] * units[:, :-1], axis=-1))
    nearest = np.max(cosines, axis=1, initial=0.0)
    return np.stack([np.max(norms, axis=1), nearest, np.max(np.abs(units), axis=(1, 2))], axis=1)
