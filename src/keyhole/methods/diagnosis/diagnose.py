"""What kind of oracle it is, from a few queries: each asks for one property that tells families apart.

Single tokens show what stands behind attention: heads answer them by an affine map, a net by a bent one, normalisation
by one that does not grow. Nearly equal tokens weigh the same, which shows a residual. Copies of a token
multiply its odds: behind one head 1/(answer) is then affine in 1/copies. The ranks of such answers count heads.

A family is named only where what holds for all of it was seen to hold (`consistency`); else it is unknown, and the
findings say what did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.diagnosis.activation import ask_activation
from keyhole.methods.diagnosis.consistency import (
    FARTHER,
    STILL,
    TURN,
    NearTokens,
    ask_far_tokens,
    ask_near_tokens,
    ask_reflection,
)
from keyhole.methods.diagnosis.family_tests import affine_misfit, odds_rank, rank_above
from keyhole.methods.examination import Examination, Finding, are_labels
from keyhole.methods.registry import methods_for
from keyhole.noise import Noise
from keyhole.numerics.svd import least_squares, pseudo_inverse, svd
from keyhole.optional import on_demand
from keyhole.queries import Signature

UNKNOWN, CONSTANT, POSITIONAL = "unknown", "constant", "positional"
# Families that a diagnosis can name for which there are methods.
FAMILIES = ("single-head", "form-head", "multi-head", "residual", "relu-net", "one-layer", "labels", "normalised")
# Norms that tokens are tried at, over the square root of the width: logits go with their square.
LADDER = 2.0 ** np.arange(-6, 7, 2)
# Attention that does this part of what it does when it is saturated is neither flat nor saturated.
ACTIVE = 0.15
# Lengths of the tokens that are told from each other: where there is one direction only, they must not be equal.
LENGTHS = np.array([[1.0], [0.6], [0.8]])
# Answers that vary by no more than so many times what their errors explain show nothing.
SHOWS = 4.0
# So many different answers are few, where each comes more than once.
FEW_VALUES = 8
# Rounding that sums inside an oracle may make, over what is expected, before a map is taken for bent.
CANCELLATION = 32.0
# Identities that hold for a family are off by no more than this, over what rounding and noise explain.
HOLDS = 4.0
# A residual is the token itself, but for this part.
ITSELF = 0.05
# Copies of a token whose odds they multiply.
COPIES = (1, 2, 4)
MANY_COPIES = (1, 2, 3, 4, 6, 8, 12, 16)
SPOTS = 4
NEAR_SPOTS = 3
CONTEXTS = 8  # sequences before the last token that must move no answer before it is said that none does
SIDES = 2  # tokens that are asked beside their opposites, of different lengths
MOST_SPOTS = 3  # must say something before one head is believed in
# Every other spot has tokens longer by this: heads that look alike among short tokens differ among longer ones.
LONGER = 3.0
# Tokens whose logits are read have this part of the norm at which attention shows.
SHORT = 0.25
# Rows that ranks are looked for in: first a few, then more while the rank is full.
FIRST_ROWS, MOST_ROWS = 6, 96
FEW_ROWS = 4  # behind several outputs, where a head is recovered from so few queries that a rank is soon dearer


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The family of an oracle, the method that recovers it (None: none does), and why."""

    family: str
    method: str | None
    findings: tuple[Finding, ...]
    options: dict[str, Any] = field(default_factory=dict)
    noise: Noise = field(default_factory=Noise.exact)
    queries: int = 0  # that it took
    alternatives: tuple[dict[str, Any], ...] = ()  # options that are worth trying where these fail
    recovers: str | None = None  # the family whose methods recover it, of which `method` is the preferred one

    def in_words(self) -> str:
        """One sentence, without the evidence."""
        facts = ", ".join(f"{finding.what}: {finding.found}" for finding in self.findings)
        named = {UNKNOWN: "its family is unknown", CONSTANT: "its answers are constant"}
        return f"{named.get(self.family, f'it looks like {self.family}')} ({facts})"

    @property
    def consequence(self) -> str:
        """What follows where no method recovers it, after `in_words`."""
        if self.family == UNKNOWN and self.found("length law") == "other":
            return "so that only a table by length would do: name it (--method parts --option length_law=table)"
        follows = {UNKNOWN: "so that no method here is for it", CONSTANT: "so that there is nothing to recover"}
        return follows.get(self.family, "which no method here recovers")

    def found(self, what: str) -> str | None:
        """What was found of one property; None where it was not looked for."""
        return next((finding.found for finding in self.findings if finding.what == what), None)

    def __repr__(self) -> str:
        """What it is, without the evidence."""
        return f"Diagnosis({self.in_words()}; method {self.method}, {self.queries} queries)"

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        card: str = on_demand("report.notebook").card_of_diagnosis(self)
        return card

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "family": self.family,
            "method": self.method,
            "options": dict(self.options),
            "noise": str(self.noise),
            "queries": self.queries,
            "findings": [vars(finding) for finding in self.findings],
        }


