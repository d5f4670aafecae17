"""One head of bilinear score with any link, normaliser, position bias and length law, at the counting bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, final

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.families import SingleHead
from keyhole.families.parts import KINDS, PARTS, SOFTMAX, Attention
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.columns import Draft, Score
from keyhole.methods.forms.outputs import ask_along, choose_outputs, most_informative
from keyhole.methods.forms.score_matrix import ask_score
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.biased import ask_biased
from keyhole.methods.parts.bounded import Fit, ask_bounded
from keyhole.methods.parts.inverse import AT_ZERO, COMPLETE, Inverse, Number
from keyhole.methods.parts.lengths import Pair, as_arrays, ask_kept, ask_length_table
from keyhole.methods.parts.reader import PartReader
from keyhole.methods.parts.saturation import ask_ends, find_constants
from keyhole.methods.parts.unknown_link import ask_link
from keyhole.methods.parts.zero_scores import (
    Probe,
    ask_table,
    ask_values,
    ask_window,
    ask_zero_weight,
    bias_of_weight,
    lone_weight,
)
from keyhole.noise import GAUSSIAN_DEVIATIONS, Noise
from keyhole.queries import Signature
from keyhole.recovery import Outcome

Names = dict[str, str]  # kind -> name of the part
ASSUMPTIONS = (
    "the box computes one attention head of the parts that were named over its raw tokens, read at the last position",
    "answers are right up to the rounding of their dtype and the declared noise",
)
# The token whose weight alone is asked for is so short that its score is below this.
FAINT = 2.0**-58
# What the length law makes of logits of two tokens.
OF_TWO = {"log": math.log(2), "root": 2**-0.5}
# How reading ends where a score bias makes logits of long tokens large.
MAY_BE_BIASED = (Outcome.WRONG_FAMILY, Outcome.NOT_IDENTIFIABLE, Outcome.SATURATED)
SCORE_BIAS = (
    "a logit does not scale with its tokens: a score bias beside other parts than a softmax's is not read, or the "
    "parts are others than those named"
)


def ask_bilinear(signature: Signature, rng: np.random.Generator, names: Names) -> Steps[Estimate[SingleHead]]:
    """Score, value and constants of f(X) = Σ_i weight_i·x_iᵀ·v for the parts of these names.

    Answers over values of the first of two tokens are its weight, which each pair of a link and a normaliser takes back
    to a logit; the rest is the cross approximation of a softmax head. Constants show where logits are as large as they
    can be, what distances add where they are zero, and what lengths do beside zero tokens.
    """
    if signature.max_norm is not None and names["link"] == "unknown":
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "an unknown link is not read within a norm bound: name the link")
    if signature.max_norm is not None:
        found, value, words = yield from ask_bounded(signature, rng, names)
        return _bounded_estimate(signature.noise, found, value, {"parts_found": words} if words else {})
    try:
        return (yield from _Bilinear(signature.as_conspiring(), rng, names).run())
    except Unrecoverable as error:
        if error.outcome not in MAY_BE_BIASED:
            raise
        biased = yield from ask_biased(signature, rng, names)
        if biased is None:
            raise
    found, value, words = biased
    return _bounded_estimate(signature.noise, found, value, {"parts_found": words} if words else {})


def _bounded_estimate(noise: Noise, found: Fit, value: Value, details: dict[str, Any]) -> Estimate[SingleHead]:
    """What least squares found, with the radius of the output bias where none was."""
    head, radius = found.head, found.radius
    if radius.output_bias is None:
        radius = replace(radius, output_bias=value.bias_radius)
    elif not value.has_bias:  # fitted, and taken for none where none shows
        size = abs(floats(head.output_bias))
        if size <= radius.output_bias:
            head, radius = replace(head, output_bias=None), replace(radius, output_bias=radius.output_bias + size)
    normal = noise.kind == "gaussian"
    errors = {name: array / GAUSSIAN_DEVIATIONS for name, array in radius.arrays().items()} if normal else {}
    details = {"output_bias": head.output_bias is not None, "residual": found.cost**0.5, **details}
    return Estimate(
        head,
        radius,
        head.counting_bound,
        standard_error=radius.with_arrays(errors) if normal else None,
        assumptions=ASSUMPTIONS,
        details=details,
    )


@final
class _Bilinear:
    def __init__(self, signature: Signature, rng: np.random.Generator, names: Names) -> None:
        self.signature, self.rng, self.names = signature, rng, names
        self.link, self.normaliser = names["link"], names["normaliser"]
        self.position, self.law = names["position_bias"], names["length_law"]
        self.constants: dict[str, tuple[Array, Array]] = {}  # by path, with radii
        self.words: dict[str, dict[str, float]] = {}  # of the parts that have some, by kind
        self.kinds = {kind: names[kind] for kind in KINDS}
        self.details: dict[str, Any] = {}

    def run(self) -> Steps[Estimate[SingleHead]]:
        """Values, then everything along one output."""
        paired = self.normaliser not in COMPLETE
        value = yield from ask_values(self.signature, paired)
        if value.vector.ndim == 1:
            factor, score = yield from self._ask_along(self.signature, value)
        else:
            outputs = choose_outputs(self.signature.space, value.vector, even=True, radius=value.radius)
            along = ask_along(self.signature, value, most_informative(outputs), self._ask_along)
            factor, score = yield from along
            self.details |= {"output_rank": outputs.rank, "outputs_used": 1}
        return self._estimate(value, factor, score)

    def _ask_along(self, signature: Signature, value: Value) -> Steps[tuple[Number, Score]]:
        """What the value is off by, as a factor, and the score, from one output."""
        probe = Probe(signature, value)
        inverse = yield from self._ask_inverse(probe)
        two = OF_TWO.get(self.law, 1.0)
        reader = PartReader(signature, value, inverse, two)
        score = yield from ask_score(reader, self.rng, Draft())
        if score is None:
            raise Unrecoverable(Outcome.WRONG_FAMILY, SCORE_BIAS)
        if reader.relative:
            score = replace(score, radius=score.radius + reader.relative * abs(score.matrix))
        self._keep_link(inverse)
        lone = yield from self._ask_lone(probe, inverse, score)
        yield from self._ask_positions(probe, inverse, lone)
        yield from self._ask_lengths(probe, inverse, score)
        if not inverse.paired:
            return Number(1.0, 0.0), score
        zero = Number(inverse.zero, inverse.radii.get("zero", 0.0))
        return zero.through(lambda weight: 1 / weight), score

    # --- what weights mean ------------------------------------------------------------------------------------------

    def _ask_inverse(self, probe: Probe) -> Steps[Inverse]:
        biased = self.position in ("alibi", "table")
        zero = AT_ZERO.get(self.normaliser, 0.5)
        inverse = Inverse(self.link, self.normaliser).changed(zero=zero)
        if self.link == "unknown":
            return replace(inverse, table=(yield from ask_link(probe, self.rng)))
        if biased and not inverse.paired:
            found = yield from ask_zero_weight(probe)
            inverse = inverse.with_constant("zero", found.value, found.radius)
        ends = self.link != "exp" or self.normaliser == "sink" or (biased and self.normaliser == "plus-one")
        if ends:
            least, most = yield from ask_ends(probe, self.rng)
            rounding = self.signature.space.rounding
            if biased and self.normaliser == "plus-one":
                # As beside a sink: what is added to the first token does not matter to the weight in that at zero.
                inverse = find_constants(replace(inverse, normaliser="sink", unit=1.0), least, most, rounding)
                inverse = replace(inverse, normaliser=self.normaliser)
            else:
                inverse = find_constants(inverse, least, most, rounding)
        if self.link == "sigmoid":  # masses at zero are σ(bias)
            bias = Number(inverse.bias, inverse.radii["bias"])
            mass = bias.through(lambda bias: AT_ZERO[self.normaliser] / (1 + math.exp(-bias)))
            inverse = inverse.with_constant("zero", mass.value, mass.radius)
        return inverse

    def _keep_link(self, inverse: Inverse) -> None:
        if inverse.table is not None:
            self.constants["link.coefficients"] = (floats(inverse.table.link.coefficients), inverse.table.radius)
            self.words["link"] = {"reach": inverse.table.link.reach}
            self.details["link_reach"] = inverse.table.link.reach
        for name, path in (("cap", "link.cap"), ("bias", "link.bias")):
            if PARTS["link", self.link].__name__ in ("Softcap", "Sigmoid") and name in inverse.radii:
                self._keep(path, getattr(inverse, name), inverse.radii[name])

    def _keep(self, path: str, number: float | Floats, radius: float | Floats) -> None:
        made = np.asarray(number, dtype=np.float64)
        self.constants[path] = (made, np.asarray(radius + self.signature.space.rounding * np.abs(made)))

    # --- positions --------------------------------------------------------------------------------------------------

    def _ask_lone(self, probe: Probe, inverse: Inverse, score: Score) -> Steps[Number]:
        """The mass beside those of tokens, over that of a token of logit zero; a sink's energy where there is one."""
        biased = self.position in ("alibi", "table")
        if self.normaliser == "plus-one":
            return Number(1.0, 0.0)
        if self.normaliser != "sink":
            return Number(0.0, 0.0)
        zero = Number(inverse.zero, inverse.radii["zero"])
        if biased:
            size = float(self.signature.space.xp.linalg.vector_norm(score.matrix)) or 1.0
            alone = yield from lone_weight(probe, math.sqrt(FAINT / size))
            mass = Number(alone.value * zero.value, alone.radius * zero.value + alone.value * zero.radius)
            if not mass.value > 2 * mass.radius:
                message = "errors of answers hide the weight of a token alone, which a sink shows in: use finer answers"
                raise Unrecoverable(Outcome.TOO_NOISY, message)
            found = mass.through(lambda weight: 1 / weight - 1)
        else:
            found = zero.through(lambda weight: 1 / weight - 2)
        if not found.value > 2 * found.radius:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE, "weights add up to one as far as answers tell: there is no sink that shows"
            )
        energy = found.through(math.log)
        self._keep("normaliser.energy", energy.value, energy.radius)
        return found

    def _ask_positions(self, probe: Probe, inverse: Inverse, rest: Number) -> Steps[None]:
        if self.position == "window":
            width = yield from ask_window(probe)
            if width is None:
                self.kinds["position_bias"], self.details["window"] = "none", "none in sight"
            else:
                self.words["position_bias"] = {"width": width}
        if self.position not in ("alibi", "table"):
            return
        zero = Number(inverse.zero, inverse.radii.get("zero", 0.0))
        if self.normaliser in ("none", "count"):
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                f"what distances add is not read beside the normaliser {self.normaliser!r}",
            )
        first = bias_of_weight(zero, self.normaliser, [Number(0.0, 0.0)], rest)
        if self.position == "alibi":
            self._keep("position_bias.slope", -first.value, first.radius)
            return
        table = yield from ask_table(probe, self.normaliser, first, rest, inverse.unit)
        self._keep("position_bias.table", *as_arrays(table))

    # --- lengths ----------------------------------------------------------------------------------------------------

    def _ask_lengths(self, probe: Probe, inverse: Inverse, score: Score) -> Steps[None]:
        two = OF_TWO.get(self.law, 1.0)
        if self.normaliser == "top-k":
            plain = replace(score, matrix=score.matrix * two)
            kept = yield from ask_kept(Pair.of(probe, plain))
            if kept is None:
                self.kinds["normaliser"], self.details["top_k"] = "sum", "none in sight"
            else:
                self.words["normaliser"] = {"k": kept}
        if self.law == "table":
            if self.position != "none":
                raise Unrecoverable(
                    Outcome.NOT_IDENTIFIABLE, "a table by length beside a position bias is not read: name one of them"
                )
            table = yield from ask_length_table(Pair.of(probe, score), inverse, inverse.typical)
            self._keep("length_law.table", *as_arrays(table))

    # --- the estimate -----------------------------------------------------------------------------------------------

    def _attention(self, which: int) -> Attention:
        made = {}
        for kind, name in self.kinds.items():
            own = {
                path.partition(".")[2]: each[which]
                for path, each in self.constants.items()
                if path.startswith(kind + ".")
            }
            made[kind] = PARTS[kind, name](**own, **self.words.get(kind, {}))
        return Attention(**made)

    def _in_words(self) -> str:
        plain = SOFTMAX.parts
        others = [f"{kind.replace('_', ' ')} {name}" for kind, name in self.kinds.items() if name != plain[kind].name]
        return ", ".join(others) or "those of a softmax"

    def _estimate(self, value: Value, factor: Number, score: Score) -> Estimate[SingleHead]:
        xp, width, rank = self.signature.space.xp, self.signature.width, score.rank
        vector, radius = value.vector * factor.value, value.radius * factor.value
        radius = radius + abs(value.vector) * factor.radius
        if factor.value != 1.0:
            radius = radius + 2 * self.signature.space.eps * abs(vector)
        params = SingleHead(score.matrix, vector, attention=self._attention(0))
        radii = SingleHead(score.radius, radius, attention=self._attention(1))
        if score.hidden_bias:
            radii = replace(radii, score_bias=0 * score.matrix[0, :] + score.hidden_bias)
        bound = -(-rank * (2 * width - rank) // self.details.get("output_rank", 1)) + width + params.attention.numbers
        biased = bool(xp.any(abs(value.bias) > value.bias_radius))
        if bool(xp.any(value.bias_radius > 0)):
            # Read of one answer, it is in all predictions: of errors that conspire held-out answers may see twice that.
            times = 2.0 if self.signature.noise.may_conspire else 1.0
            radii = replace(radii, output_bias=times * value.bias_radius)
        if biased:
            params, bound = replace(params, output_bias=value.bias), bound + 1
        details = {"rank": rank, "output_bias": biased, "parts": self._in_words(), **self.details}
        return Estimate(params, radii, bound, assumptions=ASSUMPTIONS, details=details)
