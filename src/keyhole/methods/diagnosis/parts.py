"""A diagnosis that goes on where softmax attention was not seen to hold: what the parts of one head are called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.methods.base import Steps
from keyhole.methods.diagnosis.diagnose import POSITIONAL, UNKNOWN, Diagnosis, diagnose
from keyhole.methods.examination import Examination, Finding
from keyhole.methods.parts.method import reads
from keyhole.methods.parts.naming.ask_parts import Naming, ask_parts
from keyhole.methods.registry import methods_for
from keyhole.queries import Signature

# What is said of heads whose weights are not those of a softmax. Of several outputs heads are counted for certain.
MAY_BE_ONE_HEAD = (UNKNOWN, POSITIONAL, "multi-head", "one-layer")
# Families of heads by parts: of a bilinear score, and of other forms.
BILINEAR, OTHER_FORM = "single-head", "form-head"
BILINEAR_FORM = "bilinear"
# Tokens of a sequence that is longer than windows are, their norm over the usual one, and by which part of their mean
# the answer may be off it: score biases of any size that shows otherwise make less.
LONG, NEARLY_ZERO, UNEQUAL = 512, 2.0**-20, 1e-3


def diagnose_with_parts(
    signature: Signature, rng: np.random.Generator, naming: np.random.Generator
) -> Steps[Diagnosis]:
    """The family of an oracle, and where it is none of softmax attention the names of the parts of one head."""
    found = yield from diagnose(signature, rng)
    if found.family == BILINEAR:
        known = signature.with_changes(noise=found.noise)
        if (yield from _ask_equal_tokens(known, naming)):
            return found
        said = Finding(
            "long sequences", "not of a softmax", "equal tokens far from the last one count less, or none do"
        )
        found = replace(found, findings=(*found.findings, said))
    return (yield from with_parts(found, signature, naming))


def may_be_one_head(found: Diagnosis) -> bool:
    """Whether one head of other parts may look like this."""
    several = found.family == "multi-head" and any(
        "rank" in each.evidence for each in found.findings if each.what == "heads"
    )
    return found.noise.kind == "exact" and found.family in (BILINEAR, *MAY_BE_ONE_HEAD) and not several


def with_parts(
    found: Diagnosis, signature: Signature, rng: np.random.Generator, naming: Naming | None = None
) -> Steps[Diagnosis]:
    """The diagnosis with the names of parts, asked for where they are not known, and the method for such a head."""
    if not may_be_one_head(found):
        return found
    if naming is None:
        naming = yield from ask_parts(signature.with_changes(noise=found.noise), rng)
    if not naming.known:
        return replace(found, findings=(*found.findings, *naming.findings[-1:]))
    return of_naming(found, naming)


def of_naming(found: Diagnosis, naming: Naming) -> Diagnosis:
    """The diagnosis of a head whose parts are known; options are the parts that are not those of a softmax."""
    family = BILINEAR if naming.form == BILINEAR_FORM else OTHER_FORM
    methods = methods_for(family, found.noise, naming.options) if reads(naming.options) else []
    return replace(
        found,
        family=family,
        method=methods[0].name if methods else None,
        findings=(*found.findings, *naming.findings),
        options=naming.options,
        alternatives=(),
        recovers=family if methods else None,
    )


def _ask_equal_tokens(signature: Signature, rng: np.random.Generator) -> Steps[bool]:
    """Whether tokens of a long sequence that are nearly zero weigh the same, as numbers on them show."""
    exam = Examination(signature, rng, "diagnosis")
    count = min(LONG, signature.max_length or LONG)
    if exam.noise.kind != "exact" or count < 2:
        return True
    (direction,) = exam.norm * NEARLY_ZERO / count * exam.directions(1)
    numbers = np.arange(1.0, count + 1)
    queries = [np.outer(each, direction) for each in (numbers, numbers[::-1], [np.mean(numbers)], [0.0])]
    up, down, mean, bias = yield from exam.ask([list(query) for query in queries])
    bar = exam.error(float(np.max(np.abs([up, down, mean])))) + UNEQUAL * np.linalg.norm(mean - bias)
    return bool(max(np.linalg.norm(up - mean), np.linalg.norm(down - mean)) <= bar)
