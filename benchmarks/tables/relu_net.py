"""Queries, errors and seconds of `relu-net`: random, peer and trained nets, orientation, several outputs, GELU."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Unrecoverable
from keyhole.methods.certificate import certify
from keyhole.methods.relu_net.exact.method import relu_net
from keyhole.recovery import Outcome
from keyhole.session import Session

# (width, neurons): queries of the prototype without polish; seeds.
SIZES = {
    (10, 5): (130, 20),
    (10, 20): (406, 20),
    (20, 20): (None, 20),
    (32, 64): (2744, 20),
    (64, 128): (9614, 8),
    (100, 100): (11517, 8),
    (784, 32): (26179, 4),
}
# The nets of the note, with queries, seconds and error of cryptanalytic-model-extraction as the note gives them: they
# are not measured here, and its seconds are another machine's.
PEERS = {(20, 10): (14621, 4.8, 5.6e-12), (10, 10): (12260, 5.1, 1.4e-12), (10, 20): (22493, 233.0, 3.9e-12)}
FRESH_POINTS = 4000
PEER_POINTS = 100_000
ORIENTATIONS = ((32, 64), (64, 128), (16, 64), (64, 256))


@dataclass(frozen=True)
class Run:
    """One recovery and how far off it was."""

    queries: int
    error: float  # largest on fresh N(0, I) tokens, over the standard deviation of the answers
    seconds: float
    outcome: str
    ratio: float  # of held-out errors to their bars
    details: dict[str, Any]


def random_net(
    width: int, neurons: int, rng: np.random.Generator, outputs: int | None = None, activation: str = "relu"
) -> ReluNet:
    shape = () if outputs is None else (outputs,)
    return ReluNet(
        rng.standard_normal((neurons, width)) / width**0.5,
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal((*shape, neurons)) / neurons**0.5,
        np.zeros(shape),
        activation=activation,
    )


def recovered(net: ReluNet, seed: int, x: Any = None, **options: Any) -> Run:
    oracle = kh.FunctionOracle(net, width=net.width)
    session = Session(oracle)
    began = perf_counter()
    try:
        estimate = session.run(relu_net(oracle.signature, np.random.default_rng([seed, 1]), **options))
    except Unrecoverable as error:
        return Run(session.queries, np.nan, perf_counter() - began, error.outcome.name, np.nan, {})
    seconds, queries = perf_counter() - began, session.queries
    judged = session.run(certify(estimate, oracle.signature, np.random.default_rng([seed, 2]), 32))
    x = np.random.default_rng([seed, 3]).standard_normal((FRESH_POINTS, net.width)) if x is None else x
    truth = net.on_vectors(x)
    error = float(np.max(np.abs(estimate.params.on_vectors(x) - truth)) / np.std(truth))
    ratio = judged.certificate.worst_ratio
    return Run(queries, error, seconds, judged.outcome.name, ratio, dict(estimate.details))


def table() -> str:
    parts = {
        "Random nets, one output": sizes(),
        "200 fresh seeds": fresh(),
        "The nets of the peers (error: largest on 1e5 tokens N(0, I))": peers(),
        "Orientation of neurons, one output": orientations(),
        "Several outputs": several(),
        "Trained nets (scikit-learn digits), error on the data": trained(),
        "Smooth activations": smooth(),
    }
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts.items())


def sizes() -> str:
    rows = []
    for (width, neurons), (bar, seeds) in SIZES.items():
        numbers = neurons * (width + 2) + 1
        for polish in (False, True):
            runs = [
                recovered(random_net(width, neurons, np.random.default_rng([width, neurons, s])), s, polish=polish)
                for s in range(seeds)
            ]
            queries = float(np.median([run.queries for run in runs]))
            most = max(run.queries for run in runs)
            against = f"{queries / bar:.2f}, {most / bar:.2f}" if bar and not polish else ""
            rows.append(
                [
                    f"{width}, {neurons}",
                    "polished" if polish else "lean",
                    seeds,
                    f"{queries:.0f}",
                    f"{queries / numbers:.2f}",
                    against,
                    _errors(runs),
                    _certified(runs),
                    _seconds(runs),
                ]
            )
    columns = [
        "d, k",
        "mode",
        "runs",
        "queries",
        "per parameter",
        "over the prototype's: median, most",
        "error: median, worst",
    ]
    return markdown([*columns, "certified", "s"], rows)


def fresh() -> str:
    rows = []
    for polish in (False, True):
        runs = []
        for seed in range(1000, 1200):
            rng = np.random.default_rng(seed)
            net = random_net(int(rng.integers(1, 32)), int(rng.integers(1, 40)), rng)
            runs.append(recovered(net, seed, polish=polish))
        right = sum(run.outcome == "CERTIFIED" and run.error < (1e-10 if polish else 1e-7) for run in runs)
        wrong = sum(run.outcome == "CERTIFIED" and not run.error < 1e-5 for run in runs)
        rows.append(["polished" if polish else "lean", len(runs), right, wrong, _errors(runs)])
    return markdown(["mode", "runs", "certified and right", "certified and wrong", "error: median, worst"], rows)


def peers() -> str:
    rows = []
    for (width, neurons), (queries, seconds, error) in PEERS.items():
        rng = np.random.RandomState(7)
        inner, outer = rng.normal(size=(width, neurons)) / width**0.5, rng.normal(size=(neurons, 1)) / neurons**0.5
        biases = [0.1 * rng.normal(size=neurons), 0.1 * rng.normal(size=1)]
        net = ReluNet(inner.T, biases[0], outer[:, 0], np.asarray(biases[1][0]))
        x = np.random.default_rng(0).standard_normal((PEER_POINTS, width))
        for polish in (False, True):
            runs = [recovered(net, seed, x, polish=polish) for seed in range(5)]
            worst = max(run.error for run in runs) * float(np.std(net.on_vectors(x)))
            most = max(run.queries for run in runs)
            slowest = float(np.median([run.seconds for run in runs]))
            rows.append(
                [
                    f"{width}-{neurons}-1",
                    "polished" if polish else "lean",
                    f"{most} ({queries / most:.0f} × fewer)",
                    f"{worst:.1e} ({error:.1e})",
                    f"{slowest:.3f} ({seconds / slowest:.0f} × faster)",
                ]
            )
    return markdown(["net", "mode", "queries, most of 5", "error (peer's)", "s, median"], rows)


def orientations() -> str:
    rows = []
    for width, neurons in ORIENTATIONS:
        run = recovered(random_net(width, neurons, np.random.default_rng([width, neurons])), 0)
        rows.append([f"{width}, {neurons}", run.details.get("orientation"), f"{run.seconds:.1f}", f"{run.error:.1e}"])
    return markdown(["d, k", "orientation", "s in all", "error"], rows)


def several() -> str:
    rows = []
    for width, neurons, outputs, seeds in ((32, 128, 32, 3), (10, 20, 3, 10), (16, 16, 16, 10)):
        numbers = neurons * (width + 1 + outputs) + outputs
        for polish in (False, True):
            nets = [random_net(width, neurons, np.random.default_rng([width, s]), outputs) for s in range(seeds)]
            runs = [recovered(net, seed, polish=polish) for seed, net in enumerate(nets)]
            queries = float(np.median([run.queries for run in runs]))
            rows.append(
                [
                    f"{width}, {neurons}, {outputs}",
                    "polished" if polish else "lean",
                    seeds,
                    f"{queries:.0f}",
                    f"{queries / numbers:.2f}",
                    _errors(runs),
                    _certified(runs),
                    _seconds(runs),
                ]
            )
    columns = ["d, k, p", "mode", "runs", "queries", "per parameter", "error: median, worst", "certified", "s"]
    return markdown(columns, rows)


def trained() -> str:
    try:
        from sklearn.datasets import load_digits
        from sklearn.neural_network import MLPClassifier
    except ImportError:
        return "scikit-learn is not installed"
    import warnings

    x, labels = load_digits(return_X_y=True)
    x = x / 16.0
    rows = []
    for hidden in (16, 32, 128):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = MLPClassifier((hidden,), max_iter=200, random_state=0).fit(x, labels)
        (inner, outer), (bias, constant) = model.coefs_, model.intercepts_
        full = ReluNet(inner.T, bias, outer.T, constant)
        one = ReluNet(inner.T, bias, outer.T[0], np.asarray(constant[0]))
        for name, net in (("one logit", one), ("ten logits", full)):
            for polish in (False, True):
                run = recovered(net, hidden, x, polish=polish)
                rows.append(
                    [
                        hidden,
                        name,
                        "polished" if polish else "lean",
                        run.details.get("neurons"),
                        run.queries,
                        f"{run.error:.1e}",
                        run.outcome,
                        run.details.get("orientation"),
                        f"{run.seconds:.2f}",
                    ]
                )
    columns = ["hidden", "answers", "mode", "neurons found", "queries", "error", "outcome", "orientation", "s"]
    return markdown(columns, rows)


def smooth() -> str:
    rows = []
    for width, neurons, seeds in ((10, 20, 20), (32, 64, 20)):
        numbers = neurons * (width + 2) + 1
        for name in ("gelu", "gelu_tanh", "silu"):
            for asked in (name, "auto") if width == 10 else ("auto",):
                nets = [
                    random_net(width, neurons, np.random.default_rng([width, s]), activation=name) for s in range(seeds)
                ]
                runs = [recovered(net, seed, activation=asked) for seed, net in enumerate(nets)]
                good = sum(run.error <= 1e-9 and run.details.get("activation") == name for run in runs)
                queries = float(np.median([run.queries for run in runs]))
                rows.append(
                    [
                        f"{width}, {neurons}",
                        name,
                        asked,
                        f"{good} of {seeds}",
                        f"{queries:.0f}",
                        f"{queries / numbers:.2f}",
                        _errors(runs),
                        _seconds(runs),
                    ]
                )
    columns = [
        "d, k",
        "activation",
        "asked for",
        "error ≤ 1e-9",
        "queries",
        "per parameter",
        "error: median, worst",
        "s",
    ]
    return markdown(columns, rows)


def _errors(runs: list[Run]) -> str:
    errors = [run.error for run in runs]
    return f"{np.nanmedian(errors):.1e}, {np.nanmax(errors):.1e}"


def _certified(runs: list[Run]) -> str:
    return f"{sum(run.outcome == Outcome.CERTIFIED.name for run in runs)} of {len(runs)}"


def _seconds(runs: list[Run]) -> str:
    return f"{np.median([run.seconds for run in runs]):.2f}"
