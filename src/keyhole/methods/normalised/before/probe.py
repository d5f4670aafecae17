"""Whether a norm is before attention, which one, whether the last token is added, and epsilon."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import FLOAT32, Floats
from keyhole.families.norms.normalise import Norm, mean_free
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.normalised.before.outer import Outer, ask_sides
from keyhole.queries import Measurements, Signature, sequences
from keyhole.recovery import Outcome

# Tokens so long that epsilon is nothing beside them, over the square root of the width.
LONG = 2.0**20
# Answers at such norms are the same, but for so many roundings.
SAME = 2.0**8
# A residual is the token itself, but for this part.
ITSELF = 0.25
# Epsilon is looked for with tokens shorter by this factor each, so often, until they are answered by this part less.
RUNG, MOST_RUNGS, LESS = 2.0**6, 24, 0.9
# It is read from tokens of these norms, over √(width·ε): there answers change with it the most, and hardly.
READ, BESIDE = 2.0**-0.5, 2.0**3


@dataclass(frozen=True)
class Before:
    """A norm before attention."""

    norm: Norm
    residual: bool
    epsilon: float
    radius: float  # of epsilon
    share: float  # the part that attention is of an answer to tokens that are normalised to half the largest norm
    outer: Outer | None = None  # a norm of what attention answers


def ask_before(signature: Signature, rng: np.random.Generator) -> Steps[Before]:
    """The norm before attention; WRONG_FAMILY where there is none, NOT_IDENTIFIABLE where epsilon does not show."""
    probe = _Probe(signature, rng)
    try:
        residual = yield from probe.ask_residual()
    except NotAffine as error:
        return (yield from _ask_both(probe, error))
    norm = yield from probe.ask_norm()
    epsilon, radius, share = yield from probe.ask_epsilon()
    return Before(norm, residual, epsilon, radius, share)


class NotAffine(Unrecoverable):
    """Normalised single tokens are answered by no affine map."""

    def __init__(self, off: float) -> None:
        super().__init__(
            Outcome.WRONG_FAMILY,
            f"normalised single tokens are off an affine map by {off:.2g}: no heads are behind a norm",
        )


def _ask_both(probe: _Probe, refused: NotAffine) -> Steps[Before]:
    """Norms on both sides of attention, where single tokens are answered by no affine map."""
    norm = yield from probe.ask_norm()
    basis = mean_free(probe.width, norm)
    try:
        sides = yield from ask_sides(probe.ask, probe.signature, basis, probe.rng, probe.natural)
    except Unrecoverable as error:
        raise Unrecoverable(error.outcome, f"{refused}; nor are they on both sides: {error}") from error
    return Before(norm, probe.residual, sides.epsilon, sides.radius, 1.0, sides.outer)


class _Probe:
    """Single tokens along a few directions."""

    def __init__(self, signature: Signature, rng: np.random.Generator) -> None:
        self.signature, self.width, self.rng = signature, signature.width, rng
        basis = mean_free(self.width, "layer")
        self.ways = np.linalg.qr(basis @ rng.standard_normal((basis.shape[1], min(2, basis.shape[1]))))[0].T
        self.most = min(LONG * self.width**0.5, signature.norm_limit / 2)
        self.residual = False
        self.size = 0.0  # of the largest answer

    def _ask(self, *tokens: Floats) -> Steps[Floats]:  # (n, outputs), less the residual
        return (yield from self.ask(np.stack(tokens)))

    def ask(self, asked: Floats) -> Steps[Floats]:  # (n, width) -> (n, outputs)
        """Answers to single tokens, less the residual."""
        plan = sequences("norm", self.signature.space.asarray(asked[:, None, :]))
        measured: Measurements = yield plan
        answers = measured.by_output
        self.size = max(self.size, float(np.max(np.abs(answers))))
        return answers - asked if self.residual else answers

    def _rounding(self, *tokens: Floats) -> float:
        """What rounding may make of an answer to such tokens."""
        largest = max(self.size, *(float(np.max(np.abs(token))) for token in tokens))
        return SAME * self.signature.space.eps * largest + 2 * self.signature.noise.radius

    def ask_residual(self) -> Steps[bool]:
        """Whether answers to ever longer tokens stay where they are, or move by the token itself."""
        one, two = self.most * self.ways[0], self.most * self.ways[-1]
        mixed = (one + two) / 2**0.5 if len(self.ways) > 1 else -one
        far, farther, opposite, other, between = yield from self._ask(one, 2 * one, -one, two, mixed)
        moved = farther - far
        if moved.shape[0] == self.width and float(np.linalg.norm(moved - one)) <= ITSELF * float(np.linalg.norm(one)):
            self.residual, moved = True, moved - one
            far, opposite, other, between = far - one, opposite + one, other - two, between - mixed
        allowed = self._rounding(2 * one) + float(np.max(np.abs(far - opposite))) / LONG
        if float(np.max(np.abs(moved))) > allowed:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"a token twice as long moves the answer by {np.max(np.abs(moved)):.2g}: nothing normalises tokens "
                "before attention",
            )
        self.middle = (far + opposite) / 2
        self.far = far - self.middle
        mean = (self.far + other - self.middle) / 2**0.5 if len(self.ways) > 1 else -self.far
        off = float(np.max(np.abs(between - self.middle - mean)))
        if off > allowed:
            raise NotAffine(off)
        if float(np.max(np.abs(self.far))) <= allowed:
            raise self._without_values(allowed)
        return self.residual

    def _without_values(self, allowed: float) -> Unrecoverable:
        """How to end where long tokens show no values: there are none, or rounding hides them."""
        if self.signature.space.eps < FLOAT32 and self.signature.noise.kind == "exact":
            said = "single tokens have no value behind the norm, so that nothing shows epsilon"
            return Unrecoverable(Outcome.NOT_IDENTIFIABLE, said)
        return Unrecoverable(
            Outcome.TOO_NOISY,
            f"single tokens of norm {self.most:.2g} show no value behind the norm, where errors hide what is below "
            f"{allowed:.2g}: ask the layer in float64",
        )

    def ask_norm(self) -> Steps[Norm]:
        """LayerNorm takes off the mean of a token, RMSNorm does not."""
        token = self.natural * self.ways[0]
        one, shifted = yield from self._ask(token, token + np.linalg.norm(token) * self.width**-0.5)
        self.middle_near = one
        allowed = self._rounding(token)
        return "layer" if float(np.max(np.abs(one - shifted))) <= allowed else "rms"

    @property
    def natural(self) -> float:
        return float(min(self.width**0.5, self.signature.norm_limit / 2))

    def ask_epsilon(self) -> Steps[tuple[float, float, float]]:
        """Epsilon, its radius, and the share of attention in the answers to tokens that tell it."""
        whole, along = float(np.linalg.norm(self.far)), self.far / np.linalg.norm(self.far)
        norm = self.natural
        for _ in range(MOST_RUNGS):
            part = float(((yield from self._ask(norm * self.ways[0]))[0] - self.middle) @ along) / whole
            if part <= LESS:
                break
            norm /= RUNG
        else:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                f"tokens of norm {norm:.2g} are normalised like longer ones: epsilon is zero, or too small",
            )
        for _ in range(2):
            square = (norm**2) * (1 / part**2 - 1)  # width·ε
            if not 0 < square < np.inf:
                raise Unrecoverable(
                    Outcome.WRONG_FAMILY, "single tokens do not shorten as LayerNorm or RMSNorm would have it"
                )
            near, beside = READ * square**0.5, min(BESIDE * square**0.5, self.most)
            answers = yield from self._ask(*(sign * each * self.ways[0] for each in (near, beside) for sign in (1, -1)))
            odd = (answers[0::2] - answers[1::2]) / 2 @ along
            ratio = float(odd[0] / odd[1]) ** 2
            square = near**2 * beside**2 * (1 - ratio) / (ratio * beside**2 - near**2)
            part, norm = (near**2 / (near**2 + max(square, 0.0))) ** 0.5, near
        length = float(np.linalg.norm(self.ways[0] * beside))
        error = self.signature.space.eps * (float(np.max(np.abs(answers))) + length) + self.signature.noise.radius
        relative = 2 * error * sum(1 / abs(float(each)) for each in odd) / (1 - ratio)
        answered = float(np.linalg.norm(answers[0]))
        share = answered / (answered + near)
        epsilon = square / self.width
        return epsilon, epsilon * relative, share
