"""Answers with any errors of at most τ: radii, what four adversaries make of them, and queries over d² + d."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

import keyhole as kh
from benchmarks.support.heads import gaussian, low_rank
from benchmarks.support.rows import markdown
from keyhole.methods import Estimate
from keyhole.methods.robust.bounded.method import bounded
from keyhole.noise import Noise
from keyhole.session import Session

WIDTHS = (16, 32)
NORMS = (0.5, 1.0, 2.0, 4.0)
TOLERANCES = (1e-6, 1e-5, 1e-4, 1e-3)
RUNS = 50  # per row and width
FAMILIES = ("norm 0.3", "norm 3", "norm 30", "rank 2", "value over 4 decades")
# A row at less than 45° to the value leans on nothing else: it is x_0.
ALONG = 0.95


@dataclass
class Seen:
    """What the runs of one row of the table found."""

    runs: int = 0
    inside: int = 0
    reached: list[float] = field(default_factory=list)  # largest error over radius, or that of the target
    ratios: list[float] = field(default_factory=list)  # queries over d² + d


def table() -> str:
    columns = ["errors", "d", "runs", "truth within the radius", "worst error over radius: median, least, most"]
    columns += ["queries / (d² + d): median, most"]
    rows = [_row(name, width) for width in WIDTHS for name in (*RANDOM, *TARGETED)]
    total = f"Truth within the radius in {sum(row[3] for row in rows)} of {sum(row[2] for row in rows)} runs."
    shown = [[*row[:3], f"{row[3]}/{row[2]}", *row[4:]] for row in rows]
    return "\n\n".join([markdown(columns, shown), total, _radii()])


def _row(name: str, width: int) -> list[object]:
    seen = Seen()
    for number in range(RUNS):
        rng = np.random.default_rng([number, width, *name.encode()])
        truth = head(FAMILIES[number % len(FAMILIES)], width, rng)
        norm, tolerance = NORMS[number // 4 % 4], TOLERANCES[number % 4]
        if name in RANDOM:
            estimate, queries = attacked(truth, norm, tolerance, RANDOM[name](tolerance, rng), number)
            _take(seen, truth, estimate, queries, None)
        else:
            _take(seen, truth, *TARGETED[name](truth, norm, tolerance, rng, number))
    reached = f"{np.median(seen.reached):.2f}, {min(seen.reached):.2f}, {max(seen.reached):.2f}"
    return [name, width, seen.runs, seen.inside, reached, f"{np.median(seen.ratios):.3f}, {max(seen.ratios):.3f}"]


def _take(seen: Seen, truth: kh.SingleHead, estimate: Estimate, queries: int, target: tuple[int, int] | None) -> None:
    errors = np.abs(estimate.params.score - truth.score) / estimate.radius.score
    others = np.abs(estimate.params.value - truth.value) / estimate.radius.value
    seen.runs += 1
    seen.inside += bool(np.max(errors) <= 1 and np.max(others) <= 1)
    seen.reached.append(float(np.max(errors) if target is None else errors[target]))
    seen.ratios.append(queries / estimate.counting_bound)


def _radii() -> str:
    """Radii over what hides from any questions, for small and large logits and several numbers of copies."""
    columns = ["d", "copies", "largest logit at norm B", "mean radius / (2τ/(B³·norm of v))", "queries / (d² + d)"]
    rows = []
    for width, copies in ((16, 1), (16, 4), (16, 16), (16, 64), (32, 16), (64, 16)):
        for norm in (0.1, 10.0) if copies == 16 else (0.1,):
            truth = gaussian(norm)(width, np.random.default_rng(width))
            estimate, queries = attacked(
                truth, 1.0, 1e-5, RANDOM["constant"](1e-5, np.random.default_rng(0)), 0, copies
            )
            largest = float(np.max(np.linalg.norm(truth.score, axis=0)))
            floor = 2e-5 / np.linalg.norm(truth.value)
            ratio = np.mean(estimate.radius.score) / floor
            rows.append([width, copies, f"{largest:.1f}", f"{ratio:.2f}", f"{queries / estimate.counting_bound:.3f}"])
    return markdown(columns, rows)


def head(family: str, width: int, rng: np.random.Generator) -> kh.SingleHead:
    if family.startswith("norm"):
        return gaussian(float(family.split()[1]))(width, rng)
    if family == "rank 2":
        return low_rank(2, 0.3)(width, rng)
    truth = gaussian(1.0)(width, rng)
    return kh.SingleHead(truth.score, rng.permutation(np.geomspace(1e-4, 1.0, width)) * rng.choice([-1, 1], width))


# --- adversaries ----------------------------------------------------------------------------------------------------

# From tokens (batch, length, width) to errors (batch,).
Errors = Callable[[np.ndarray], np.ndarray]


def attacked(
    truth: kh.SingleHead, norm: float, tolerance: float, errors: Errors, seed: int, copies: int = 16
) -> tuple[Estimate, int]:
    oracle = kh.FunctionOracle(
        lambda tokens: truth(tokens) + errors(tokens), truth.width, norm, noise=Noise.bounded(tolerance)
    )
    session = Session(oracle)
    estimate = session.run(bounded(oracle.signature, np.random.default_rng(seed), copies=copies))
    return estimate, session.queries


def _uniform(tolerance: float, rng: np.random.Generator) -> Errors:
    return lambda tokens: rng.uniform(-tolerance, tolerance, len(tokens))


def _sign(tolerance: float, rng: np.random.Generator) -> Errors:
    """Plus or minus the tolerance, the same for the same question."""
    mix = rng.standard_normal(64)

    def errors(tokens: np.ndarray) -> np.ndarray:
        hashed = np.sin(1e4 * np.sum(tokens, axis=1) @ mix[: tokens.shape[2]] + 1e3 * tokens[:, -1, :].sum(axis=1))
        return np.where(hashed > 0, tolerance, -tolerance)

    return errors


def _constant(tolerance: float, rng: np.random.Generator) -> Errors:
    sign = float(rng.choice([-1, 1]))
    return lambda tokens: np.full(len(tokens), sign * tolerance)


RANDOM = {"uniform": _uniform, "sign": _sign, "constant": _constant}


def pushing(truth: kh.SingleHead, tolerance: float, targets: np.ndarray, direction: float, signs: np.ndarray) -> Errors:
    """Knows truth and design: pushes W[targets[b], b] of every column b with a target (others −1).

    An entry a takes x_a = p·v + r·e_a with weight 1/r and x_0 ∥ v with weight −p/r, where p > 0 and r has the sign of
    v_a. Answers to single tokens (`signs` for x_0 and e_a) decide how large logits seem.
    """
    unit = truth.value / np.linalg.norm(truth.value)

    def errors(tokens: np.ndarray) -> np.ndarray:
        if tokens.shape[1] == 1:
            overlap = np.abs(tokens[:, 0, :] @ unit) > ALONG * np.linalg.norm(tokens[:, 0, :], axis=1)
            return tolerance * np.where(overlap, signs[0], signs[1] * np.sign(tokens[:, 0, :] @ unit))
        column = np.argmax(np.abs(tokens[:, -1, :]), axis=1)
        target = targets[column]
        first = tokens[:, 0, :] / np.linalg.norm(tokens[:, 0, :], axis=1, keepdims=True)
        own = np.sign(unit[target]) + (unit[target] == 0)
        push = np.where(first @ unit > ALONG, -own, own)
        return np.where(target >= 0, direction * push * tolerance, 0.0)

    return errors


def _strategies() -> Iterator[tuple[float, np.ndarray]]:
    for direction in (1.0, -1.0):
        for along in (1.0, -1.0):
            for entries in (1.0, -1.0):
                yield direction, np.array([along, entries])


Attack = tuple[Estimate, int, tuple[int, int]]


def _best(truth: kh.SingleHead, norm: float, tolerance: float, targets: np.ndarray, seed: int) -> Attack:
    """The worst of all strategies: the entry that came furthest relative to its radius."""
    attacks = []
    for direction, signs in _strategies():
        estimate, queries = attacked(truth, norm, tolerance, pushing(truth, tolerance, targets, direction, signs), seed)
        column = np.nonzero(targets >= 0)[0]
        errors = np.abs(estimate.params.score - truth.score) / estimate.radius.score
        best = column[np.argmax(errors[targets[column], column])]
        attacks.append((errors[targets[best], best], estimate, queries, (int(targets[best]), int(best))))
    return max(attacks, key=lambda attack: attack[0])[1:]


def _one_entry(truth: kh.SingleHead, norm: float, tolerance: float, rng: np.random.Generator, seed: int) -> Attack:
    targets = np.full(truth.width, -1)
    targets[rng.integers(truth.width)] = rng.integers(truth.width)
    return _best(truth, norm, tolerance, targets, seed)


def _all_columns(truth: kh.SingleHead, norm: float, tolerance: float, rng: np.random.Generator, seed: int) -> Attack:
    return _best(truth, norm, tolerance, rng.integers(truth.width, size=truth.width), seed)


TARGETED = {"targeted, one entry": _one_entry, "targeted, every column": _all_columns}
