"""Keyhole recovers the attention inside a model from its answers, with the fewest queries and a certificate."""

from keyhole.audit import audit
from keyhole.errors import KeyholeError, RecoveryFailed
from keyhole.measure import Noise
from keyhole.model import MultiHead, OneLayer, ReluNet, SingleHead, distance, load
from keyhole.oracles import FunctionOracle, TorchOracle
from keyhole.recovery import Outcome, Recovery
from keyhole.session import recover

__all__ = [
    "FunctionOracle",
    "KeyholeError",
    "MultiHead",
    "Noise",
    "OneLayer",
    "Outcome",
    "Recovery",
    "RecoveryFailed",
    "ReluNet",
    "SingleHead",
    "TorchOracle",
    "audit",
    "distance",
    "load",
    "recover",
]
