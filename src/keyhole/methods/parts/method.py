"""One attention head of parts that are named: which learner reads it, and what may be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import UsageError
from keyhole.families.parts import KINDS, PARTS, SIGMOID_BESIDE, SOFTMAX, part_names
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.multi_head.vector.parts.method import ask_heads
from keyhole.methods.parts.bilinear import Names, ask_bilinear
from keyhole.methods.parts.naming.ask_parts import ask_parts
from keyhole.methods.parts.score_forms.learners import LEARNERS as SCORE_FORMS
from keyhole.methods.parts.score_forms.learners import TURNING
from keyhole.methods.parts.several_heads import ask_unnamed_heads
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Learners by the score form; those of links whose masses are powers of logits go by the link.
LEARNERS: dict[str, Callable[..., Steps[Estimate]]] = {"bilinear": ask_bilinear, **SCORE_FORMS}
PLAIN = {"form": "bilinear", **{kind: part.name for kind, part in SOFTMAX.parts.items()}}


def parts(
    signature: Signature,
    rng: np.random.Generator,
    *,
    form: str | None = None,
    link: str | None = None,
    normaliser: str | None = None,
    position_bias: str | None = None,
    length_law: str | None = None,
    heads: str = "one",
    frequencies: Array | None = None,
) -> Steps[Estimate]:
    """Score, value and the constants of all parts of one head; of named parts those left out are a softmax's.

    Where none is named, 13 to 66 queries name them all first.

    A head f(X) = Σ_i weight_i·x_iᵀ·v is read by as many queries as it has unknown numbers, and a few more: constants
    show at the largest logits, what distances add at a logit of zero, and what lengths do beside zero tokens. Several
    heads are read by `ask_heads`.
    """
    given = {
        "form": form,
        "link": link,
        "normaliser": normaliser,
        "position_bias": position_bias,
        "length_law": length_law,
    }
    if frequencies is not None:
        try:
            frequencies = np.asarray(frequencies, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(f"frequencies must be numbers, one for each pair, not {frequencies!r}") from error
    if heads not in ("one", "several"):
        raise UsageError(f"heads must be 'one' or 'several', not {heads!r}")
    if heads == "several":
        if link == "unknown":
            raise UsageError("an unknown link is read of one head: name the link of several")
        named = {kind: name for kind, name in given.items() if name is not None and kind != "form"}
        if not named and form is None:
            return (yield from ask_unnamed_heads(signature, rng, frequencies))
        return (yield from ask_heads(signature, rng, named, form or "bilinear", frequencies))
    if frequencies is not None or any(name is not None for name in given.values()):
        names = check_names(given)
        if _of(names) not in LEARNERS:
            raise UsageError(f"no learner reads heads of {_of(names)!r}; there are learners for {', '.join(LEARNERS)}")
        if _of(names) != "bilinear":
            signature = signature.as_conspiring()
        if frequencies is None:
            return (yield from LEARNERS[_of(names)](signature, rng, names))
        if _of(names) not in TURNING:
            raise UsageError(f"frequencies= are those of forms that turn ({', '.join(TURNING)}), not of {_of(names)!r}")
        return (yield from LEARNERS[_of(names)](signature, rng, names, frequencies=frequencies))
    naming = yield from ask_parts(signature, rng)
    if not reads(naming.parts):
        last = naming.findings[-1]
        said = f"no learner reads {naming.in_words()}" if naming.known else f"{last.what}: {last.evidence}"
        raise Unrecoverable(Outcome.WRONG_FAMILY, f"the parts of a head were looked for, and {said}")
    names = check_names(naming.parts)
    estimate = yield from LEARNERS[_of(names)](signature, rng, names)
    return replace(estimate, details={**estimate.details, "parts": naming.parts, "naming_queries": naming.queries})


def reads(given: Mapping[str, str]) -> bool:
    """Whether there is a learner for heads whose parts have these names, the others being a softmax's."""
    try:
        names = check_names({**dict.fromkeys(PLAIN), **given})
    except UsageError:
        return False
    return _of(names) in LEARNERS


def _of(names: Names) -> str:
    """What learners go by."""
    return names["link"] if PARTS["link", names["link"]].is_power else names["form"]


def check_names(given: dict[str, Any]) -> Names:
    """The name of every part; UsageError for one that is not known, or for two that contradict each other."""
    names = {kind: PLAIN[kind] if name is None else str(name) for kind, name in given.items()}
    for kind in KINDS:
        if names[kind] not in (known := part_names(kind)):
            raise UsageError(f"unknown {kind.replace('_', ' ')} {names[kind]!r}; known: {', '.join(known)}")
    if names["link"] == "unknown" and names != {**PLAIN, "link": "unknown"}:
        raise UsageError("an unknown link is read of a bilinear score beside the normaliser 'sum' and no other part")
    if names["link"] == "sigmoid":
        if given["normaliser"] is None:
            names["normaliser"] = "none"  # sigmoid attention
        if names["normaliser"] not in SIGMOID_BESIDE:
            raise UsageError(
                f"sigmoid weights are read with the normaliser {' or '.join(SIGMOID_BESIDE)}, "
                f"not {names['normaliser']!r}"
            )
    if PARTS["link", names["link"]].is_power and not PARTS["normaliser", names["normaliser"]].takes_powers:
        raise UsageError(f"the normaliser {names['normaliser']!r} takes no link {names['link']!r}: take 'exp'")
    return names


PARTS_METHOD = Method(
    name="parts",
    summary="one head whose attention is no plain softmax: softcap, sigmoid, sinks, sparsemax, ALiBi, windows and more",
    run=parts,
    families=("single-head", "form-head"),
    last_only=True,
    when_refuted={"heads": "several"},
    options={
        "form": "the score form: bilinear, rotary, qk-norm, qk-norm-rotary, gaussian, elu-features, exp-features",
        "frequencies": "angles per position of a form that turns, one for each pair; those of base 10000 if left out",
        "link": f"what logits become: {', '.join(part_names('link'))}",
        "normaliser": f"what makes weights of them: {', '.join(part_names('normaliser'))}",
        "position_bias": f"what distance adds: {', '.join(part_names('position_bias'))}",
        "length_law": f"what the length multiplies logits by: {', '.join(part_names('length_law'))}",
        "heads": "one, or several, which are read from several outputs, and whose parts are found where none is named",
    },
)
