"""Attention as ONNX graphs, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.targets import random_multi_head

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper

WIDTH, OUTPUTS = 5, 4
FLOATS = {np.float64: onnx.TensorProto.DOUBLE, np.float32: onnx.TensorProto.FLOAT, np.float16: onnx.TensorProto.FLOAT16}
TRUTH = random_multi_head(1, WIDTH, outputs=OUTPUTS, score_bias=0.5, output_bias=0.5, seed=3)


def graph(
    layer: kh.MultiHead = TRUTH,
    dtype: Any = np.float64,
    batch: Any = "batch",
    length: Any = "length",
    pool: bool = False,
) -> Any:
    """Σ_h softmax(X·Wᵀ·Xᵀ + …)·X·V_h + b at every position, or the mean over all."""
    kind, width = FLOATS[dtype], layer.width
    nodes, constants, sums = [], [], []

    def constant(name: str, array: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(array, dtype=dtype), name))
        return name

    def node(operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator}_{len(nodes)}"
        nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    for number, head in enumerate(layer.heads):
        keys = node("MatMul", "tokens", constant(f"score{number}", np.asarray(head.score).T))
        if head.score_bias is not None:
            keys = node("Add", keys, constant(f"score_bias{number}", head.score_bias))
        logits = node("MatMul", keys, node("Transpose", "tokens", perm=[0, 2, 1]))
        mixed = node("MatMul", node("Softmax", logits, axis=-1), "tokens")
        sums.append(node("MatMul", mixed, constant(f"value{number}", head.value)))
    total = sums[0]
    for each in sums[1:]:
        total = node("Add", total, each)
    total = node("Add", total, constant("bias", 0.0 if layer.output_bias is None else layer.output_bias))
    total = node("ReduceMean", total, axes=[1], keepdims=0) if pool else node("Identity", total)
    shape = [batch, layer.outputs] if pool else [batch, length, layer.outputs]
    tokens = helper.make_tensor_value_info("tokens", kind, [batch, length, width])
    outputs = helper.make_tensor_value_info(total, kind, shape)
    return helper.make_graph(nodes, "attention", [tokens], [outputs], constants)


def write(path: Path, made: Any) -> Path:
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path
