"""Wide linear cells of a net, far out: where a last token lies, and how far mixtures may move around it.

Far out the cells of a net are cones, the wider the longer their points are. Inside one of them, around a last token g,

    f([m×(g + u); n×g]) − f([g]) = Σ_h σ(ln(m/n) + uᵀ·W_h·g)·(u·v_h)   with   v_h = Σ_active c_j·M_hj,

c_j the weights out of the neurons and M_h what these see of head h, whether or not the last token passes attention by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from keyhole.arrays import Floats
from keyhole.families.relu_net import ReluNet
from keyhole.methods.one_layer.cells import LinearCells, PlainNet

# Arguments from which activations are straight to the last digit.
BENDS = {"relu": 0.0, "gelu": 9.0, "gelu_tanh": 9.0}
SLOW_BEND = 40.0
# Kinks are at least so many times as far away as a mixture moves, if neurons see as much of a head as of all.
ROOM = 6.0
# Points are lengthened by this until their cells are wide enough, at most so often.
LONGER, MOST_LONGER = 1.25, 400
# Ascent to the middle of a cell: steps, the first step and the first softness of the minimum over kinks, over the norm.
STEPS, FIRST_STEP, SOFTNESS = 80, 0.3, 0.3
# Cells no narrower than this are as wide as can be used: their points are much longer than steps anyway.
WIDEST = 0.5


@dataclass(frozen=True)
class FarNet:
    """A net, seen from far out."""

    net: PlainNet

    @classmethod
    def of(cls, net: ReluNet) -> FarNet:
        """A net whose activation says from where on it is straight."""
        plain = PlainNet.of(net, 1.0)
        return cls(replace(plain, bend=BENDS.get(net.activation, SLOW_BEND), typical=1.0))

    @cached_property
    def normals(self) -> Floats:  # (k, width)
        """Unit vectors across kinks."""
        return np.asarray(self.net.inner / np.where(self.net.norms > 0, self.net.norms, 1.0)[:, None])

    def directions(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:  # (count, width), (count,)
        """Unit vectors in the middle of random cones, and the sine of the angle to the next kink through the origin."""
        return self.middles(rng.standard_normal((count, self.net.inner.shape[1])))

    def across(self, rng: np.random.Generator) -> Floats:  # (2 · kinks, width)
        """Vectors on both sides of every kink through the origin, half-way to the next: cones of all neurons' signs."""
        normals = self.normals[self.net.norms > 0]
        on = rng.standard_normal(normals.shape)
        on -= np.sum(on * normals, axis=1, keepdims=True) * normals
        with np.errstate(divide="ignore", invalid="ignore"):
            away = -(on @ normals.T) / (normals @ normals.T)  # (kinks, kinks) to all kinks, along the normal
        np.fill_diagonal(away, np.inf)
        sides = []
        for side in (1.0, -1.0):
            ahead = np.min(np.where(side * away > 0, side * away, np.inf), axis=1)
            sides.append(on + 0.5 * side * np.minimum(ahead, np.linalg.norm(on, axis=1))[:, None] * normals)
        return np.concatenate(sides)

    def middles(self, x: Floats) -> tuple[Floats, Floats]:  # (n, width) -> (n, width), (n,)
        """Unit vectors in the middle of the cones of vectors, and the sine of the angle to the next kink."""
        normals = self.normals[self.net.norms > 0]
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        if not len(normals):
            return x, np.full(len(x), WIDEST)
        signs = np.where(x @ normals.T > 0, 1.0, -1.0)
        best, widest = x, np.min(signs * (x @ normals.T), axis=1)
        for step in range(STEPS):
            heights = signs * (x @ normals.T)
            soft = SOFTNESS / (1 + step)
            weights = np.exp(-(heights - np.min(heights, axis=1, keepdims=True)) / soft)
            uphill = (weights * signs) @ normals
            uphill /= np.maximum(np.linalg.norm(uphill, axis=1, keepdims=True), np.finfo(float).tiny)
            x = x + FIRST_STEP / (1 + step) ** 0.7 * uphill
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            now = np.min(signs * (x @ normals.T), axis=1)
            best, widest = np.where((now > widest)[:, None], x, best), np.maximum(widest, now)
        return best, np.minimum(widest, WIDEST)

    def rises(self, directions: Floats) -> Floats:  # (n, width) -> (n,)
        """How steep the net is far out in these directions, if its neurons did not cancel."""
        active = directions @ self.net.inner.T > 0
        steep = np.sum(self.net.outer**2, axis=0) * self.net.norms**2
        skip = 0.0 if self.net.skip is None else np.sum(self.net.skip**2)
        return np.asarray(np.sqrt(active @ steep + skip))

    def cells(self, directions: Floats, products: Floats, room: float = ROOM) -> LinearCells:  # (n, width), (n,)
        """The cell of each direction at the least norm at which steps of length product/norm stay well inside.

        Kinks are `room` times as far away as that. Of directions in which there is none, the width is not positive.
        """
        norms = np.sqrt(products)
        cells = LinearCells.around(self.net, directions * norms[:, None], np.inf)
        for _ in range(MOST_LONGER):
            width = np.minimum(cells.width, WIDEST * norms)
            narrow = ~(width >= room * products / norms)
            if not np.any(narrow):
                break
            norms = np.where(narrow, LONGER * norms, norms)
            cells = LinearCells.around(self.net, directions * norms[:, None], np.inf)
        return replace(cells, width=np.where(narrow, -1.0, width))

    def outputs(self, cell: LinearCells) -> int:
        """Combinations of outputs that can be independent in one cell: as many as neurons that are on, at most."""
        count = self.net.outer.shape[0]
        return count if self.net.skip is not None else int(np.linalg.matrix_rank(self.net.outer * cell.active[0]))

    def steps_inside(self, cell: LinearCells, directions: Floats) -> Floats:  # (n, width) -> (n,)
        """How far the point of one cell may move along each direction until the cell has half its width there."""
        point, width = cell.points[0], cell.width[0]
        signs = np.where(cell.active[0] > 0, 1.0, -1.0)
        room = signs * (self.net.inner @ point + self.net.bias) - self.net.bend - width / 2 * self.net.norms
        down = -(directions @ self.net.inner.T) * signs  # (n, k)
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = np.where(down > 0, room / down, np.inf)
        return np.asarray(np.minimum(np.min(reach, axis=1, initial=np.inf), np.linalg.norm(point)))
