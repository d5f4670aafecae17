"""Results as notebooks and prompts show them, and recovered from whatever people have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args, get_overloads, get_type_hints

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import UsageError
from keyhole.methods.registry import METHODS
from keyhole.oracles import Wrapper
from keyhole.oracles.anything import as_oracle
from keyhole.runs.reader import SavedRun, read_folder
from keyhole.targets import random_multi_head, random_single_head


@pytest.fixture(scope="module")
def result() -> kh.Recovery:
    return kh.recover("demo:multi-head?heads=3&width=8&outputs=8")


def test_a_result_fits_a_screen(result: kh.Recovery) -> None:
    """Numbers by the thousand were written out."""
    verdict = kh.verify("demo:multi-head?heads=12&width=8&outputs=8", random_multi_head(12, 8, outputs=8, seed=0))
    more = (verdict, kh.diagnose("demo:multi-head?heads=3&width=8&outputs=8"), result.report(), result.stats)
    for shown in (result, result.params, result.certificate, result.certificate.radius, *more):
        text = repr(shown)
        assert len(text) < 800
        assert text.count("\n") <= 3
    assert repr(result).startswith("CERTIFIED by multi-head: ")
    assert "MultiHead(heads.0.score (8, 8), " in repr(result)
    assert repr(kh.SingleHead(np.eye(2), np.ones(2))) == "SingleHead(score (2, 2), value (2,))"


def test_failures_and_layers_from_examples_have_cards_too(rng: np.random.Generator) -> None:
    spent = kh.recover("demo:single-head?width=8", budget=3, throw=False)
    assert repr(spent).startswith("BUDGET_EXHAUSTED by ")
    assert "Budget exhausted" in spent._repr_html_()
    layer = kh.AttentionLayer(rng.standard_normal((1, 3, 3)), rng.standard_normal((1, 3, 3)))
    inputs = rng.standard_normal((300, 4, 3))
    learned = kh.learn(inputs, layer(inputs), heads=1)
    assert "300 examples" in repr(learned) or "examples" in repr(learned)
    assert "examples learned from" in learned._repr_html_()


def test_cards(result: kh.Recovery) -> None:
    head = random_single_head(4, rank=4, norm=1.0, seed=0)
    oracle = kh.FunctionOracle(head, width=4)
    cards = {
        "Certified": result,
        "3 attention heads": result.params,
        "Same": kh.verify(oracle, head),
        "How much of each head differs": kh.verify(random_multi_head(2, 4, seed=1), random_multi_head(2, 4, seed=0)),
        "single-head": kh.diagnose(oracle),
        "No defence": kh.audit("demo:single-head?width=4", ["round:3"], budgets=[1]),
    }
    for words, shown in cards.items():
        card = shown._repr_html_()
        assert words in card
        assert card.count("<div") == card.count("</div")
        assert len(card) < 200_000
    assert "<svg" in cards["Certified"]._repr_html_() or "<img" in cards["Certified"]._repr_html_()
    hostile = kh.FunctionOracle(head, width=4, name="<script>alert(1)</script>")
    assert "<script>" not in kh.recover(hostile)._repr_html_()


def test_parts_that_were_named_are_told(tmp_path: Path) -> None:
    for demo, options in (
        ("link=softcap&cap=30", {}),
        ("position_bias=window&window=3&max_norm=3", {"position_bias": "window"}),
    ):
        found = kh.recover(f"demo:single-head?width=4&{demo}", "parts", **options)
        assert "holds" not in found._repr_html_()
        assert any(
            "window" in said or "softcap" in said for section in found.report().sections for _, said in section.facts
        )


def test_a_card_needs_no_library_that_draws(result: kh.Recovery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "Certified" in result._repr_html_()


def test_a_figure_and_a_page(result: kh.Recovery, tmp_path: Path) -> None:
    figure = result.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(figure.axes) >= 3
    page = result.report()
    assert "<iframe srcdoc=" in page._repr_html_()
    assert page.save(tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_run_folder_from_python(result: kh.Recovery, tmp_path: Path) -> None:
    paths = result.save(tmp_path / "run")
    assert {"params", "radius", "run", "report"} <= paths.keys()
    found = read_folder(tmp_path / "run")
    assert isinstance(found, SavedRun)
    assert found.result.certified
    assert kh.distance(kh.load(paths["params"]), result.params) == 0
    result.save(tmp_path / "run")  # the same run again
    other = kh.recover("demo:single-head?width=4")
    with pytest.raises(UsageError, match="belongs to a run with another target"):
        other.save(tmp_path / "run")
    other.save(tmp_path / "run", force=True)
    assert kh.load(tmp_path / "run" / "params.safetensors").width == 4


BOX_OF = {
    "low-rank": "demo:single-head?width=4&rank=1",
    "sensing": "demo:single-head?width=4&rank=1",
    "robust": "demo:single-head?width=4&max_norm=1&decimals=4",
    "alphabet": "demo:single-head?width=4&alphabet=9",
    "labels": "demo:single-head?width=3&labels=1",
    "residual": "demo:multi-head?width=4&outputs=4&residual=1",
    "parts": "demo:single-head?width=4&link=softcap&cap=3",
    "multi-head": "demo:single-head?width=4",  # of one head too
}


def test_methods_that_are_named_return_what_is_declared_of_them() -> None:
    declared: dict[str, Any] = {}
    for each in get_overloads(kh.recover):
        hints = get_type_hints(each)
        for name in get_args(hints["method"]):
            declared[name] = get_args(hints["return"])[0]
    assert declared.keys() | {"normalised"} == METHODS.keys()
    for name, kind in declared.items():
        found = kh.recover(BOX_OF.get(name, f"demo:{name}?width=4"), name, throw=False)
        assert isinstance(found.params, kind), name
        assert found.certificate.radius is None or isinstance(found.certificate.radius, kind)


# --- whatever people have -----------------------------------------------------------------------------------------


def test_anything_is_recovered(tmp_path: Path) -> None:
    head = random_single_head(5, rank=5, norm=1.0, seed=0)
    head.save(tmp_path / "head.safetensors")
    for box, given in (
        (head, {}),
        (head.__call__, {"width": 5}),
        (f"file:{tmp_path / 'head.safetensors'}", {}),
        (kh.FunctionOracle(head, 5), {"width": 5}),
    ):
        assert kh.distance(kh.recover(box, **given).params, head) <= 1e-12
    assert kh.verify(head, head).same
    assert kh.verify(head.__call__, head).same
    assert kh.diagnose(head.__call__, width=5).method == "single-head"
    for box, given in ((head, {}), (head.__call__, {"width": 5})):
        found = kh.audit(box, ["round:3"], [1, 4], progress=False, **given)
        assert min(row.error for row in found.rows) < 1e-9
    with pytest.raises(UsageError, match="width="):
        kh.audit(head.__call__)


def test_noise_and_norms_are_declared_there_too() -> None:
    head = random_single_head(4, rank=4, norm=1.0, seed=0)

    def rounded(tokens: Any) -> Any:
        return np.round(head(tokens), 4)

    bounded = kh.recover(rounded, width=4, noise="rounded:4", max_norm=3.0, throw=False)
    assert bounded.method == "robust"
    oracle = as_oracle(kh.FunctionOracle(head, 4, max_norm=2.0), noise="gaussian:0.1", max_norm=1.0)
    assert (oracle.signature.max_norm, oracle.signature.noise.kind) == (1.0, "gaussian")
    plain = kh.FunctionOracle(head, 4)
    assert as_oracle(plain) is plain
    assert isinstance(oracle, Wrapper)
    with pytest.raises(UsageError, match=r"max_norm 3\.0 exceeds the 2\.0"):
        as_oracle(kh.FunctionOracle(head, 4, max_norm=2.0), max_norm=3.0)
    with pytest.raises(UsageError, match="tokens of 4 numbers, not of 5"):
        as_oracle(plain, width=5)


def test_modules_are_recovered() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    assert kh.recover(layer).certified
    with pytest.raises(UsageError, match="does not say how many numbers a token has"):
        kh.recover(torch.nn.Linear(3, 3).double().eval())


@pytest.mark.parametrize(
    ("box", "said"),
    [
        (3, "cannot ask a int; what can be asked is an Oracle"),
        (np.ones(3), "cannot ask a ndarray"),
        (kh.SingleHead, "SingleHead is a class"),
        (len, "say how many numbers a token of len has: width="),
        (lambda tokens: np.zeros((len(tokens), 0)), "say how many numbers"),
        ("nonsense", "unknown target 'nonsense'"),
        (Path("none.onnx"), r"none\.onnx"),
    ],
)
def test_what_cannot_be_asked_is_told_what_can(box: Any, said: str) -> None:
    with pytest.raises(kh.KeyholeError, match=said):
        kh.recover(box)


def test_nonsense_beside_a_box_is_refused() -> None:
    head = random_single_head(4, rank=4, norm=1.0, seed=0)
    for given, said in (
        ({"width": 3}, "these parameters have tokens of 4 numbers, not of 3"),
        ({"max_norm": "3"}, "max_norm must be a positive number"),
        ({"max_norm": True}, "max_norm must be a positive number"),
    ):
        with pytest.raises(UsageError, match=said):
            kh.recover(head, **given)
    with pytest.raises(UsageError, match=r"width must be a whole number of at least 1, not 5\.0"):
        kh.recover(head.__call__, width=5.0)
    assert kh.recover(head.__call__, width=np.int64(4)).certified
    empty = kh.recover(lambda tokens: np.zeros((len(tokens), 0)), width=4, throw=False)
    assert empty.outcome is kh.Outcome.ORACLE_FAILED
    assert "no numbers" in empty.message


def test_a_folder_names_what_asks_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder: TransformersOracle\(.*, layer=0\)"):
        kh.recover(tmp_path)
