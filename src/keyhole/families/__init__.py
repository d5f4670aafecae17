"""What an oracle can compute: parameters and forward map, one family per file.

`register` makes a family of one's own one that `load` reads; `keyhole.gauge.register` says how it is compared.
"""

from keyhole.families.attention_layer import AttentionLayer
from keyhole.families.base import Anatomy, F, F_co, Family
from keyhole.families.files import load, register
from keyhole.families.form_head import FormHead
from keyhole.families.labels import Labels
from keyhole.families.multi_head import MultiHead
from keyhole.families.norms.after import NormAfter
from keyhole.families.norms.before import NormBefore
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.residual import Residual
from keyhole.families.single_head import SingleHead

__all__ = [
    "Anatomy",
    "AttentionLayer",
    "F",
    "F_co",
    "Family",
    "FormHead",
    "Labels",
    "MultiHead",
    "NormAfter",
    "NormBefore",
    "OneLayer",
    "ReluNet",
    "Residual",
    "SingleHead",
    "load",
    "register",
]
