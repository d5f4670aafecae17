"""Random orthonormal bases, and bases that share a vector evenly."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Array, Floats, Space, floats, row_blocks

# Up to this width an orthogonalisation, of d³ steps, costs nothing beside the queries.
NARROW = 128
# Beyond it, so many rows at a time are in general position.
TURNED = 16
# How far overlaps that need not be the same differ from their mean, at most: errors grow by as little.
UNEVEN = 0.125


def random_orthogonal(space: Space, rng: np.random.Generator, width: int) -> Array:  # (width, width)
    """A random orthogonal matrix whose rows are the basis, such that exact zeros and ties have probability zero.

    Uniform among all where it is narrow. Else cosines with random signs, in random order, which spread any fixed vector
    as evenly and take d² steps; but matrices that people write down meet cosines in exact zeros, so a random
    subspace of `TURNED` dimensions is rotated at random. That can take any so many rows to any others: their joint
    distribution has a density, and an equation that does not hold for all rows holds for none of them.
    """
    if width <= NARROW:
        return space.asarray(_orthonormal(rng, width, width))
    plane, turn = _orthonormal(rng, width, TURNED), _orthonormal(rng, TURNED, TURNED)
    cosines = _signed_cosines(space, rng, width)
    plane, turned = space.asarray(plane), space.asarray((turn - np.eye(TURNED)) @ plane.T)
    for some in row_blocks(width, width):
        part = cosines[some, :]
        cosines[some, :] = part + (part @ plane) @ turned
    return cosines


def _orthonormal(rng: np.random.Generator, width: int, count: int) -> Floats:  # (width, count)
    """Random orthonormal columns."""
    signs = rng.choice([-1.0, 1.0], count)  # the decomposition prefers some
    columns = np.linalg.qr(rng.standard_normal((width, count)))[0] * signs
    # A step of Newton's method: what is taken for the inverse of a basis, its transpose, is that to the last digits.
    return np.asarray(columns - columns @ (columns.T @ columns - np.eye(count)) / 2)


def orthonormal(space: Space, rows: Floats) -> Floats:  # (n, width), n ≤ width -> the same
    """The rows made orthonormal one after the other, worked out in a space."""
    if isinstance(rows, np.ndarray) and space.on_cpu:
        return np.asarray(np.linalg.qr(rows.T)[0].T)
    return floats(space.xp.linalg.qr(space.asarray(rows).T)[0].T)


def _signed_cosines(space: Space, rng: np.random.Generator, width: int) -> Array:  # (width, width)
    """The cosine transform with random signs, in random order."""
    xp = space.xp
    order = space.indices(rng.permutation(width))
    # Signs of columns spread any vector; signs of rows keep an error that all rows share from adding up.
    signs, row_signs = (space.asarray(rng.choice([-1.0, 1.0], width)) for _ in range(2))
    # Whole turns are taken off in integers, so that the angles are exact.
    odd = 2 * space.indices(np.arange(width)) + 1
    lengths = xp.where(order == 0, space.full((width,), width**-0.5), space.full((width,), (2 / width) ** 0.5))
    lengths = lengths * row_signs
    made = xp.empty((width, width), dtype=space.dtype, device=space.device)
    for some in row_blocks(width, width):
        turns = (order[some, None] * odd[None, :]) % (4 * width)
        waves = xp.cos(space.asarray(turns) * (np.pi / (2 * width))) * signs[None, :]
        made[some, :] = waves * lengths[some, None]
    return made


def equal_overlap(  # (n, width), (width,) -> (n, width)
    space: Space, rows: Array, vector: Array, rng: np.random.Generator | None = None
) -> Array:
    """Rotate orthonormal rows among themselves so that all have the same inner product with `vector`.

    One reflection takes the inner products to their common value |projection|/√n, so a sparse,
    one-hot or badly scaled vector does no harm. With `rng` they differ by up to `UNEVEN`: two rows that share a vector
    of their plane evenly are always the same two, which a matrix that somebody wrote down may meet in exact zeros.
    """
    xp = space.xp
    vector = vector / xp.max(xp.abs(vector))  # so that squares neither overflow nor vanish
    overlaps = rows @ vector
    count = rows.shape[0]
    shares = np.ones(count) if rng is None else 1 + UNEVEN * rng.uniform(-1.0, 1.0, count)
    even = float(xp.linalg.vector_norm(overlaps)) / count**0.5
    mirror = overlaps - even * space.asarray(shares * (count**0.5 / np.linalg.norm(shares)))
    size = float(xp.vecdot(mirror, mirror))
    # Rounding turns a mirror of length m by eps·even/m: a shorter one would make overlaps less even than they are.
    if size <= space.eps * even**2 * count:
        return rows
    turned, shared = xp.empty_like(rows), (mirror @ rows)[None, :]
    for some in row_blocks(*rows.shape):
        turned[some, :] = rows[some, :] - (2 / size) * mirror[some, None] * shared
    return turned


def split_along(space: Space, rows: Array, vector: Array) -> tuple[Array, Array]:  # (n, n), (n,) -> (n − 1, n), (n,)
    """Reflect an orthonormal basis so that its last row is the direction of `vector`: the others, then that one."""
    xp = space.xp
    direction = vector / xp.linalg.vector_norm(vector)
    mirror = rows[-1, :] - direction
    size = float(xp.vecdot(mirror, mirror))
    if size > space.eps:
        rows = rows - (2 / size) * (rows @ mirror)[:, None] * mirror[None, :]
    return rows[:-1, :], direction
