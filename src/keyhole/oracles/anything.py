"""Oracles of what people have: a PyTorch module, a function, a file or an address."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families.base import is_family
from keyhole.noise import Noise
from keyhole.optional import on_demand
from keyhole.oracles.base import Oracle
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.http.oracle import HttpOracle
from keyhole.oracles.onnx import OnnxOracle
from keyhole.oracles.torch import TorchOracle, is_module
from keyhole.oracles.wrappers import Wrapper

KNOWN = (
    "an Oracle, a torch.nn.Module, a function of token batches with width=, parameters of Keyhole, a path of an ONNX "
    "file, an http:// address of a model, or a target such as 'demo:single-head?width=16'"
)


def as_oracle(
    box: Any, width: int | None = None, noise: Noise | str | None = None, max_norm: float | None = None
) -> Oracle:
    """The oracle of anything that is one or can be made one, with the width, noise and norm bound that are declared.

    UsageError says what else to do with anything else.
    """
    known = None if noise is None else Noise.of(noise)
    if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, int | float | np.number)):
        raise UsageError(f"max_norm must be a positive number or None, not {max_norm!r}")
    if isinstance(box, Oracle):
        return with_declared(box, width, known, max_norm)
    if isinstance(box, str | os.PathLike):
        return with_declared(_named(os.fspath(box)), width, known, max_norm)
    if isinstance(box, type):
        raise UsageError(f"{box.__name__} is a class: hand over an object of it")
    if is_module(box):
        return _of_module(box, width, known, max_norm)
    if not callable(box):
        raise UsageError(f"cannot ask a {type(box).__name__}; what can be asked is {KNOWN}")
    said = getattr(box, "width", None)
    own = said if width is None else width
    if is_family(box) and own != said:
        raise UsageError(f"these parameters have tokens of {said} numbers, not of {own!r}: leave width= out")
    if width is not None and (isinstance(width, bool) or not isinstance(width, int | np.integer)):
        raise UsageError(f"width must be a whole number of at least 1, not {width!r}")
    if isinstance(own, bool) or not isinstance(own, int | np.integer):
        name = getattr(box, "__qualname__", type(box).__qualname__)
        raise UsageError(f"say how many numbers a token of {name} has: width=")
    return FunctionOracle(box, int(own), max_norm, noise=known)


def with_declared(
    oracle: Oracle, width: int | None = None, noise: Noise | None = None, max_norm: float | None = None
) -> Oracle:
    """The oracle with this noise and this bound on token norms in its signature; itself where nothing changes."""
    signature = oracle.signature
    if width is not None and width != signature.width:
        raise UsageError(f"{oracle.name} has tokens of {signature.width} numbers, not of {width}: leave width= out")
    if max_norm is not None:
        own = signature.max_norm
        if own is not None and max_norm > own:
            raise UsageError(f"max_norm {max_norm} exceeds the {own} that {oracle.name} allows")
        signature = signature.with_changes(max_norm=max_norm)
    if noise is not None:
        signature = signature.with_changes(noise=noise)
    return oracle if signature is oracle.signature else Wrapper(oracle, signature)


def _named(text: str) -> Oracle:
    kind, colon, _ = text.partition(":")
    if kind in ("http", "https") and colon:
        return HttpOracle(text)
    if text.endswith(".onnx") and not (colon and kind == "onnx"):
        return OnnxOracle(text)
    if os.path.isdir(text):
        raise UsageError(
            f"{text} is a folder: TransformersOracle({text!r}, layer=0) asks one layer of the model in it, and "
            f"keyhole.recover_model({text!r}) recovers all of them"
        )
    opened: Oracle = on_demand("targets").open_target(text).oracle
    return opened


def _of_module(module: Any, width: int | None, noise: Noise | None, max_norm: float | None) -> Oracle:
    if hasattr(module, "main_input_name") and hasattr(module, "get_input_embeddings"):
        raise UsageError(
            f"{type(module).__name__} is a whole model: TransformersOracle(model, layer=0) asks one layer of it, and "
            "keyhole.recover_model(model) recovers all of them"
        )
    return TorchOracle(module, width, max_norm=max_norm, noise=noise)
