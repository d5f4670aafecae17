"""Every kind of target opens what it names, and nonsense is refused in words."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import to_numpy
from keyhole.errors import FileError, UsageError
from keyhole.oracles import Wrapper
from keyhole.targets import open_target

BOX = """
import numpy as np
import keyhole as kh

def head():
    rng = np.random.default_rng(3)
    return kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4))

def oracle():
    return kh.FunctionOracle(head(), width=4, max_norm=2.0, batch_limit=7, name="mine")

def number():
    return 5

def broken():
    return 1 / 0

def leaving():
    raise SystemExit("bye")

class Bare(kh.FunctionOracle):
    def __init__(self):
        pass

value = 3
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    path = tmp_path / "box.py"
    path.write_text(BOX)
    return path


def test_a_demo_fills_in_its_defaults() -> None:
    target = open_target("demo:single-head")
    assert target.text == target.oracle.name == "demo:single-head?width=32&norm=1&seed=0"
    assert target.oracle.signature.width == 32
    assert np.linalg.norm(target.truth.score, 2) == pytest.approx(1.0)


def test_a_demo_has_one_name_however_it_is_written() -> None:
    first = open_target("demo:single-head?seed=7&width=8&norm=1e0&rank=8")
    second = open_target("demo:single-head?width=8&norm=1.0&seed=7")
    assert first.oracle.name == second.oracle.name
    assert kh.distance(first.truth, second.truth) == 0.0


@pytest.mark.parametrize("change", ["seed=1", "norm=0.1", "rank=3", "width=9", "max_norm=2", f"seed={10**30}"])
def test_another_demo_has_another_name(change: str) -> None:
    assert open_target(f"demo:single-head?{change}").oracle.name != open_target("demo:single-head").oracle.name


def test_a_demo_has_the_rank_norm_and_bound_it_was_given() -> None:
    target = open_target("demo:single-head?width=12&rank=3&norm=1e-3&max_norm=0.5")
    singular = np.linalg.svd(target.truth.score, compute_uv=False)
    assert singular[0] == pytest.approx(1e-3)
    assert np.sum(singular > 1e-12) == 3
    assert target.oracle.signature.max_norm == 0.5


@pytest.mark.parametrize("query", ["rank=0", "norm=0"])
def test_a_demo_may_attend_to_nothing(query: str) -> None:
    target = open_target(f"demo:single-head?width=4&{query}")
    assert not np.any(target.truth.score)
    assert "rank 0" in target.label


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "demo:single-head"),
        ("triton:model", "python:path.py:factory"),
        ("onnx:", "onnx:model.onnx"),
        ("onnx:model.onnx#layer=3", "possible: width"),
        ("onnx:model.onnx#positions", "key=value"),
        ("onnx:model.onnx#positions=first", "makes no sense"),
        ("onnx:model.onnx#width=2&width=3", "twice"),
        ("transformers:", "transformers:PATH#layer=2"),
        ("transformers:path", "does not say which layer"),
        ("transformers:path#layer=one", "makes no sense"),
        ("demo:", "known: single-head"),
        ("demo:two-heads?width=3", "known: single-head"),
        ("demo:single-head?witdh=3", "possible: width"),
        ("demo:single-head?width=3&width=4", "twice"),
        ("demo:single-head?width", "key=value"),
        ("demo:single-head?width=", "whole number"),
        ("demo:single-head?width=2.5", "whole number"),
        ("demo:single-head?width=0", "from 1 to 8192"),
        ("demo:single-head?width=1000000", "from 1 to 8192"),
        ("demo:single-head?width=3&rank=4", "at most its width"),
        ("demo:single-head?norm=-1", "norm is a number from 0"),
        ("demo:single-head?norm=nan", "norm is a number from 0"),
        ("demo:single-head?norm=inf", "norm is a number from 0"),
        ("demo:single-head?seed=-1", "seed is a whole number"),
        ("demo:single-head?max_norm=0", "max_norm must be a positive number"),
        ("file:", "file:params.safetensors"),
        ("python:", "python:path.py:factory"),
        ("python:box.py", "python:path.py:factory"),
        ("python::make", "python:path.py:factory"),
    ],
)
def test_nonsense_is_refused_with_what_is_possible(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_target(text)
    assert said in str(caught.value)


def test_a_file_answers_with_what_it_holds(tmp_path: Path) -> None:
    head = open_target("demo:single-head?width=5").truth
    path = tmp_path / "params.safetensors"
    head.save(path)
    target = open_target(f"file:{path}")
    tokens = np.random.default_rng(0).standard_normal((3, 2, 5))
    np.testing.assert_array_equal(target.oracle(tokens), head(tokens))
    assert target.oracle.name == f"file:sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert kh.distance(target.truth, head) == 0.0


def test_a_forgotten_kind_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "params.safetensors"
    path.touch()
    with pytest.raises(UsageError, match="did you mean file:"):
        open_target(str(path))


@pytest.mark.parametrize("content", [None, b"", b"not a tensor", b"\xff" * 64])
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "params.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=r"params\.safetensors"):
        open_target(f"file:{path}")


def test_a_callable_with_a_width_is_a_box(box: Path) -> None:
    target = open_target(f"python:{box}:head")
    assert target.oracle.signature.width == 4
    assert target.truth is None
    assert kh.recover(target.oracle).certified


def test_an_oracle_keeps_its_name_and_signature_behind_the_digest(box: Path) -> None:
    target = open_target(f"python:{box}:oracle")
    digest = hashlib.sha256(box.read_bytes()).hexdigest()
    assert digest in target.oracle.name
    assert target.oracle.name.endswith("mine")
    assert target.oracle.signature.batch_limit == 7


def test_edited_code_is_another_box(box: Path) -> None:
    before = open_target(f"python:{box}:oracle").oracle.name
    box.write_text(BOX + "\n# edited\n")
    assert open_target(f"python:{box}:oracle").oracle.name != before


def test_code_runs_under_a_private_name_beside_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "keyhole_test_neighbour.py").write_text(BOX)
    path = tmp_path / "json.py"  # a name that must not shadow anything
    path.write_text("from keyhole_test_neighbour import head\nassert __name__ != '__main__'\n")
    import json  # noqa: PLC0415

    assert open_target(f"python:{path}:head").oracle.signature.width == 4
    assert sys.modules["json"] is json
    del sys.modules["keyhole_test_neighbour"]


