"""Keyhole recovers the attention inside a model from its answers, with the fewest queries and a certificate."""

from keyhole.audit import audit
from keyhole.errors import KeyholeError, RecoveryFailed
from keyhole.measure import Noise
from keyhole.model import MultiHead, OneLayer, ReluNet, SingleHead, distance, load
from keyhole.oracles import FunctionOracle, OnnxOracle, TorchOracle, TransformersOracle
from keyhole.recovery import Outcome, Recovery
from keyhole.session import recover
from keyhole.whole_model import recover_model

__all__ = [
    "FunctionOracle",
    "KeyholeError",
    "MultiHead",
    "Noise",
    "OneLayer",
    "OnnxOracle",
    "Outcome",
    "Recovery",
    "RecoveryFailed",
    "ReluNet",
    "SingleHead",
    "TorchOracle",
    "TransformersOracle",
    "audit",
    "distance",
    "load",
    "recover",
    "recover_model",
]
