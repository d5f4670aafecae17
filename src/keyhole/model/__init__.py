"""What a black box can be: parameters and forward map, one family per file."""

from keyhole.model.families import load
from keyhole.model.gauge import distance
from keyhole.model.head import SingleHead
from keyhole.model.layer import AttentionLayer
from keyhole.model.one_layer import OneLayer
from keyhole.model.relu_net import ReluNet

__all__ = ["AttentionLayer", "OneLayer", "ReluNet", "SingleHead", "distance", "load"]
