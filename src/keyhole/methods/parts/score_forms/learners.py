"""The learner of every score form that is not bilinear, and of powers of bilinear logits, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyhole.methods.base import Estimate, Steps
from keyhole.methods.parts.score_forms.elu_features import ask_elu_features
from keyhole.methods.parts.score_forms.exp_features import ask_exp_features
from keyhole.methods.parts.score_forms.gaussian import ask_gaussian
from keyhole.methods.parts.score_forms.powers import ask_power
from keyhole.methods.parts.score_forms.qk_norm import ask_qk_norm
from keyhole.methods.parts.score_forms.qk_norm_rotary import ask_qk_norm_rotary
from keyhole.methods.parts.score_forms.rotary import ask_rotary

# By the name of the form, or of a link whose masses are powers: (signature, rng, names of parts) -> the steps.
LEARNERS: dict[str, Callable[..., Steps[Estimate[Any]]]] = {
    "rotary": ask_rotary,
    "qk-norm": ask_qk_norm,
    "qk-norm-rotary": ask_qk_norm_rotary,
    "gaussian": ask_gaussian,
    "elu-features": ask_elu_features,
    "exp-features": ask_exp_features,
    **dict.fromkeys(("linear", "squared", "relu"), ask_power),
}
# Forms whose learners take frequencies.
TURNING = ("rotary", "qk-norm-rotary")
