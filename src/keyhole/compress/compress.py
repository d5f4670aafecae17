"""`keyhole.compress`: fewer heads, then the ranks that give the least error for their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.compress.heads import head_count, with_fewer_heads
from keyhole.compress.inputs import Batches, draw_batches, relative_error
from keyhole.compress.matrices import Truncation, roots
from keyhole.compress.result import MATRIX, Compressed, Point, size_of
from keyhole.errors import UsageError
from keyhole.families.base import F, is_family
from keyhole.gauge.tolerance import refuse_odd_numbers
from keyhole.methods import stream
from keyhole.numerics.domain import Sampler

# Points of a curve that are measured.
MOST_POINTS = 48
BOTH_SIDES = {"score": True, "value": False}  # matrices by the last step of their name: whether tokens stand at both


def compress(
    params: F,
    tolerance: float | None = None,
    *,
    rank: int | None = None,
    heads: int | None = None,
    domain: Sampler | Sequence[Array] | None = None,
    seed: int = 0,
) -> Compressed[F]:
    """Parameters of the same family that keep fewer numbers and answer almost alike.

    `heads` is how many to keep: the two most alike are merged, or the one that matters least is left out. `rank` caps
    the ranks of score and value matrices. With a `tolerance` the ranks are the fewest numbers whose answers change by
    no more, relatively and in root mean square; where none do, `met` says so, and they are those that change least.
    Without one they are as large as `rank` allows. At least one of the three is needed.

    Changes are measured on inputs of `domain`, as for `keyhole.recover`, or on random ones: some choose the path from
    the largest ranks down, others measure how far it may be followed.
    """
    _check(params, tolerance, rank, heads)
    chosen, held, words = draw_batches(params, domain, stream(seed, "compress"))
    given = params
    changes: list[str] = []
    if heads is not None:
        params, changes = with_fewer_heads(params, heads, chosen)
    matrices = _truncations(params, chosen)
    if not matrices:
        raise UsageError(f"a {params.family} of this kind has no score or value matrices, which is what is compressed")
    true, original = held.answers(given), sum(int(np.prod(array.shape)) for array in given.arrays().values())
    curve = []
    for ranks in _choices(params, matrices, chosen, rank):
        error = relative_error(held.answers(_cut(params, matrices, ranks)), true)
        curve.append(Point(_size(params, ranks), error, ranks))
    curve.sort(key=lambda point: (-point.size, point.error))
    best = curve[0]
    if tolerance is not None:
        met = [point for point in curve if point.error <= tolerance]
        best = met[-1] if met else min(curve, key=lambda point: point.error)
    made = _cut(params, matrices, best.ranks)
    return Compressed(made, best.size, original, best.error, best.ranks, tuple(changes), tuple(curve), words, tolerance)


def _check(params: F, tolerance: float | None, rank: int | None, heads: int | None) -> None:
    if not is_family(params) or params.positions != "last":
        raise UsageError(f"params must be parameters such as a MultiHead, not {type(params).__name__}")
    refuse_odd_numbers(params)
    if params.tells_labels:
        raise UsageError("answers of labels have no size that an error could be compared with: compress their numbers")
    if tolerance is None and rank is None and heads is None:
        raise UsageError("say how small: tolerance=1e-3, rank=8 or heads=4")
    if tolerance is not None and not 0 <= tolerance < 1:
        raise UsageError(f"tolerance must be a number from 0 to less than 1, not {tolerance!r}")
    for name, number, least in (("rank", rank, 0), ("heads", heads, 1)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise UsageError(f"{name} must be a whole number of at least {least}, not {number!r}")
    if heads is not None and heads > head_count(params):
        raise UsageError(f"there are {head_count(params)} heads: heads={heads} asks for more")


def _truncations(params: F, batches: Batches) -> dict[str, Truncation]:
    """The matrices that can be of lower rank, by name."""
    root, inverse = roots(batches.moments())
    return {
        name: Truncation(floats(array), root, inverse, BOTH_SIDES[part])
        for name, array in params.arrays().items()
        if (part := name.rpartition(".")[2]) in BOTH_SIDES and array.ndim == MATRIX
    }


def _choices(
    params: F, matrices: Mapping[str, Truncation], batches: Batches, most: int | None
) -> list[Mapping[str, int]]:
    """Ranks of all matrices from the largest down, each time the step that adds the least squared error per number.

    Squares of the changes by each matrix alone are added up, which orders steps; what they are together is measured.
    """
    true = batches.answers(params)
    steps: dict[str, list[tuple[int, float, int]]] = {}  # (rank, squared error, size), by falling size
    for name, matrix in matrices.items():
        found: list[tuple[int, float, int]] = []
        for rank in matrix.ranks(most):
            error = relative_error(batches.answers(_cut(params, matrices, {name: rank})), true)
            size = size_of(matrix.matrix, rank)
            if not found or size < found[-1][2]:  # two factors may be more numbers than their product
                found.append((rank, error**2, size))
        steps[name] = found
    at = dict.fromkeys(steps, 0)
    path: list[Mapping[str, int]] = []
    while True:
        path.append({name: steps[name][place][0] for name, place in at.items()})
        ways = {
            name: (steps[name][later][1] - steps[name][place][1]) / (steps[name][place][2] - steps[name][later][2])
            for name, place in at.items()
            for later in range(place + 1, min(place + 2, len(steps[name])))
        }
        if not ways:
            break
        at[min(ways, key=lambda name: ways[name])] += 1
    places = np.unique(np.linspace(0, len(path) - 1, MOST_POINTS).round().astype(int))
    return [path[int(place)] for place in places]


def _cut(params: F, matrices: Mapping[str, Truncation], ranks: Mapping[str, int]) -> F:
    """The parameters with matrices of these ranks."""
    arrays = params.arrays()
    return params.with_arrays({**arrays, **{name: matrices[name].of_rank(rank) for name, rank in ranks.items()}})


def _size(params: F, ranks: Mapping[str, int]) -> int:
    arrays: dict[str, Floats] = {name: floats(array) for name, array in params.arrays().items()}
    return sum(size_of(array, ranks.get(name)) for name, array in arrays.items())
