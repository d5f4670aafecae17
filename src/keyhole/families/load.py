"""The families that parameter files can hold, and reading them back."""

from __future__ import annotations

from os import PathLike
from typing import Any

from keyhole.errors import FileError
from keyhole.families.attention_layer import AttentionLayer
from keyhole.families.files import load_arrays
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.residual import Residual
from keyhole.families.single_head import SingleHead

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
