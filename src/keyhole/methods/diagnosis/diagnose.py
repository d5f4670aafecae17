"""The family of an oracle from a few queries, each a test of one property that differs between families.

Single tokens show what stands behind attention: heads answer them by an affine map, a net by a bent one, normalisation
by one that does not grow. Short tokens around one point weigh the same, which shows a residual. Copies of a token
multiply its odds: behind one head 1/(answer) is then affine in 1/copies. The ranks of such answers count heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.diagnosis.activation import ask_activation
from keyhole.methods.diagnosis.examination import Examination, Finding
from keyhole.methods.diagnosis.family_tests import affine_misfit, odds_rank, rank_above
from keyhole.methods.registry import methods_for
from keyhole.noise import Noise
from keyhole.queries import Signature

# Families that a diagnosis can name for which there are methods.
FAMILIES = ("single-head", "multi-head", "residual", "relu-net", "one-layer")
# Norms that tokens are tried at, over the square root of the width: logits go with their square.
LADDER = 2.0 ** np.arange(-6, 7, 2)
# Attention that does this part of what it does when it is saturated is neither flat nor saturated.
ACTIVE = 0.15
# What is normalised does not grow with its tokens, but for this part.
STILL = 1e-3
# Copies of a token whose odds they multiply.
COPIES = (1, 2, 4)
MANY_COPIES = (1, 2, 3, 4, 6, 8, 12, 16)
SPOTS = 4
MOST_SPOTS = 3  # must say something before one head is believed in
# Every other spot has tokens longer by this: heads that look alike among short tokens differ among longer ones.
LONGER = 3.0
# Tokens whose logits are read have this part of the norm at which attention shows.
SHORT = 0.25
# Rows that ranks are looked for in: first a few, then more while the rank is full.
FIRST_ROWS, MOST_ROWS = 6, 96
FEW_ROWS = 4  # behind several outputs, where a head is recovered from so few queries that a rank is soon dearer


@dataclass(frozen=True)
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
        return f"it looks like {self.family} ({facts})"

    def found(self, what: str) -> str | None:
        """What was found of one property; None where it was not looked for."""
        return next((finding.found for finding in self.findings if finding.what == what), None)

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
    steady = yield from asking.steadiness()
    if steady is not None:
        return steady
    if (yield from asking.single_tokens()):
        return (yield from asking.heads())
    return (yield from asking.ask_net())


class _Diagnosing:
    """Asks for one property after the other."""

    def __init__(self, signature: Signature, rng: np.random.Generator) -> None:
        self.exam = Examination(signature, rng, "diagnosis")
        # Of an oracle of bounded norm the ladder ends at the bound.
        self.ladder = np.unique(np.minimum(LADDER * signature.width**0.5, self.exam.most))
        self.first, self.second = self.exam.directions(2)  # the rays that single tokens are asked along
        self.zero = np.zeros(signature.width)

    def _diagnosis(self, family: str, recovers: str | None, **options: Any) -> Diagnosis:
        exam = self.exam
        methods = methods_for(recovers, exam.noise, options) if recovers is not None else []
        method = methods[0].name if methods else None
        return Diagnosis(family, method, tuple(exam.findings), options, exam.noise, recovers=recovers)

    # --- properties

    def steadiness(self) -> Steps[Diagnosis | None]:
        """Whether answers repeat, and depend on nothing but the last token and the set of the others."""
        a, b, x = self.exam.norm * self.exam.directions(3)
        queries = [[a, x], [a, a, x, x], [x]] if self.exam.longest >= 4 else [[x], [x], [x]]
        if self.exam.longest >= 3:
            queries += [[a, b, x], [b, a, x]]
        answers = yield from self.exam.ask(queries)
        again = yield from self.exam.ask(queries[:1], repeat=1)
        size = float(np.max(np.abs(answers)))
        apart = float(np.max(np.abs(again - answers[:1])))
        if self.exam.noise.kind in ("exact", "measure"):
            yield from self.exam.ask_noise(answers, apart)
        if self.exam.longest >= 3:
            swapped = float(np.max(np.abs(answers[-1] - answers[-2])))
            if swapped > self.exam.error(size):
                self.exam.say("positions", "count", f"two tokens exchanged move the answer by {swapped:.2g}")
                return self._diagnosis("positional", None)
            self.exam.say("positions", "do not count", f"two tokens exchanged move the answer by {swapped:.2g}")
        if self.exam.longest >= 4:
            doubled = float(np.max(np.abs(answers[1] - answers[0])))
            if doubled > self.exam.error(size):
                self.exam.say("average", "no", f"every token doubled moves the answer by {doubled:.2g}")
                return self._diagnosis("unknown", None)
        return None

    def single_tokens(self) -> Steps[bool]:
        """Whether single tokens are answered by an affine map."""
        rays = [[norm * direction] for direction in (self.first, self.second) for norm in self.ladder]
        inner = 0.5 * self.ladder[-1]
        rest = [[self.zero], [inner * (self.first + self.second)], [inner * self.first], [inner * self.second]]
        answers = yield from self.exam.ask(rays + rest)
        if self.exam.noise.kind == "exact":
            yield from self.exam.ask_noise(answers, 0.0)
            if self.exam.noise.kind == "exact":
                self.exam.say("noise", "none", "a question asked twice was answered the same, with all digits")
        self.at_zero = answers[-4]
        self.on_rays = answers[:-4].reshape(2, self.ladder.size, -1)
        worst = 0.0
        sizes = np.max(np.abs(self.on_rays), axis=(0, 2))  # at each norm: along one ray answers may cancel
        for ray in self.on_rays:
            misfit, error = affine_misfit(self.ladder, ray, self.at_zero), self.exam.error(sizes)
            worst = max(worst, float(np.max(misfit / error)))
        added = answers[-3] + answers[-4] - answers[-2] - answers[-1]
        worst = max(worst, float(np.max(np.abs(added)) / self.exam.error(float(np.max(np.abs(answers))))))
        self.affine = bool(worst <= 1.0)
        self.exam.say(
            "one token",
            "an affine map" if self.affine else "a bent map",
            f"off an affine map by {worst:.2g} times what rounding explains",
        )
        return self.affine

    def _in_plane(self, count: int) -> tuple[Floats, Floats]:  # (count, width) tokens, (count, outputs)
        """Random tokens of norm one at most in the plane of the two rays, and what they add to the zero token's answer.

        That need not be asked where single tokens are answered by an affine map.
        """
        plane = self.exam.rng.standard_normal((count, 2))
        plane /= np.sum(np.abs(plane), axis=1, keepdims=True)
        slopes = (self.on_rays[:, -1] - self.at_zero) / self.ladder[-1]
        return plane @ np.stack([self.first, self.second]), plane @ slopes

    def _residual(self) -> Steps[None]:
        """Whether there is a residual: tokens near one point weigh the same, and only it singles out the last."""
        self.residual = False
        if self.exam.noise.kind != "exact":
            self.exam.say("residual", "unknown", "noise hides what short steps do")
            return
        # So near that logits cannot differ, and not so near that rounding hides what is left.
        near = self.exam.signature.space.eps**0.45 * self.exam.norm
        if self.affine:
            base, there = (0.5 * self.exam.norm * each for each in self._in_plane(SPOTS))
            steps, moves = (near * each for each in self._in_plane(SPOTS))
            inner = yield from self.exam.ask(
                [[point - step, point + step] for point, step in zip(base, steps, strict=True)]
            )
            middle = self.at_zero + there
            answers = np.stack([inner, middle - moves, middle + moves], axis=1)
        else:
            base = 0.5 * self.exam.norm * self.exam.directions(SPOTS)
            both = near * self.exam.directions(2 * SPOTS).reshape(SPOTS, 2, -1)
            queries = []
            for point, (a, x) in zip(base, both, strict=True):
                queries += [[point + a, point + x], [point + a], [point + x]]
            answers = (yield from self.exam.ask(queries)).reshape(SPOTS, 3, -1)
        tilt = np.abs(answers[:, 0] - 0.5 * (answers[:, 1] + answers[:, 2]))
        slope = np.abs(answers[:, 1] - answers[:, 2])
        part = np.linalg.norm(tilt, axis=1) / (np.linalg.norm(slope, axis=1) + 1e-300)
        noticed = np.linalg.norm(tilt, axis=1) > self.exam.error(np.linalg.norm(answers[:, 0], axis=1))
        residual = bool(np.median(np.where(noticed, part, 0.0)) > self.exam.signature.space.eps**0.225)
        self.residual = residual
        self.exam.say(
            "residual",
            "yes" if residual else "no",
            f"of two tokens that weigh the same, the last tells {np.median(part):.2g} of the difference more",
        )

    # --- heads: single tokens are answered by an affine map

    def heads(self) -> Steps[Diagnosis]:
        """How many heads, and what biases they have."""
        pairs = [[norm * self.first, norm * self.second] for norm in self.ladder]
        if self.exam.longest < 2:
            return self._diagnosis("linear", "single-head")
        answers = yield from self.exam.ask(pairs)
        a, x = self.on_rays
        size = np.linalg.norm(np.abs(a) + np.abs(x), axis=1)
        alone = np.linalg.norm(answers - x, axis=1) / self.exam.error(size)
        offset = float(np.max(np.abs(self.at_zero)))
        biased = offset > self.exam.error(float(self.exam.signature.space.tiny))
        self.exam.say("output bias", "yes" if biased else "no", f"a zero token is answered {offset:.2g}")
        if np.max(alone) <= 1.0:
            self.exam.say("attention", "none", "another token before the last one moves no answer")
            return self._diagnosis("linear in the last token", None)
        yield from self._residual()
        if self.residual:
            self.exam.say("attention", "yes", "another token before the last one moves the answer")
            return (yield from self._behind_residual(answers))
        flat = np.linalg.norm(answers - 0.5 * (a + x), axis=1)
        if np.max(flat / self.exam.error(size)) <= 1.0:
            self.exam.say("attention", "a plain average", "two tokens weigh the same at every norm")
            return self._diagnosis("average", "single-head")
        self.exam.say("attention", "yes", "tokens weigh differently")
        norm = self._active(answers)
        yield from self._score_bias(norm)
        heads = yield from self._count(norm)
        if heads == "1":
            yield from self._score_rank(norm)
            return self._diagnosis("single-head", "single-head")
        return self._diagnosis("multi-head", "multi-head")

    def _behind_residual(self, pairs: Floats) -> Steps[Diagnosis]:
        """Heads to which the last token is added."""
        heads = yield from self._count(self._active(pairs))
        recovers = "residual" if self.exam.outputs == self.exam.signature.width else None
        if recovers is None or heads != "1":
            return self._diagnosis("attention with a residual", recovers)
        diagnosis = self._diagnosis("attention with a residual", recovers, heads=1)
        return replace(diagnosis, alternatives=({},))  # few answers told it: there may be more heads

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
        allowed = self.exam.error(np.max(np.abs(answers)) + np.max(np.abs(alone)))
        shows = bool(np.max(tilt) > allowed)
        self.exam.say(
            "score bias",
            "yes" if shows else "no",
            f"beside a zero token others weigh a half, up to {np.max(tilt):.2g}",
        )

    def _count(self, norm: float) -> Steps[str]:
        """The number of heads: from the rank of what one token adds, or from how its copies add up."""
        outputs = self.exam.outputs
        u = norm * self.exam.directions(1)[0]
        rank = 1
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
                rank, gap = rank_above(added, float(self.exam.error(np.max(np.abs(answers)))))
                if rank < rows:
                    break
            if rank > 1:
                least = "" if rank < min(rows, outputs) else "at least "
                self.exam.say("heads", f"{least}{rank}", f"what one token adds has rank {rank}, gap {gap:.1g}")
                return f"{least}{rank}"
        if self.exam.longest <= COPIES[-1]:
            self.exam.say("heads", "1 or more", f"sequences of {self.exam.longest} tokens are too short to count them")
            return "1"
        # Where all copies add the same, or nothing, shorter tokens tell more.
        for shorter in (1.0, 0.25, 0.0625):
            ranks = yield from self._odds(shorter * norm, COPIES)
            if max(ranks) > 1 or sum(ranks) >= MOST_SPOTS:
                break
        if max(ranks) <= 1:
            self.exam.say("heads", "1", "copies of a token multiply its odds as one head does")
            return "1"
        most = max((yield from self._odds(shorter * norm, MANY_COPIES))) if self.exam.longest > MANY_COPIES[-1] else 2
        least = "" if 2 < most < len(MANY_COPIES) // 2 else "at least "
        self.exam.say("heads", f"{least}{max(2, most)}", f"copies of a token add up like {max(2, most)} heads")
        return f"{least}{max(2, most)}"

    def _odds(self, norm: float, copies: Sequence[int]) -> Steps[list[int]]:
        """Ranks of what copies of a token add, at a few places."""
        scale = min(1.0, 0.5 * self.exam.signature.norm_limit / norm)
        sizes = np.full((SPOTS, 1), norm * scale)
        sizes[1::2] *= max(1.0, min(LONGER, 0.5 * self.exam.signature.norm_limit / (norm * scale)))
        u, (g, alone) = sizes * self.exam.directions(SPOTS), (sizes * each for each in self._in_plane(SPOTS))
        queries = [[u[spot] + g[spot]] * count + [g[spot]] for spot in range(SPOTS) for count in copies]
        answers = (yield from self.exam.ask(queries)).reshape(SPOTS, len(copies), -1)
        ranks = []
        for each, single in zip(answers, self.at_zero + alone, strict=True):
            added = each - single
            strongest = np.linalg.svd(added, full_matrices=False)[2][0]
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
        """Whether logits of n tokens have the rank n − 1, which the score's may exceed; kept where it is settled."""
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
        logit_error = float(np.max(error / np.abs(ends[..., loud][off]) / (weight * (1 - weight))[off]))
        rank, gap = rank_above(plain, logit_error)
        full = rank >= count - 1
        if last or not full:
            said = f"{count * (count - 1)} logits have rank {rank}" + ("" if full else f", gap {gap:.1g}")
            self.exam.say("score rank", f"at least {rank}" if full else str(rank), said)
        return full

    # --- what is bent

    def ask_net(self) -> Steps[Diagnosis]:
        """A net, behind attention or alone, or normalisation."""
        pair = [[norm * self.first, norm * self.second] for norm in self.ladder] if self.exam.longest >= 2 else []
        ways = [self.first, self.second, -self.first]
        far = (
            [[times * self.exam.far * way] for times in (1, 2) for way in ways]
            if self.exam.signature.max_norm is None
            else []
        )
        answers = yield from self.exam.ask(pair + far) if pair + far else self.exam.ask([[self.first]])
        x = self.on_rays[1]
        moved = 0.0
        if pair:
            sizes = np.maximum.accumulate(np.max(np.linalg.norm(self.on_rays, axis=2), axis=0))
            moved = float(np.max(np.linalg.norm(answers[: len(pair)] - x, axis=1) / self.exam.error(sizes)))
        attends = moved > 1.0
        moves = "moves the answer" if attends else "moves no answer"
        self.exam.say("attention", "yes" if attends else "none", f"another token before the last one {moves}")
        if far:
            once, twice = answers[-6:-3], answers[-3:]
            growth = float(np.max(np.linalg.norm(twice - once, axis=1) / np.linalg.norm(once, axis=1)))
            identity = False
            if self.exam.outputs == self.exam.signature.width:
                slope = (twice - once) / self.exam.far
                identity = bool(np.linalg.norm(slope - np.array(ways)) <= STILL)
            if growth < STILL or identity:
                self.exam.say("normalised", "yes", f"a token twice as long moves the answer by {growth:.2g} of it")
                return self._diagnosis("normalised", None)
            self.exam.say("normalised", "no", f"a token twice as long moves the answer by {growth:.2g} of it")
        if attends:
            yield from self._residual()
        activation = yield from ask_activation(self.exam)
        if attends:
            return self._diagnosis("one-layer", "one-layer" if activation == "relu" else None)
        smooth = "smooth" if self.exam.signature.max_norm is None else "auto"  # which shows from afar only
        if activation == "relu":  # or so few neurons that none was seen to bend
            exact = self.exam.noise.kind == "exact"
            return replace(self._diagnosis("relu-net", "relu-net"), alternatives=({"activation": smooth},) * exact)
        return self._diagnosis("relu-net", "relu-net", activation=smooth if activation == "smooth" else activation)
