"""Which family an oracle is likely of, from 3 to 16 queries along one direction e.

Single tokens 0, A·e and −0.7·A·e tell an affine map from a net: far out a neuron is active on one side only. Where the
map is affine the answer to every single token t·e is known, and two tokens −t·e and t·e cost one query: one head
answers between its two single tokens, and copies of one of them multiply its odds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.attempt import Ledger
from keyhole.methods.base import Steps
from keyhole.methods.diagnosis.activation import ask_curvature
from keyhole.methods.examination import LEAST_NUMBERS, Examination, Finding, ask_for_labels
from keyhole.methods.noise_estimation.measure import NoiseEstimate, coarseness, measure_noise
from keyhole.noise import Noise
from keyhole.queries import Signature

# The token on the other side is shorter, so that its answer has digits of its own.
OTHER = 0.7324081924
# Binary digits that are missing in so few answers by coincidence less than once in 10⁷ oracles.
COINCIDENCE = 30.0
# Further answers where some look rounded.
MORE_ANSWERS = 7
# A bend below this part of the answers may be an error that is the same whenever a query is repeated.
SLIGHT = 1e-3
# What is normalised does not grow with its tokens, but for this part.
STILL = 1e-3
# The degree of a head whose weights are logits, or a power of them, is three at least; nets have one, gated ones two.
CUBIC = 2.5
# A token of value zero stands beside so many last ones, each shorter than the one before by this power of two; its
# answers are nothing below this part of those to tokens as long.
LASTS, LAST_STEP, NO_VALUE = 6, 6, 2.0**-12
# Logits between these tell heads apart; they grow with the square of the norm. So many norms are tried.
LEAST_LOGIT, LOGIT, MOST_LOGIT, NORMS = 0.5, 1.5, 3.0, 6
# Norms are changed by this factor where attention is flat or saturated.
FACTOR = 16.0
COPIES = 3
# Steps at which two tokens weigh the same, over the norm.
NEAR = 2.0**-16
# Pairs of tokens that tell whether single ones are answered by rounding only, which is at most so many roundings of
# them: what is added up may be larger than what it adds up to.
PAIRS, ROUNDING_OF_PAIRS = 2, 2.0**10
# They are asked where answers to single tokens are no more than this part of these: most nets are spared them.
FAINT = 2.0**-20
ONE_TOKEN, BENT = "one token", "a bent map"
# Spots at which curvature is looked for.
SPOTS = 2


@dataclass(frozen=True)
class Evidence:
    """The likeliest family of an oracle, with the figures it rests on."""

    family: str | None  # the likeliest; None where a diagnosis must tell
    noise: Noise  # found, or as declared
    findings: tuple[Finding, ...] = ()
    noise_evidence: str = ""  # where it was found out
    noise_queries: int = 0  # that this took
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method for the first family
    other_parts: bool = False  # whether one head of other parts than a softmax's would be answered like this

    @property
    def bends(self) -> bool:
        """Whether single tokens were answered by a bent map."""
        return any(each.what == ONE_TOKEN and each.found == BENT for each in self.findings)


def triage(signature: Signature, rng: np.random.Generator) -> Steps[Evidence]:
    """The likeliest family, and noise that was not declared."""
    return (yield from _Triage(signature, rng).evidence())


def ask_slight_bend(signature: Signature, rng: np.random.Generator) -> Steps[bool]:
    """Whether single tokens of usual norm are answered by an affine map but for a little: it may be an error.

    The tokens of `triage` are so long that errors of any size are lost beside their answers.
    """
    exam = Examination(signature, rng, "triage")
    (direction,) = exam.norm * exam.directions(1)
    zero, up, down = yield from exam.ask([[0.0 * direction], [direction], [-OTHER * direction]])
    size = float(max(np.max(np.abs(each)) for each in (zero, up, down)))
    bend = float(np.max(np.abs(zero - down - OTHER * (up - zero))))
    return bool(exam.error(size) < bend <= SLIGHT * size)


class _Triage:
    """Asks along one direction."""

    def __init__(self, signature: Signature, rng: np.random.Generator) -> None:
        self.exam = Examination(signature, rng, "triage")
        self.width = signature.width
        (self.direction,) = self.exam.directions(1)
        self.far = self.exam.far
        self.noise_found = "", 0  # evidence, queries
        self.on_line = True  # whether two tokens were answered between single ones, or beyond

    def evidence(self) -> Steps[Evidence]:
        """The three single tokens, and what follows from them."""
        if self.exam.signature.answers == "labels":
            self.exam.say("answers", "labels", "the box declares that its answers are labels")
            return (yield from self._labels())
        zero, up, down = yield from self._ask([0.0], [self.far], [-OTHER * self.far])
        if (yield from ask_for_labels(self.exam, np.stack([zero, up, down]))):
            return (yield from self._labels())
        self.zero, self.slope = zero, (up - zero) / self.far
        size = float(max(np.max(np.abs(each)) for each in (zero, up, down)))
        bend = float(np.max(np.abs(zero - down - OTHER * (up - zero))))
        if bend > 4 * self.exam.error(size) and (yield from self._cancels(size)):
            return self._evidence("multi-head")
        if bend > 4 * self.exam.error(size) and (yield from self._is_normalised(up)):
            return self._evidence("normalised")
        if self.exam.noise.kind in ("exact", "measure"):
            yield from self._noise(np.stack([zero, up, down]), bend, size)
        bent = bend > 4 * self.exam.error(size)
        off = f"off a line by {bend:.2g} where answers reach {size:.2g}"
        self.exam.say(ONE_TOKEN, BENT if bent else "an affine map", off)
        if bent:
            return (yield from self._ask_net(up, down))
        return (yield from self._heads())

    def _cancels(self, size: float) -> Steps[bool]:
        """Whether single tokens are answered by rounding of what pairs show: values of heads add up to none."""
        if self.exam.longest < 2 or size > FAINT * self.far:
            return False
        pairs = [list(self.exam.norm * self.exam.directions(2)) for _ in range(PAIRS)]
        shown = float(np.max(np.abs((yield from self.exam.ask(pairs)))))
        shown *= self.far / self.exam.norm  # of pairs as long
        cancels = bool(size <= ROUNDING_OF_PAIRS * self.exam.signature.space.eps * shown)
        if cancels:
            said = f"single tokens are answered by {size:.2g}, pairs as long by {shown:.2g}: the values of heads cancel"
            self.exam.say("heads", "several", said)
        return cancels

    def _cancels_behind_errors(self) -> Steps[bool]:
        """Whether single tokens are answered alike but for errors, and pairs of them are not."""
        error = 4 * self.exam.error(float(np.max(np.abs(self.zero))))
        if np.max(np.abs(self.slope)) * self.far > error:
            return False
        tokens = self.exam.norm * self.exam.directions(2 * PAIRS)
        queries = [[token] for token in tokens] + [[*tokens[place : place + 2]] for place in range(0, len(tokens), 2)]
        moved = np.max(np.abs((yield from self.exam.ask(queries)) - self.zero), axis=1)
        single, shown = (float(np.max(each)) for each in (moved[: len(tokens)], moved[len(tokens) :]))
        if not single <= error < shown:
            return False
        said = f"single tokens move the answer by {single:.2g} and pairs by {shown:.2g}: the values of heads cancel"
        self.exam.say("heads", "several", said)
        return True

    def _is_normalised(self, up: Floats) -> Steps[bool]:
        """Whether a token twice as long moves the answer by what it is longer: all else only turns with it."""
        known = self.exam.noise.kind == "exact" and up.size == self.width and 2 * self.far <= self.exam.most
        if not known or not float(np.linalg.norm(self.slope - self.direction)) <= STILL:
            return False
        (twice,) = yield from self._ask([2 * self.far])
        off = float(np.max(np.abs(twice - up - self.far * self.direction)))
        normalised = bool(off <= 4 * self.exam.error(2 * self.far))
        if normalised:
            said = f"a token twice as long moves the answer by what it is longer, but for {off:.2g}"
            self.exam.say("growth", "that of the token", said)
        return normalised

    def _labels(self) -> Steps[Evidence]:
        """Labels, and how often they are wrong where that is to be measured."""
        if self.exam.noise.kind == "measure":
            ledger, known = Ledger(np.inf), self.exam.signature.with_changes(answers="labels")
            estimate = yield from ledger.count(measure_noise(known, self.exam.rng))
            self.exam.noise, self.noise_found = estimate.noise, (estimate.evidence, ledger.spent)
            self.exam.say("noise", str(estimate.noise), estimate.evidence)
        return self._evidence("labels")

    def _ask(self, *sequences: list[float]) -> Steps[Floats]:  # -> (count, outputs)
        """Answers to sequences of multiples of the direction."""
        return (yield from self.exam.ask([[norm * self.direction for norm in each] for each in sequences]))

    def _evidence(self, family: str | None, **options: Any) -> Evidence:
        return Evidence(family, self.exam.noise, tuple(self.exam.findings), *self.noise_found, options)

    def _noise(self, answers: Floats, bend: float, size: float) -> Steps[None]:
        """Rounding shows in the digits of answers; where they bend or are rounded, one is asked again.

        Noise is measured where that differs, and where a slight bend may be an error that repeats.
        """
        exam = self.exam
        digits = coarseness(answers[answers != 0], exam.signature.space.eps, COINCIDENCE)
        measure = exam.noise.kind == "measure"
        if digits.evidence:  # so few answers may all end in 0: then they look rounded to fewer decimals than they are
            norms = self.far * exam.rng.uniform(0.1, 1.0, MORE_ANSWERS)
            more = yield from self._ask(*([norm] for norm in norms))
            numbers = np.append(answers, more)
            digits = coarseness(numbers[numbers != 0], exam.signature.space.eps, COINCIDENCE)
            if np.unique(np.abs(numbers[numbers != 0])).size < LEAST_NUMBERS:  # of which digits say nothing
                digits = NoiseEstimate(Noise.exact(), "")
        if not measure and (digits.evidence or bend > exam.error(size)):
            again = yield from exam.ask([[self.far * self.direction]], repeat=1)
            apart = float(np.max(np.abs(again[0] - answers[1])))
            measure = apart > exam.error(size) or (not digits.evidence and bend <= SLIGHT * size)
        estimate: NoiseEstimate = digits
        ledger = Ledger(np.inf)
        if measure:
            estimate = yield from ledger.count(measure_noise(exam.signature, exam.rng))
            if digits.evidence and estimate.noise.kind == "bounded":  # kinks follow no smooth curve either
                estimate = digits
        exam.noise, self.noise_found = estimate.noise, (estimate.evidence, ledger.spent)
        if estimate.evidence:
            exam.say("noise", str(estimate.noise), estimate.evidence)

    # --- single tokens are answered by a bent map

    def _ask_net(self, up: Floats, down: Floats) -> Steps[Evidence]:
        """A net, alone or behind attention."""
        cubic = False
        if 2 * self.far <= self.exam.most:
            # On the side where neurons are active: on the other a net may stand still.
            upwards = np.linalg.norm(up - self.zero) >= np.linalg.norm(down - self.zero)
            once, norm = (up, self.far) if upwards else (down, -OTHER * self.far)
            (twice,) = yield from self._ask([2 * norm])
            size = max(float(np.linalg.norm(once)), float(np.linalg.norm(twice)), self.exam.signature.space.tiny)
            growth = float(np.linalg.norm(twice - once)) / size
            if growth <= STILL:
                self.exam.say("growth", "none", f"a token twice as long moves the answer by {growth:.2g} of it")
                return self._evidence(None)
            with np.errstate(all="ignore"):
                cubic = bool(np.log2(np.linalg.norm(twice) / np.linalg.norm(once)) > CUBIC)
        attends = False
        if self.exam.longest >= 2:
            for norm in (self.far, -self.far):
                (beside,) = yield from self._ask([norm, 0.0])
                attends = bool(
                    np.max(np.abs(beside - self.zero)) > self.exam.error(np.max(np.abs(np.stack([up, down]))))
                )
                if attends:
                    break
        moves = "moves the answer" if attends else "moves no answer"
        self.exam.say("attention", "yes" if attends else "none", f"another token before the last one {moves}")
        smooth = yield from ask_curvature(self.exam, SPOTS)
        far = self.exam.signature.max_norm is None  # from where bends of smooth neurons are seen
        if attends:
            known = {"activation": "smooth"} if smooth else {}
            found = self._evidence("one-layer" if far or not smooth else None, **known)
            return replace(found, other_parts=cubic)
        found = self._evidence("relu-net", **({"activation": "smooth" if far else "auto"} if smooth else {}))
        return replace(found, other_parts=cubic)

    # --- single tokens are answered by an affine map

    def _heads(self) -> Steps[Evidence]:
        """One head or several, with a residual or without."""
        exact = self.exam.noise.kind in ("exact", "dtype")
        silent = not np.any(self.slope)  # as where sinks have all the weight
        if self.exam.longest >= 2 and not exact and (yield from self._cancels_behind_errors()):
            return self._evidence("multi-head")
        if self.exam.longest < 2 or not exact or silent:
            return replace(self._evidence("single-head"), other_parts=silent and self.exam.longest >= 2)
        residual = self.exam.outputs == self.width and (yield from self._residual())
        own = self.direction if residual else 0.0  # what the last token adds to its answer
        one = yield from self._one_head(self.slope - own)
        said = "two tokens and copies of one of them are answered as by one head"
        self.exam.say("heads", "1" if one else "several", said if one else said.replace("as by", "not as by"))
        if residual:
            return self._evidence("residual", **({"heads": 1} if one else {}))
        if one:
            return self._evidence("single-head")
        return replace(self._evidence("multi-head"), other_parts=(yield from self._weighs_as_one()))

    def _weighs_as_one(self) -> Steps[bool]:
        """Whether one set of weights may explain the answers: a token of value zero then counts nowhere.

        Values of several heads add up to zero without being zero, and their weights differ where logits are neither
        zero nor large; last tokens are of so many norms that some are.
        """
        exam = self.exam
        if not self.on_line or exam.outputs > 1 or exam.signature.max_norm is not None or self.width < 2:
            return self.on_line
        (other,) = exam.directions(1)
        ((answer,),) = yield from exam.ask([[self.far * other]])
        values = np.append(self.slope, (answer - self.zero[0]) / self.far)
        size = np.linalg.norm(values)
        if not size > 0:
            return False
        token = self.far * (values[1] * self.direction - values[0] * other) / size
        lasts = exam.norm * 2.0 ** (-LAST_STEP * np.arange(LASTS))[:, None] * exam.directions(LASTS)
        beside = yield from exam.ask([[token, last] for last in lasts])
        return bool(np.max(np.abs(beside - self.zero)) <= NO_VALUE * self.far * size)

    def _residual(self) -> Steps[bool]:
        """Whether the last of two tokens that weigh the same counts for more."""
        step = NEAR * self.exam.norm
        (answer,) = yield from self._ask([-step, step])
        part = float((answer - self.zero) @ self.direction) / step
        off = float(np.linalg.norm(answer - self.zero - step * self.direction)) / step
        said = f"of two tokens that weigh the same, the last tells {part:.2g} of itself more"
        self.exam.say("residual", "yes" if off < 0.5 else "no", said)
        return bool(off < 0.5)

    def _one_head(self, slope: Floats) -> Steps[bool]:
        """Whether −t·e and t·e, and copies of the first, are answered as one head with these values would."""
        norm = self.exam.norm
        even: tuple[float, float, float] | None = None  # the norm, weight and radius where attention looked flat
        if not np.any(slope):  # without values heads cannot be told apart
            return True
        for _ in range(NORMS):
            weight, radius, line = yield from self._weight(norm, 1, slope)
            self.on_line &= line
            if not line or not -radius <= weight <= 1 + radius:
                return False
            smaller = min(weight, 1 - weight)
            if smaller <= 8 * radius:  # saturated
                norm /= FACTOR
                continue
            logit = abs(np.log(weight / (1 - weight)))
            if LEAST_LOGIT <= logit <= MOST_LOGIT:
                break
            flat = abs(weight - 0.5) <= 8 * radius
            longer = min(norm * (FACTOR if flat else (LOGIT / logit) ** 0.5), self.exam.most)
            if longer == norm:
                break
            even = (norm, weight, radius) if flat else None
            norm = longer
        else:
            if even is None:  # attention is saturated at every norm
                return True
            norm, weight, radius = even  # or it is flat, unless two heads of opposite logits are, of as many copies
        if self.exam.longest <= COPIES:
            return True
        odds = COPIES * weight / (1 - weight)
        more, more_radius, line = yield from self._weight(norm, COPIES, slope)
        self.on_line &= line
        allowed = more_radius + radius * COPIES / ((1 - weight) * (1 + odds)) ** 2
        return bool(line and abs(more - odds / (1 + odds)) <= 4 * allowed)

    def _weight(self, norm: float, copies: int, slope: Floats) -> Steps[tuple[float, float, bool]]:
        """The weight of copies of −t·e beside t·e, its radius, and whether the answer lies between single tokens."""
        (answer,) = yield from self._ask([-norm] * copies + [norm])
        last, apart = self.zero + norm * self.slope, -2 * norm * slope
        moved = answer - last
        length = float(np.linalg.norm(apart))
        weight = float(moved @ apart) / length**2
        error = float(self.exam.error(np.max(np.abs(answer)) + np.max(np.abs(last)) + length))
        return weight, error / length, bool(np.linalg.norm(moved - weight * apart) <= 4 * error)