def test_a_part_of_a_model_by_its_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n\n\ndef model():\n    torch.manual_seed(0)\n"
        "    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()\n\n\n"
        "def number():\n    return 3.0\n"
    )
    target = open_target(f"python:{path}:model#module=layers.1.self_attn")
    assert target.oracle.signature.width == 8
    assert "layers.1.self_attn" in target.label
    x = torch.ones(1, 3, 8, dtype=torch.float64)
    assert not torch.equal(target.oracle(x), open_target(f"python:{path}:model").oracle(x))
    with pytest.raises(UsageError, match=r"no module 'layers\.1\.self_atn'; it has layers\.1\.self_attn"):
        open_target(f"python:{path}:model#module=layers.1.self_atn")
    with pytest.raises(UsageError, match="makes a float"):
        open_target(f"python:{path}:number#module=layers")
    with pytest.raises(UsageError, match="is for a PyTorch module"):
        open_target(f"python:{path}:number#width=8")


def test_attention_with_one_linear_map_for_all_is_recovered(tmp_path: Path) -> None:
    """As vision models have it: queries, keys and values of all heads from one matrix."""
    pytest.importorskip("torch")
    path = tmp_path / "vision.py"
    path.write_text(
        "import torch\n\n\nclass Attention(torch.nn.Module):\n    def __init__(self, dim, heads):\n"
        "        super().__init__()\n        self.heads = heads\n        self.qkv = torch.nn.Linear(dim, 3 * dim)\n"
        "        self.proj = torch.nn.Linear(dim, dim)\n\n    def forward(self, x):\n"
        "        b, n, d = x.shape\n"
        "        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)\n"
        "        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
        "        return self.proj(y.transpose(1, 2).reshape(b, n, d))\n\n\n"
        "def model():\n    torch.manual_seed(0)\n"
        "    return torch.nn.ModuleDict({'blocks': torch.nn.ModuleList([Attention(8, 2)])}).double().eval()\n"
    )
    with pytest.raises(UsageError, match="give width="):
        open_target(f"python:{path}:model#module=blocks.0")
    oracle = open_target(f"python:{path}:model#module=blocks.0&width=8").oracle
    result = kh.recover(oracle, throw=False)
    assert result.certified, result.message
    tokens = np.random.default_rng(0).standard_normal((9, 5, 8))
    np.testing.assert_allclose(
        result.params(tokens), to_numpy(oracle(oracle.signature.space.asarray(tokens))), atol=1e-8
    )


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("missing", "no function 'missing'"),
        ("value", "no function 'value'"),
        ("number", "type int"),
        ("broken", "line 16: ZeroDivisionError"),
        ("leaving", "SystemExit: bye"),
        ("Bare", "does not set 'signature'"),
    ],
)
def test_bad_code_is_refused_with_the_place(box: Path, factory: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_target(f"python:{box}:{factory}")
    assert said in str(caught.value)
    assert "box.py" in str(caught.value)


def test_code_that_cannot_be_read_or_compiled_is_refused(box: Path) -> None:
    box.write_text("def head(:\n")
    with pytest.raises(UsageError, match="SyntaxError"):
        open_target(f"python:{box}:head")
    with pytest.raises(FileError, match="cannot read"):
        open_target(f"python:{box.parent / 'none.py'}:head")


def test_a_bound_can_be_tightened_but_not_loosened(box: Path) -> None:
    target = open_target(f"python:{box}:oracle")
    tight = target.with_declared(1.0)
    assert isinstance(tight.oracle, Wrapper)
    assert tight.oracle.name == target.oracle.name
    assert tight.oracle.signature.max_norm == 1.0
    assert target.with_declared() is target
    with pytest.raises(UsageError, match=r"exceeds the 2\.0"):
        target.with_declared(3.0)
