"""The method `multi-head`: from many outputs at natural norms, from few ones with long tokens, head by head."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Array, floats, namespace
from keyhole.families.multi_head import MultiHead
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable, last_only
from keyhole.methods.forms.value import Value, ask_value, is_nonzero
from keyhole.methods.multi_head.gated.method import ask_gated_heads, fits_at_once
from keyhole.methods.multi_head.scalar.method import HeadsTooNear, ask_scalar_heads
from keyhole.methods.multi_head.vector.method import ask_vector_heads
from keyhole.methods.multi_head.vector.parts.method import ask_heads
from keyhole.methods.multi_head.vector.probe import HeadsHidden
from keyhole.queries import Measurements, Signature, sequences
from keyhole.recovery import Outcome

# Scores that are known to fewer than this part of all digits are read again, all at once.
DIGITS = 1 / 6
# Places are compared in sequences of so many tokens; answers differ where they do by more than so many roundings.
PLACES, ROUNDINGS = 64, 2.0**12
# How reading heads one by one ends where reading them all at once may still do.
AT_ONCE = (Outcome.WRONG_FAMILY, Outcome.SATURATED, Outcome.TOO_NOISY)


def multi_head(
    signature: Signature,
    rng: np.random.Generator,
    *,
    budget: float = np.inf,  # noqa: ARG001 - it cannot do with fewer
    link: str = "exp",
    normaliser: str = "sum",
    position_bias: str = "none",
    form: str = "bilinear",
    frequencies: Array | None = None,
) -> Steps[Estimate[MultiHead]]:
    """Number, scores, values and biases of heads whose answers are added up.

    They are determined by sequences of three tokens, up to their order, if heads of equal scores count as one. With at
    least as many outputs as heads a query tells many numbers (`ask_vector_heads`); where it does not tell the heads
    apart they are read one by one (`ask_scalar_heads`).

    The options name what attention has instead of the parts of a softmax; then `ask_heads` reads it, from many outputs.
    """
    if (link, normaliser, position_bias, form) != ("exp", "sum", "none", "bilinear"):
        names = {"link": link, "normaliser": normaliser, "position_bias": position_bias}
        asked = ask_heads(signature.with_changes(positions="last").as_coarse(), rng, names, form, frequencies)
        return (yield from (last_only(asked) if signature.positions == "all" else asked))
    signature = signature.as_coarse()
    last = signature.with_changes(positions="last")
    everywhere = signature.positions == "all"
    asking = ask_value(last, nonzero=False)
    value = yield from (last_only(asking) if everywhere else asking)
    hidden: HeadsHidden | None = None
    if value.vector.ndim == 2 and not (signature.noise.kind == "gaussian" and fits_at_once(value)):
        try:
            found = yield from ask_vector_heads(signature, rng, value)
        except HeadsHidden as error:
            hidden = error
        else:
            again = _ask_again(last, rng, value, found)
            return (yield from (last_only(again) if everywhere else again))
    try:
        few = _ask_few_outputs(last, rng, value, hidden)
        return (yield from (last_only(few) if everywhere else few))
    except Unrecoverable as error:
        if hidden is not None:
            raise Unrecoverable(error.outcome, f"{hidden}; and one by one: {error}") from error
        raise


def _unknown(found: Estimate[MultiHead]) -> float:
    """The largest part of a score that is not known."""
    heads = zip(found.radius.heads, found.params.heads, strict=True)
    sizes = [[float(namespace(each.score).linalg.vector_norm(each.score)) for each in pair] for pair in heads]
    return max((wide / size for wide, size in sizes if size > 0), default=0.0)


def _ask_again(
    signature: Signature, rng: np.random.Generator, value: Value, found: Estimate[MultiHead]
) -> Steps[Estimate[MultiHead]]:
    """All heads at once, where they are known to few digits only and that tells more of as many."""
    if _unknown(found) <= signature.space.eps**DIGITS or not fits_at_once(value):
        return found
    try:
        other = yield from ask_gated_heads(signature, rng, value)
    except Unrecoverable:
        return found
    as_many = len(other.params.heads) >= len(found.params.heads)
    return other if as_many and _unknown(other) < _unknown(found) else found


def _check_places(signature: Signature, value: Value) -> Steps[None]:
    """Unrecoverable where a token counts for more at one place than at another though all logits are the same.

    Heads of slopes, windows or tables by distance are told by two queries so; one by one they would take hundreds.
    """
    length = min(PLACES, signature.max_length or PLACES)
    if length < 3 or signature.noise.kind != "exact":  # the last place is that of a zero token
        return
    space, rows = signature.space, floats(value.vector)
    tokens = np.zeros((2, length, signature.width))
    best = int(np.argmax(np.linalg.norm(rows, axis=1)))
    tokens[0, 0, best] = tokens[1, length - 2, best] = min(1.0, signature.norm_limit)
    answers: Measurements = yield sequences("heads", space.asarray(tokens))
    seen = answers.by_output
    size = float(np.max(np.abs(seen))) + float(np.max(np.abs(rows[best])))
    if np.max(np.abs(seen[0] - seen[1])) > ROUNDINGS * space.eps * size:
        raise Unrecoverable(Outcome.WRONG_FAMILY, "tokens count for more at one place than at another")


def _ask_few_outputs(
    signature: Signature, rng: np.random.Generator, value: Value, hidden: HeadsHidden | None
) -> Steps[Estimate[MultiHead]]:
    """One by one where norms are free and answers exact, with the fewest queries; all at once where that fails."""
    if hidden is not None:
        yield from _check_places(signature, value)
    cancel = signature.width == 1 and not is_nonzero(signature, value)  # all logits of single numbers are proportional
    if signature.max_norm is not None or signature.noise.kind != "exact" or cancel:
        return (yield from ask_gated_heads(signature, rng, value))
    try:
        found = yield from ask_scalar_heads(signature, rng, value)
    except Unrecoverable as error:
        if error.outcome not in AT_ONCE or isinstance(error, HeadsTooNear):
            raise
        try:
            return (yield from ask_gated_heads(signature, rng, value))
        except Unrecoverable as other:
            raise Unrecoverable(error.outcome, f"{error}; and all at once: {other}") from error
    return (yield from _ask_again(signature, rng, value, found))


MULTI_HEAD = Method(
    name="multi-head",
    summary="several softmax heads added up, their number unknown, biases included",
    run=multi_head,
    options={
        "link": "how logits become energies: exp or softcap",
        "normaliser": "how energies become weights: sum, sink or plus-one",
        "position_bias": "what distances do: none, alibi, window, causal or table",
        "form": "how logits come of tokens: bilinear, rotary, qk-norm or qk-norm-rotary",
        "frequencies": "angles per position of rotary forms, one for each pair; those of base 10000 if left out",
    },
    families=("multi-head",),
    takes_noise=("exact", "rounded", "bounded", "gaussian"),
)
