"""What can be known of a family and what cannot, by the inputs of an oracle, with a change to test each claim.

A claim that something cannot be known comes with a change of it that no answer shows; one that it can be known, with a
change that answers do show. Tests apply them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Floats, floats, like
from keyhole.errors import UsageError
from keyhole.families.parts import SOFTMAX
from keyhole.families.single_head import SingleHead
from keyhole.gauge import perturbations as change

INPUTS = {
    "unrestricted": "tokens are any vectors",
    "one-hot": "tokens are unit vectors e_1, …, e_d, words of a vocabulary",
    "mean-zero": "the entries of every token add up to zero, as behind a layer norm without its bias",
}


@dataclass(frozen=True)
class Claim:
    """One thing about a family that can or cannot be known."""

    quantity: str
    known: bool
    reason: str
    change: Callable[..., change.Changed]  # (params, rng) -> what answers like them, or does not
    since: int = 1  # known: where sequences have up to so many tokens, or more
    until: int | None = None  # not known: where they have at most so many; None: ever

    def holds(self, max_length: int | None) -> bool:
        """Whether the claim is one about sequences of up to `max_length` tokens."""
        if self.known:
            return max_length is None or max_length >= self.since
        return self.until is None or (max_length is not None and max_length <= self.until)


def known(quantity: str, reason: str, how: Callable[..., change.Changed], since: int = 1) -> Claim:
    """Something that answers show."""
    return Claim(quantity, True, reason, how, since=since)


def hidden(quantity: str, reason: str, how: Callable[..., change.Changed], until: int | None = None) -> Claim:
    """Something that no answer shows."""
    return Claim(quantity, False, reason, how, until=until)


_SIGN = change.of_kind("length-2-only")  # as two tokens cannot tell it
ALONE = "a token alone has all the weight, whatever its logit"
SUMS = "weights add up to one"
_FACTORS = (
    hidden("key and query matrices beyond their product W", "only the product makes logits", change.factors),
    hidden("value and output matrices beyond their product", "only the product makes answers", change.factors),
    hidden("a key bias", "it moves the logits of all tokens alike", change.key_bias),
    hidden("how biases are shared by values and output", SUMS, change.value_bias),
)
_LENGTH_ONE = hidden("W and c", ALONE, change.logits, until=1)
# Of one-hot and mean-zero tokens: what is added to all entries of a row or column.
_ONE_HOT = (
    hidden("a row added to all rows of W", "it moves the logits of all tokens alike: x·1 = 1", change.equal_rows),
    hidden("W·1 against c", "x_N·1 = 1, so a score bias is a column added to all", change.column_for_bias),
    hidden("a number added to c", "it moves all logits alike: x·1 = 1", change.bias_constant),
    hidden("a number added to the entries of v, against b", f"x·1 = 1 and {SUMS}", change.value_for_bias),
)
_MEAN_ZERO = (
    hidden("a row added to all rows of W", "x·1 = 0", change.equal_rows),
    hidden("a column added to all columns of W", "x_N·1 = 0", change.equal_columns),
    hidden("a number added to c", "x·1 = 0", change.bias_constant),
    hidden("a number added to the entries of v", "x·1 = 0", change.value_constant),
)


def _sign_of_a_head(value: str) -> Claim:
    """What two tokens leave open of several heads whose values have this name."""
    return hidden(
        "the sign of a head, against an average",
        f"of two tokens the weight of one is one minus that of the other: (W, {value}) is (−W, −{value}) and an "
        f"average of 2{value}",
        change.of_kind("length-2-only"),
        until=2,
    )


_HEADS_APART = (
    hidden("the order of heads", "answers are added up", change.of_kind("permutation")),
    hidden("how heads of equal logits share a value", "only the sum shows", change.of_kind("split")),
    hidden("logits of a head without a value", "it says nothing", change.of_kind("zero head")),
    _sign_of_a_head("v"),
)
_SIGNED = "two tokens show Σ v_h·tanh of half a logit, which is odd"
_HEADS = "the answer along a line has a pole for every head, of which position and residue show"
_SEVERAL = (
    hidden("the order of heads", "what they make is added up", change.of_kind("order of heads")),
    hidden("how heads of equal logits share a value", "only the sum shows", change.of_kind("split of a head")),
    hidden("logits of a head that the net does not see", "it says nothing", change.of_kind("zero head")),
    _sign_of_a_head("V"),
)
_NEURONS = (
    hidden("the order of neurons", "answers are added up", change.of_kind("permutation")),
    hidden(
        "the scale of a ReLU neuron",
        "act(s·z) = s·act(z) for s > 0; smooth ones have a scale",
        change.of_kind("scaling"),
    ),
    hidden("which way a neuron looks, against the skip", "act(z) = z + act(−z)", change.of_kind("sign trade")),
    hidden("how neurons of one kink share their weights", "only the sum shows", change.of_kind("split")),
    hidden("a neuron that nobody hears", "its weights outwards are zero", change.of_kind("dead neuron")),
    hidden("a neuron that sees nothing, against the bias", "it is a constant", change.of_kind("constant neuron")),
)
_NET = "kinks are where the slope changes"
_LAYER_NET = "every pair of last token and mixture can be asked for"
_BIASES = hidden("the bias of attention, against those of the net", "only sums show", change.of_kind("bias trade"))
_VALUES = (
    hidden(
        "V beyond its products with the net (no residual)", "only the products show", change.of_kind("factor gauge")
    ),
    hidden("V where the net does not look (with a residual)", "nobody sees it", change.unseen_value),
)

CLAIMS: dict[tuple[str, str], tuple[Claim, ...]] = {
    ("single-head", "unrestricted"): (
        known("value v", "the answer to one token is x·v + b", change.value),
        known("output bias b", "the answer to the zero token", change.output_bias),
        known("score matrix W", "two tokens show the logit uᵀ(W·g + c), unless v = 0", change.score, since=2),
        known("score bias c", "the same at g = 0", change.score_bias, since=2),
        _LENGTH_ONE,
        *_FACTORS,
    ),
    ("single-head", "one-hot"): (
        known("differences of entries of v", "one token shows v_a + b", change.value),
        known(
            "W and c together, but for what follows", "two tokens show W_ab − W_bb + c_a − c_b", change.score, since=2
        ),
        _LENGTH_ONE,
        *_ONE_HOT,
        *_FACTORS,
    ),
    ("single-head", "mean-zero"): (
        known("v on tokens of mean zero", "the answer to one token is x·v + b", change.value),
        known("output bias b", "the answer to the zero token", change.output_bias),
        known("W between tokens of mean zero", "two tokens show the logit", change.score, since=2),
        known("c on tokens of mean zero", "two tokens show the logit", change.score_bias, since=2),
        _LENGTH_ONE,
        *_MEAN_ZERO,
        *_FACTORS,
    ),
    ("multi-head", "unrestricted"): (
        known("the sum of all values, and b", "the answer to one token", change.value),
        known("v of W less v of −W, for every W", _SIGNED, change.score, since=2),
        known("score, score bias and value of every head whose logits differ from all others'", _HEADS, _SIGN, 3),
        _LENGTH_ONE,
        *_HEADS_APART,
        *_FACTORS,
    ),
    ("multi-head", "one-hot"): (
        known("differences of entries of the sum of all values", "the answer to one token", change.value),
        known(
            "for every last token, the columns of W (but for what follows) and their values", _HEADS, change.score, 3
        ),
        _LENGTH_ONE,
        hidden(
            "which column belongs to which of two heads of equal value",
            "every last token shows columns of W with values, and heads are told apart by values alone",
            change.exchange_columns,
        ),
        *_ONE_HOT,
        *_HEADS_APART,
        *_FACTORS,
    ),
    ("multi-head", "mean-zero"): (
        known("the sum of all values on tokens of mean zero, and b", "the answer to one token", change.value),
        known("every head on tokens of mean zero, where logits differ there", _HEADS, _SIGN, since=3),
        _LENGTH_ONE,
        *_MEAN_ZERO,
        *_HEADS_APART,
        *_FACTORS,
    ),
    ("relu-net", "unrestricted"): (
        known("the kink of every neuron", _NET, change.kink),
        known("the weight of every kink", "it is how much the slope changes", change.weight),
        known("the affine map beside the kinks", "it is what remains", change.affine),
        *_NEURONS,
    ),
    ("relu-net", "one-hot"): (
        known("the answers to the d tokens", "they can be asked", change.affine),
        hidden("everything else, kinks and weights", "there are d tokens only", change.neuron_by_table),
    ),
    ("relu-net", "mean-zero"): (
        known("kinks and affine map on tokens of mean zero", _NET, change.kink),
        hidden("a number added to a row of weights_in or skip", "x·1 = 0", change.equal_weights),
        *_NEURONS,
    ),
    ("one-layer", "unrestricted"): (
        known("the net on a token that is its own mixture", "the answer to one token", change.affine),
        known("W and c", "mixtures of other weights are others, unless the net does not look", change.score, since=2),
        known("the net as a function of last token and the mixture of each head", _LAYER_NET, change.value, since=2),
        known("W, c and A·Vᵀ of every head whose logits differ from all others'", _HEADS, _SIGN, since=3),
        hidden("W and c", ALONE, change.logits, until=1),
        _BIASES,
        *_VALUES,
        *_SEVERAL,
        *_NEURONS,
    ),
    ("one-layer", "one-hot"): (
        known("the answers to the d tokens alone", "they can be asked", change.affine),
        known("W and c together, but for what follows", "mixtures of other weights are others", change.score, since=2),
        hidden("W and c", ALONE, change.logits, until=1),
        *_ONE_HOT[:3],
        hidden("a row added to all rows of V, against the biases", f"x·1 = 1 and {SUMS}", change.value_row_for_bias),
        _BIASES,
        *_VALUES,
        *_SEVERAL,
        *_NEURONS,
    ),
    ("one-layer", "mean-zero"): (
        known("the net on a token that is its own mixture", "the answer to one token", change.affine),
        known("W and c on tokens of mean zero", "mixtures of other weights are others", change.score, since=2),
        hidden("W and c", ALONE, change.logits, until=1),
        *_MEAN_ZERO[:3],
        hidden("a row added to all rows of V", "x·1 = 0", change.value_constant),
        _BIASES,
        *_VALUES,
        *_SEVERAL,
        *_NEURONS,
    ),
}
# The last token is known, so that what is added to it can be known as far as it could be alone.
CLAIMS |= {
    ("residual", inputs): tuple(
        replace(claim, change=change.beside_last_token(claim.change)) for claim in CLAIMS["multi-head", inputs]
    )
    for inputs in INPUTS
}
FAMILIES = tuple(dict.fromkeys(family for family, _ in CLAIMS))


def claims(family: str, inputs: str = "unrestricted", max_length: int | None = None) -> list[Claim]:
    """What can and what cannot be known of a family from such inputs, in sequences of up to so many tokens."""
    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    if inputs not in INPUTS:
        raise UsageError(f"unknown inputs {inputs!r}; known: {', '.join(INPUTS)}")
    if max_length is not None and max_length < 1:
        raise UsageError(f"max_length must be at least 1, not {max_length}")
    return [claim for claim in CLAIMS[family, inputs] if claim.holds(max_length)]


@dataclass(frozen=True)
class AlphabetSpan:
    """Directions that the tokens of an alphabet have, and that they differ by.

    Of tokens e_1, …, e_m answers depend on the values of single tokens and on the logits (e_a − e_b)ᵀ(W·e_b + c). So W
    shows on D × span E only, with D the span of all differences. Where some n has e_a·n = 1 for all tokens, as where
    they are linearly independent, a score bias c is the same as c·nᵀ added to W, and an output bias as its n-fold
    added to the value.
    """

    rows: Floats  # (m, width)
    span: Floats  # (width, r) orthonormal
    differences: Floats  # (width, r₀) orthonormal
    unit: Floats | None  # (width,) whose inner product with every token is one, if there is such a vector

    @classmethod
    def of(cls, alphabet: Array) -> AlphabetSpan:
        """The spans, up to the rounding of the numbers."""
        rows = floats(alphabet)
        span, differences = _directions(rows), _directions(rows - np.mean(rows, axis=0))
        if span.shape[1] == differences.shape[1]:
            return cls(rows, span, differences, None)
        inner = rows @ span
        unit = span @ np.linalg.lstsq(inner, np.ones(len(rows)), rcond=None)[0]
        return cls(rows, span, differences, unit)

    @property
    def numbers(self) -> tuple[int, int]:
        """How many directions tokens have and differ by: r and r₀."""
        return self.span.shape[1], self.differences.shape[1]

    def canonical(self, head: SingleHead) -> SingleHead:
        """The head of smallest norm that answers all sequences of the tokens alike."""
        score, value = floats(head.score), floats(head.value)
        bias = None if head.score_bias is None else floats(head.score_bias)
        constant = None if head.output_bias is None else floats(head.output_bias)
        if self.unit is not None:
            score = score if bias is None else score + np.outer(bias, self.unit)
            value = value if constant is None else value + np.multiply.outer(self.unit, constant)
            bias = constant = None
        onto, along = self.span @ self.span.T, self.differences @ self.differences.T
        made = (along @ score @ onto, onto @ value, None if bias is None else along @ bias, constant)
        return replace(
            head,
            **{
                name: None if part is None else like(part, head.score)
                for name, part in zip(("score", "value", "score_bias", "output_bias"), made, strict=True)
            },
            attention=SOFTMAX,
        )


def on_alphabet(head: SingleHead, alphabet: Array) -> SingleHead:
    """The part of a softmax head that sequences of these tokens (m, width) show: the same for heads that answer alike.

    The method `alphabet` recovers this, so that `keyhole.distance` to it is an error.
    """
    return AlphabetSpan.of(alphabet).canonical(head)


def _directions(rows: Floats) -> Floats:  # (m, width) -> (width, rank)
    """Orthonormal directions of the rows, those of rounding left out."""
    _, sizes, right = np.linalg.svd(rows, full_matrices=False)
    least = np.finfo(np.float64).eps * max(rows.shape) * max(float(sizes[0]), 1e-300)
    return np.asarray(right[: int(np.sum(sizes > least))].T)
