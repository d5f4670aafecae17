"""Networks of GELU or SiLU neurons: at long tokens their kinks are sharp, at short ones each shows its width."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.families import ReluNet
from keyhole.families.activations import activate
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.relu_net.exact.cells import EXTRA_CELLS, ask_wide_cells, pieces_of, solve_neurons
from keyhole.methods.relu_net.exact.estimate import estimate_net, heldout_tokens
from keyhole.methods.relu_net.exact.kink_search import NotPiecewiseLinear
from keyhole.methods.relu_net.exact.queries import Pieces, TokenQueries
from keyhole.methods.relu_net.exact.refit import NetArrays, Refit, answers_of, refit
from keyhole.methods.relu_net.exact.several_outputs import new_wide_tokens, pieces_of_fit

# Tokens this much longer than usual see kinks that are sharp to the last digits of a window around them.
FARTHEST = 1e12
# Where lines seen from there do not show sharp kinks, neurons bend over lengths that are this much longer than usual.
FARTHER = 1e4
# At this length offsets are known to many digits and neurons off their kinks are still on or off for good; the second
# for neurons that bend slowly.
FAR = (1e5, 1e8)
# Variance of what is not known yet, in units of the answers.
VAGUE = 1e6
# How far a neuron is from its kink is guessed until it is neither on for good nor half on: these parts of a slope.
LEAST_BEND, MOST_BEND = 0.02, 0.42
GUESSES, GUESS = 12, 6.0
# Places on a kink among which the one furthest from other kinks is taken.
PLACES = 200
# A fit is one of the right activation when residuals are below this part of the answers.
ANOTHER_FUNCTION = 1e-6
# A neuron bends where what enters it is below this.
BENDING = 2.0
# In a fit answers near kinks tell most: equations for each unknown.
EQUATIONS_NEAR = 1.5


# Pieces, and at a distance (k,) of each neuron from its kink how much it bends (k,): 1 − act(z)/z at z = |a|·distance,
# half at the kink, none far away.
Bends = tuple[Pieces, Floats, Floats]


def ask_smooth(
    queries: TokenQueries,
    rng: np.random.Generator,
    far: Pieces,
    farther: float,
    names: tuple[str, ...],
    skip: bool | None,
    lines: int,
) -> Steps[tuple[Estimate[ReluNet], float]]:
    """The net of one of these activations that fits, and the typical distance of its kinks.

    act(z) = z + act(−z) as for ReLU. `far` is the net of ReLU neurons that it is far away, `farther` times as far as
    usual, from as many `lines`, which tells all but the lengths |a_i|; 1 − act(z)/z of an answer beside a kink tells
    those; then all parameters are fitted together to new answers.
    NotPiecewiseLinear where nothing fits.
    """
    failure: NotPiecewiseLinear | None = None
    for length in FAR:
        try:
            nearer = TokenQueries(queries.signature, farther * length)
            start = yield from _ask_nearer(nearer, far.in_unit(FARTHEST / length), rng)
            fit, name, scale = yield from _ask_fit(queries, start, names, rng)
        except NotPiecewiseLinear as error:
            failure = error
            continue
        pieces, radii = pieces_of_fit(fit)
        sharpness = np.linalg.norm(fit.net.inner, axis=1)
        details = {"lines": lines, "polished": True}
        return estimate_net(queries, pieces, radii, skip, details, name, sharpness), scale
    assert failure is not None
    raise failure


def _ask_nearer(far: TokenQueries, seen: Pieces, rng: np.random.Generator) -> Steps[Bends]:
    """Kinks with their offsets, and how the neurons bend there, in tokens of length one; `seen` is in those of far."""
    rough = seen
    if seen.weight.shape[1] == 1:
        count = seen.count + 2 + int(EXTRA_CELLS * seen.count)
        vague = VAGUE * float(seen.size(np.asarray(far.width**0.5))) ** 2 * np.eye(seen.count + 1)
        rows = yield from ask_wide_cells(far, seen, vague, 1.0, count, rng, "polish", _beside_kinks(seen, rng))
        if np.linalg.matrix_rank(rows.active) < seen.count + 1:
            raise NotPiecewiseLinear("the cells of a smooth network could not be told apart")
        seen = pieces_of(solve_neurons(rows), rough.normal)
    else:
        x = new_wide_tokens(far, seen, 1.0, rng)
        answers = yield from far.ask("polish", x)
        errors = far.rounding * seen.size(np.linalg.norm(x, axis=1)) + far.noise
        start = NetArrays(seen.normal, seen.offset, seen.weight, seen.affine)
        seen = pieces_of_fit(refit(start, x, answers, errors, "relu", rng))[0]
    return (yield from _ask_bends(far, seen, rng))


def _beside_kinks(pieces: Pieces, rng: np.random.Generator) -> Floats:  # (2k, width)
    """Tokens on either side of every kink, half-way to the next: random ones miss cells between kinks nearly parallel."""
    places = _on_kinks(pieces, rng)
    away = np.abs(pieces.heights(places))
    np.fill_diagonal(away, np.inf)
    step = 0.5 * np.min(away, axis=1, initial=1.0)[:, None] * pieces.normal
    return np.concatenate([places + step, places - step])


def _ask_bends(far: TokenQueries, pieces: Pieces, rng: np.random.Generator) -> Steps[Bends]:
    """How much each neuron bends at some distance from its kink, where it neither bends fully nor hardly."""
    count = pieces.count
    places = _on_kinks(pieces, rng)
    load = np.einsum("ko,ko->k", pieces.weight, pieces.weight)
    distance, bend = np.full(count, 1.0 / far.length), np.full(count, np.nan)
    low, high = np.zeros(count), np.full(count, np.inf)
    todo = np.arange(count)
    for _ in range(GUESSES):
        x = places[todo] + distance[todo, None] * pieces.normal[todo]
        answers = yield from far.ask("bends", x)
        short = np.einsum("no,no->n", pieces(x) - answers, pieces.weight[todo]) / load[todo]
        bend[todo] = short / distance[todo]
        near, away = bend[todo] > MOST_BEND, bend[todo] < LEAST_BEND
        low[todo[near]], high[todo[away]] = distance[todo[near]], distance[todo[away]]
        todo = todo[near | away]
        if todo.size == 0:
            return pieces.in_unit(far.length), distance * far.length, bend
        # Longer or shorter by a factor until both sides are known, then in between.
        guess = np.where(low[todo] > 0, np.sqrt(low[todo] * high[todo]), high[todo] / GUESS)
        distance[todo] = np.where(np.isinf(high[todo]), low[todo] * GUESS, guess)
    raise NotPiecewiseLinear("kinks of the box are sharp, or no kinks of smooth neurons")


def _on_kinks(pieces: Pieces, rng: np.random.Generator) -> Floats:  # (k, width)
    """A token on every kink, far from all the others."""
    x = rng.standard_normal((PLACES, pieces.normal.shape[1]))
    heights, nearness = pieces.heights(x), pieces.normal @ pieces.normal.T
    places = np.empty_like(pieces.normal)
    for kink in range(pieces.count):
        others = np.abs(heights - heights[:, kink : kink + 1] * nearness[kink])
        others[:, kink] = np.inf
        best = int(np.argmax(np.min(others, axis=1)))
        places[kink] = x[best] - heights[best, kink] * pieces.normal[kink]
    return places


def _ask_fit(
    queries: TokenQueries, start: Bends, names: tuple[str, ...], rng: np.random.Generator
) -> Steps[tuple[Refit, str, float]]:
    """All parameters fitted to new answers, with the activation that is nearest to them at first."""
    pieces, distance, bend = start
    outputs, width = pieces.weight.shape[1], queries.width
    offsets = np.abs(pieces.offset)
    scale = float(np.median(offsets)) if np.any(offsets > 0) else 1.0
    lengths = {name: _sharpness(name, bend) / distance for name in names}
    # Neurons bend over 1/|a|: where that is wider than their distance from the origin, tokens must be longer.
    scale = max(scale, float(np.median(1 / lengths[names[0]])) if pieces.count else 1.0)
    unknowns = pieces.count * (width + 1 + outputs) + outputs * (width + 1)
    count = int(np.ceil(EQUATIONS_NEAR * unknowns / outputs)) + 4
    x = _tokens(queries, pieces, scale, BENDING / lengths[names[0]], count, rng)
    answers = yield from queries.ask("polish", x)
    errors = queries.rounding * pieces.size(np.linalg.norm(x, axis=1)) + queries.noise
    nets = {
        name: NetArrays(pieces.normal * a[:, None], pieces.offset * a, pieces.weight / a[:, None], pieces.affine)
        for name, a in lengths.items()
    }
    misses = {name: float(np.linalg.norm(answers - answers_of(net, x, name))) for name, net in nets.items()}
    best = min(misses, key=lambda name: misses[name])
    fit = refit(nets[best], x, answers, errors, best, rng)
    left = np.max(np.abs(answers - answers_of(fit.net, x, best)))
    if not left <= ANOTHER_FUNCTION * np.max(np.abs(answers)):
        raise NotPiecewiseLinear(f"no smooth activation fits: the best, {best}, misses answers by {left:.2g}")
    return fit, best, scale


def _tokens(
    queries: TokenQueries, pieces: Pieces, scale: float, bending: Floats, count: int, rng: np.random.Generator
) -> Floats:
    """Half of them anywhere, half beside a kink, and more beside kinks of which the others see one side only.

    Beside a kink every other one lies where its neuron still bends.
    """
    if not pieces.count:
        return heldout_tokens(queries, scale, count, rng)
    beside = -(-count // 2)
    x = heldout_tokens(queries, scale, count - beside, rng)
    on = np.sum(pieces.heights(x) > 0, axis=0)
    even = beside // pieces.count + (np.arange(pieces.count) < beside % pieces.count)
    need = int(np.ceil(EQUATIONS_NEAR * (queries.width + 2)))
    kink = np.repeat(np.arange(pieces.count), np.maximum(even, need - np.minimum(on, x.shape[0] - on)))
    near = np.arange(kink.size) % 2 == 0
    height = np.where(near, np.minimum(scale, bending[kink]), np.maximum(scale, bending[kink]))
    more = heldout_tokens(queries, scale, kink.size, rng)
    now = np.einsum("nd,nd->n", more, pieces.normal[kink]) + pieces.offset[kink]
    more += (height * rng.uniform(-1.5, 1.5, kink.size) - now)[:, None] * pieces.normal[kink]
    return np.concatenate([x, more])


def _sharpness(name: str, bend: Floats) -> Floats:
    """Where 1 − act(z)/z is `bend`, z > 0, by bisection."""
    low, high = np.zeros_like(bend), np.full_like(bend, 40.0)
    for _ in range(60):
        middle = 0.5 * (low + high)
        flat = 1 - activate(name, middle) / middle > bend
        low, high = np.where(flat, middle, low), np.where(flat, high, middle)
    return np.asarray(0.5 * (low + high))
