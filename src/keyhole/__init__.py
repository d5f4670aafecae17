"""Keyhole recovers the attention inside a model from its answers, with the fewest queries and a certificate."""

from keyhole.audit import audit
from keyhole.errors import KeyholeError, RecoveryFailed
from keyhole.families import AttentionLayer, MultiHead, OneLayer, ReluNet, Residual, SingleHead, load
from keyhole.gauge import Witness, canonical, distance, equivalent, kinds, witness
from keyhole.noise import Noise
from keyhole.oracles import FunctionOracle, HttpOracle, OnnxOracle, TorchOracle, TransformersOracle
from keyhole.recover import recover
from keyhole.recover_model import recover_model
from keyhole.recovery import Outcome, Recovery
from keyhole.samples import learn
from keyhole.verify import Verdict, verify

__all__ = [
    "AttentionLayer",
    "FunctionOracle",
    "HttpOracle",
    "KeyholeError",
    "MultiHead",
    "Noise",
    "OneLayer",
    "OnnxOracle",
    "Outcome",
    "Recovery",
    "RecoveryFailed",
    "ReluNet",
    "Residual",
    "SingleHead",
    "TorchOracle",
    "TransformersOracle",
    "Verdict",
    "Witness",
    "audit",
    "canonical",
    "distance",
    "equivalent",
    "kinds",
    "learn",
    "load",
    "recover",
    "recover_model",
    "verify",
    "witness",
]
