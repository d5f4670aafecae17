"""Score forms that are not bilinear: rotary, with normed keys and queries, Gaussian, and of features."""

from keyhole.families.forms.base import Form
from keyhole.families.forms.features import EluFeatures, ExpFeatures
from keyhole.families.forms.gaussian import Gaussian
from keyhole.families.forms.qk_norm import QKNorm
from keyhole.families.forms.qk_norm_rotary import QKNormRotary
from keyhole.families.forms.rotary import Rotary, geometric

FORMS: dict[str, type[Form]] = {
    each.name: each for each in (Rotary, QKNorm, QKNormRotary, Gaussian, EluFeatures, ExpFeatures)
}

__all__ = [
    "FORMS",
    "EluFeatures",
    "ExpFeatures",
    "Form",
    "Gaussian",
    "QKNorm",
    "QKNormRotary",
    "Rotary",
    "geometric",
]
