"""Learners: one per file, each a pure generator. None of them touches an oracle."""

from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.multi_head.method import MULTI_HEAD
from keyhole.methods.one_layer.method import ONE_LAYER
from keyhole.methods.relu_net.method import NET
from keyhole.methods.residual import RESIDUAL
from keyhole.methods.robust.method import ROBUST
from keyhole.methods.sensing.method import SENSING
from keyhole.methods.single_head.method import LOW_RANK, SINGLE_HEAD
from keyhole.queries import Signature

METHODS: dict[str, Method] = {
    method.name: method for method in (SINGLE_HEAD, LOW_RANK, SENSING, ROBUST, NET, ONE_LAYER, MULTI_HEAD, RESIDUAL)
}
# What "auto" chooses from: the robust one where answers carry noise, else the first that has the options asked for.
AUTO = (SINGLE_HEAD, ROBUST)


def noisy(signature: Signature) -> bool:
    """Whether answers are known to err by more than the arithmetic behind them."""
    return signature.noise.kind not in ("exact", "measure")


__all__ = ["AUTO", "METHODS", "Estimate", "Method", "Steps", "Unrecoverable", "noisy"]
