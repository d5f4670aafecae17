"""What a black box can be: parameters and forward map, one family per file."""

from keyhole.model.families import load
from keyhole.model.gauge import canonical, distance, equivalent
from keyhole.model.head import SingleHead
from keyhole.model.layer import AttentionLayer
from keyhole.model.multi_head import MultiHead
from keyhole.model.one_layer import OneLayer
from keyhole.model.relu_net import ReluNet
from keyhole.model.residual import Residual
from keyhole.model.witness import Witness, kinds, witness

__all__ = [
    "AttentionLayer",
    "MultiHead",
    "OneLayer",
    "ReluNet",
    "Residual",
    "SingleHead",
    "Witness",
    "canonical",
    "distance",
    "equivalent",
    "kinds",
    "load",
    "witness",
]
