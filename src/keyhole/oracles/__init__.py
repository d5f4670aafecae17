"""Oracles behind one interface, and wrappers that change how one behaves."""

from keyhole.oracles.base import Oracle
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.http.oracle import HttpOracle
from keyhole.oracles.http.rest import RestOracle
from keyhole.oracles.onnx import OnnxOracle
from keyhole.oracles.torch import TorchOracle
from keyhole.oracles.transformers.oracle import TransformersOracle
from keyhole.oracles.wrappers import Batched, Budgeted, Cast, Counted, Flipped, Labelled, Noisy, Rounded, Wrapper

__all__ = [
    "Batched",
    "Budgeted",
    "Cast",
    "Counted",
    "Flipped",
    "FunctionOracle",
    "HttpOracle",
    "Labelled",
    "Noisy",
    "OnnxOracle",
    "Oracle",
    "RestOracle",
    "Rounded",
    "TorchOracle",
    "TransformersOracle",
    "Wrapper",
]
