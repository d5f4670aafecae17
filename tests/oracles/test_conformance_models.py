"""The conformance suite on oracles of real models: PyTorch modules, layers of transformers models, ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.oracles import Oracle
from keyhole.testing import OracleConformance, check_oracle

WIDTH = 12


# --- PyTorch ----------------------------------------------------------------------------------------------------


class OfTorch(OracleConformance):
    options: dict[str, Any] = {}  # noqa: RUF012

    def make(self) -> Oracle:
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        layer = torch.nn.MultiheadAttention(WIDTH, 3, batch_first=True).double().eval()
        return kh.TorchOracle(layer, **self.options)


class TestTorchOracle(OfTorch):
    pass


class TestTorchOracleAtAllPositions(OfTorch):
    options = {"positions": "all"}  # noqa: RUF012


class TestTorchOracleAtTheFirstPosition(OfTorch):
    options = {"positions": 0}  # noqa: RUF012


class TestTorchOracleInSinglePrecision(OfTorch):
    options = {"dtype": "float32", "max_norm": 9.0, "max_length": 4, "batch_limit": 3}  # noqa: RUF012


def test_an_encoder_layer_conforms() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 3, 16, dropout=0.0).double().eval()
    check_oracle(lambda: kh.TorchOracle(layer))


# --- transformers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert", {}),
        ("bert", {"part": "attention-block", "positions": "all"}),
        ("gpt2", {"positions": "all"}),
        ("llama", {"part": "layer"}),
    ],
)
def test_layers_of_transformers_models_conform(kind: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from support.transformers_models import model_of  # noqa: PLC0415 - imports PyTorch

    check_oracle(lambda: kh.TransformersOracle(model_of(kind), 1, **options))


# --- ONNX -------------------------------------------------------------------------------------------------------


class OfOnnx(OracleConformance):
    graph: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def written(self, tmp_path: Path) -> None:
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
        from support.onnx_models import graph, write  # noqa: PLC0415 - imports onnx

        self.path = write(tmp_path / "model.onnx", graph(**self.graph))

    def make(self) -> Oracle:
        return kh.OnnxOracle(self.path, **self.options)


class TestOnnxOracle(OfOnnx):
    pass


class TestOnnxOracleAtAllPositions(OfOnnx):
    graph = {"dtype": np.float32}  # noqa: RUF012
    options = {"positions": "all"}  # noqa: RUF012


class TestOnnxOracleOfFixedBatch(OfOnnx):
    graph = {"batch": 3}  # noqa: RUF012


class TestOnnxOracleOfFixedBatchAndLength(OfOnnx):
    graph = {"batch": 2, "length": 4}  # noqa: RUF012
    options = {"repeat": True}  # noqa: RUF012
    lengths = (1, 2, 4)
