"""The outputs of a head as a measuring device: which mixtures of tokens they resolve, and how well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Array, Space
from keyhole.methods.base import Found, Steps, Unrecoverable, map_measurements
from keyhole.methods.forms.value import Value
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.queries import Measurements, Signature
from keyhole.recovery import Outcome

CUT = 0.27


@dataclass(frozen=True)
class Outputs:
    """Value matrix · turn = basis · diag(sizes), cut where singular values become too small to divide by."""

    basis: Array  # (width, used) orthonormal
    in_outputs: Array  # (width, used) the same as the outputs show it: what the decomposition rounds off then cancels
    sizes: Array  # (used,)
    turn: Array  # (outputs, used)
    rank: int  # numerical rank of the value matrix, at least `used`
    error: Array  # (outputs,) norm of each output's value vector: what its rounding is proportional to

    @property
    def used(self) -> int:
        """Numbers per answer that are used."""
        return int(self.sizes.shape[0])

    def mixture(self, answers: Array) -> Array:  # (n, outputs) -> (n, used)
        """The coordinates, in the basis, of the mixed tokens behind answers without bias."""
        return (answers @ self.turn) / self.sizes


def choose_outputs(  # (width, outputs)
    space: Space, value: Array, *, even: bool = False, radius: Array | None = None
) -> Outputs:
    """Keep the singular values that do not cost more accuracy than they save queries.

    The oracle rounds every output at eps of the largest singular value, and reading divides by the smallest one
    used. The cut, eps^CUT of the largest, leaves 10 of 16 digits in float64 and 5 of 7 in float32.
    `even` brings all outputs to one size first, which is right where their errors are proportional to it; those whose
    value is known to fewer digits than that, by its `radius`, are left out.
    """
    xp = space.xp
    error = xp.linalg.vector_norm(value, axis=0)
    weigh = 1 / xp.where(error > 0, error, xp.ones_like(error)) if even else xp.ones_like(error)
    if radius is not None:
        unknown = xp.where(error > 0, xp.linalg.vector_norm(radius, axis=0) * weigh, xp.inf * weigh)
        most = max(space.eps ** (1 - CUT), float(xp.min(unknown)))
        weigh = xp.where(unknown <= most, weigh, xp.zeros_like(weigh))
    left, sizes, right = xp.linalg.svd(value * weigh, full_matrices=False)
    largest = float(sizes[0])
    rank = int(xp.sum(xp.astype(sizes > 8 * space.eps * max(value.shape) ** 0.5 * largest, xp.int64)))
    used = int(xp.sum(xp.astype(sizes > space.eps**CUT * largest, xp.int64)))
    turn = right[:used, :].T * weigh[:, None]
    return Outputs(left[:, :used], value @ (turn / sizes[:used]), sizes[:used], turn, max(rank, used), error)


def ask_along(
    signature: Signature, value: Value, direction: Array, ask: Callable[[Signature, Value], Steps[Found]]
) -> Steps[Found]:
    """Run a generator for heads of one output on one combination `direction` (outputs,) of several."""
    # Noise that is not independent between outputs may add up.
    total = float(signature.space.xp.sum(signature.space.xp.abs(direction)))
    stretch = 1.0 if signature.noise.kind == "gaussian" else total
    plain = signature.with_changes(noise=replace(signature.noise, scale=stretch * signature.noise.scale))
    steps = ask(plain, value.along(direction))
    combined = map_measurements(steps, lambda a: Measurements(a.values @ direction, stretch * a.radius))
    return (yield from combined)


def most_informative(outputs: Outputs) -> Array:  # (outputs,)
    """The combination of outputs that shows most of the weights of attention."""
    if not outputs.turn.shape[1]:
        raise Unrecoverable(Outcome.TOO_NOISY, "no output shows its value to enough digits")
    return outputs.turn[:, 0]


def window_rows(space: Space, rng: np.random.Generator, basis: Array) -> Array:  # (width, used) -> (width, width)
    """An orthogonal matrix of which any `used` cyclically neighbouring rows are well conditioned on the basis."""
    xp = space.xp
    width, used = basis.shape
    if used == width:
        return random_orthogonal(space, rng, width)
    both, _ = xp.linalg.qr(xp.concat([basis, space.normal(rng, width, width - used)], axis=1))
    frame = space.asarray(_window_frame(width, used))
    inner, outer = random_orthogonal(space, rng, used), random_orthogonal(space, rng, width - used)
    return frame[:, :used] @ inner @ basis.T + frame[:, used:] @ outer @ both[:, used:].T


def _window_frame(width: int, used: int) -> npt.NDArray[np.float64]:  # (width, width)
    """The real Fourier basis, ordered so that windows of `used` rows of its first `used` columns are well conditioned.

    Evenly spread frequencies make a window nearly a Fourier matrix of its own. A block of an orthogonal matrix
    and the complementary block have the same singular values, so of the columns and the others the fewer are spread.
    """
    place, fewer = np.arange(width), min(used, width - used)
    chosen = _spread_frequencies(width, fewer)
    columns: dict[int, list[npt.NDArray[np.float64]]] = {}
    for frequency in range(width // 2 + 1):
        angle = 2 * np.pi * ((frequency * place) % width) / width
        waves = [np.cos(angle)] if frequency in (0, width / 2) else [np.cos(angle), np.sin(angle)]
        columns[frequency] = [wave / np.linalg.norm(wave) for wave in waves]
    some = [wave for frequency in chosen for wave in columns[frequency]]
    rest = [wave for frequency in columns if frequency not in chosen for wave in columns[frequency]]
    return np.stack(some + rest if used == fewer else rest + some, axis=1)


def _spread_frequencies(width: int, count: int) -> list[int]:
    """Frequencies whose waves number `count`, spread evenly."""
    if count % 2:
        return [0] + [int(k * width / count + 0.5) for k in range(1, (count + 1) // 2)]
    return [int((k + 0.5) * width / count + 0.5) for k in range(count // 2)]
