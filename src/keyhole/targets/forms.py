"""Heads of other score forms, as demos have them."""

from __future__ import annotations

import numpy as np

from keyhole.errors import UsageError
from keyhole.families import FormHead
from keyhole.families.forms import FORMS, Form, Gaussian, QKNorm, QKNormRotary, Rotary, geometric
from keyhole.families.parts import SOFTMAX, Attention
from keyhole.targets.target import Choice, Knob

FORM_KNOBS: dict[str, Knob | Choice] = {
    "form": Choice(tuple(FORMS)),
    "key_width": Knob(int, None, 1, 8192),  # rows of key and query; the width of tokens if left out
    "epsilon": Knob(float, None, 0.0),  # what norms of keys and queries add to mean squares
    "biases": Knob(float, None, 0.0),  # sizes of the entries of random biases of keys and queries that turn
}


NORMED = ("qk-norm", "qk-norm-rotary")


def random_form_head(
    form: str,
    width: int,
    *,
    rows: int | None = None,
    norm: float = 1.0,
    seed: int = 0,
    outputs: int | None = None,
    attention: Attention = SOFTMAX,
    epsilon: float | None = None,
    biases: float | None = None,
) -> FormHead:
    """Gaussian keys, queries and value; the strength of logits is that of a random bilinear head of this norm."""
    rows = width if rows is None else rows
    if FORMS[form].positional and rows % 2:
        raise UsageError(f"form={form} turns pairs of rows: key_width must be even, not {rows}")
    rng = np.random.default_rng([seed, FORM_STREAM])
    value = rng.standard_normal((width,) if outputs is None else (width, outputs))
    made = _random_form(form, rows, width, norm, rng)
    if epsilon is not None:
        if form not in NORMED:
            raise UsageError(f"epsilon= is a number of normed keys and queries: form={form} has none, leave it out")
        made = made.with_arrays({**made.arrays(), "epsilon": np.full(2, rows * epsilon)})
    if biases is not None:
        if form != "rotary":
            raise UsageError(f"biases= are those of rotary keys and queries: form={form} has none, leave it out")
        query_bias, key_bias = biases * rng.standard_normal((2, rows))
        made = made.with_arrays({**made.arrays(), "query_bias": query_bias, "key_bias": key_bias})
    return FormHead(made, value, None, attention)


# Sets the random numbers of a form apart from those that a method draws from the same seed.
FORM_STREAM = 0xDE32


def _random_form(form: str, rows: int, width: int, norm: float, rng: np.random.Generator) -> Form:
    query, key = (rng.standard_normal((rows, width)) for _ in range(2))
    around_one = 1 + 0.3 * rng.standard_normal((2, rows))
    if form == "qk-norm":
        return QKNorm(query, key, norm * rows**0.5 * around_one[0])
    if form == "qk-norm-rotary":
        return QKNormRotary(query, key, around_one[0], norm * rows**0.5 * around_one[1], geometric(rows // 2))
    # A random matrix of this size has about the norm.
    factor = (norm / (2 * (rows * width) ** 0.5)) ** 0.5
    query, key = factor * query, factor * key
    if form == "rotary":
        return Rotary(query, key, geometric(rows // 2))
    if form == "gaussian":
        return Gaussian(2 * key.T @ query, key.T @ key)
    return FORMS[form](query, key)  # type: ignore[call-arg]
