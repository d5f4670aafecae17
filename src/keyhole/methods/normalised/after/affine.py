"""What single tokens and reflected ones tell of heads behind a residual and LayerNorm: all but the heads themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.value import Value
from keyhole.methods.normalised.after.sphere import Sphere, fit_homography, fit_offset, fit_sphere
from keyhole.numerics.svd import least_squares, pseudo_inverse
from keyhole.queries import Measurements, Signature, sequences
from keyhole.recovery import Outcome

# Tokens so long that no bias and no epsilon shows, over the square root of the width.
LONG = 2.0**50
# Single tokens beyond the numbers of a token.
SPARE, SPARE_PART = 8, 0.15
# Tokens of natural norms that tell the bias, and pairs of a token and its reflection that tell the residual.
OFFSET_TOKENS, REFLECTED = 16, 3
# Answers are those of a norm where they are off by no more than so many roundings, relatively.
FITS = 2.0**26


@dataclass(frozen=True)
class Affine:
    """h = images·x + offset is what is normalised where x is alone, the last token less its mean among it."""

    sphere: Sphere
    linear: Floats  # (m, width)
    offset: Floats  # (m,)
    error: float  # deviation of one entry of `linear`

    @property
    def values(self) -> Floats:  # (width, m)
        """The values of all heads together: what is left without the last token."""
        return np.asarray(self.linear.T - self.sphere.basis)

    def images(self, tokens: Floats) -> Floats:  # (n, width) -> (n, m)
        """What is normalised where these tokens are alone."""
        return np.asarray(tokens @ self.linear.T + self.offset)

    def as_value(self) -> Value:
        """The same as a value of the heads."""
        wide = ROUNDING_DEVIATIONS * self.error
        size = float(np.sqrt(np.mean(self.offset**2)) + 1)
        return Value(self.values, np.full_like(self.values, wide), self.offset, np.full_like(self.offset, wide * size))


class Asking:
    """Queries of one stage."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature

    def ask(self, stage: str, tokens: Floats) -> Steps[Floats]:  # (n, length, width) -> (n, outputs)
        """The answers, for which a norm needs as many numbers as tokens have."""
        measured: Measurements = yield sequences(stage, self.signature.space.asarray(tokens))
        answers = measured.by_output
        if answers.shape[1] != self.signature.width:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"the box answers {answers.shape[1]} numbers where tokens have {self.signature.width}: there is no "
                "residual in that",
            )
        return answers


def ask_affine(signature: Signature, rng: np.random.Generator) -> Steps[Affine]:
    """Gain and bias of the norm, and the affine map of single tokens that it normalises.

    Long tokens tell the norm and, up to a factor, the linear map; once more those that it maps to an even cloud, which
    is better conditioned. A token u and its reflection beside g are answered by what differs by the values of u, as
    σ(z) + σ(−z) = 1: that tells the factor, since the residual is known.
    """
    asking, width = Asking(signature), signature.width
    if width < 3 or signature.max_norm is not None or signature.noise.kind != "exact":
        raise Unrecoverable(
            Outcome.TOO_NOISY,
            "a norm behind a residual is read from exact answers to tokens of at least three numbers and of any norm: "
            "remove max_norm, or use an oracle of higher precision",
        )
    count = width + SPARE
    tokens = LONG * rng.standard_normal((count, width))
    answers = yield from asking.ask("norm", tokens[:, None])
    sphere = fit_sphere(answers)
    _check_fit(signature, sphere.misfit, "single tokens are not answered as LayerNorm answers")
    linear, _, misfit = fit_homography(sphere.directions(answers), tokens / LONG)
    _check_fit(signature, misfit, "what is normalised is no affine map of single tokens")
    sphere, linear, error = yield from _ask_whitened(asking, rng, sphere, linear)
    affine = yield from _ask_offset(asking, rng, Affine(sphere, linear, np.zeros(width - 1), error))
    return (yield from _ask_factor(asking, rng, affine))


def _check_fit(signature: Signature, misfit: float, said: str) -> None:
    if not misfit <= FITS * signature.space.eps:
        raise Unrecoverable(Outcome.WRONG_FAMILY, f"{said}: they are off by {misfit:.2g} of their size")


def _ask_whitened(
    asking: Asking, rng: np.random.Generator, sphere: Sphere, linear: Floats
) -> Steps[tuple[Sphere, Floats, float]]:
    """Sphere and linear map from tokens that the map known so far takes to an even cloud."""
    width = asking.signature.width
    count = int((1 + SPARE_PART) * width) + SPARE
    # Along the direction that the map does not see tokens are as long as elsewhere on average.
    inverse = pseudo_inverse(linear)
    blind = np.linalg.qr(inverse, mode="complete")[0][:, -1]
    cloud = rng.standard_normal((count, width - 1)) @ inverse.T
    size = float(np.sqrt(np.mean(cloud**2)))
    tokens = cloud / size + rng.standard_normal((count, 1)) * blind
    answers = yield from asking.ask("norm", LONG * tokens[:, None])
    sphere = fit_sphere(answers)
    linear, norms, misfit = fit_homography(sphere.directions(answers), tokens)
    _check_fit(asking.signature, misfit, "what is normalised is no affine map of single tokens")
    # Errors of directions, of the size of the misfit, through the inverse of the tokens.
    error = max(misfit, asking.signature.space.eps) * float(np.sqrt(np.mean(norms**2) / (width - 1)))
    return sphere, linear, error * float(np.linalg.norm(np.linalg.pinv(tokens), 2))


def _ask_offset(asking: Asking, rng: np.random.Generator, affine: Affine) -> Steps[Affine]:
    """The bias, from tokens of natural norms."""
    tokens = rng.standard_normal((OFFSET_TOKENS, asking.signature.width))
    answers = yield from asking.ask("norm", tokens[:, None])
    offset = fit_offset(affine.sphere.directions(answers), tokens @ affine.linear.T)
    return replace(affine, offset=offset)


def _ask_factor(asking: Asking, rng: np.random.Generator, affine: Affine) -> Steps[Affine]:
    """The factor of the map: [g + u; g] and [g − u; g] differ by the values of u, the residual not among them."""
    width = asking.signature.width
    last, token = rng.standard_normal((2, REFLECTED, width))
    queries = np.concatenate([np.stack([last + way * token, last], axis=1) for way in (1, -1)])
    answers = yield from asking.ask("norm", queries)
    ups, downs = np.split(affine.sphere.directions(answers), 2)
    residual = token @ affine.sphere.basis
    factors, misfits, sizes = [], [], []
    for up, down, own, image in zip(ups, downs, residual, token @ affine.linear.T, strict=True):
        design = np.stack([up, -down, own], axis=1)
        solved = least_squares(design, image)
        factors.append(solved[2])
        misfits.append(float(np.linalg.norm(design @ solved - image)))
        sizes.append(float(np.linalg.norm(image)))
    factor = float(np.median(factors))
    _check_fit(asking.signature, max(misfits) / min(sizes), "a token and its reflection do not weigh one together")
    if not abs(factor) > 0:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, "no residual shows, so that the scale of what is normalised is free"
        )
    sphere = affine.sphere if factor > 0 else affine.sphere.flipped()
    return Affine(sphere, affine.linear / factor, affine.offset / factor, affine.error / abs(factor))
