"""Which way neurons point: a kink looks the same from both sides, but the affine remainder tells."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Booleans, Floats
from keyhole.methods.relu_net.exact.lattice import subset_with_sum

# Residuals may be this many times their radius, which is itself several standard deviations.
SLACK = 4.0
# Errors are expected to be this much smaller than that: each bit more makes the right choice of neurons easier to find.
EXPECTED = 16.0
# Lattice reduction of 256 neurons takes a minute; of more than this it is not tried.
MOST_FOR_LATTICE = 288
# A subset sum is unique beyond doubt when other subsets meet it with this probability (minus a power of 2).
DOUBT_BITS = 20.0


def solve_orientation(
    jumps: Floats,  # (k, n) the linear map of each neuron, flattened
    remainder: Floats,  # (n,) that of no neuron
    jump_errors: Floats,  # (k,) bars on entries
    remainder_error: float,
    most: int = MOST_FOR_LATTICE,
) -> tuple[Booleans | None, str]:  # (k,) and a word on it
    """Neurons that point the other way, w·max(0, −z) = w·max(0, z) − w·z, so that their jumps add up to −remainder.

    The words: "found", "not identifiable" (nothing or too much fits) and "not found".
    """
    count, equations = jumps.shape
    bar = SLACK * (np.sqrt(np.sum(jump_errors**2)) + remainder_error)
    size = float(np.max(np.abs(jumps), initial=0.0))
    if size == 0.0:
        return (np.zeros(0, dtype=bool), "found") if np.all(np.abs(remainder) <= bar) else (None, "not identifiable")
    _, values, basis = np.linalg.svd(jumps, full_matrices=False)
    rank = int(np.sum(values > SLACK * max(bar, np.finfo(float).eps * values[0])))
    # In the span of the jumps: fewer equations, all of them telling.
    inside, wanted = jumps @ basis[:rank].T, -(basis[:rank] @ remainder)
    past = np.max(np.abs(remainder + basis[:rank].T @ wanted)) > bar * equations**0.5  # a way past the neurons
    bits = float(np.log2(size / max(bar, np.finfo(float).tiny)))
    if past or (rank < count and rank * bits < count + DOUBT_BITS):
        return None, "not identifiable"  # of many neurons: other choices add up to the same, as far as is known
    if rank == count:
        return _adding_up(np.rint(np.linalg.lstsq(inside.T, wanted, rcond=None)[0]), jumps, remainder, bar)
    chosen = subset_with_sum(inside, wanted, bar / EXPECTED) if count <= most else None
    return (None, "not found") if chosen is None else _adding_up(chosen.astype(np.float64), jumps, remainder, bar)


def _adding_up(share: Floats, jumps: Floats, remainder: Floats, bar: float) -> tuple[Booleans | None, str]:
    """A choice, if it is one and adds up."""
    adds_up = np.max(np.abs(share @ jumps + remainder)) <= bar
    if adds_up and np.all((share == 0) | (share == 1)):
        return np.asarray(share == 1), "found"
    return None, "not identifiable"
