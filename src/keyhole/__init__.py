"""Keyhole recovers the attention inside a model from its answers, with the fewest queries and a certificate."""

from keyhole.audit import audit
from keyhole.errors import KeyholeError, RecoveryFailed
from keyhole.measure import Noise
from keyhole.model import AttentionLayer, OneLayer, ReluNet, SingleHead, distance, load
from keyhole.oracles import FunctionOracle
from keyhole.recovery import Outcome, Recovery
from keyhole.samples import learn
from keyhole.session import recover

__all__ = [
    "AttentionLayer",
    "FunctionOracle",
    "KeyholeError",
    "Noise",
    "OneLayer",
    "Outcome",
    "Recovery",
    "RecoveryFailed",
    "ReluNet",
    "SingleHead",
    "audit",
    "distance",
    "learn",
    "load",
    "recover",
]
