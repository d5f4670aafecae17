"""Members of the families: heads, several heads, residuals, nets, layers, at all scales, generic and degenerate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Kinds, Random, decades, one_of
from benchmarks.fuzz.maps import Floats, Head, Heads, Layer, Net

MEMBERS = Kinds("member")
SMOOTH = ("gelu", "gelu_tanh", "silu")


def draw_width(rng: Random, most: int = 16) -> int:
    """Small widths mostly: recoveries take a fraction of a second."""
    return min(most, int(one_of(rng, (1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 8, 10, 12, 16))))


def draw_outputs(rng: Random, width: int) -> int:
    return int(one_of(rng, (1, 2, 3, 4, width, width + 2)))


def natural_size(score: float, width: int) -> float:
    """Entries of tokens whose logits are of order one, for a score matrix with entries of size score/√d."""
    return (score * math.sqrt(width)) ** -0.5


def boxed(params: Heads | Net | Layer, width: int, scalar: bool, size: float, limit: str = "") -> Box:
    if isinstance(params, Net):
        return Box(params.map(), width, scalar, size, params, limit=limit, kinks=onto_kinks(params))
    return Box(params.map(), width, scalar, size, params, limit=limit)


def onto_kinks(net: Net) -> Callable[[Floats, Random], Floats]:
    """Moves vectors to the kink of one neuron each."""

    def move(x: Floats, rng: Random) -> Floats:
        squares = np.sum(net.inner**2, axis=1)
        (used,) = np.nonzero(squares > 0)
        if not used.size:
            return x
        chosen = rng.choice(used, len(x))
        heights = np.sum(x * net.inner[chosen], axis=1) + net.inner_bias[chosen]
        return x - (heights / squares[chosen])[:, None] * net.inner[chosen]

    return move


# --- one head -------------------------------------------------------------------------------------------------------


def draw_score(rng: Random, width: int, scale: float, rank: int | None = None) -> Floats:
    """Entries of size scale/√d."""
    if rank is None:
        return scale * rng.standard_normal((width, width)) / math.sqrt(width)
    left, right = rng.standard_normal((2, width, rank))
    return scale * left @ right.T / math.sqrt(width * rank)


def draw_head(
    rng: Random,
    *,
    rank: int | None = None,
    query_bias: bool = False,
    score_bias: bool = False,
    output_bias: bool = False,
) -> Box:
    width = draw_width(rng)
    rank = None if rank is None else min(rank, width)
    scale, loud = decades(rng, -4, 4), decades(rng, -4, 4)
    size = natural_size(scale, width)
    scalar = bool(rng.integers(2))
    outputs = 1 if scalar else draw_outputs(rng, width)
    bias = np.zeros(width)
    if query_bias:  # keys times a bias of the queries: it lies in the column space of the score matrix
        kept = rank or width
        left, right = rng.standard_normal((2, width, kept))
        score = scale * left @ right.T / math.sqrt(width * kept)
        bias = scale * size * left @ rng.standard_normal(kept) / math.sqrt(kept) * decades(rng, -1, 1)
    else:
        score = draw_score(rng, width, scale, rank)
    if score_bias:
        bias = scale * size * rng.standard_normal(width) * decades(rng, -1, 1)
    constant = size * loud * rng.standard_normal(outputs) * decades(rng, -1, 1) if output_bias else np.zeros(outputs)
    head = Head(score, bias, loud * rng.standard_normal((width, outputs)))
    return boxed(Heads((head,), constant), width, scalar, size)


MEMBERS.add("one head", "full rank", draw_head)
MEMBERS.add("one head", "low rank", lambda rng: draw_head(rng, rank=int(rng.integers(1, 4))))
MEMBERS.add("one head", "score bias", lambda rng: draw_head(rng, score_bias=True))
MEMBERS.add("one head", "query bias", lambda rng: draw_head(rng, query_bias=True))
MEMBERS.add(
    "one head", "query bias, low rank", lambda rng: draw_head(rng, query_bias=True, rank=int(rng.integers(1, 4)))
)
MEMBERS.add("one head", "output bias", lambda rng: draw_head(rng, output_bias=True))
MEMBERS.add("one head", "all biases", lambda rng: draw_head(rng, score_bias=True, output_bias=True))


def plain_matrix(rng: Random, width: int) -> Floats:
    """What somebody types in."""
    grid = np.arange(width)
    choices: list[Callable[[], Floats]] = [
        lambda: np.eye(width),
        lambda: -np.eye(width),
        lambda: np.ones((width, width)),
        lambda: np.eye(width)[rng.permutation(width)],
        lambda: np.flip(np.eye(width), 0),
        lambda: rng.integers(-3, 4, (width, width)).astype(float),
        lambda: rng.integers(0, 2, (width, width)).astype(float),
        lambda: np.zeros((width, width)),
        lambda: np.diag(grid + 1.0),
        lambda: np.diag((grid == 0).astype(float)),
        lambda: 2.0 * np.eye(width) - np.eye(width, k=1) - np.eye(width, k=-1),
        lambda: np.eye(width) - np.ones((width, width)) / width,
        lambda: np.ones((width, width)) / width,
        lambda: np.tril(np.ones((width, width))),
        lambda: np.outer(grid + 1.0, np.ones(width)),
        lambda: np.outer(np.ones(width), (-1.0) ** grid),
        lambda: np.cos(np.pi * np.outer(grid, grid + 0.5) / width),
        lambda: np.roll(np.eye(width), 1, axis=0),
        lambda: np.round(rng.standard_normal((width, width)), 1),
    ]
    return one_of(rng, choices)()


def plain_value(rng: Random, width: int) -> Floats:
    grid = np.arange(width)
    choices: list[Floats] = [
        np.eye(width)[:, :1],
        np.ones((width, 1)),
        (grid + 1.0)[:, None],
        ((-1.0) ** grid)[:, None],
        np.eye(width),
        np.ones((width, 2)),
        rng.integers(-2, 3, (width, 3)).astype(float),
        np.eye(width)[:, : max(1, width // 2)],
    ]
    return one_of(rng, choices)


def draw_plain_head(rng: Random) -> Box:
    width = draw_width(rng)
    score, value = plain_matrix(rng, width), plain_value(rng, width)
    bias = one_of(rng, (np.zeros(width), np.zeros(width), np.ones(width), np.eye(width)[0]))
    scalar = value.shape[1] == 1 and bool(rng.integers(4))
    constant = np.zeros(value.shape[1]) if rng.random() < 0.7 else np.ones(value.shape[1])
    limit = "" if np.any(value) else "a value of zero shows nothing"
    return boxed(Heads((Head(score, bias, value),), constant), width, scalar, width**-0.25, limit)


def draw_no_scores(rng: Random) -> Box:
    """An average, with or without a score bias."""
    width = draw_width(rng)
    scalar = bool(rng.integers(2))
    value = rng.standard_normal((width, 1 if scalar else draw_outputs(rng, width))) * decades(rng, -4, 4)
    bias = rng.standard_normal(width) * decades(rng, -2, 2) * int(rng.integers(2))
    constant = rng.standard_normal(value.shape[1]) * int(rng.integers(2))
    return boxed(Heads((Head(np.zeros((width, width)), bias, value),), constant), width, scalar, 1.0)


def draw_uneven_head(rng: Random) -> Box:
    """Value columns over six decades, some of them zero."""
    box = draw_head(rng)
    heads: Heads = box.params
    (head,) = heads.heads
    factors = 10 ** rng.uniform(-6, 0, head.value.shape[1])
    factors[rng.random(len(factors)) < 0.2] = 0.0
    value = head.value * factors
    limit = "" if np.any(value) else "a value of zero shows nothing"
    return boxed(Heads((replace(head, value=value),), heads.constant), box.width, box.scalar, box.size, limit)


MEMBERS.add("one head", "typed-in matrices", draw_plain_head)
MEMBERS.add("one head", "score of zero", draw_no_scores)
MEMBERS.add("one head", "uneven outputs", draw_uneven_head)


# --- several heads --------------------------------------------------------------------------------------------------


def draw_heads(rng: Random, scalar: bool, relation: str = "", *, square: bool = False, most_width: int = 8) -> Box:
    """Two to four heads; `relation` says what is special about two of them."""
    width = draw_width(rng, most_width) if not square else max(2, draw_width(rng, most_width))
    count = int(rng.integers(2, 5))
    outputs = 1 if scalar else width if square else int(one_of(rng, (count, count + 1, width, 2 * count)))
    scale, loud = decades(rng, -3, 3), decades(rng, -3, 3)
    size = natural_size(scale, width)
    biases = rng.random() < 0.3
    heads = []
    for _ in range(count):
        rank = None if rng.random() < 0.7 else int(rng.integers(1, width + 1))
        score = draw_score(rng, width, scale * decades(rng, -0.5, 0.5), rank)
        bias = scale * size * rng.standard_normal(width) if biases else np.zeros(width)
        heads.append(Head(score, bias, loud * rng.standard_normal((width, outputs))))
    first, second, *rest = heads
    limit = ""
    if relation == "equal":
        second = replace(second, score=first.score, bias=first.bias)
    elif relation == "opposite scores":
        second = replace(second, score=-first.score, bias=-first.bias)
    elif relation == "proportional scores":
        factor = float(one_of(rng, (2.0, 0.5, -0.5, 3.0)))
        second = replace(second, score=factor * first.score, bias=factor * first.bias)
    elif relation == "zero scores":
        second = replace(second, score=0 * first.score)
    elif relation == "opposite values":
        second = replace(second, value=-first.value)
        limit = "" if scalar else "values of two heads are opposite"
    elif relation == "equal values":
        second = replace(second, value=first.value)
    elif relation == "low-rank values":
        rank = max(1, outputs // count)
        low = [
            rng.standard_normal((width, rank)) @ rng.standard_normal((rank, outputs)) * loud / rank**0.5 for _ in heads
        ]
        first, second, *rest = [replace(head, value=value) for head, value in zip(heads, low, strict=True)]
    heads = [first, second, *rest]
    if relation in ("uneven outputs", "dead outputs"):
        factors = 10 ** rng.uniform(-4, 0, outputs)
        if relation == "dead outputs":
            factors = np.ones(outputs)
            factors[rng.permutation(outputs)[: max(1, outputs // 3)]] = 0.0
        heads = [replace(head, value=head.value * factors) for head in heads]
    behind_one_number = min(outputs, np.linalg.matrix_rank(np.hstack([head.value.T for head in heads]))) < count
    if relation in ("opposite scores", "proportional scores") and (behind_one_number or width == 1):
        limit = "proportional heads behind fewer numbers than heads"
    if width == 1 and count > 1:  # all scores are multiples of one another
        limit = "width one: all heads are proportional"
    constant = size * loud * rng.standard_normal(outputs) if rng.random() < 0.3 else np.zeros(outputs)
    return boxed(Heads(tuple(heads), constant), width, scalar, size, limit)


RELATIONS = (
    "",
    "equal",
    "opposite scores",
    "proportional scores",
    "zero scores",
    "opposite values",
    "equal values",
    "uneven outputs",
    "dead outputs",
    "low-rank values",
)


def _add_heads() -> None:
    for relation in RELATIONS:
        name = relation or "generic"
        if relation not in ("uneven outputs", "dead outputs", "low-rank values"):
            MEMBERS.add("heads, one number", name, lambda rng, relation=relation: draw_heads(rng, True, relation))
        MEMBERS.add("heads, several outputs", name, lambda rng, relation=relation: draw_heads(rng, False, relation))


_add_heads()


# --- a residual -----------------------------------------------------------------------------------------------------


def with_residual(box: Box) -> Box:
    """The same heads with the last token beside them; they have as many outputs as inputs."""
    params: Heads = replace(box.params, residual=True)
    return boxed(params, box.width, False, box.size, box.limit)


def draw_square_head(rng: Random, *, biases: bool = False) -> Box:
    width = draw_width(rng, 12)
    scale, loud = decades(rng, -4, 4), decades(rng, -2, 2)
    size = natural_size(scale, width)
    bias = scale * size * rng.standard_normal(width) if biases else np.zeros(width)
    constant = size * loud * rng.standard_normal(width) if biases else np.zeros(width)
    rank = None if rng.random() < 0.6 else int(rng.integers(1, width + 1))
    head = Head(draw_score(rng, width, scale, rank), bias, loud * rng.standard_normal((width, width)) / width**0.5)
    return boxed(Heads((head,), constant), width, False, size)


MEMBERS.add("residual", "one head", lambda rng: with_residual(draw_square_head(rng)))
MEMBERS.add("residual", "one head, biases", lambda rng: with_residual(draw_square_head(rng, biases=True)))
MEMBERS.add(
    "residual",
    "several heads",
    lambda rng: with_residual(draw_heads(rng, False, square=True)),
)
MEMBERS.add(
    "residual",
    "several heads, low-rank values",
    lambda rng: with_residual(draw_heads(rng, False, "low-rank values", square=True)),
)


# --- nets -----------------------------------------------------------------------------------------------------------


def draw_net(
    rng: Random,
    activation: str = "relu",
    *,
    biases: bool = True,
    duplicates: bool = False,
    most: int = 20,
    width: int = 0,
    sizes: tuple[float, float, float] | None = None,
) -> tuple[Net, float]:
    """A net, and the size of tokens at which its kinks lie."""
    width = width or draw_width(rng, 8)
    neurons = int(rng.integers(1, most + 1))
    outputs = int(one_of(rng, (1, 1, 2, 3, 4)))
    scale, size, loud = sizes or (decades(rng, -4, 4), decades(rng, -2, 2), decades(rng, -4, 4))
    if activation != "relu":
        size = 1 / scale  # smooth neurons bend where their argument is of order one
    spread = 10 ** rng.normal(0, 0.2, (neurons, 1))
    inner = scale * spread * rng.standard_normal((neurons, width)) / width**0.5
    bias = scale * size * spread[:, 0] * rng.standard_normal(neurons) if biases else np.zeros(neurons)
    outer = loud * rng.standard_normal((outputs, neurons))
    if duplicates and neurons > 1:
        number = int(rng.integers(1, neurons))
        factor = float(one_of(rng, (1.0, -1.0) if activation != "relu" else (1.0, -1.0, 2.0, -0.5)))
        inner[number], bias[number] = factor * inner[0], factor * bias[0]
    skip = np.zeros((outputs, width))
    if rng.random() < 0.3:
        skip = loud * scale * rng.standard_normal((outputs, width))
    constant = loud * scale * size * rng.standard_normal(outputs) * int(rng.integers(2))
    return Net(inner, bias, outer, constant, skip, activation), size


def net_limit(net: Net) -> str:
    """The documented limits of `relu-net`."""
    width = net.inner.shape[1]
    if net.activation == "relu" and not np.any(net.inner_bias) and width <= 2:
        return "all kinks in one point of two dimensions"
    if net.activation != "relu" and width <= 2:
        return "smooth nets of one or two dimensions"
    return ""


def draw_net_box(rng: Random, activation: str = "relu", **options: bool | int) -> Box:
    net, size = draw_net(rng, activation, **options)
    scalar = len(net.outer) == 1 and bool(rng.integers(4))
    limit = net_limit(net)
    if options.get("duplicates") and activation != "relu":
        limit = limit or "parallel smooth neurons"
    return boxed(net, net.inner.shape[1], scalar, size, limit)


def draw_integer_net(rng: Random) -> Box:
    width, neurons = draw_width(rng, 6), int(rng.integers(1, 9))
    inner = rng.integers(-2, 3, (neurons, width)).astype(float)
    bias = rng.integers(-3, 4, neurons).astype(float)
    outputs = int(rng.integers(1, 4))
    outer = rng.integers(-2, 3, (outputs, neurons)).astype(float)
    net = Net(inner, bias, outer, np.zeros(outputs), np.zeros((outputs, width)))
    bends = np.any(inner, axis=1) & np.any(outer, axis=0)
    return boxed(net, width, outputs == 1, 1.0, net_limit(net) if np.any(bends) else "an affine map")


def draw_bump(rng: Random) -> Box:
    """A net with a narrow ridge: three parallel kinks near each other."""
    net, size = draw_net(rng, most=8)
    width = net.inner.shape[1]
    normal = rng.standard_normal(width)
    normal /= np.linalg.norm(normal)
    offset, narrow = size * rng.standard_normal(), size * decades(rng, -4, -1)
    height = float(np.max(np.abs(net.outer))) * float(np.max(np.abs(net.inner))) * size
    ridge = np.array([offset - narrow, offset, offset + narrow])
    heights = np.array([1.0, -2.0, 1.0]) * height / narrow
    outer = np.hstack([net.outer, np.ones((len(net.outer), 1)) * heights])
    inner, bias = np.vstack([net.inner, [normal] * 3]), np.concatenate([net.inner_bias, -ridge])
    ridged = replace(net, inner=inner, inner_bias=bias, outer=outer)
    limit = "narrow bumps may lie between the places that a line was asked at"
    return boxed(ridged, width, len(net.outer) == 1, size, limit)


MEMBERS.add("ReLU net", "generic", draw_net_box)
MEMBERS.add("ReLU net", "no biases", lambda rng: draw_net_box(rng, biases=False))
MEMBERS.add("ReLU net", "duplicates", lambda rng: draw_net_box(rng, duplicates=True))
MEMBERS.add("ReLU net", "few neurons", lambda rng: draw_net_box(rng, most=3))
MEMBERS.add("ReLU net", "integers", draw_integer_net)
MEMBERS.add("ReLU net", "narrow ridge", draw_bump)


def _add_smooth() -> None:
    for activation in SMOOTH:
        MEMBERS.add("smooth net", activation, lambda rng, name=activation: draw_net_box(rng, name, most=8))
    MEMBERS.add(
        "smooth net",
        "duplicates",
        lambda rng: draw_net_box(rng, str(one_of(rng, SMOOTH)), duplicates=True, most=8),
    )
    MEMBERS.add(
        "smooth net", "no biases", lambda rng: draw_net_box(rng, str(one_of(rng, SMOOTH)), biases=False, most=8)
    )


_add_smooth()


# --- one layer ------------------------------------------------------------------------------------------------------


def draw_layer(
    rng: Random,
    *,
    residual: bool,
    activation: str = "relu",
    biases: bool = True,
    score_bias: bool = False,
    most: int = 8,
    heads: int = 1,
) -> tuple[Layer, float]:
    width = draw_width(rng, 8)
    inner = width if residual else int(one_of(rng, (1, 2, 3, 4, width)))
    scale = decades(rng, -2, 2)
    size = natural_size(scale, width)
    loud = 1.0 if residual else decades(rng, -2, 2)
    rank = None if rng.random() < 0.7 else int(rng.integers(1, width + 1))
    bias = scale * size * rng.standard_normal(width) * 0.5 if score_bias else np.zeros(width)
    drawn = [
        Head(draw_score(rng, width, scale, rank), bias, loud * rng.standard_normal((width, inner)) / width**0.5)
        for _ in range(heads)
    ]
    steep = decades(rng, -1, 1) if activation == "relu" else 1 / (size * loud)
    net, _ = draw_net(
        rng, activation, biases=biases, most=most, width=inner, sizes=(steep, size * loud, decades(rng, -2, 2))
    )
    return Layer(tuple(drawn), np.zeros(inner), net, residual), size


def draw_layer_box(rng: Random, **options: bool | str | int) -> Box:
    layer, size = draw_layer(rng, **options)
    limit = ""
    if layer.residual and not np.any(layer.net.inner_bias):
        limit = "a net without biases behind a residual"
    elif np.any(layer.heads[0].bias) and layer.residual:
        limit = "a score bias beside a residual"
    elif layer.net.activation != "relu":
        limit = "smooth nets behind attention need a learner of their own"
    elif len(layer.heads) > 1 and layer.width < 3:
        limit = "several heads of one or two dimensions"
    elif len(layer.heads) > 1 and layer.net.inner.shape[1] == 1:
        limit = "parallel kinks behind several heads"
    elif not np.any(layer.net.inner_bias) and layer.net.inner.shape[1] <= 2:
        limit = "all kinks in one point of two dimensions"
    scalar = len(layer.net.outer) == 1 and bool(rng.integers(4))
    return boxed(layer, layer.width, scalar, size, limit)


def without_score(box: Box) -> Box:
    """The same layer with a mean of all tokens for attention."""
    layer: Layer = box.params
    heads = tuple(replace(head, score=0 * head.score) for head in layer.heads)
    return boxed(replace(layer, heads=heads), box.width, box.scalar, box.size, box.limit)


MEMBERS.add("one layer", "head, then a net", lambda rng: draw_layer_box(rng, residual=False))
MEMBERS.add("one layer", "residual", lambda rng: draw_layer_box(rng, residual=True))
MEMBERS.add("one layer", "score bias", lambda rng: draw_layer_box(rng, residual=False, score_bias=True))
MEMBERS.add("one layer", "net without biases", lambda rng: draw_layer_box(rng, residual=False, biases=False))
MEMBERS.add("one layer", "score of zero", lambda rng: without_score(draw_layer_box(rng, residual=False)))
MEMBERS.add("one layer", "one neuron", lambda rng: draw_layer_box(rng, residual=False, most=1))
MEMBERS.add(
    "one layer",
    "smooth net",
    lambda rng: draw_layer_box(rng, residual=bool(rng.integers(2)), activation=str(one_of(rng, SMOOTH))),
)
MEMBERS.add(
    "one layer",
    "several heads",
    lambda rng: draw_layer_box(rng, residual=bool(rng.integers(2)), heads=int(rng.integers(2, 4))),
)


# --- labels ---------------------------------------------------------------------------------------------------------


def draw_labels(rng: Random, outputs: int, *, threshold: bool = False) -> Box:
    """The sign of one head, or which of its outputs is the largest."""
    width = int(rng.integers(1, 7))
    scale = decades(rng, -2, 2)
    size = natural_size(scale, width)
    head = Head(draw_score(rng, width, scale), np.zeros(width), rng.standard_normal((width, outputs)))
    constant = size * rng.standard_normal(outputs) if threshold else np.zeros(outputs)
    numbers = Heads((head,), constant).map()

    def labels(tokens: Floats) -> Floats:
        answers = numbers(tokens)
        return np.where(answers[:, 0] > 0, 1.0, -1.0) if outputs == 1 else np.argmax(answers, axis=1) * 1.0

    def truth(tokens: Floats) -> Floats:  # nan on a boundary, such as tokens that are all zero
        ordered = np.sort(np.hstack([numbers(tokens), np.zeros((len(tokens), int(outputs == 1)))]), axis=1)
        return np.where(ordered[:, -1] > ordered[:, -2], labels(tokens), np.nan)[:, None]

    limit = "classes of tokens of two numbers meet in too few boundaries" if width == 2 and outputs > 3 else ""
    return Box(truth, width, True, size, answer=labels, labels=True, limit=limit)


MEMBERS.add("labels", "signs", lambda rng: draw_labels(rng, 1))
MEMBERS.add("labels", "signs against a threshold", lambda rng: draw_labels(rng, 1, threshold=True))
MEMBERS.add("labels", "classes", lambda rng: draw_labels(rng, int(rng.integers(3, 6))))
