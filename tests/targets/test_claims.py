"""What owners have of their model, as `keyhole verify` takes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import KeyholeError
from keyhole.targets.claims import open_claim
from support.commands import Run, one_line

BOX = """
import torch
import keyhole as kh

def attention():
    torch.manual_seed(3)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    torch.nn.init.normal_(module.in_proj_bias)
    return module
"""


def test_weights_of_a_module_in_both_formats(run: Run) -> None:
    torch = pytest.importorskip("torch")
    namespace: dict[str, object] = {}
    exec(BOX, namespace)
    module = namespace["attention"]()  # type: ignore[operator]
    state = {f"layers.0.{name}": each for name, each in module.state_dict().items()}
    torch.save(state, "weights.pt")
    pytest.importorskip("safetensors.torch").save_file(state, "weights.safetensors")
    for name in ("weights.pt", "weights.safetensors"):
        claim = f"{name}#heads=2&prefix=layers.0"
        assert run("verify", "python:box.py:attention", claim, "-q") == (0, "", "")
    verdict = kh.verify(module, "weights.pt#heads=2&prefix=layers.0")
    assert verdict.same
    # as four heads the same numbers are another layer
    assert run("verify", "python:box.py:attention", "weights.pt#heads=4&prefix=layers.0", "-q")[0] == 1
    for claim in ("weights.pt", "weights.pt#heads=2", "weights.pt#heads=3&prefix=layers.0", "none.pt#heads=2"):
        code, _, err = run("verify", "python:box.py:attention", claim)
        assert (code, one_line(err)) == (2, True), claim


def test_pickles_are_not_run(run: Run) -> None:
    pickle = pytest.importorskip("pickle")

    class Evil:
        def __reduce__(self) -> object:
            return (Path.touch, (Path("ran"),))

    Path("evil.pt").write_bytes(pickle.dumps(Evil()))
    code, _, err = run("verify", "python:box.py:attention", "evil.pt#heads=2")
    assert (code, one_line(err)) == (2, True)
    assert not Path("ran").exists()


def test_a_layer_of_a_model_and_layers_that_were_recovered(run: Run) -> None:
    models = pytest.importorskip("support.transformers_models")
    models.made("bert").save_pretrained("model")
    assert run("verify", "transformers:model#layer=1", "transformers:model#layer=1", "-q")[0] == 0
    assert run("verify", "transformers:model#layer=1", "transformers:model#layer=0", "-q")[0] == 1
    heads = {f"h{number}": kh.TransformersOracle("model", layer=number).heads() for number in range(2)}
    arrays = {f"{name}.{part}": array for name, each in heads.items() for part, array in each.arrays().items()}
    from keyhole.families.files import save_arrays  # noqa: PLC0415
    from keyhole.recover_model import FAMILY  # noqa: PLC0415

    Path("run").mkdir()
    save_arrays("run/layers.safetensors", FAMILY, arrays, {"layers": '["h0", "h1"]'})
    assert open_claim("run#layer=h1").params.counting_bound == heads["h1"].counting_bound
    assert run("verify", "transformers:model#layer=1", "run/layers.safetensors#layer=1", "-q")[0] == 0
    for claim in ("run", "run#layer=2", "run#layer=h2"):
        code, _, err = run("verify", "transformers:model#layer=1", claim)
        assert (code, one_line(err)) == (2, True), claim


def test_a_run_folder_is_its_parameters_and_error_bars(run: Run) -> None:
    result = kh.recover("demo:single-head?width=4")
    Path("run").mkdir()
    for name, params in (("params", result.params), ("radius", result.certificate.radius)):
        assert params is not None
        params.save(f"run/{name}.safetensors")
    claim = open_claim("run")
    assert claim.radius is not None
    assert np.array_equal(
        claim.params.arrays()["score"], open_claim("file:run/params.safetensors").params.arrays()["score"]
    )
    assert run("verify", "demo:single-head?width=4", "run", "-q") == (0, "", "")
    code, out, _ = run("verify", "demo:single-head?width=4", "run", "--no-radius")
    assert (code, "error bars in" in out) == (0, False)
    for text in (".", "run#layer=0", "run#heads", "nothing.safetensors"):
        with pytest.raises(KeyholeError):
            open_claim(text)


def test_a_box_of_ones_own_is_recovered_first(run: Run) -> None:
    pytest.importorskip("torch")
    onnx_models = pytest.importorskip("support.onnx_models")
    onnx_models.write(Path("model.onnx"), onnx_models.graph())
    onnx_models.TRUTH.save("params.safetensors")
    for claim in ("model.onnx", "onnx:model.onnx#positions=last", "params.safetensors"):
        assert run("verify", "onnx:model.onnx", claim, "-q") == (0, "", ""), claim
    code, _, err = run("verify", "onnx:model.onnx", "python:box.py:nothing")
    assert (code, one_line(err)) == (2, True)
    assert run("verify", "demo:single-head?width=4", "demo:single-head?width=4", "-q") == (0, "", "")
    assert run("verify", "demo:single-head?width=4", "demo:single-head?width=4&seed=1", "-q")[0] == 1
    assert run("verify", "python:box.py:attention", "python:box.py:attention", "-q") == (0, "", "")
    namespace: dict[str, object] = {}
    exec(BOX, namespace)
    module = namespace["attention"]()  # type: ignore[operator]
    assert kh.verify(module, module).same
    assert not kh.verify(kh.MultiHead.of(kh.load("params.safetensors")), "demo:multi-head?width=5&outputs=4").same


def test_a_box_that_is_not_recovered_is_no_claim() -> None:
    def odd(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(np.sin(37 * tokens.sum(axis=(1, 2)) ** 2))

    with pytest.raises(KeyholeError, match="could not be recovered"):
        kh.verify("demo:single-head?width=3", kh.FunctionOracle(odd, width=3))
    with pytest.raises(KeyholeError, match="another box, which is recovered first"):
        open_claim("nothing.safetensors")
