"""What the parts of one head are called: tests in order, each for a group of parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.errors import OracleError
from keyhole.methods.base import Steps
from keyhole.methods.examination import Examination, Finding
from keyhole.methods.parts.naming.first_look import KERNEL, KEYS, NORMED, POWER, ask_first_look
from keyhole.methods.parts.naming.kernels import ask_kernel
from keyhole.methods.parts.naming.keys import ask_keys
from keyhole.methods.parts.naming.normed import ask_normed
from keyhole.methods.parts.naming.plane import Plane, Unnamed
from keyhole.methods.parts.naming.powers import ask_power
from keyhole.methods.parts.naming.products import Named, ask_products
from keyhole.methods.parts.naming.rays import ask_steps
from keyhole.methods.parts.naming.zero_scores import EQUAL_SCORES, FARTHER, ask_zero_scores
from keyhole.queries import Signature

OTHER = "other"
# The parts of softmax attention.
SOFTMAX_PARTS = {
    "form": "bilinear",
    "link": "exp",
    "normaliser": "sum",
    "position_bias": "none",
    "length_law": "none",
}
# Nine digits are compared, of which sums and differences cost some; squares of the longest tokens must not overflow.
FINE, LONGEST_TOKEN = 1e-15, 2.0**500


@dataclass(frozen=True)
class Naming:
    """The names of the parts of one head, "other" where none fits, with the findings they rest on."""

    form: str
    link: str
    normaliser: str
    position_bias: str
    length_law: str
    findings: tuple[Finding, ...]
    queries: int

    @property
    def known(self) -> bool:
        """Whether every part has a name."""
        return OTHER not in self.parts.values()

    @property
    def options(self) -> dict[str, str]:
        """The parts that are not those of softmax attention."""
        return {kind: name for kind, name in self.parts.items() if name != SOFTMAX_PARTS[kind]}

    def in_words(self) -> str:
        """The parts that are not those of softmax attention."""
        named = ", ".join(f"{kind.replace('_', ' ')} {name}" for kind, name in self.options.items())
        return f"a head of {named}" if named else "a head of softmax attention"

    @property
    def parts(self) -> dict[str, str]:
        """The names by the kind of part."""
        return {
            "form": self.form,
            "link": self.link,
            "normaliser": self.normaliser,
            "position_bias": self.position_bias,
            "length_law": self.length_law,
        }


def ask_parts(signature: Signature, rng: np.random.Generator) -> Steps[Naming]:
    """Name the parts of a head from 13 to 66 queries, of tokens of norms from 2^-200 to 2^140 and up to 512 in a row.

    Every name is checked: the parts predict answers to sequences that no name came from. What is not known, or cannot
    be told of such an oracle, is "other", and the last finding says why. Nothing is certified by it: a head that is one
    of these for most tokens, or only on a plane, is named as that.
    """
    exam = Examination(signature, rng, "naming of parts")
    plane = Plane(exam)
    parts = dict.fromkeys(SOFTMAX_PARTS, OTHER)
    try:
        _check_nameable(signature)
        named = yield from _ask(plane)
        known = named.attention
        names = (named.form, known.link, known.normaliser, known.position_bias, known.length_law)
        parts = dict(zip(SOFTMAX_PARTS, names, strict=True))
    except Unnamed as ended:
        exam.findings.append(ended.finding)
    except (
        OracleError
    ) as error:  # to tokens of extreme norms, perhaps; where the oracle is gone, the next query says so
        exam.say("parts", OTHER, str(error))
    return Naming(**parts, findings=tuple(exam.findings), queries=plane.queries)


def _check_nameable(signature: Signature) -> None:
    """Unnamed where tokens cannot be so long and so short, or answers not so exact, that names could be told."""
    reasons = {
        "labels say nothing of weights": signature.answers != "numbers",
        "tokens of one number have no plane": signature.width < 2,
        "scores vanish and saturate for certain only where norms are free": signature.max_norm is not None,
        "names are told by nine equal digits, which such answers do not have": (
            signature.noise.kind not in ("exact", "measure") or not signature.space.eps <= FINE
        ),
        "scores vanish and saturate for certain only in float64": signature.space.huge < LONGEST_TOKEN,
        f"position biases and length laws take sequences of {FARTHER[-1]} tokens": (
            signature.max_length is not None and signature.max_length < FARTHER[-1]
        ),
    }
    for why, holds in reasons.items():
        if holds:
            raise Unnamed("parts", why, "unknown")


def _ask(plane: Plane) -> Steps[Named]:
    """The tests in order, from what tells most."""
    look = yield from ask_first_look(plane)
    if look.group == POWER:
        return (yield from ask_power(plane, look))
    if look.group == KERNEL:
        return (yield from ask_kernel(plane, look.values, look.pair_degree))
    if look.group == KEYS:
        plain = None if look.biased else (yield from ask_zero_scores(plane, look))
        return (yield from ask_keys(plane, plain, look.values))
    if look.group == NORMED:
        return (yield from ask_normed(plane, (yield from ask_zero_scores(plane, look, EQUAL_SCORES))))
    zero = yield from ask_zero_scores(plane, look)
    step = yield from ask_steps(plane, zero)
    if np.isnan(step):  # scores that a short last token does not move are of normalised ones
        return (yield from ask_normed(plane, zero))
    return (yield from ask_products(plane, zero, step))
