"""The learner of every score form that is not bilinear, and of powers of bilinear logits, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyhole.methods.base import Estimate, Steps
from keyhole.methods.parts.score_forms.gaussian import ask_gaussian
from keyhole.methods.parts.score_forms.powers import ask_power
from keyhole.methods.parts.score_forms.qk_norm import ask_qk_norm
from keyhole.methods.parts.score_forms.qk_norm_rotary import ask_qk_norm_rotary
from keyhole.methods.parts.score_forms.rotary import ask_rotary

# By the name of the form: (signature, rng, names of the parts of attention) -> the steps.
LEARNERS: dict[str, Callable[..., Steps[Estimate[Any]]]] = {
    "rotary": ask_rotary,
    "qk-norm": ask_qk_norm,
    "qk-norm-rotary": ask_qk_norm_rotary,
    "gaussian": ask_gaussian,
}
# By the name of the link, for bilinear logits.
POWERS: dict[str, Callable[..., Steps[Estimate[Any]]]] = dict.fromkeys(("linear", "squared", "relu"), ask_power)
