"""A part of an ONNX file between two of its tensors, as a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from keyhole.errors import FileError, UsageError
from keyhole.optional import extra

USER = "a part of an ONNX file"
# How many names a message lists.
LISTED = 4


def part_of(path: Path, tokens: str | None, answer: str | None) -> bytes:
    """The model from the tensor `tokens` to the tensor `answer`, inner ones or the file's own, where None is given.

    Everything else that it needs must be constant. UsageError where a name is none of the file's tensors, or where the
    answer depends on another input too, or not on the tokens at all.
    """
    onnx = extra("onnx", "onnx", USER)
    model = _read(onnx, path)
    graph = model.graph
    constants = {each.name for each in [*graph.initializer, *graph.sparse_initializer]}
    maker = {name: node for node in graph.node for name in node.output if name}
    own = [each.name for each in graph.input if each.name not in constants]
    start = _named(path, tokens, own, {*own, *maker}, "input")
    end = _named(path, answer, [each.name for each in graph.output], {*own, *maker}, "output")
    needed, others, seen = _behind(end, start, maker, constants)
    if others:
        raise UsageError(
            f"{path.name}: {end!r} depends on {', '.join(others[:LISTED])} besides {start!r}: name an input between "
            "them and it, or export the file with the others as constants"
        )
    if start not in seen:
        raise UsageError(f"{path.name}: {end!r} does not depend on {start!r}: take an output behind it")
    nodes = [node for node in graph.node if any(name in needed for name in node.output)]
    known = {each.name: each for each in [*graph.input, *graph.output, *graph.value_info]}
    used = {name for node in nodes for name in _reads(node)}
    made = onnx.helper.make_graph(
        nodes,
        graph.name,
        [_value(onnx, known, start, path)],
        [_value(onnx, known, end, path)],
        [each for each in graph.initializer if each.name in used],
    )
    whole = onnx.helper.make_model(made, opset_imports=model.opset_import, functions=model.functions)
    whole.ir_version = model.ir_version
    return bytes(whole.SerializeToString())


def _read(onnx: Any, path: Path) -> Any:
    """The file with the types and shapes of its inner tensors."""
    try:
        return onnx.shape_inference.infer_shapes(onnx.load(str(path)))
    except Exception as error:
        raise FileError(f"{path} cannot be read as an ONNX file ({' '.join(str(error).split())[:200]})") from error


def _named(path: Path, name: str | None, own: Sequence[str], tensors: set[str], kind: str) -> str:
    if name is None:
        if len(own) != 1:
            raise UsageError(f"{path.name} has {len(own)} {kind}s: say which, {kind}= one of {', '.join(own)}")
        return own[0]
    if name not in tensors:
        near = get_close_matches(name, tensors, LISTED) or sorted(tensors)[:LISTED]
        raise UsageError(
            f"{path.name} has no tensor {name!r}; its own {kind}s are {', '.join(own)}, and others "
            f"{', '.join(map(repr, near))} and more"
        )
    return name


def _behind(end: str, start: str, maker: dict[str, Any], constants: set[str]) -> tuple[set[str], list[str], set[str]]:
    """Tensors that have to be made for `end`, those that nothing makes, and all that were met on the way."""
    needed, others, left, seen = set[str](), list[str](), [end], set[str]()
    while left:
        name = left.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        if name == start or name in constants:
            continue
        if name not in maker:
            others.append(name)
            continue
        needed.add(name)
        left += _reads(maker[name])
    return needed, others, seen


def _reads(node: Any) -> list[str]:
    """What a node reads, inside of loops and branches too."""
    inner = [each for attribute in node.attribute for graph in (attribute.g, *attribute.graphs) for each in graph.node]
    made = {name for each in inner for name in each.output}
    return [*node.input, *(name for each in inner for name in _reads(each) if name not in made)]


def _value(onnx: Any, known: dict[str, Any], name: str, path: Path) -> Any:
    """The declaration of a tensor: that of the file, or what inference found."""
    found = known.get(name)
    if found is None or not found.type.tensor_type.elem_type:
        raise UsageError(
            f"{path.name} says neither type nor shape of {name!r}, and they cannot be inferred: name another tensor"
        )
    shape = [each.dim_value or each.dim_param or None for each in found.type.tensor_type.shape.dim]
    return onnx.helper.make_tensor_value_info(name, found.type.tensor_type.elem_type, shape)
