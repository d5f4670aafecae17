"""The families that parameter files can hold, and reading them back."""

from __future__ import annotations

from os import PathLike
from typing import Any

from keyhole.errors import FileError
from keyhole.model.files import load_arrays
from keyhole.model.head import SingleHead
from keyhole.model.layer import AttentionLayer
from keyhole.model.multi_head import MultiHead
from keyhole.model.one_layer import OneLayer
from keyhole.model.relu_net import ReluNet
from keyhole.model.residual import Residual

FAMILIES: dict[str, Any] = {family.family: family for family in (SingleHead, ReluNet, AttentionLayer)}
FAMILIES |= {family.family: family.of_arrays for family in (MultiHead, OneLayer, Residual)}


def load(path: str | PathLike[str]) -> Any:
    """Read parameters saved with `.save(path)`: an object of the family that was saved."""
    family, arrays = load_arrays(path)
    if family not in FAMILIES:
        raise FileError(f"{path} holds the unknown family {family!r}; known: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](**arrays)
    except (TypeError, ValueError) as error:
        raise FileError(f"{path} does not hold a valid {family}: {error}") from error
