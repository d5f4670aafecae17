"""One head from answers with any errors of at most τ: every entry with a radius that no adversary can leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Array, Floats, Space
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.certificate import coarseness
from keyhole.methods.forms.value import check_length
from keyhole.methods.robust.bounded.design import ScoreTable
from keyhole.methods.robust.bounded.interval import Interval
from keyhole.methods.robust.bounded.low_rank import LowRankReader
from keyhole.methods.robust.bounded.reader import BoundedReader
from keyhole.methods.robust.bounded.score import ScoreReader
from keyhole.queries import Signature

FAMILY = (
    "the box computes one softmax head over its raw tokens, read at the last position",
    "every answer is right up to the rounding of its dtype and an error of at most the declared tolerance",
)
ASSUMPTIONS = (
    *FAMILY,
    "the head has no biases: one that the tolerance hides (details say how large it may be) is not within the radii",
)
ASSUMPTIONS_COVERED = (*FAMILY, "biases did not show: those that the tolerance hides are within the radii")

UNLUCKY_SKETCH = (
    "the random tokens were not unlucky: with probability 1e-5 they hide a part of the score matrix beyond its radius"
)

# Radii of a score of low rank must be so much finer than those that a certificate just accepts, by the mean of so many
# draws of its queries.
FINE, DRAWS = 0.6, 4
# Copies of each token of a pair, where none are asked for: more gain little.
COPIES = 16


def bounded(
    signature: Signature,
    rng: np.random.Generator,
    *,
    copies: int = COPIES,
    cover_biases: bool = False,
    low_rank: bool = False,
) -> Steps[Estimate[SingleHead]]:
    """Score matrix and value of f(X) = Σ_i softmax_i(x_iᵀ·W·x_N) · x_iᵀ·V from answers with any errors |e| ≤ τ.

    The robust version of theorem 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): ε-accuracy
    under additive tolerance, given margin and norm conditions, which are checked and reported. Sequences hold
    `copies` tokens x, as many −x, and one g = s·e_b; with x_a = p·v̂ + r·e_a an entry of W takes two of them,
    x_a and x_0 ∥ v, and its radius is 2√2·τ/(B³|v|) for tokens of norm B: √2 times the spectral norm that errors of
    τ hide from any queries. d² + 3d + 8 queries, a few more where logits are large; d² + 2d + 11
    where norms are free, and then rounding is all that is left of the radius.

    With `low_rank` a random sketch comes first, and where it shows a rank r that is low, r columns do: some
    (2r + 10)·d queries, radii hundreds of times as wide, since they hold whatever the tolerance hides of further rank.

    Biases that show are refused. With `cover_biases` the radii, three to six times as wide and for d − 2 queries more,
    also hold for heads whose biases hide in the tolerance. Assumes what `ASSUMPTIONS` says.
    """
    check_length(signature)
    reader = BoundedReader(signature, copies, cover_biases)
    value, shape = yield from reader.ask_value()
    design = yield from reader.ask_overlap(value)
    if cover_biases:
        design = yield from reader.ask_bias_bound(value, design)
        hidden: float | None = float(np.max(design.bias.size))
    else:
        hidden = yield from reader.ask_bias_check(value, design, rng)
    scale = yield from reader.ask_scale(value, design, rng)
    table = ScoreTable(value, design, reader.layout, signature.space.eps)
    entries = ScoreReader(reader, table)
    yield from entries.ask_diagonal(scale)
    if low_rank:
        estimate = yield from _ask_low_rank(entries, shape, hidden, rng)
        if estimate is not None:
            return estimate
    yield from entries.ask_rest(rng)
    score = entries.solve()
    if reader.free:
        yield from entries.ask_form_check(score, rng)
    return _estimate(reader, table, score, shape, hidden)


def _ask_low_rank(
    entries: ScoreReader, shape: tuple[int, ...], hidden: float | None, rng: np.random.Generator
) -> Steps[Estimate[SingleHead] | None]:
    """The head where its score is of low rank, and its radii fine enough for a certificate; None elsewhere."""
    reader, judge = LowRankReader(entries, rng), np.random.default_rng(rng.integers(2**63))
    found = yield from reader.ask()
    while found is not None:
        estimate = _estimate(entries.reader, entries.table, found.score, shape, hidden)
        estimate = replace(
            estimate,
            counting_bound=found.rank * (2 * entries.width - found.rank) + entries.width,
            assumptions=(*estimate.assumptions, UNLUCKY_SKETCH),
            details={"rank": found.rank, "tail": found.tail, **estimate.details},
        )
        times = np.mean([coarseness(estimate, entries.reader.signature, judge) for _ in range(DRAWS)])
        if times <= FINE:
            if entries.reader.free:
                yield from entries.ask_form_check(found.score, rng)
            return estimate
        found = yield from reader.ask_more()
    return None


def _estimate(
    reader: BoundedReader,
    table: ScoreTable,
    score: Interval,
    shape: tuple[int, ...],
    hidden: float | None,
) -> Estimate[SingleHead]:
    """Parameters, radii, and the conditions they rest on."""
    space, value, design = reader.space, table.value, table.design
    vector, around = (part.reshape((reader.width, *shape)) for part in (value.vector, value.radius))
    # What cannot be told from nothing is taken for nothing: tokens made for its logits would be of any length.
    silent = bool(np.all(np.abs(score.middle) <= score.radius))
    matrix, matrix_radius = (0 * score.middle, score.size) if silent else (score.middle, score.radius)
    radius = SingleHead(_radius(space, matrix, matrix_radius), _radius(space, vector, around))
    if reader.cover_biases:
        biases = _radius(space, 0.0, design.bias.size), _radius(space, 0.0, value.hidden_bias.reshape(shape))
        radius = replace(radius, score_bias=biases[0], output_bias=biases[1])
    row, column = table.entries_to_ask()
    forms = table.forms(row, column, table.diagonal(np.linalg.norm(score.size, axis=0)))
    logits, overlap = np.abs(forms.middle) * table.scale[row, column], design.overlap[row]
    # The logit at which the answer comes within its own errors of the value of the first token.
    gap = (overlap.radius + table.radius[row, column]) / overlap.middle
    saturation = float(np.max(logits / np.arctanh(1 - gap)))
    floor = 0.0 if reader.free else 2 * reader.signature.noise.radius / (reader.longest**3 * value.norm)
    return Estimate(
        params=SingleHead(space.asarray(matrix), space.asarray(vector)),
        radius=radius,
        counting_bound=reader.width**2 + reader.width,
        assumptions=ASSUMPTIONS_COVERED if reader.cover_biases else ASSUMPTIONS,
        details={
            "margin": design.margin,
            "norm": saturation,
            "floor": floor,
            "largest_radius": float(np.max(score.radius)),
            "largest_logit": float(np.max(logits)),
            "copies": reader.layout.plus,
            "output": value.output,
            "hidden_output_bias": float(np.max(value.hidden_bias)),
            "hidden_score_bias": hidden,
            "conditions": {  # of the theorem
                "margin": {"value": design.margin, "needed": reader.least_margin, "holds": True},
                "norm": {"value": saturation, "needed": 1.0, "holds": saturation <= 1.0},
            },
        },
    )


def _radius(space: Space, centre: Floats | float, radius: Floats) -> Array:
    """Radii that also cover the rounding of centre and radius to the oracle's dtype."""
    eps = space.spacing
    return space.asarray((radius + eps * np.abs(centre)) * (1 + 4 * eps) + space.tiny)
