"""Parameters named by one line of text: what an owner has of the model that a box is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from keyhole.errors import FileError, UsageError
from keyhole.families import Family, load
from keyhole.families.files import load_arrays
from keyhole.families.torch_layouts import heads_of
from keyhole.optional import extra
from keyhole.oracles import Oracle, TransformersOracle
from keyhole.oracles.anything import as_oracle
from keyhole.recover import recover
from keyhole.recover_model import FAMILY, load_layers
from keyhole.targets import KINDS, open_target
from keyhole.targets.models import TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS, WHOLE, split
from keyhole.targets.target import Keys, Target, path_of, read_options

PARAMS, RADIUS, LAYERS = "params.safetensors", "radius.safetensors", "layers.safetensors"  # in a run folder
EXAMPLES = (
    "params.safetensors, a run folder, layers.safetensors#layer=0, transformers:PATH#layer=1, the weights of an "
    "nn.MultiheadAttention: weights.safetensors#heads=4, weights.pt#heads=4&prefix=encoder.attention, "
    "or another box, which is recovered first: model.onnx, demo:single-head?width=8, python:box.py:make"
)
STATE_KEYS: Keys = {"heads": WHOLE, "prefix": (str, "the beginning of names"), "layer": (str, "a name or number")}
SUFFIXES = (".pt", ".pth", ".bin")
TRANSFORMERS, FILE, ONNX = "transformers:", "file:", "onnx:"
BOXES = tuple(f"{kind}:" for kind in KINDS if f"{kind}:" not in (TRANSFORMERS, FILE))


@dataclass(frozen=True)
class Claim:
    """Parameters, and what they are in words."""

    params: Family
    label: str
    radius: Family | None = None  # error bars that a run wrote beside them
    bars: str = f"with the error bars in {RADIUS} beside them"  # what they are in words


def open_claim(text: str) -> Claim:
    """The parameters that a text names; UsageError or FileError says what is wrong with it and what is possible."""
    if text.startswith(TRANSFORMERS):
        return _of_transformers(text.removeprefix(TRANSFORMERS))
    name, _, query = text.removeprefix(FILE).partition("#")
    if text.startswith(BOXES) or name.endswith(".onnx"):
        return _of_box(open_target(text if text.startswith(BOXES) else ONNX + text.removeprefix(FILE)))
    path, given = path_of(name, PARAMS), read_options(query, STATE_KEYS, "a file of parameters")
    if not path.exists():
        raise FileError(f"{path}: no such file; what can be named is {EXAMPLES}")
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix in SUFFIXES or (path.suffix == ".safetensors" and "heads" in given):
        return _of_state(path, given)
    if "layer" in given or _is_layers(path):
        return _of_layers(path, given.get("layer"))
    if given:
        raise UsageError(f"{', '.join(given)}= is for weights and layers; parameters of Keyhole are one thing: {path}")
    params = load(path)
    return Claim(params, f"the {params.family} of width {params.width} in {path}", _beside(path))


def claim_of(box: Any) -> Claim:
    """The parameters of what a text names, or of an oracle or PyTorch module of one's own."""
    if isinstance(box, str | PathLike):
        return open_claim(fspath(box))
    oracle = as_oracle(box)
    return _recovered(oracle, oracle.name)


def _of_box(target: Target) -> Claim:
    """The parameters of a box of one's own: those that are known, or what its answers say."""
    try:
        return _recovered(target.oracle, target.label) if target.truth is None else Claim(target.truth, target.label)
    finally:
        target.oracle.close()


def _recovered(oracle: Oracle, label: str) -> Claim:
    """What a recovery finds in a box, with its error bars; UsageError where it is not certified."""
    found = recover(oracle, throw=False, progress=False)
    if not found.certified or found.params is None:
        raise UsageError(
            f"{label} could not be recovered, so nothing can be compared with it: {found.outcome.name}: {found.message}"
        )
    said = f"what {found.stats.queries:,} queries recover of {label}"
    return Claim(found.params, said, found.certificate.radius, "with its error bars")


def _in_folder(folder: Path) -> Path:
    for name in (PARAMS, LAYERS):
        if (folder / name).is_file():
            return folder / name
    raise FileError(f"{folder} holds neither {PARAMS} nor {LAYERS}; what can be named is {EXAMPLES}")


def _beside(path: Path) -> Family | None:
    """The error bars that a run wrote beside the parameters; None where it is no such file."""
    radii = path.with_name(RADIUS)
    return load(radii) if path.name == PARAMS and radii.is_file() else None


def _is_layers(path: Path) -> bool:
    """Whether a file holds the heads of all layers of a model."""
    try:
        return load_arrays(path)[0] == FAMILY
    except FileError:
        return False  # whoever reads it in earnest says what is wrong


def _of_layers(path: Path, layer: str | None) -> Claim:
    found, _ = load_layers(path)
    if layer is None and len(found) > 1:
        raise UsageError(f"{path} holds {len(found)} layers: name one, {path}#layer=0")
    names = list(found)
    number = layer or "0"
    name = number if number in found else names[int(number)] if number.isdecimal() and int(number) < len(names) else ""
    if not name:
        raise UsageError(f"{path} has no layer {layer!r}; it has {', '.join(names)}")
    return Claim(found[name], f"the heads of {name} in {path}")


def _of_transformers(rest: str) -> Claim:
    path, given = split(rest, TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS)
    if "layer" not in given:
        raise UsageError(f"{TRANSFORMERS}{rest} does not say which layer; write {TRANSFORMERS_EXAMPLE}")
    oracle = TransformersOracle(path, **given)
    try:
        return Claim(oracle.heads(), f"the heads at {oracle.place.name} in {path}")
    finally:
        oracle.close()


def _of_state(path: Path, given: Mapping[str, Any]) -> Claim:
    """The heads of an `nn.MultiheadAttention` whose weights a file holds; no code of the file runs."""
    torch = extra("torch", "torch", "reading weights of a PyTorch module")
    if "heads" not in given:
        raise UsageError(f"weights do not say how many heads they are: {path}#heads=4")
    try:
        tensors = (
            extra("safetensors.torch", "torch", "reading weights").load_file(path)
            if path.suffix == ".safetensors"
            else (torch.load(path, map_location="cpu", weights_only=True))
        )
        prefix = given.get("prefix", "")
        prefix += "." if prefix and not prefix.endswith(".") else ""
        state = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        weight = state["in_proj_weight"]
        dtype, bias = weight.dtype, "in_proj_bias" in state
        module = torch.nn.MultiheadAttention(weight.shape[1], given["heads"], bias=bias, dtype=dtype, device="cpu")
        module.load_state_dict(state)
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot read {path}: {error}") from error
    except Exception as error:  # an unpickler and PyTorch raise whatever they like
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} holds no weights of an nn.MultiheadAttention of these names: {said}") from error
    return Claim(heads_of(module.double()), f"the {given['heads']} heads of the weights in {path}")
