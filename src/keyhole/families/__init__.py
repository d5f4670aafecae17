"""What an oracle can compute: parameters and forward map, one family per file."""

from keyhole.families.attention_layer import AttentionLayer
from keyhole.families.load import load
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.residual import Residual
from keyhole.families.single_head import SingleHead

__all__ = ["AttentionLayer", "MultiHead", "OneLayer", "ReluNet", "Residual", "SingleHead", "load"]
