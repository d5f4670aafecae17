"""An unknown smooth link, learned along one ray: weights in proportion to φ(logit) for any monotone φ > 0."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.families.parts import Tabulated
from keyhole.families.parts.links import chebyshev_coefficients
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import FIRST_PROBE, NORM_RATIO, ScaleSearch, floor_power
from keyhole.methods.parts.link_table import LinkTable
from keyhole.methods.parts.zero_scores import Probe
from keyhole.queries import Measurements, Plan, Term, TokenRows
from keyhole.recovery import Outcome

# The product of norms at which either end of the link shows. Cubes of such logits do not overflow.
FAR = 2.0**160
# The grid ends where energies would be so far from that at zero if the link were straight: masses that are entire
# functions without near zeros need 17 nodes there, others 33 ...
REACH = 1.5
# ... or at this part of the nearer end of the link, beyond which it has hardly any slope.
PART_OF_END = 0.75
GRIDS = (17, 33)
# Energies are a polynomial where the last coefficients are below this, or below so many radii: the rest is rounding.
TAIL, TAIL_RADII = 3e-15, 3.0
LAST = 3
# Coefficients fall like powers of 1/ρ, ρ by how far the nearest singularity is over the reach. The finer grid does from
# the first of these on; where it will not, the reach is made so short that the coarser one does, by the second.
FINE_DECAY, COARSE_DECAY = 3.1, 14.0
# Grids are laid so often.
TRIES = 4
# A slope is known where the energy is so many radii, and the link bends little where it is at most this.
CLEAR_RADII, SMALL_ENERGY = 30.0, 0.3
PROBE_STEP = 2.0**14
# Places at which the slope of the polynomial is looked at.
PLACES = 257
FOLDS = "weights do not grow or fall all along a ray of logits: the link is not monotone, or the score is zero"
ROUGH = "energies along a ray of logits are no polynomial of degree 32 however short it is: the link is not smooth"


def ask_link(probe: Probe, rng: np.random.Generator) -> Steps[LinkTable]:
    """The link along the logits of one pair of directions, on nested Chebyshev grids, of slope one at zero."""
    column = rng.standard_normal(probe.signature.width)
    ray = _Ray(probe, column / np.linalg.norm(column))
    ends, _ = yield from ray.ask("constants", np.array([-FAR, FAR]))
    if not min(ends) < 0 < max(ends):
        raise Unrecoverable(Outcome.WRONG_FAMILY, FOLDS)
    search = ScaleSearch(FIRST_PROBE, probe.signature.space.tiny**0.5, FAR)
    for scale in search:
        (energy,), (radius,) = yield from ray.ask("scale", np.array([scale]))
        if abs(energy) > SMALL_ENERGY:
            search.lower_scale(PROBE_STEP)
        elif abs(energy) < CLEAR_RADII * radius:
            search.raise_scale(PROBE_STEP)
        else:
            break
    reach = min(REACH, PART_OF_END * min(abs(ends))) * scale / energy
    for _ in range(TRIES):
        found = yield from _ask_grids(ray, reach)
        if isinstance(found, LinkTable):
            return found
        reach *= found
    raise Unrecoverable(Outcome.WRONG_FAMILY, ROUGH)


class _Ray:
    """Energies of [A·token; (scale/A)·column] over that at zero."""

    def __init__(self, probe: Probe, column: Floats) -> None:
        self.probe = probe
        self.columns = TokenRows(probe.signature.space.asarray(column[None, :]))

    def ask(self, stage: str, scales: Floats) -> Steps[tuple[Floats, Floats]]:
        """Energies and their radii at these products of norms; infinite where a weight is zero or one."""
        space = self.probe.signature.space
        scale = floor_power(float(np.max(np.abs(scales))))
        first = NORM_RATIO * max(floor_power(math.sqrt(scale)), scale)  # the last token's own logit is none
        index = space.indices(np.zeros(scales.size))
        positions = [
            [Term(self.probe.token, index, first)],
            [Term(self.columns, index, space.asarray(scales / first))],
        ]
        answers: Measurements = yield Plan(stage, scales.size, positions)
        weights, radii = replace(self.probe, norm=first).read(answers)
        radii = radii + np.abs(scales) / first**2
        energies = np.where(weights > 0.5, math.inf, -math.inf)
        inside = (weights > 2 * radii) & (weights < 1 - 2 * radii)
        some = weights[inside]
        energies[inside] = np.log(some) - np.log1p(-some)
        errors = np.full(scales.shape, math.inf)
        errors[inside] = radii[inside] / (some * (1 - some))
        near = inside & (np.abs(weights - 0.5) <= radii)
        return np.where(near, 0.0 * weights, energies), errors


def _ask_grids(ray: _Ray, reach: float) -> Steps[LinkTable | float]:
    """The link on the first grid that does, up to this product of norms; what to multiply that by where none does."""
    known: dict[int, tuple[float, float]] = {GRIDS[-1] // 2: (0.0, 0.0)}  # by place on the finest grid
    for count in GRIDS:
        places = [j * (GRIDS[-1] - 1) // (count - 1) for j in range(count)]
        new = [place for place in places if place not in known]
        where = np.cos(np.pi * np.array(new) / (GRIDS[-1] - 1))
        energies, radii = yield from ray.ask("link", reach * where)
        known |= {place: pair for place, *pair in zip(new, energies, radii, strict=True)}  # type: ignore[misc]
        values, errors = (np.array([known[place][n] for place in places]) for n in range(2))
        if not np.all(np.isfinite(errors)):
            return 0.5
        if np.any(np.diff(values) > errors[1:] + errors[:-1]):  # places fall
            raise Unrecoverable(Outcome.WRONG_FAMILY, FOLDS)
        found = _table(values, errors)
        if found is not None:
            return found
        shorter = _shorter(values)
        if shorter < 1:
            return shorter
    return 0.5


def _shorter(values: Floats) -> float:
    """One where a finer grid will do, else by how much shorter the coarsest one has to be."""
    sizes = np.abs(chebyshev_coefficients(values.size) @ values)
    decay = float(np.max(sizes) / np.max(sizes[-LAST:])) ** (1 / (values.size - LAST))
    return 1.0 if decay >= FINE_DECAY else _distance(decay) / _distance(COARSE_DECAY)


def _distance(decay: float) -> float:
    """How far off the nearest singularity is, over the reach: half an axis of the ellipse through it."""
    return max(decay - 1 / decay, 0.1) / 2


def _table(values: Floats, errors: Floats) -> LinkTable | None:
    """The polynomial through energies that fall from the place 1 to −1; None where its last coefficients matter."""
    count = values.size
    matrix = chebyshev_coefficients(count)
    coefficients, radius = matrix @ values, np.abs(matrix) @ errors
    tail = float(np.max(np.abs(coefficients[-LAST:])))
    if tail > max(TAIL, TAIL_RADII * float(np.max(radius[-LAST:]))):
        return None
    radius = radius + tail
    slopes = np.polynomial.chebyshev.chebval(
        np.linspace(-1, 1, PLACES), derivative := np.polynomial.chebyshev.chebder(coefficients)
    )
    if not np.min(slopes) > 0:
        raise Unrecoverable(Outcome.WRONG_FAMILY, FOLDS)
    at_zero = np.polynomial.chebyshev.chebval(0.0, np.polynomial.chebyshev.chebder(np.eye(count)))
    reach = float(np.polynomial.chebyshev.chebval(0.0, derivative))
    unit_error = float(np.abs(at_zero @ matrix) @ errors + tail * count) / reach
    everywhere = np.abs(np.polynomial.chebyshev.chebvander(np.linspace(-1, 1, PLACES), count - 1) @ matrix)
    energy_error = float(np.max(everywhere @ errors)) + LAST * tail
    # In the unit of the true slope coefficients are those of a function that is stretched by the error of this one.
    radius = radius + 2 * unit_error * float(np.max(np.abs(slopes)))
    return LinkTable(Tabulated(coefficients, reach), radius, energy_error, unit_error)
