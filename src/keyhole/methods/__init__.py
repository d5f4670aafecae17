"""Learners: one per file, each a pure generator. None of them touches an oracle."""

from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.low_rank import LOW_RANK
from keyhole.methods.sensing import SENSING
from keyhole.methods.single_head import SINGLE_HEAD

METHODS: dict[str, Method] = {method.name: method for method in (SINGLE_HEAD, LOW_RANK, SENSING)}
# What "auto" stands for until a box is diagnosed before it is recovered.
AUTO = SINGLE_HEAD

__all__ = ["AUTO", "METHODS", "Estimate", "Method", "Steps", "Unrecoverable"]
