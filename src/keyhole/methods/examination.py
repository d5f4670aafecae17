"""Queries of any lengths, the errors of their answers, and findings with their evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import FLOAT32, Floats, floats
from keyhole.methods.base import Steps
from keyhole.methods.noise_estimation.measure import coarseness, measure_noise
from keyhole.queries import Measurements, Plan, Signature, sequences

# The longest tokens over the square root of the width, where norms are free.
FAR = 2.0**16
# Different numbers that there must be among answers before their digits say anything.
LEAST_NUMBERS = 4
# Queries that must be answered by few whole numbers before answers are taken for labels, none larger than this.
LABEL_QUERIES, LARGEST_LABEL = 12, 4096
# Times rounding: what sums inside an oracle make of it, and of differences of answers.
ROUNDING = 256.0


@dataclass(frozen=True)
class Finding:
    """One property of an oracle, and the figures it rests on."""

    what: str
    found: str
    evidence: str


class Examination:
    """Asks queries of any lengths, and keeps findings."""

    def __init__(self, signature: Signature, rng: np.random.Generator, stage: str) -> None:
        self.signature, self.rng, self.stage = signature, rng, stage
        self.findings: list[Finding] = []
        self.noise = signature.noise
        self.rounding = ROUNDING
        self.outputs = 1  # until an answer has come
        self.most = min(signature.norm_limit, signature.space.huge**0.25)  # the longest token that may be asked
        self.norm = min(self.most, signature.width**0.5)
        self.longest = signature.max_length or 64
        self.far = min(self.most, FAR * signature.width**0.5)

    def directions(self, count: int) -> Floats:  # (count, width)
        """Random unit vectors."""
        vectors = self.rng.standard_normal((count, self.signature.width))
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    def ask(self, queries: Sequence[Sequence[Floats]], repeat: int = 0) -> Steps[Floats]:  # -> (count, outputs)
        """Answers to sequences of any lengths, one plan per length."""
        lengths = sorted({len(query) for query in queries})
        plans, places = [], []
        for length in lengths:
            place = [number for number, query in enumerate(queries) if len(query) == length]
            tokens = self.signature.space.asarray(np.array([queries[number] for number in place]))
            made = sequences(self.stage, tokens)
            plans.append(Plan(self.stage, made.count, made.positions, first_repeat=repeat))
            places.append(place)
        measurements: list[Measurements] = yield plans
        answers: Floats | None = None
        for place, each in zip(places, measurements, strict=True):
            values = floats(each.values)
            values = values[:, -1, ...] if self.signature.positions == "all" else values
            values = values.reshape(len(place), -1)
            answers = np.empty((len(queries), values.shape[1])) if answers is None else answers
            answers[place] = values
            self.outputs = values.shape[1]
        assert answers is not None
        return answers

    def say(self, what: str, found: str, evidence: str) -> None:
        """Keep a property and its evidence."""
        self.findings.append(Finding(what, found, evidence))

    def error(self, size: float | Floats) -> Any:
        """What rounding and noise make of a difference of answers of this size."""
        space = self.signature.space
        # What is rounded to decimals may have been computed in float32.
        eps = max(space.eps, FLOAT32) if self.noise.kind == "rounded" else space.eps
        relative = self.rounding * eps + 4 * self.noise.relative
        return relative * size + 4 * self.outputs**0.5 * self.noise.radius + space.tiny  # never zero

    def ask_noise(self, answers: Floats, apart: float) -> Steps[None]:
        """Measure noise where answers do not repeat or have few digits."""
        digits = coarseness(answers.ravel(), self.signature.space.eps)
        coarse = digits.noise.kind != "exact" and np.unique(np.abs(answers[answers != 0])).size >= LEAST_NUMBERS
        if (
            self.noise.kind != "measure"
            and not coarse
            and apart <= self.error(float(np.max(np.abs(answers), initial=0.0)))
        ):
            return
        estimate = yield from measure_noise(self.signature, self.rng)
        self.noise, evidence = estimate.noise, estimate.evidence
        if coarse and estimate.noise.kind == "bounded":  # a net has kinks, which follow no smooth curve either
            self.noise, evidence = digits.noise, digits.evidence
        self.say("noise", str(self.noise), evidence)


def ask_for_labels(exam: Examination, first: Floats) -> Steps[bool]:  # (answers, outputs)
    """Whether answers are labels: few whole numbers over and over, which single tokens tell apart, however long."""
    if exam.outputs != 1 or exam.noise.kind not in ("exact", "measure", "flipped") or not are_labels(first):
        return False
    lengths = [1 + number % min(exam.longest, 3) for number in range(LABEL_QUERIES)]
    norms = exam.far * 2.0 ** -np.arange(LABEL_QUERIES)
    queries = [norm * exam.directions(length) for norm, length in zip(norms, lengths, strict=True)]
    more = yield from exam.ask(queries)
    answers, single = np.vstack([first, more]), np.vstack([first, more[np.array(lengths) == 1]])
    values = np.unique(answers)
    found = are_labels(answers) and np.unique(single).size > 1 and values.size <= len(answers) / 2
    if found:
        said = f"{len(answers)} answers are {values.size} whole numbers, for tokens of norms up to {exam.far:.3g}"
        exam.say("answers", "labels", said)
    return found


def are_labels(answers: Floats) -> bool:
    """Whether answers are whole numbers as names of classes are."""
    return bool(np.all(answers == np.round(answers)) and np.max(np.abs(answers), initial=0.0) <= LARGEST_LABEL)