def diagnose(signature: Signature, rng: np.random.Generator) -> Steps[Diagnosis]:
    """Name the family of an oracle from about a hundred queries; a few hundred where answers are noisy."""
    asking = _Diagnosing(signature, rng)
    if signature.answers == "labels":
        return asking.labels("the box declares that its answers are labels")
    steady = yield from asking.steadiness()
    if steady is not None:
        return steady
    silent = yield from asking.single_tokens()
    if silent is not None:
        return silent
    return (yield from asking.heads() if asking.affine else asking.bent())


class _Diagnosing:
    """Asks for one property after the other."""

    def __init__(self, signature: Signature, rng: np.random.Generator) -> None:
        self.exam = Examination(signature, rng, "diagnosis")
        # Of an oracle of bounded norm the ladder ends at the bound.
        self.ladder = np.unique(np.minimum(LADDER * signature.width**0.5, self.exam.most))
        # The rays that single tokens are asked along.
        self.first, self.second = LENGTHS[:2] * self.exam.directions(2)
        self.seen: list[Floats] = []  # answers so far
        self.zero = np.zeros(signature.width)

    def _diagnosis(self, family: str, recovers: str | None, **options: Any) -> Diagnosis:
        exam = self.exam
        methods = methods_for(recovers, exam.noise, options) if recovers is not None else []
        method = methods[0].name if methods else None
        return Diagnosis(family, method, tuple(exam.findings), options, exam.noise, recovers=recovers)

    # --- properties

    def steadiness(self) -> Steps[Diagnosis | None]:
        """Whether answers repeat, and depend on nothing but the last token and the set of the others."""
        a, b, x = self.exam.norm * LENGTHS * self.exam.directions(3)
        questions = [[a, x], [a, a, x, x], [x]] if self.exam.longest >= 4 else [[x], [x], [x]]
        if self.exam.longest >= 3:
            questions += [[a, b, x], [b, a, x]]
        answers = yield from self.exam.ask(questions)
        self.seen.append(answers)
        again = yield from self.exam.ask(questions[:1], repeat=1)
        size = float(np.max(np.abs(answers)))
        if self.exam.outputs == self.exam.signature.width:  # attention may cancel against a residual
            size = max(size, float(np.max(np.abs([a, b, x]))))
        apart = float(np.max(np.abs(again - answers[:1])))
        if self.exam.noise.kind in ("exact", "measure"):
            yield from self.exam.ask_noise(answers, apart)
        if self.exam.longest >= 3:
            swapped = float(np.max(np.abs(answers[-1] - answers[-2])))
            if swapped > self.exam.error(size):
                self.exam.say("positions", "count", f"two tokens exchanged move the answer by {swapped:.2g}")
                return self._diagnosis(POSITIONAL, None)
            self.exam.say("positions", "do not count", f"two tokens exchanged move the answer by {swapped:.2g}")
        if self.exam.longest >= 4:
            doubled = float(np.max(np.abs(answers[1] - answers[0])))
            if doubled > self.exam.error(size):
                self.exam.say("average", "no", f"every token doubled moves the answer by {doubled:.2g}")
                return self._diagnosis(UNKNOWN, None)
        return None

    def _few_values(self) -> Steps[Diagnosis | None]:
        """What to say of answers that are all the same, or a few numbers over and over, as names of classes are."""
        exam = self.exam
        if len(np.unique(np.vstack(self.seen), axis=0)) <= FEW_VALUES:
            lengths = [1 + number % min(exam.longest, SPOTS) for number in range(2 * SPOTS)]
            norms = self.ladder[np.arange(2 * SPOTS) % self.ladder.size] * exam.rng.uniform(0.5, 1.0, 2 * SPOTS)
            queries = [norm * exam.directions(length) for norm, length in zip(norms, lengths, strict=True)]
            self.seen.append((yield from exam.ask(queries)))
        answers = np.vstack(self.seen)
        # Of queries of their own: those for steadiness have the same answers by intention.
        values, counts = np.unique(np.vstack(self.seen[1:]), axis=0, return_counts=True)
        if self._span() <= exam.error(float(np.max(np.abs(answers)))) - exam.error(0.0):
            some = f"the same, {answers[0, 0]:.3g}" if exam.outputs == 1 else "the same"
            said = f"{len(answers)} answers are {some}, for tokens of norms up to {self.ladder[-1]:.3g}"
            exam.say("answers", "constant", said)
            return self._diagnosis(CONSTANT, None)
        error = exam.error(float(np.max(np.abs(answers))))
        rounded = (
            len(values) > 1 and float(np.max(np.ptp(values, axis=0))) <= error
        )  # one number, and no names of classes
        if len(values) <= FEW_VALUES and np.min(counts) > 1 and not rounded:
            said = f"{len(answers)} answers take {len(values)} different values, each of them more than once"
            if exam.outputs == 1 and are_labels(answers) and np.unique(self.seen[1]).size > 1:
                if exam.signature.noise.kind == "exact":  # names of classes look like rounded numbers
                    exam.noise = Noise.exact()
                    exam.findings = [finding for finding in exam.findings if finding.what != "noise"]
                return self.labels(said)
            exam.say("answers", "few values", said)
            return self._diagnosis(UNKNOWN, None)
        return None

    def labels(self, said: str) -> Diagnosis:
        """What to say of an oracle that answers with labels."""
        self.exam.say("answers", "labels", said)
        return self._diagnosis("labels", "labels")

    def _hidden(self) -> Diagnosis | None:
        """What to say of answers that vary by no more than their errors explain."""
        exam, span = self.exam, self._span()
        if span > SHOWS * exam.error(0.0):
            return None
        radius = exam.noise.radius
        if exam.signature.noise.kind == "exact":  # found out, of numbers that may as well be the names of classes
            exam.noise = Noise.exact()
            exam.findings = [finding for finding in exam.findings if finding.what != "noise"]
        said = f"they are {span:.2g} apart at most: no more than errors of {radius:.2g} would explain"
        exam.say("answers", "hidden by errors", said)
        return self._diagnosis(UNKNOWN, None)

    def _span(self) -> float:
        """By how much answers vary."""
        return float(np.max(np.ptp(np.vstack(self.seen), axis=0)))

    def single_tokens(self) -> Steps[Diagnosis | None]:
        """Whether single tokens are answered by an affine map, and whether answers vary at all."""
        rays = [[norm * direction] for direction in (self.first, self.second) for norm in self.ladder]
        inner = 0.5 * self.ladder[-1]
        sides = inner * LENGTHS[1:] * self.exam.directions(SIDES)
        rest = [self.zero, inner * (self.first + self.second), inner * self.first, inner * self.second, *sides, *-sides]
        answers = yield from self.exam.ask(rays + [[token] for token in rest])
        self.seen.append(answers)
        silent = yield from self._few_values()
        if silent is None and self.exam.noise.kind == "exact":
            yield from self.exam.ask_noise(answers, 0.0)
            if self.exam.noise.kind == "exact":
                self.exam.say("noise", "none", "a question asked twice was answered the same, with all digits")
        silent = silent or self._hidden()
        if silent is not None:
            return silent
        single = answers[len(rays) :]
        self.at_zero = single[0]
        self.on_rays = answers[: len(rays)].reshape(2, self.ladder.size, -1)
        worst = 0.0
        sizes = np.max(np.abs(self.on_rays), axis=(0, 2))  # at each norm: along one ray answers may cancel
        for ray in self.on_rays:
            misfit, bar = affine_misfit(self.ladder, ray, self.at_zero), self.exam.error(sizes)
            worst = max(worst, float(np.max(misfit / bar)))
        added = single[1] + single[0] - single[2] - single[3]
        both = single[4 : 4 + SIDES] + single[4 + SIDES :] - 2 * self.at_zero  # a token and its opposite
        off = max(float(np.max(np.abs(added))), float(np.max(np.abs(both))))
        worst = max(worst, off / self.exam.error(float(np.max(np.abs(answers)))))
        rounded = self.exam.error(float(self.ladder[-1]))
        if self.exam.outputs == self.exam.signature.width and np.max(np.abs(answers - self.at_zero)) <= rounded:
            self.exam.say("one token", "undone", "answers are what rounding leaves of the token less itself")
            return self._diagnosis("attention with a residual", "residual")
        if self.exam.noise.kind == "exact" and 1.0 < worst <= CANCELLATION:  # values of several heads may cancel
            self.exam.rounding, worst = 2 * worst * self.exam.rounding, 0.5
        self.affine = bool(worst <= 1.0)
        self.exam.say(
            "one token",
            "an affine map" if self.affine else "a bent map",
            f"off an affine map by {worst:.2g} times what errors explain",
        )
        return None

    def _in_plane(self, count: int) -> tuple[Floats, Floats]:  # (count, width) tokens, (count, outputs)
        """Random tokens of norm one at most in the plane of the two rays, and what they add to the zero token's answer.

        That need not be asked where single tokens are answered by an affine map.
        """
        plane = self.exam.rng.standard_normal((count, 2))
        plane /= np.sum(np.abs(plane), axis=1, keepdims=True)
        tokens = plane @ np.stack([self.first, self.second])
        return tokens, self._slope(tokens)

    def _slope(self, tokens: Floats) -> Floats:  # (count, width) in the plane -> (count, outputs)
        """What tokens add to the zero token's answer where single tokens are answered by an affine map."""
        slopes = (self.on_rays[:, -1] - self.at_zero) / self.ladder[-1]
        return np.asarray(tokens @ pseudo_inverse(np.stack([self.first, self.second])) @ slopes)

    def _weights(self) -> Steps[bool]:
        """Whether nearly equal tokens weigh the same; then only a residual tells the last of them from the others."""
        self.residual, self.itself, self.added_radius = False, False, 0.0
        exam = self.exam
        if exam.noise.kind != "exact":
            exam.say("residual", "unknown", "noise hides what short steps do")
            return True
        if self.affine:
            tokens = np.stack([self._in_plane(NEAR_SPOTS)[0] for _ in range(3)])
        else:
            tokens = exam.directions(3 * NEAR_SPOTS).reshape(3, NEAR_SPOTS, -1)
        known = (lambda each: self.at_zero + self._slope(each)) if self.affine else None
        found, even = yield from ask_near_tokens(exam, 0.5 * exam.norm * tokens[0], tokens[1:], known)
        if not even:
            said = f"the answer to nearly equal tokens is off their mean by {found.uneven:.2g} of their difference"
            exam.say("weights", "not of a softmax", f"{said}, however near they are")
            return False
        self.residual = found.last > 0
        said = f"of two tokens that weigh the same, the last tells {found.last:.2g} of the difference more"
        exam.say("residual", "yes" if self.residual else "no", said)
        if self.residual and self.affine:
            return self._linear_residual(tokens[1], found)
        return True

    def _linear_residual(self, steps: Floats, found: NearTokens) -> bool:
        """Whether what the last token adds is a linear map of it, and whether it is the token itself."""
        units, added = steps / np.linalg.norm(steps, axis=1, keepdims=True), found.added
        plane = pseudo_inverse(np.stack([self.first, self.second]))
        coordinates = units @ plane
        maps = least_squares(coordinates, added)
        size = float(np.max(np.linalg.norm(added, axis=1)))
        off = float(np.max(np.linalg.norm(added - coordinates @ maps, axis=1))) / size
        if off > max(ITSELF, HOLDS * found.radius / size):
            self.exam.say("last token", "not a residual", f"what it adds is off a linear map by {off:.2g} of it")
            return False
        self.added, self.added_radius = plane @ maps, found.radius
        if self.exam.outputs == self.exam.signature.width:
            apart = float(np.max(np.linalg.norm(added - units, axis=1)))
            self.itself = apart <= max(ITSELF, HOLDS * found.radius)
            if self.itself:
                self.added, self.added_radius = np.eye(self.exam.outputs), 0.0
            else:
                self.exam.say("residual", "another map", f"it is off the token itself by {apart:.2g} of it")
        return True

    # --- heads: single tokens are answered by an affine map

    def heads(self) -> Steps[Diagnosis]:
        """How many heads, and what biases they have."""
        pairs = [[norm * self.first, norm * self.second] for norm in self.ladder]
        if self.exam.longest < 2:
            return self._diagnosis("linear", "single-head")
        answers = yield from self.exam.ask(pairs)
        a, x = self.on_rays
        size = np.linalg.norm(np.abs(a) + np.abs(x), axis=1)
        offset = float(np.max(np.abs(self.at_zero)))
        biased = offset > self.exam.error(float(self.exam.signature.space.tiny))
        self.exam.say("output bias", "yes" if biased else "no", f"a zero token is answered {offset:.2g}")
        moved = float(np.max(np.linalg.norm(answers - x, axis=1) / self.exam.error(size)))
        if moved <= 1.0 and (yield from self._moved()) <= 1.0:
            self.exam.say("attention", "none", "other tokens before the last one move no answer")
            return self._diagnosis("linear in the last token", "relu-net")
        if not (yield from self._weights()):
            return self._diagnosis(UNKNOWN, None)
        return (yield from self._attention(answers, size))

    def _attention(self, answers: Floats, size: Floats) -> Steps[Diagnosis]:  # (norms, outputs), (norms,)
        """What kind of attention answers pairs of tokens, nearly equal ones of which weigh the same."""
        a, x = self.on_rays
        flat = np.linalg.norm(answers - 0.5 * (a + x) - self._own(self.ladder), axis=1)
        if np.max(flat / (self.exam.error(size) + self.added_radius * self.ladder)) <= 1.0:
            return (yield from self._average())
        norm = self._active(answers)
        if not (yield from self._logits(norm)):
            return self._diagnosis(UNKNOWN, None)
        if self.residual:
            return (yield from self._behind_residual(norm))
        yield from self._score_bias(norm)
        heads = yield from self._count(norm)
        if heads == "1":
            yield from self._score_rank(norm)
            return self._diagnosis("single-head", "single-head")
        return self._diagnosis("multi-head", "multi-head")

    def _moved(self) -> Steps[float]:
        """How far random tokens before the last one move its answer, over what errors explain."""
        norms = np.where(np.arange(CONTEXTS) % 2, self.ladder[-1], self.exam.norm)[:, None]
        last = norms * self._in_plane(CONTEXTS)[0]
        others = min(self.exam.longest - 1, SPOTS)
        queries = [
            [*(norm * self.exam.directions(1 + number % others)), token]
            for number, (norm, token) in enumerate(zip(norms, last, strict=True))
        ]
        answers = yield from self.exam.ask(queries)
        expected = self.at_zero + self._slope(last)
        if not self.affine:
            expected = yield from self.exam.ask([[token] for token in last])
        size = float(np.max(np.abs(answers)) + np.max(np.abs(expected)))
        return float(np.max(np.linalg.norm(answers - expected, axis=1)) / self.exam.error(size))

    def _average(self) -> Steps[Diagnosis]:
        """Pairs are answered by their mean: so must longer sequences be."""
        off = yield from self._off_average()
        if off > HOLDS:
            said = f"pairs are answered by their mean, longer sequences not, by {off:.2g} times what errors explain"
            self.exam.say("attention", "not of a softmax", said)
            return self._diagnosis(UNKNOWN, None)
        self.exam.say("attention", "a plain average", "tokens weigh the same at every norm")
        if self.residual:
            return self._diagnosis("average with a residual", None)
        return self._diagnosis("average", "single-head")

    def _off_average(self) -> Steps[float]:
        """How far random sequences are from being answered by the mean of their tokens, over what errors explain."""
        lengths = [min(self.exam.longest, 2 + number) for number in range(SPOTS)]
        queries = [self.exam.norm * self._in_plane(length)[0] for length in lengths]
        answers = yield from self.exam.ask([list(query) for query in queries])
        means = np.stack([query.mean(axis=0) for query in queries])
        expected = self.at_zero + self._slope(means)
        if self.residual:
            expected = expected + np.stack([query[-1] for query in queries] - means) @ self.added
        size = float(np.max(np.abs(answers)) + np.max(np.abs(expected)))
        bar = self.exam.error(size) + self.added_radius * self.exam.norm
        return float(np.max(np.linalg.norm(answers - expected, axis=1)) / bar)

    def _own(self, norms: Floats) -> Floats:  # (n,) -> (n, outputs) or 0
        """What a residual makes of the pair of the two rays, beside the mean of both."""
        if not self.residual:
            return np.zeros((norms.size, 1))
        return np.asarray(0.5 * norms[:, None] * ((self.second - self.first) @ self.added))

    def _logits(self, norm: float) -> Steps[bool]:
        """Whether weights are those of logits linear in the token, as one token and its reflection show."""
        # Also of the longest tokens, on which errors have the least part.
        norms = np.where(np.arange(SPOTS) % 2, self.ladder[-1], norm)[:, None]
        norms = np.minimum(norms, 0.5 * self.exam.signature.norm_limit)
        points, steps = (part * norms * self._in_plane(SPOTS)[0] for part in (0.3, 1.0))
        slope = self._slope(steps) - (steps @ self.added if self.residual else 0.0)
        # A residual that noise or rounding hides among nearly equal tokens shows here: it is the token itself, or none.
        hidden = not self.residual and self.exam.outputs == self.exam.signature.width
        slopes = [slope, slope - steps] if hidden else [slope]
        off = yield from ask_reflection(self.exam, points, steps, slopes, self.added_radius)
        if hidden and off[0] > HOLDS >= off[1]:
            self.residual, self.itself = True, True
            self.added = np.eye(self.exam.outputs)
            said = "a token and its reflection beside the last one show that it is added to the answer"
            self.exam.findings = [finding for finding in self.exam.findings if finding.what != "residual"]
            self.exam.say("residual", "yes", said)
        elif min(off) > HOLDS:
            said = (
                f"weights of a token and its reflection do not add up to one, by {off[0]:.2g} times what errors explain"
            )
            self.exam.say("attention", "not of a softmax", said)
            return False
        self.exam.say("attention", "yes", "tokens weigh differently; a token and its reflection add up to one weight")
        return True

    def _behind_residual(self, norm: float) -> Steps[Diagnosis]:
        """Heads to which the last token is added."""
        heads = yield from self._count(norm)
        recovers = "residual" if self.itself else None
        if recovers is None or heads != "1":
            return self._diagnosis("attention with a residual", recovers)
        found = self._diagnosis("attention with a residual", recovers, heads=1)
        return replace(found, alternatives=({},))  # few answers told it: there may be more heads

    def _active(self, pairs: Floats) -> float:
        """The least norm at which attention does a fair part of what it does to the longest tokens."""
        a, x = self.on_rays
        whole = np.linalg.norm(a - x, axis=1) + self.exam.signature.space.tiny
        away = np.linalg.norm(pairs - 0.5 * (a + x), axis=1) / whole
        return float(self.ladder[int(np.argmax(away >= ACTIVE * np.max(away)))])

    def _score_bias(self, norm: float) -> Steps[None]:
        """Beside a zero last token logits are what the score bias makes them."""
        tokens, alone = (norm * each for each in self._in_plane(SPOTS))
        answers = yield from self.exam.ask([[token, self.zero] for token in tokens])
        tilt = np.abs(answers - self.at_zero - 0.5 * alone)
        bar = self.exam.error(np.max(np.abs(answers)) + np.max(np.abs(alone)))
        shows = bool(np.max(tilt) > bar)
        self.exam.say(
            "score bias",
            "yes" if shows else "no",
            f"beside a zero token others weigh a half, up to {np.max(tilt):.2g}",
        )

    def _count(self, norm: float) -> Steps[str]:
        """The number of heads: from the rank of what one token adds, or from how its copies add up."""
        outputs = self.exam.outputs
        u = norm * self.exam.directions(1)[0]
        found = 1
        if outputs > 1:
            rows, added = 0, np.empty((0, outputs))
            while rows < MOST_ROWS:
                more = max(FIRST_ROWS, rows)
                g, alone = self._in_plane(more)
                sizes = norm * self.exam.rng.choice([0.7, 1.5, 2.0], (more, 1))
                sizes = np.minimum(sizes, 0.5 * self.exam.signature.norm_limit)
                g, alone = sizes * g, self.at_zero + sizes * alone
                scale = min(1.0, 0.5 * self.exam.signature.norm_limit / norm)
                answers = yield from self.exam.ask([[scale * u + each, each] for each in g])
                added = np.vstack([added, answers - alone])
                rows += more
                found, gap = rank_above(added, float(self.exam.error(np.max(np.abs(answers)))))
                if found < rows:
                    break
            if found > 1:
                least = "" if found < min(rows, outputs) else "at least "
                self.exam.say("heads", f"{least}{found}", f"what one token adds has rank {found}, gap {gap:.1g}")
                return f"{least}{found}"
        if self.exam.longest <= COPIES[-1]:
            one = yield from self._one_logit(norm)
            said = "logits of two tokens are " + ("linear" if one else "not linear") + " in the token"
            self.exam.say("heads", "1" if one else "at least 2", said)
            return "1" if one else "at least 2"
        # Where all copies add the same, or nothing, shorter tokens tell more.
        for shorter in (1.0, 0.25, 0.0625):
            ranks = yield from self._odds(shorter * norm, COPIES)
            if max(ranks) > 1 or sum(ranks) >= MOST_SPOTS:
                break
        if max(ranks) <= 1:
            exact = self.exam.noise.kind == "exact"
            said = "copies of a token multiply its odds as one head does" + ("" if exact else ", within errors")
            self.exam.say("heads", "1" if exact else "1 or more", said)
            return "1"
        most = max((yield from self._odds(shorter * norm, MANY_COPIES))) if self.exam.longest > MANY_COPIES[-1] else 2
        least = "" if 2 < most < len(MANY_COPIES) // 2 else "at least "
        self.exam.say("heads", f"{least}{max(2, most)}", f"copies of a token add up like {max(2, most)} heads")
        return f"{least}{max(2, most)}"

    def _one_logit(self, norm: float) -> Steps[bool]:
        """Whether the logit of g + 2u beside g is twice that of g + u, as behind one head, wherever both are seen."""
        scale = norm * min(1.0, 0.3 * self.exam.signature.norm_limit / norm)
        for shorter in (1.0, 0.25, 0.0625):
            points, steps = (shorter * scale * self._in_plane(SPOTS)[0] for _ in range(2))
            answers = yield from self.exam.ask(
                [[g + times * u, g] for times in (1.0, 2.0) for g, u in zip(points, steps, strict=True)]
            )
            added = answers.reshape(2, SPOTS, -1) - self.at_zero - self._slope(points)
            whole = np.stack([self._slope(times * steps) for times in (1.0, 2.0)])
            loud = np.argmax(np.abs(whole[0]), axis=1)[None, :, None]  # the output that tells most
            part, size = (np.take_along_axis(each, loud, axis=2)[..., 0] for each in (added, whole))
            bar = self.exam.error(float(np.max(np.abs(answers)))) / np.maximum(
                np.abs(size), self.exam.signature.space.tiny
            )
            weight = part / size
            seen = np.all((weight > 8 * bar) & (weight < 1 - 8 * bar), axis=0)
            if np.any(weight < -8 * bar) or np.any(weight > 1 + 8 * bar):
                return False
            if np.sum(seen) >= MOST_SPOTS:
                break
        logits = np.log(weight[:, seen] / (1 - weight[:, seen]))
        radius = bar[:, seen] / (weight * (1 - weight))[:, seen]
        return bool(np.all(np.abs(logits[1] - 2 * logits[0]) <= 2 * radius[1] + 4 * radius[0]))

    def _odds(self, norm: float, copies: Sequence[int]) -> Steps[list[int]]:
        """Ranks of what copies of a token add, at a few places."""
        scale = min(1.0, 0.5 * self.exam.signature.norm_limit / norm)
        sizes = np.full((SPOTS, 1), norm * scale)
        sizes[1::2] *= max(1.0, min(LONGER, 0.5 * self.exam.signature.norm_limit / (norm * scale)))
        u, (g, alone) = sizes * self.exam.directions(SPOTS), (sizes * each for each in self._in_plane(SPOTS))
        questions = [[u[spot] + g[spot]] * count + [g[spot]] for spot in range(SPOTS) for count in copies]
        answers = (yield from self.exam.ask(questions)).reshape(SPOTS, len(copies), -1)
        ranks = []
        for each, single in zip(answers, self.at_zero + alone, strict=True):
            added = each - single
            strongest = svd(added)[2][0]
            error = float(self.exam.error(max(np.max(np.abs(each)), np.max(np.abs(single)))))
            ranks.append(odds_rank(np.array(copies), added @ strongest, error))
        return ranks

    def _score_rank(self, norm: float) -> Steps[None]:
        """The rank of the score matrix, if it is very small: of a few logits."""
        if self.exam.noise.kind != "exact" or self.exam.signature.width <= 2 * FIRST_ROWS:
            return
        scale = min(SHORT, 0.5 * self.exam.signature.norm_limit / norm)  # so that no logit saturates
        tokens = norm * scale * self.exam.directions(FIRST_ROWS)
        most = FIRST_ROWS if self.exam.outputs == 1 else FEW_ROWS
        alone, pairs = np.empty((0, self.exam.outputs)), np.empty((0, 0, self.exam.outputs))
        for count in range(2, most + 1):  # each token as the first and as the last one of a pair with all before it
            fresh, done = tokens[len(alone) : count], len(alone)
            before = [(i, j) for i in range(count) for j in range(count) if i != j and max(i, j) >= done]
            answers = yield from self.exam.ask(
                [[token] for token in fresh] + [[tokens[i], tokens[j]] for i, j in before]
            )
            alone = np.vstack([alone, answers[: len(fresh)]])
            wider = np.zeros((count, count, self.exam.outputs))
            wider[:done, :done] = pairs
            for (i, j), answer in zip(before, answers[len(fresh) :], strict=True):
                wider[i, j] = answer
            pairs = wider
            if count > 2 and not self._full_rank(alone, pairs, last=count == most):
                return

    def _full_rank(self, alone: Floats, pairs: Floats, *, last: bool) -> bool:  # (n, outputs), (n, n, outputs)
        """Whether logits of n tokens have the rank n − 1, which the score's may exceed; said where it is settled."""
        count = len(alone)
        off = ~np.eye(count, dtype=bool)
        ends = alone[:, None] - alone[None, :]
        loud = int(np.argmax(np.min(np.abs(ends[off]), axis=0)))  # the output that tells most
        weight = np.full((count, count), 0.5)  # of a token beside itself
        weight[off] = ((pairs - alone[None, :])[..., loud][off]) / ends[..., loud][off]
        if not np.all((weight > 0) & (weight < 1)):
            return False
        logits = np.log(weight / (1 - weight))  # u·W·g + u·c − g·W·g − g·c: a row and a column more than the score
        plain = logits - logits.mean(axis=0) - logits.mean(axis=1, keepdims=True) + logits.mean()
        error = self.exam.error(max(np.abs(alone).max(), np.abs(pairs).max()))
        bar = float(np.max(error / np.abs(ends[..., loud][off]) / (weight * (1 - weight))[off]))
        rank, gap = rank_above(plain, bar)
        full = rank >= count - 1
        if last or not full:
            said = f"{count * (count - 1)} logits have rank {rank}" + ("" if full else f", gap {gap:.1g}")
            self.exam.say("score rank", f"at least {rank}" if full else str(rank), said)
        return full

    # --- what is bent

    def bent(self) -> Steps[Diagnosis]:
        """A net, behind attention or alone, or normalisation."""
        exam = self.exam
        moved = 0.0
        if exam.longest >= 2:
            answers = yield from exam.ask([[norm * self.first, norm * self.second] for norm in self.ladder])
            sizes = np.maximum.accumulate(np.max(np.linalg.norm(self.on_rays, axis=2), axis=0))
            moved = float(np.max(np.linalg.norm(answers - self.on_rays[1], axis=1) / exam.error(sizes)))
            moved = moved if moved > 1.0 else (yield from self._moved())
        attends = moved > 1.0
        moves = "moves the answer" if attends else "moves no answer"
        exam.say("attention", "yes" if attends else "none", f"another token before the last one {moves}")
        if exam.signature.max_norm is None:
            ended = yield from self._far()
            if ended is not None:
                return ended
        if attends and not (yield from self._weights()):
            return self._diagnosis(UNKNOWN, None)
        activation = yield from ask_activation(exam)
        smooth = "smooth" if exam.signature.max_norm is None else "auto"  # which shows from afar only
        if attends:
            known = {} if activation == "relu" else {"activation": activation}
            return self._diagnosis("one-layer", "one-layer" if not known or smooth == "smooth" else None, **known)
        if activation == "relu":  # or so few neurons that none was seen to bend
            exact = exam.noise.kind == "exact"
            return replace(self._diagnosis("relu-net", "relu-net"), alternatives=({"activation": smooth},) * exact)
        return self._diagnosis("relu-net", "relu-net", activation=smooth if activation == "smooth" else activation)

    def _far(self) -> Steps[Diagnosis | None]:
        """Whether a bent map is one of no net: it does not grow, or is bent far from the origin too."""
        ways = np.stack([self.first, self.second, -self.first])
        found = yield from ask_far_tokens(self.exam, ways)
        for times in FARTHER[1:]:
            if found.growth < STILL or found.identity or found.bent <= HOLDS:
                break
            found = yield from ask_far_tokens(self.exam, ways, times)
        said = f"a token twice as long moves the answer by {found.growth:.2g} of it"
        if found.growth < STILL or found.identity:
            turned = f"{said}, one turned by {TURN:.1g} by {found.turned:.2g}" + ": it saturates" * (not found.turns)
            self.exam.say("normalised", "yes" if found.turns else "no", turned)
            return self._diagnosis("normalised", "normalised") if found.turns else self._diagnosis(UNKNOWN, None)
        self.exam.say("normalised", "no", said)
        if found.bent > HOLDS:
            off = f"far from the origin it is off an affine map by {found.bent:.2g} times what errors explain"
            self.exam.say("net", "no", off)
            return self._diagnosis(UNKNOWN, None)
        return None
