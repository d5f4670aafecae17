"""Draws the pictures of the documentation: `python -m benchmarks.figures [NAME ...] [--out FOLDER]`.

Each function below is a picture of the same name. It asks small boxes, or reads a table of benchmarks/results; nothing
is drawn by hand. Needs the `report` extra.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from scipy.special import expit

import keyhole as kh
from benchmarks.summaries import first_number, result_rows
from benchmarks.tables.residual import heads_of, matched_scores
from keyhole.families.parts import (
    Alibi,
    DistanceTable,
    Entmax,
    Exp,
    Relu,
    Sigmoid,
    Sink,
    Softcap,
    Sparsemax,
    Sum,
    Window,
)
from keyhole.oracles import Cast, Flipped, Noisy, Rounded
from keyhole.report.charts import short
from keyhole.targets import random_multi_head

Floats = npt.NDArray[np.float64]

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
INK, FAINT = "#22303c", "#9aa5b1"
BLUE, ORANGE, GREEN, RED = "#1f5fa8", "#e07b39", "#2f8f6b", "#b3384a"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "keyhole",  # the same picture is the same file
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}

PICTURES: dict[str, Callable[[Figure], None]] = {}


def picture(draw: Callable[[Figure], None]) -> Callable[[Figure], None]:
    """Register a picture under the name of its function."""
    PICTURES[draw.__name__.replace("_", "-")] = draw
    return draw


def random_head(width: int, rank: int | None = None, seed: int = 0) -> kh.SingleHead:
    rng = np.random.default_rng(seed)
    score = rng.standard_normal((width, rank or width)) @ rng.standard_normal((rank or width, width))
    return kh.SingleHead(score / np.linalg.norm(score, 2), rng.standard_normal(width) / width**0.5)


def heat_map(axes: Any, matrix: Floats, title: str) -> None:
    limit = float(np.max(np.abs(matrix)))
    axes.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set_title(title)
    axes.set_xticks([])
    axes.set_yticks([])


@picture
def keyhole(figure: Figure) -> None:
    """A head, what was recovered of it, and the error for a number of queries beside that of distillation."""
    figure.set_size_inches(12.4, 3.7)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.5])
    truth = random_head(32, rank=6)
    result = kh.recover(kh.FunctionOracle(truth, width=32), "single-head")
    assert result.certified
    heat_map(left, truth.score, "Inside the box, seen by nobody")
    heat_map(middle, np.asarray(result.params.score), f"Recovered from {result.stats.queries} answers")
    middle.set_xlabel(f"largest error {short(float(np.max(np.abs(result.params.score - truth.score))))}, certified")

    rows = [row for row in result_rows("distillation", "Adam error") if row["answers"] == "exact" and row["d"] == "16"]
    queries = [first_number(row["queries"]) for row in rows]
    for column, name, colour, marker in (
        ("Adam error", "distillation, Adam", ORANGE, "s-"),
        ("L-BFGS error", "distillation, L-BFGS", RED, "^-"),
    ):
        right.loglog(queries, [first_number(row[column]) for row in rows], marker, color=colour, label=name)
    spent = [first_number(row["Keyhole queries"]) for row in rows]
    right.loglog(spent[:1], [first_number(rows[0]["Keyhole error"])], "o", ms=9, color=BLUE, label="Keyhole")
    right.axvline(272, color=FAINT, lw=1, ls="--", zorder=0)
    right.annotate("fewest possible", (272, 1e-12), (285, 1e-12), color=FAINT, fontsize=9)
    right.set(xlabel="queries, d = 16", ylabel="relative error of W, median", title="Error for a number of queries")
    right.set_ylim(1e-16, 10)
    right.set_xticks(queries, [f"{each:,.0f}" for each in queries])
    right.minorticks_off()
    right.legend(loc="center right")


@picture
def single_head(figure: Figure) -> None:
    """Where a two-token answer lies, and what a recovery takes."""
    figure.set_size_inches(10.4, 3.7)
    left, right = figure.subplots(1, 2)
    head = random_head(8)
    rng = np.random.default_rng(1)
    u, g = rng.standard_normal((2, 8))
    u *= np.sign(u @ head.value)
    logit = float(u @ head.score @ g)
    scales = np.linspace(-8, 8, 25) / logit
    tokens = np.stack([np.stack([u + s * g, s * g]) for s in scales])
    weights = (head(tokens) - scales * (g @ head.value)) / (u @ head.value)
    line = np.linspace(-8, 8, 200)
    left.plot(line, expit(line), color=FAINT, label="σ(z)")
    left.plot(scales * logit, weights, "o", color=BLUE, label="(f − g·v) / (u·v), asked")
    left.set(xlabel="z = uᵀWg", ylabel="weight of the first token", title="Two tokens: one answer, one form of W")
    left.legend()

    widths = [4, 8, 16, 32, 64, 128]
    results = [kh.recover(kh.FunctionOracle(random_head(width), width=width), "single-head") for width in widths]
    right.loglog(widths, [each.stats.counting_bound for each in results], color=FAINT, label="counting bound d² + d")
    right.loglog(widths, [each.stats.queries for each in results], "o", color=BLUE, label="queries asked")
    for width, each in zip(widths, results, strict=True):
        error = kh.distance(each.params, random_head(width))
        right.annotate(short(error), (width, each.stats.queries), (6, -10), textcoords="offset points", fontsize=8)
    right.set(xlabel="width d", ylabel="queries", title="Queries, with the relative error of W and v")
    right.set_xticks(widths, [str(width) for width in widths])
    right.minorticks_off()
    right.set_xlim(3.3, 230)
    right.legend()


@picture
def low_rank(figure: Figure) -> None:
    """How many forms of each column are asked for, in the order they are asked."""
    figure.set_size_inches(10.4, 3.7)
    left, right = figure.subplots(1, 2)
    width, rank = 24, 4
    head = random_head(width, rank)
    asked: dict[tuple[float, ...], int] = {}

    def box(tokens: Floats) -> Floats:
        if tokens.shape[1] == 2:
            for last in tokens[:, 1, :]:
                name = tuple(np.round(last / np.linalg.norm(last), 6))
                asked[name] = asked.get(name, 0) + 1
        return np.asarray(head(tokens))

    result = kh.recover(kh.FunctionOracle(box, width=width), "single-head", heldout=1)
    columns = list(asked.values())[:width]
    colours = [BLUE if n > rank + 1 else GREEN if n == rank + 1 else ORANGE for n in columns]
    left.bar(range(1, width + 1), columns, color=colours)
    for colour, name in (
        (BLUE, "new: read in full"),
        (GREEN, "in the span: r + 1 rows"),
        (ORANGE, "rank known: r rows"),
    ):
        left.bar([0], [0], color=colour, label=name)
    found = result.stats.details["rank"]
    left.set(
        xlabel="column, in the order asked", ylabel="forms read", title=f"d = {width}: rank {found} is found on the way"
    )
    left.legend()

    ranks = [1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32]
    spent = [kh.recover(kh.FunctionOracle(random_head(32, r), width=32), "single-head").stats.queries for r in ranks]
    line = np.linspace(1, 32, 100)
    right.plot(line, line * (64 - line) + 32, color=FAINT, label="counting bound r(2d − r) + d")
    right.plot(ranks, spent, "o", color=BLUE, label="queries asked, rank not told")
    right.set(xlabel="rank r", ylabel="queries", title="d = 32", ylim=(0, None))
    right.legend(loc="lower right")


@picture
def alphabet(figure: Figure) -> None:
    """Queries for alphabets of every size, and those of logits that saturate."""
    figure.set_size_inches(7.6, 3.7)
    axes = figure.subplots()
    width, sizes = 16, (2, 4, 8, 12, 16, 20, 24, 32)
    tokens = np.random.default_rng(1).standard_normal((max(sizes), width))
    head = random_head(width)
    spent = [
        kh.recover(kh.FunctionOracle(head, width=width, alphabet=tokens[:size]), heldout=32).stats.queries
        for size in sizes
    ]
    numbers = [min(size, width) for size in sizes], [min(size - 1, width) for size in sizes]
    bound = [span * apart + span for span, apart in zip(*numbers, strict=True)]
    axes.plot(sizes, bound, color=FAINT, label="numbers that the tokens show, r·r₀ + r")
    axes.plot(sizes, spent, "o", color=BLUE, label="queries asked")
    axes.set(xlabel="tokens m", ylabel="queries", title=f"d = {width}: what few tokens show", ylim=(0, None))
    axes.legend(loc="lower right")


@picture
def normalised(figure: Figure) -> None:
    """How long tokens are that a recovery sends through a norm, and what the norm makes of them."""
    figure.set_size_inches(7.6, 3.7)
    axes = figure.subplots()
    width, epsilon = 16, 1e-5
    heads = random_multi_head(width=width, heads=2, outputs=width)
    layer = kh.NormBefore.folded(heads, np.ones(width), epsilon)
    sent: list[Floats] = []

    def box(tokens: Floats) -> Floats:
        centred = tokens - np.mean(tokens, axis=-1, keepdims=True)
        sent.append(np.linalg.norm(centred, axis=-1).reshape(-1))
        return np.asarray(layer(tokens))

    result = kh.recover(kh.FunctionOracle(box, width=width), "normalised")
    lengths = np.concatenate(sent)
    lengths = np.unique(lengths[(lengths > 0) & (lengths < 1e2)].round(12))

    def normed(length: Floats) -> Floats:
        return np.asarray(length / np.sqrt(length**2 / width + epsilon))

    line = np.geomspace(1e-5, 1e2, 200)
    axes.semilogx(line, normed(line), color=FAINT, label="LayerNorm, ε = 10⁻⁵")
    axes.semilogx(lengths, normed(lengths), ".", color=BLUE, label="tokens that were sent; longer ones are at the rim")
    title = f"d = {width}: {result.stats.queries} queries, within the ball that ε opens"
    axes.set(xlabel="length of a token, its mean taken off", ylabel="length it is normalised to", title=title)
    axes.legend(loc="lower right")


@picture
def sensing(figure: Figure) -> None:
    """How often a number of random measurements is enough."""
    figure.set_size_inches(7.6, 3.7)
    axes = figure.subplots()
    rows = list(result_rows("sensing", "solver"))
    ratio, exact = "measurements / r(2d − r)", "certified and exact (≤ 1e-8)"
    for solver, colour in (("factored", BLUE), ("nuclear-norm", ORANGE)):
        for rank, marker in (("2", "o-"), ("4", "s--")):
            some = [row for row in rows if row["solver"] == solver and row["r"] == rank]
            shares = [int(good) / int(all_) for good, all_ in (row[exact].split("/") for row in some)]
            axes.plot([float(row[ratio]) for row in some], shares, marker, color=colour, label=f"{solver}, r = {rank}")
    axes.set(
        xlabel="measurements per number of W", ylabel="share of runs certified and exact", title="d = 64, rank not told"
    )
    axes.legend()


@picture
def attention_by_parts(figure: Figure) -> None:
    """What links, normalisers and position biases do, each as the code computes it."""
    figure.set_size_inches(9.6, 3.2)
    first, second, third = figure.subplots(1, 3)
    logits = np.linspace(-6, 6, 241)
    for link, name, colour in (
        (Exp(), "exp", FAINT),
        (Softcap(3.0), "softcap, cap 3", BLUE),
        (Sigmoid(0.0), "sigmoid", ORANGE),
        (Relu(), "relu", GREEN),
    ):
        energies = np.where(logits <= 0, np.nan, link(logits)) if link.is_power else link(logits)
        first.plot(logits, energies, color=colour, label=name)
    first.set(xlabel="logit", ylabel="energy", title="links", ylim=(-6, 6))
    two = np.stack([logits, 0 * logits], axis=1)
    for normaliser, name, colour in (
        (Sum(), "sum", FAINT),
        (Sink(1.0), "sink, energy 1", BLUE),
        (Entmax(), "entmax-1.5", ORANGE),
        (Sparsemax(), "sparsemax", GREEN),
    ):
        second.plot(logits, normaliser(two)[:, 0], color=colour, label=name)
    second.set(xlabel="energy over the other's", ylabel="weight", title="normalisers, two tokens", xlim=(-4, 4))
    distances, zeros = np.arange(12)[::-1], np.zeros((1, 12))
    for bias, name, marker in (
        (Alibi(0.3), "ALiBi, slope 0.3", "o-"),
        (DistanceTable(np.array([0.8, 0.1, -0.9, -1.6])), "table of 4", "s-"),
        (Window(6), "window of 6", "^-"),
    ):
        third.plot(distances, Sum()(bias(zeros))[0], marker, label=name, markersize=4)
    third.set(xlabel="distance from the query", ylabel="weight at score zero", title="position biases")
    first.legend(loc="upper left")
    second.legend(loc="lower right")
    third.legend()


@picture
def robust(figure: Figure) -> None:
    """Error against queries for three kinds of error."""
    figure.set_size_inches(7.6, 4.0)
    axes = figure.subplots()
    width = 8
    head = random_head(width, seed=3)
    box = kh.FunctionOracle(head, width=width, max_norm=1.0)
    multiples = np.array([2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    bound = width**2 + width
    for oracle, name, colour, marker in (
        (Noisy(box, 1e-3), "normal errors of 10⁻³", ORANGE, "s-"),
        (Rounded(box, 3), "rounded to 3 decimals", GREEN, "^-"),
        (Cast(box, "bfloat16"), "rounded to bfloat16", BLUE, "o-"),
    ):
        errors, spent = [], []
        for multiple in multiples:
            result = kh.recover(oracle, "robust", budget=int(multiple * bound) + 32, target_error=1e-14, throw=False)
            if result.params is not None:
                errors.append(kh.distance(result.params, head))
                spent.append(result.stats.queries / bound)
        axes.loglog(spent, errors, marker, color=colour, label=name)
    line = np.array([2.0, 64.0])
    axes.loglog(line, 0.05 / np.sqrt(line), color=FAINT, ls="--", lw=1, zorder=0)
    axes.annotate("1/√queries", (30, 0.012), color=FAINT, fontsize=9)
    axes.set(xlabel="queries over d² + d", ylabel="relative error", title="d = 8, tokens of norm 1 at most")
    axes.set_xticks(multiples, [f"{each:g} ×" for each in multiples])
    axes.minorticks_off()
    axes.legend(loc="lower left")


@picture
def labels(figure: Figure) -> None:
    """Error against labels per number: of right signs, of signs of short tokens, and of wrong ones at times."""
    figure.set_size_inches(7.6, 4.0)
    axes = figure.subplots()
    width = 8
    truth = kh.Labels(random_head(width, seed=3))
    numbers = width**2 + width
    errors = 2.0 ** -np.arange(4, 33, 4)
    for how, rate, name, colour, marker in (
        ({}, 0.0, "signs", BLUE, "o-"),
        ({"max_norm": 1.0}, 0.0, "signs, tokens of norm ≤ 1", GREEN, "^-"),
        ({}, 0.1, "signs, a tenth of them wrong", ORANGE, "s-"),
    ):
        box = kh.FunctionOracle(truth, width=width, answers="labels", **how)
        oracle = Flipped(box, rate, seed=1) if rate else box
        found = [kh.recover(oracle, "labels", target_error=float(error), throw=False) for error in errors]
        spent = [result.stats.queries / numbers for result in found]
        axes.semilogy(spent, [kh.distance(result.params, truth) for result in found], marker, color=colour, label=name)
    bits = np.linspace(4, 34)
    axes.semilogy(bits, 2.0 ** (1.5 - bits), "--", color=FAINT, label="one bit a label")
    axes.set(xlabel="labels per number of W and v", ylabel="relative error", title="d = 8")
    axes.legend()


@picture
def multi_head(figure: Figure) -> None:
    """The number of heads in the answers, and how well each of them comes back."""
    figure.set_size_inches(10.4, 3.7)
    left, right = figure.subplots(1, 2)
    heads, width, outputs = 5, 16, 16
    layer = random_multi_head(heads=heads, width=width, outputs=outputs, seed=0)
    rng = np.random.default_rng(0)
    u, total = rng.standard_normal(width), sum(np.asarray(head.value) for head in layer.heads)
    answers = []
    for g in rng.standard_normal((6, width)):
        for first, last in ((1, 8), (1, 2), (2, 1), (8, 1)):
            tokens = np.stack([u + g] * first + [g] * last)[None]
            answers.append(np.asarray(layer(tokens))[0] - g @ total)
    values = np.linalg.svd(np.stack(answers), compute_uv=False)
    values = np.maximum(values / values[0], 1e-17)
    left.semilogy(range(1, len(values) + 1), values, "o", color=FAINT)
    left.semilogy(range(1, heads + 1), values[:heads], "o", color=BLUE)
    left.axvline(heads + 0.5, color=ORANGE, ls="--", lw=1)
    left.set(
        xlabel="number",
        ylabel="singular value over the largest",
        title="The rank of the answers is the number of heads",
    )

    result = kh.recover(kh.FunctionOracle(layer, width=width, max_norm=20.0), "multi-head")
    found = [np.asarray(head.score) for head in result.params.heads]
    order = [int(np.argmin([np.linalg.norm(head.score - each) for each in found])) for head in layer.heads]
    bars = [np.asarray(head.score) for head in result.certificate.radius.heads]
    errors = [np.max(np.abs(head.score - found[k])) for head, k in zip(layer.heads, order, strict=True)]
    numbers = np.arange(1, heads + 1)
    right.semilogy(numbers, [np.max(bars[k]) for k in order], "v", color=ORANGE, label="largest error bar")
    right.semilogy(numbers, errors, "o", color=BLUE, label="largest error")
    right.set(
        xlabel="head", ylabel="of an entry of the score", title=f"All {heads} heads from {result.stats.queries} queries"
    )
    right.set_xticks(numbers)
    right.legend()


@picture
def multi_head_scalar(figure: Figure) -> None:
    """One number along a half-circle of last tokens: every head jumps once."""
    figure.set_size_inches(7.6, 3.7)
    axes = figure.subplots()
    heads, width = 5, 12
    layer = random_multi_head(heads=heads, width=width, outputs=None, seed=2)

    def jumps(tokens: Floats) -> Floats:
        u, g, h = tokens
        along = np.stack([np.asarray(head.score).T @ u for head in layer.heads])
        return np.asarray(np.arctan2(-along @ g, along @ h) % np.pi)

    draws = np.random.default_rng(4).standard_normal((500, 3, width))
    u, g, h = max(draws, key=lambda each: float(np.min(np.diff(np.sort([0, *jumps(each), np.pi])))))
    angles = np.linspace(0, np.pi, 2000)
    last = np.cos(angles)[:, None] * g + np.sin(angles)[:, None] * h
    norm = 1e6
    answers = np.asarray(layer(np.stack([norm * u + last, last], axis=1))) / norm
    axes.plot(angles / np.pi, answers, color=BLUE)
    for number, angle in enumerate(jumps(np.stack([u, g, h])), 1):
        axes.axvline(angle / np.pi, color=ORANGE, ls="--", lw=1, zorder=0)
        axes.annotate(
            f"head {number}",
            (angle / np.pi, 1.0),
            (3, -9),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=8,
            color=ORANGE,
        )
    axes.set(
        xlabel="last token, from g (0) to −g (1)",
        ylabel="answer over T",
        title="Long first token: each head jumps once",
    )


@picture
def residual(figure: Figure) -> None:
    """How many digits of attention are left where tokens are larger."""
    figure.set_size_inches(7.6, 3.7)
    axes = figure.subplots()
    sizes = [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5]
    errors, bars = [], []
    for size in sizes:
        truth = heads_of(heads=3, width=12, size=size, seed=0)
        result = kh.recover(kh.FunctionOracle(kh.Residual(truth), width=12, max_norm=20.0), "residual", throw=False)
        matched = matched_scores(truth, result)
        errors.append(max(np.max(np.abs(found - head)) for head, found, _ in matched))
        bars.append(max(np.max(radius) for *_, radius in matched))
    axes.loglog(sizes, bars, "v-", color=ORANGE, label="largest error bar")
    axes.loglog(sizes, errors, "o-", color=BLUE, label="largest error of a score entry")
    axes.invert_xaxis()
    axes.set(xlabel="size of attention beside its tokens", ylabel="error", title="x_N + attention: 3 heads, d = 12")
    axes.legend()


@picture
def relu_net(figure: Figure) -> None:
    """The answers along a line, their slope, and the kinks that were found."""
    figure.set_size_inches(10.4, 3.7)
    left, right = figure.subplots(1, 2)
    rng = np.random.default_rng(5)
    width, neurons = 6, 8
    net = kh.ReluNet(
        rng.standard_normal((neurons, width)) / width**0.5,
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal(neurons) / neurons**0.5,
        np.asarray(0.1),
    )
    result = kh.recover(kh.FunctionOracle(net, width=width), "relu-net")

    def crossings(line: Floats) -> Floats:
        start, way = line
        return np.asarray(
            -(result.params.weights_in @ start + result.params.bias_in) / (result.params.weights_in @ way)
        )

    # Of some random lines the one whose kinks can be seen best.
    lines = [line for line in rng.standard_normal((5000, 2, width)) if np.max(np.abs(crossings(line))) < 3.5]
    start, way = max(lines, key=lambda line: float(np.min(np.diff(np.sort(crossings(line))))))
    steps = np.linspace(-4, 4, 4001)
    answers = np.asarray(net((start + steps[:, None] * way)[:, None, :]))
    kinks = crossings(np.stack([start, way]))
    left.plot(steps, answers, color=BLUE)
    left.plot(kinks, np.interp(kinks, steps, answers), "o", color=ORANGE, label="kinks of the recovered neurons")
    left.set(xlabel="position on a random line", ylabel="answer", title="Linear between kinks")
    left.legend()
    right.plot(steps[1:], np.diff(answers) / np.diff(steps), color=BLUE)
    for kink in kinks:
        right.axvline(kink, color=ORANGE, ls="--", lw=1, zorder=0)
    right.set(xlabel="position on the line", ylabel="slope", title="At each kink one neuron is added or taken away")


@picture
def one_layer(figure: Figure) -> None:
    """The answer to a long and a short token over that to the long one alone: a sigmoid, whatever the net is."""
    figure.set_size_inches(7.6, 3.7)
    axes = figure.subplots()
    rng = np.random.default_rng(6)
    width, neurons = 8, 16
    attention = kh.SingleHead(rng.standard_normal((width, width)) / width, np.eye(width))
    net = kh.ReluNet(
        rng.standard_normal((neurons, width)) / width**0.5,
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal(neurons) / neurons**0.5,
        np.asarray(0.3),
    )
    layer = kh.OneLayer(attention, net)
    line = np.linspace(-6, 6, 200)
    axes.plot(line, expit(line), color=FAINT, label="σ(z)")
    long = 2.0**60
    for number, (row, q) in enumerate(rng.standard_normal((3, 2, width)), 1):
        logits = np.linspace(-5.5, 5.5, 12) + 0.3 * number
        short = logits / (long * float(row @ attention.score @ q))
        tokens = np.stack([np.stack([long * row, s * q]) for s in short])
        alone = np.asarray(layer(long * row[None, None, :]))
        axes.plot(
            logits,
            np.asarray(layer(tokens)) / alone,
            "os^"[number - 1],
            label=f"asked, row {number}",
            color=(BLUE, ORANGE, GREEN)[number - 1],
        )
    axes.set(
        xlabel="z = L·c·rᵀWq", ylabel="f([L·r; c·q]) / φ(L·r)", title="Through the net one sees the weight of attention"
    )
    axes.legend()


@picture
def learn(figure: Figure) -> None:
    """Error against the number of examples, and what came back behind noise."""
    figure.set_size_inches(10.4, 3.7)
    left, right = figure.subplots(1, 2)
    d, k, m = 6, 4, 2
    rng = np.random.default_rng(7)
    layer = kh.AttentionLayer(rng.standard_normal((m, d, d)) / d, rng.standard_normal((m, d, d)) / d**0.5)
    inputs = rng.choice([-1.0, 1.0], size=(400, k, d))
    outputs = np.asarray(layer(inputs))
    noisy = outputs + 1e-3 * rng.standard_normal(outputs.shape)
    numbers = m * d * (d + d)  # parameters
    for given, noise, name, colour, marker in (
        (outputs, "exact", "exact outputs", BLUE, "o"),
        (noisy, kh.Noise.gaussian(1e-3), "normal errors of 10⁻³", ORANGE, "s"),
    ):
        ratios, errors, certified = [], [], []
        for n in (8, 10, 12, 16, 24, 32, 64, 128, 256):
            options = {} if noise == "exact" else {"noise": noise}
            result = kh.learn(inputs[:n], given[:n], heads=m, throw=False, **options)
            if result.params is not None:
                ratios.append(n * k * d / numbers)
                errors.append(kh.distance(result.params, layer))
                certified.append(result.certified)
        left.loglog(ratios, errors, "-", color=colour, lw=1, zorder=0)
        for good in (True, False):
            chosen = [i for i, each in enumerate(certified) if each is good]
            left.loglog(
                [ratios[i] for i in chosen],
                [errors[i] for i in chosen],
                marker,
                color=colour,
                mfc=colour if good else "white",
                label=name if good else None,
            )
    left.loglog([], [], "o", color=INK, mfc="white", label="hollow: not certified")
    left.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    left.minorticks_off()
    left.set(xlabel="numbers per parameter", ylabel="relative error", title=f"d = {d}, k = {k}, m = {m}, varpro")
    left.legend()
    result = kh.learn(inputs, noisy, heads=m, noise=kh.Noise.gaussian(1e-3))
    truth, found = np.asarray(layer.scores), np.asarray(result.params.scores)
    order = [int(np.argmin([np.linalg.norm(each - score) for each in found])) for score in truth]
    errors = np.ravel(found[order] - truth)
    bars = np.ravel(np.asarray(result.certificate.radius.scores)[order])
    right.errorbar(np.ravel(truth), errors, bars, fmt="o", color=BLUE, ecolor=FAINT, elinewidth=1, ms=4)
    right.axhline(0, color=ORANGE, lw=1)
    right.set(
        xlabel="true entry of a score", ylabel="error, with its error bar", title="All entries, from 400 noisy examples"
    )


@contextmanager
def our_style() -> Iterator[None]:
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def save(name: str, folder: Path) -> Path:
    """Draw one picture into a folder."""
    path = folder / f"{name}.svg"
    with our_style():
        figure = Figure(layout="constrained")
        PICTURES[name](figure)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"one of {', '.join(PICTURES)}; all if left out")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER", help="docs/images if left out")
    arguments = parser.parse_args()
    if unknown := set(arguments.name) - set(PICTURES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}")
    for name in arguments.name or PICTURES:
        print(save(name, arguments.out))


if __name__ == "__main__":
    main()
