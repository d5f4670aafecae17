"""ONNX models as black boxes: batch and length dynamic or fixed, files that are none refused."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import FileError, UsageError, WrongShape
from keyhole.oracles import Counted
from keyhole.targets import open_target

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
helper, numpy_helper = onnx.helper, onnx.numpy_helper

from support.onnx_models import TRUTH, WIDTH, graph, write  # noqa: E402 - imports onnx


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def question(batch: int = 5, length: int = 4) -> Any:
    return np.random.default_rng(0).standard_normal((batch, length, WIDTH))


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["batch", 1, 3, 8])
def test_any_batch(path: Path, batch: Any) -> None:
    oracle = kh.OnnxOracle(write(path, graph(batch=batch)))
    for count in (1, 2, 3, 7):
        np.testing.assert_allclose(oracle(question(count)), TRUTH(question(count)), rtol=0, atol=1e-13)
    every = kh.OnnxOracle(path, positions="all")
    np.testing.assert_allclose(every(question()), TRUTH.at_all_positions(question()), rtol=0, atol=1e-13)
    first = kh.OnnxOracle(path, positions=0)
    np.testing.assert_allclose(first(question()), TRUTH(question()), rtol=0, atol=1e-13)
    assert oracle.signature.max_length is None
    assert len({oracle.name, first.name}) == 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-13), (np.float32, 1e-5), (np.float16, 5e-2)])
def test_any_dtype(path: Path, dtype: Any, tolerance: float) -> None:
    oracle = kh.OnnxOracle(write(path, graph(dtype=dtype)))
    np.testing.assert_allclose(oracle(question()), TRUTH(question()), rtol=0, atol=tolerance)
    assert oracle.signature.space.eps == np.finfo(dtype).eps
    assert oracle(question()).dtype == (np.float32 if dtype is np.float16 else dtype)
    long = 1e6 * question()  # beyond float16: infinity, without a warning
    with pytest.raises(kh.errors.NonFiniteAnswer) if dtype is np.float16 else nullcontext():
        oracle(long)


def test_one_row_per_sequence(path: Path) -> None:
    oracle = kh.OnnxOracle(write(path, graph(pool=True)))
    np.testing.assert_allclose(oracle(question()), TRUTH.at_all_positions(question()).mean(1), rtol=0, atol=1e-13)
    with pytest.raises(UsageError, match="one answer per sequence"):
        kh.OnnxOracle(path, positions="all")


def test_a_fixed_length_answers_no_other(path: Path) -> None:
    oracle = kh.OnnxOracle(write(path, graph(length=6)), max_length=9)
    assert oracle.signature.max_length == 6
    np.testing.assert_allclose(oracle(question(length=6)), TRUTH(question(length=6)), rtol=0, atol=1e-13)
    with pytest.raises(WrongShape, match=r"6 tokens and no others, not of 2: .*dynamic length, .*say repeat=True"):
        oracle(question(length=2))
    result = kh.recover(oracle, throw=False)
    assert result.outcome is kh.Outcome.ORACLE_FAILED
    assert "dynamic length" in result.message


@pytest.mark.parametrize("positions", ["last", "all", 0])
def test_repeated_tokens_make_up_a_fixed_length(path: Path, positions: Any) -> None:
    """Every token as often as every other: the same weights, so the same question."""
    oracle = kh.OnnxOracle(write(path, graph(length=6)), positions=positions, repeat=True)
    expected = TRUTH.at_all_positions if positions == "all" else TRUTH
    assert oracle.signature.max_length == 3  # all lengths up to it divide six, so that no method asks another
    for length in (1, 2, 3):
        tokens = question(length=length)
        np.testing.assert_allclose(oracle(tokens), expected(tokens), rtol=0, atol=1e-13)
    with pytest.raises(UsageError, match="exceed max_length 3"):
        oracle(question(length=4))
    with pytest.raises(UsageError, match="export it for 12 tokens, which 1 to 4 divide"):
        kh.OnnxOracle(write(path, graph(length=5)), repeat=True)
    with pytest.raises(UsageError, match=r"only 1 to 3 make up when repeated, not 4: export it for 12"):
        kh.OnnxOracle(write(path, graph(length=6)), repeat=True, max_length=4)
    assert kh.recover(kh.OnnxOracle(write(path, graph(length=12)), repeat=True), throw=False).certified


def test_a_part_between_two_tensors(path: Path) -> None:
    """A graph that projects before and squashes behind its attention, asked for the attention alone."""
    made = graph()
    inner, outer = made.output[0].name, helper.make_tensor_value_info("squashed", onnx.TensorProto.DOUBLE, None)
    raw = helper.make_tensor_value_info("raw", onnx.TensorProto.DOUBLE, ["batch", "length", WIDTH])
    halved = [numpy_helper.from_array(np.asarray(0.5), "half"), *made.initializer]
    nodes = [
        helper.make_node("Mul", ["raw", "half"], ["tokens"]),
        *made.node,
        helper.make_node("Tanh", [inner], ["squashed"]),
    ]
    write(path, helper.make_graph(nodes, "around", [raw], [outer], halved))
    whole, alone = kh.OnnxOracle(path), kh.OnnxOracle(path, input="tokens", output=inner)
    np.testing.assert_allclose(alone(question()), TRUTH(question()), rtol=0, atol=1e-13)
    np.testing.assert_allclose(whole(2 * question()), np.tanh(TRUTH(question())), rtol=0, atol=1e-13)
    assert alone.name != whole.name
    target = open_target(f"onnx:{path}#input=tokens&output={inner}&positions=all")
    np.testing.assert_allclose(target.oracle(question()), TRUTH.at_all_positions(question()), rtol=0, atol=1e-13)
    behind = kh.OnnxOracle(path, output=inner)
    np.testing.assert_allclose(behind(2 * question()), TRUTH(question()), rtol=0, atol=1e-13)
    for options, said in (
        ({"input": "tokes"}, r"no tensor 'tokes'; its own inputs are raw, and others 'tokens'"),
        ({"input": inner, "output": "tokens"}, f"'tokens' depends on raw besides '{inner}'"),
    ):
        with pytest.raises(UsageError, match=said):
            kh.OnnxOracle(path, **options)


@pytest.mark.parametrize("positions", ["last", "all"])
def test_an_onnx_head_is_recovered(path: Path, positions: Any) -> None:
    oracle = Counted(kh.OnnxOracle(write(path, graph(batch=4)), positions=positions))
    result = kh.recover(oracle)
    assert kh.distance(result.params, TRUTH) <= 1e-9
    assert oracle.queries == result.stats.new_queries
    oracle.close()


def test_the_same_result_as_the_layer_in_torch(path: Path) -> None:
    torch = pytest.importorskip("torch")
    from keyhole.families.torch_layouts import heads_of  # noqa: PLC0415

    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(WIDTH, 1).double().eval()
    found = [kh.recover(kh.OnnxOracle(write(path, graph(heads_of(layer))))), kh.recover(kh.TorchOracle(layer))]
    assert kh.distance(found[0].params, found[1].params) <= 1e-11
    assert found[0].stats.queries == found[1].stats.queries


def test_a_name_is_a_digest_of_the_weights(path: Path, tmp_path: Path) -> None:
    name = kh.OnnxOracle(write(path, graph())).name
    assert kh.OnnxOracle(write(tmp_path / "copy.onnx", graph())).name == name
    assert kh.OnnxOracle(write(path, graph(dtype=np.float32))).name != name
    model = helper.make_model(graph(), opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    names = set()
    for factor in (1.0, 2.0):  # weights in a file beside it
        scaled = onnx.ModelProto.FromString(model.SerializeToString())
        tensor = scaled.graph.initializer[0]
        tensor.CopyFrom(numpy_helper.from_array(factor * numpy_helper.to_array(tensor), tensor.name))
        options = {"save_as_external_data": True, "location": "large.onnx.data", "size_threshold": 0}
        (tmp_path / "large.onnx.data").unlink(missing_ok=True)
        onnx.save(scaled, tmp_path / "large.onnx", **options)
        names.add(kh.OnnxOracle(tmp_path / "large.onnx").name)
    assert len(names) == 2
    assert kh.OnnxOracle(path, name="mine").name == "mine"


def test_targets(path: Path) -> None:
    write(path, graph())
    target = open_target(f"onnx:{path}#positions=all&max_norm=2")
    assert target.label == f"the ONNX model of width {WIDTH} in {path}, observed at all positions"
    assert target.oracle.signature.max_norm == 2.0
    assert kh.recover(open_target(f"onnx:{path}").oracle).certified
    assert "position 0" in open_target(f"onnx:{path}#positions=0&repeat=1").label


@pytest.mark.parametrize("keepdims", [0, 1])
def test_labels_of_an_argmax(path: Path, keepdims: int) -> None:
    numbers = graph()
    name = numbers.output[0].name
    numbers.node.append(helper.make_node("ArgMax", [name], ["label"], axis=-1, keepdims=keepdims))
    numbers.output.append(helper.make_tensor_value_info("label", onnx.TensorProto.INT64, None))
    write(path, numbers)
    oracle = open_target(f"onnx:{path}#answers=labels&output=label").oracle
    assert oracle.signature.answers == "labels"
    expected = np.argmax(kh.OnnxOracle(path, output=name)(question()), axis=-1)
    assert np.array_equal(oracle(question()), expected)
    with pytest.raises(UsageError, match="answers must be"):
        open_target(f"onnx:{path}#answers=classes&output=label")


# --- refused, with the remedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08" * 64, "cut"])
def test_a_file_that_is_none(path: Path, content: Any) -> None:
    path.write_bytes(write(path, graph()).read_bytes()[:300] if content == "cut" else content)
    with pytest.raises(FileError, match=r"model\.onnx is not an ONNX model.*export it again"):
        kh.OnnxOracle(path)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        kh.OnnxOracle(path)
    with pytest.raises(FileError, match="no such file"):
        open_target(f"onnx:{path}")


def simple(shape: Any = ("batch", "length", WIDTH), kind: int = onnx.TensorProto.DOUBLE, **changes: Any) -> Any:
    """A graph that passes tokens on, with further inputs and outputs."""
    tokens = helper.make_tensor_value_info("tokens", kind, shape)
    more = [helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, [1]) for name in changes.get("inputs", ())]
    names = changes.get("outputs", ("answers",))
    nodes = [helper.make_node(changes.get("operator", "Identity"), ["tokens"], [name]) for name in names]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in names]
    return helper.make_graph(nodes, "simple", [tokens, *more], outputs)


OPEN = ("batch", "length", "width")
REFUSED: list[tuple[str, Any, dict[str, Any], type[kh.KeyholeError], str]] = [
    ("a mask", simple(inputs=["mask"]), {}, UsageError, "wants mask besides tokens.*as constants"),
    ("self-attention", simple(inputs=["key"], shape=[1]), {}, UsageError, r"If all are the same.*layer\(x, x, x\)"),
    ("token numbers", simple(kind=onnx.TensorProto.INT64), {}, UsageError, "export the part behind the embedding"),
    ("two axes", simple(shape=("length", WIDTH)), {}, WrongShape, r"not \(batch, length, width\)"),
    ("two outputs", simple(outputs=["one", "two"]), {}, UsageError, "output= one of one, two"),
    (
        "no such output",
        simple(),
        {"output": "hidden"},
        UsageError,
        "has no tensor 'hidden'; its own outputs are answers",
    ),
    ("no such input", simple(), {"input": "x"}, UsageError, "has no tensor 'x'; its own inputs are tokens"),
    ("no width", simple(shape=OPEN), {}, UsageError, "give width="),
    ("another width", simple(), {"width": 4}, UsageError, "width 5, not 4: leave width out"),
    ("another shape", simple(operator="Flatten"), {}, WrongShape, "one row of outputs per token"),
    ("no position", simple(), {"positions": "first"}, UsageError, "'last', 'all' or the number"),
    ("no provider", simple(), {"providers": ["NoExecutionProvider"]}, FileError, "NoExecutionProvider"),
]


@pytest.mark.parametrize(("made", "options", "kind", "said"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_a_remedy(
    made: Any, options: dict[str, Any], kind: type[kh.KeyholeError], said: str, path: Path
) -> None:
    with pytest.raises(kind, match=f"(?s){said}"):
        kh.OnnxOracle(write(path, made), **options)


def test_the_remedies_work(path: Path) -> None:
    oracle = kh.OnnxOracle(write(path, simple(shape=OPEN, outputs=["one", "two"])), WIDTH, input="tokens", output="two")
    np.testing.assert_array_equal(oracle(question()), question()[:, -1])


def test_a_length_that_is_dynamic_in_name_only(path: Path) -> None:
    """What the older exporter of PyTorch makes of nn.MultiheadAttention."""
    made = graph()
    shape = numpy_helper.from_array(np.array([-1, 4, WIDTH]), "shape")
    made.initializer.append(shape)
    for number, node in enumerate(made.node):
        made.node[number].input[:] = ["fixed" if name == "tokens" else name for name in node.input]
    made.node.insert(0, helper.make_node("Reshape", ["tokens", "shape"], ["fixed"]))
    with pytest.raises(kh.KeyholeError, match=r"dynamic in name only, export it again|answered shape"):
        kh.OnnxOracle(write(path, made))


def test_without_onnxruntime_the_extra_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"OnnxOracle needs onnxruntime.*pip install 'keyhole\[onnx\]'"):
        kh.OnnxOracle(path)
