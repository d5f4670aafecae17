"""What the parts of one head are called: tests in order, each for a group of parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.errors import OracleError
from keyhole.methods.base import Steps
from keyhole.methods.diagnosis.examination import Examination, Finding
from keyhole.methods.parts.naming.first_look import KERNEL, KEYS, NORMED, POWER, ask_first_look
from keyhole.methods.parts.naming.kernels import ask_kernel
from keyhole.methods.parts.naming.keys import ask_keys
from keyhole.methods.parts.naming.normed import ask_normed
from keyhole.methods.parts.naming.plane import Parts, Plane
from keyhole.methods.parts.naming.powers import ask_power
from keyhole.methods.parts.naming.products import Named, ask_products
from keyhole.methods.parts.naming.rays import ask_steps
from keyhole.methods.parts.naming.zero_scores import EQUAL_SCORES, ask_zero_scores
from keyhole.queries import Signature

OTHER = "other"


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
    """Name the parts of a head from 14 to 66 queries."""
    exam = Examination(signature, rng, "naming of parts")
    plane = Plane(exam)
    try:
        named = yield from _ask(plane)
        parts = (
            named.form,
            named.attention.link,
            named.attention.normaliser,
            named.attention.position_bias,
            named.attention.length_law,
        )
    except Parts as ended:
        exam.findings.append(ended.finding)
        parts = (OTHER,) * 5
    except OracleError as error:  # to tokens of extreme norms, perhaps; where the oracle is gone, the next query says so
        exam.say("answers", "none", str(error))
        parts = (OTHER,) * 5
    return Naming(*parts, findings=tuple(exam.findings), queries=plane.queries)


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
