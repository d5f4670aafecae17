"""Random orthonormal bases, and bases that share a vector evenly."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Array, Space


def random_orthogonal(space: Space, rng: np.random.Generator, width: int) -> Array:  # (width, width)
    """A random orthogonal matrix whose rows are the basis: cosines with random signs, in random order.

    Random signs spread any fixed vector evenly over the cosines, as a fully random rotation would, and it
    is made in d² steps where an orthogonalisation takes d³.
    """
    xp = space.xp
    order = space.indices(rng.permutation(width))
    # Signs of columns spread any vector; signs of rows keep an error that all rows share from adding up.
    signs, row_signs = (space.asarray(rng.choice([-1.0, 1.0], width)) for _ in range(2))
    # Whole turns are taken off in integers, so that the angles are exact.
    turns = (order[:, None] * (2 * space.indices(np.arange(width)) + 1)[None, :]) % (4 * width)
    waves = xp.cos(space.asarray(turns) * (np.pi / (2 * width))) * signs[None, :]
    lengths = xp.where(order == 0, space.full((width,), width**-0.5), space.full((width,), (2 / width) ** 0.5))
    return waves * (lengths * row_signs)[:, None]


def equal_overlap(space: Space, rows: Array, vector: Array) -> Array:  # (n, width), (width,) -> (n, width)
    """Rotate orthonormal rows among themselves so that all have the same inner product with `vector`.

    One reflection takes the inner products to their common value |projection|/√n, so a sparse,
    one-hot or badly scaled vector does no harm.
    """
    xp = space.xp
    vector = vector / xp.max(xp.abs(vector))  # so that squares neither overflow nor vanish
    overlaps = rows @ vector
    count = rows.shape[0]
    aim = float(xp.linalg.vector_norm(overlaps)) / count**0.5
    mirror = overlaps - aim
    size = float(xp.vecdot(mirror, mirror))
    # Rounding turns a mirror of length m by eps·aim/m: a shorter one would make overlaps less even than they are.
    if size <= space.eps * aim**2 * count:
        return rows
    return rows - (2 / size) * mirror[:, None] * (mirror @ rows)[None, :]


def split_along(space: Space, rows: Array, vector: Array) -> tuple[Array, Array]:  # (n, n), (n,) -> (n − 1, n), (n,)
    """Reflect an orthonormal basis so that its last row is the direction of `vector`: the others, then that one."""
    xp = space.xp
    direction = vector / xp.linalg.vector_norm(vector)
    mirror = rows[-1, :] - direction
    size = float(xp.vecdot(mirror, mirror))
    if size > space.eps:
        rows = rows - (2 / size) * (rows @ mirror)[:, None] * mirror[None, :]
    return rows[:-1, :], direction
