"""Reports: one page for every kind of run, that needs nothing but itself, whatever its folder holds."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.cli import main
from keyhole.cli import recover_model as cli_model
from keyhole.errors import FileError
from keyhole.recover_model import ModelRecovery
from keyhole.recovery import Certificate, Outcome, Recovery, Stats, of_error_bar, percent, power, times, typeset
from keyhole.report import build
from keyhole.report.build import as_html, read_report, write_report
from keyhole.report.charts import short, thin
from keyhole.report.html.canvas import canvas, through_zero
from keyhole.runs.settings import Settings
from keyhole.runs.store import ATTENTION, write_run
from keyhole.sentence.attention_on import MOST_TOKENS
from keyhole.sentence.token_weights import TokenWeights, save_weights
from keyhole.targets import open_target, random_multi_head
from support.browsers import ARGUMENTS, chromium, picture, violations
from support.commands import Run, one_line

BOX = ""
VOID = {"meta", "input", "img", "br", "hr", "link"}
HEADS = "demo:multi-head?heads=3&width=5&outputs=6"
# A folder, and the command that fills it.
COMMANDS = {
    "single-head": ["recover", "demo:single-head?width=6&rank=2"],
    "multi-head": ["recover", HEADS],
    "relu-net": ["recover", "demo:relu-net?width=4&neurons=5"],
    "one-layer": ["recover", "demo:one-layer?width=4&neurons=5"],
    "noisy": ["recover", "demo:single-head?width=4&max_norm=1&noise=1e-3", "--budget", "2000"],
    "spent": ["recover", "demo:single-head?width=6", "--budget", "20"],
    "nothing": ["recover", "demo:single-head?width=4&norm=0"],
    "learned": ["learn", "demo:layer?d=4&k=3&m=2&n=400"],
    "six-phase": ["learn", "demo:layer?d=4&k=2&m=2&n=1500&out=8", "--heads", "2", "--method", "six-phase"],
    "too-few": ["learn", "demo:layer?d=4&k=3&m=2&n=3"],
    "audit": ["audit", "demo:single-head?width=4", "--defence", "round:3+clip:1", "--multiples", "1,2,4"],
    "diagnosis": ["diagnose", "demo:one-layer?width=5&residual=1"],
}
LOOKED_AT = {"single-head", "multi-head", "spent", "audit"}  # kept as pictures
PICTURES = {
    "single-head": {"queries", "score", "score-true", "score-error", "spectrum", "heldout", "errors", "error-bars"},
    "multi-head": {"queries", "value-norms", "spectra", "head-0", "head-2-true", "heldout", "errors", "error-bars"},
    "relu-net": {"queries", "kinks", "directions", "line", "heldout", "errors", "error-bars"},
    "one-layer": {"queries", "score", "score-true", "spectrum", "kinks", "line", "heldout", "error-bars"},
    "noisy": {"queries", "score", "heldout", "errors", "error-bars"},
    "spent": {"queries", "score", "score-true"},
    "learned": {"value-norms", "spectra", "head-0", "head-1-true", "heldout", "errors", "error-bars"},
    "six-phase": {"phases", "head-0", "head-1-true", "heldout"},
    "audit": {"curves"},
    "different": {"noticed"},
    "model": {"layer-0-head-0", "layer-0-heldout", "layer-0-spectra"},
}
SAID = {
    "single-head": [
        "Certified",
        "rank 2 of 6",
        "the fewest possible",
        "every answer lies within the error bar",
        "value v",
    ],
    "multi-head": [
        "3 attention heads",
        "No query can tell their order",
        "two tokens and copies of one of them",
        "Diagnosis",
        "From a few first queries it was found to be: multi-head",
    ],
    "relu-net": ["5 ReLU neurons", "Kinks of 5 neurons", "Along a line"],
    "one-layer": ["One layer of a Transformer", "The net behind attention"],
    "noisy": ["largest standard error", "independent and normal"],
    "spent": ["Budget exhausted", "What to do.", "there is no certificate"],
    "nothing": ["score matrix"],
    "learned": ["Learning, phase by phase", "numbers per parameter", "examples held back"],
    "six-phase": ["Phase 1 crude sum", "Phase 6 projections", "after the descent"],
    "too-few": ["Too few examples", "Nothing was recovered"],
    "audit": ["What each defence is worth", "Rounding to 3 decimals and clipping", "counting bound"],
    "diagnosis": ["It looks like", "Evidence", "residual"],
    "same": ["Same", "The box answers like the parameters"],
    "different": ["Different", "Smallest change that is noticed"],
    "model": ["1 of 2 attention layers recovered", "bert.layer.0", "BUDGET_EXHAUSTED"],
}


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of folders, one for each kind of run."""
    folder = tmp_path_factory.mktemp("runs")
    for name, words in COMMANDS.items():
        assert command(*words, "--out", str(folder / name), "--json") in (0, 1)
    heads = str(folder / "multi-head" / "truth.safetensors")
    assert command("verify", HEADS, heads, "--out", str(folder / "same"), "-q") == 0
    assert command("verify", f"{HEADS}&seed=1", heads, "--out", str(folder / "different"), "-q") == 1
    whole_model(folder / "model")
    return folder


def whole_model(folder: Path) -> None:
    """What the command keeps of a model of two layers, the second of which could not be paid for."""
    oracle = open_target(HEADS).oracle
    results = [kh.recover(oracle, "multi-head", throw=False, budget=budget) for budget in (None, 10)]
    names = ("bert.layer.0", "bert.layer.1")
    found = ModelRecovery(dict(zip(names, results, strict=True)), {})
    layers = {name: {**each.summary(), "distance": None, "left_out": None} for name, each in found.layers.items()}
    folder.mkdir()
    settings = Settings("transformers:m#layer=all", out=folder)
    _, notes = cli_model._keep(found, {"target": settings.target, "certified": False, "layers": layers}, settings)
    assert notes == []


class Page(HTMLParser):
    """The elements of a page, and what its script of data holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.style = self.data = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data
        elif self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check_page(text: str) -> Page:
    """Nothing is loaded or run, every picture is told in words, and no two elements have one name."""
    page = Page(text)
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert re.findall(r"url\((?!#)|@import|https?:", page.style) == []
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "keyhole-result"}]
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "a", "foreignobject"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name == "src" or (name == "href" and tag == "image"):
                assert value.startswith("data:image/png;base64,")
            elif name == "href":
                assert value.startswith("#")
                assert value[1:] in identifiers
            elif name not in {"content", "alt", "aria-label"}:
                assert "//" not in value
                assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)", value))
        if tag == "img":
            assert len(attributes["alt"]) > 40
            assert re.search(r"\d", attributes["alt"])
        if tag == "svg":
            assert attributes["role"] == "img"
            assert len(attributes["aria-label"]) > 40
            assert re.search(r"\d", attributes["aria-label"])
    (policy,) = [attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return page


@pytest.mark.parametrize("name", list(SAID))
def test_a_report_says_and_shows_what_there_is_and_loads_nothing(runs: Path, name: str) -> None:
    folder = runs / name
    text = (folder / "report.html").read_text()
    page = check_page(text)
    for said in SAID[name]:
        assert said in page.text
    (record,) = folder.glob("*.json")
    assert json.loads(page.data) == json.loads(record.read_text())
    report = read_report(folder)
    drawn = {chart.name for chart in report.charts}
    if name in {"single-head", "multi-head", "relu-net"}:  # what was recovered comes first
        assert report.sections[0].charts
    assert PICTURES.get(name, set()) <= drawn
    pictures = [attributes for tag, attributes in page.elements if tag in {"svg", "img"}]
    assert len(pictures) == len(drawn)
    assert {attributes.get("aria-label") or attributes["alt"] for attributes in pictures} == {
        chart.alternative for chart in report.charts
    }
    assert as_html(report) == text  # made again it is the same


def test_words_of_pictures_have_the_figures_of_the_run(runs: Path) -> None:
    charts = {chart.name: chart.alternative for chart in read_report(runs / "single-head").charts}
    record = json.loads((runs / "single-head" / "run.json").read_text())["result"]
    assert f"{record['queries']} queries by stage" in charts["queries"]
    assert f"counting bound is {record['counting_bound']}" in charts["queries"]
    values = np.linalg.svd(kh.load(runs / "single-head" / "params.safetensors").score, compute_uv=False)
    assert f"after value 2 of {short(values[1])} the next is {short(values[2])}" in charts["spectrum"]
    assert short(float(record["worst_error"])) in charts["errors"]


def test_heads_are_shown_beside_their_own_truth(runs: Path) -> None:
    """No query can tell the order of heads, so the true ones are found by what they are."""
    found, true = (kh.load(runs / "multi-head" / f"{name}.safetensors") for name in ("params", "truth"))
    charts = {chart.name: chart for chart in read_report(runs / "multi-head").charts}
    for number, head in enumerate(found.heads):
        shown: Any = charts[f"head-{number}-true"]
        np.testing.assert_allclose(shown.matrix, head.score, atol=1e-9)
    assert {round(float(np.linalg.norm(head.score)), 6) for head in true.heads} == {
        round(float(np.linalg.norm(charts[f"head-{number}-true"].matrix)), 6)  # type: ignore[attr-defined]
        for number in range(3)
    }


def test_a_large_layer_makes_a_page_of_less_than_three_megabytes(tmp_path: Path) -> None:
    layer = random_multi_head(12, 384, rank=32, outputs=384, value_rank=32, score_bias=1.0, output_bias=1.0)
    rng = np.random.default_rng(0)
    bars = [
        kh.SingleHead(*(1e-9 * rng.random(array.shape) for array in head.arrays().values())) for head in layer.heads
    ]
    radius = kh.MultiHead(bars, 1e-9 * rng.random(384))
    answers = rng.standard_normal(32 * 384)
    errors = 1e-9 * rng.standard_normal(answers.size)
    certificate = Certificate(radius, None, 32, 4e-9, 0.5, 1e-9, ("a", "b"), answers + errors, answers)
    stats = Stats(2431, 2463, 32, 1474, 1.0, 0.5, {"value": 400, "scores": 2031}, {"heads": 12})
    result = Recovery(Outcome.CERTIFIED, "32 fresh answers predicted", layer, certificate, stats, "multi-head")
    write_run(tmp_path, result, asdict(Settings("demo:multi-head")), "box", 1e-10, label="a layer", truth=layer)
    words = tuple(f"word{number}" for number in range(MOST_TOKENS))  # as many as there may be, and all look at all
    weights = rng.dirichlet(np.ones(MOST_TOKENS), (12, MOST_TOKENS))
    save_weights(tmp_path / ATTENTION, " ".join(words), {"layer": TokenWeights(words, weights, weights)})
    path, report = write_report(tmp_path)
    assert path.stat().st_size <= 3_000_000
    assert report.sections[0].title == "What the heads attend to"
    assert len(report.sections[0].panels) == 12
    assert len(report.sections[0].folded) == 3
    page = check_page(path.read_text())
    assert "each pixel is the largest" in page.text
    assert len([chart for chart in report.charts if chart.name.startswith("head-")]) == 24
    assert len(json.loads(page.data)["heldout"]["answers"]) == answers.size


EVIL = (
    "</script><script>alert(1)</script><!-- <b onmouseover=alert(1)>\"'> $x_{ {{7*7}} {% if %} &lt; \0\u202e ]]> \ud800"
)


def test_names_cannot_break_out_of_the_page(runs: Path, tmp_path: Path) -> None:
    places: dict[str, Any] = {
        "single-head": (
            "box",
            "label",
            "settings.target",
            "result.message",
            "result.method",
            "keyhole",
            "result.stages",
        ),
        "multi-head": ("label", "result.details.diagnosis_findings.0.evidence", "result.assumptions.0"),
        "learned": ("label", "settings.data", "result.details.samples.sentence"),
        "audit": ("target", "box", "reference", "rows.0.outcome"),
        "different": ("box", "claimed", "message", "parts"),
        "diagnosis": ("target", "box", "family", "findings.0.found"),
        "model": ("target", "layers"),
    }
    for name, where in places.items():
        folder = tmp_path / name
        shutil.copytree(runs / name, folder)
        benign = Page((folder / "report.html").read_text())
        (path,) = folder.glob("*.json")
        record = json.loads(path.read_text())
        for place in where:
            poison(record, place.split("."))
        path.write_text(json.dumps(record))
        page = check_page(write_report(folder)[0].read_text())
        assert json.loads(page.data) == record
        assert "{{7*7}} {% if %}" in page.text
        tags = [tag for tag, _ in page.elements if tag in {"script", "b", "svg", "style"}]
        assert tags.count("script") == tags.count("style") == 1
        assert "b" not in tags
        assert "alert(1)" in page.text
        assert tags.count("svg") <= [tag for tag, _ in benign.elements].count("svg")


def poison(record: Any, place: list[str]) -> None:
    """Put the name of names in some place: as a text, or as a key where an object is there."""
    key: Any = int(place[0]) if place[0].isdigit() else place[0]
    if len(place) > 1:
        poison(record[key], place[1:])
    elif isinstance(record[key], dict):
        first = next(iter(record[key]))
        record[key] = {EVIL: record[key].pop(first), **record[key]}
    else:
        record[key] = EVIL


# --- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs / "single-head", tmp_path / "run")
    return tmp_path / "run"


def test_the_command_makes_it_again_with_pictures(run: Run, folder: Path) -> None:
    before = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    code, out, err = run("report", "run")
    assert (code, err) == (0, "")
    assert "Certified: One attention head of width 6, recovered" in out
    assert "run/report.html" in out
    assert (folder / "report.html").read_bytes() == before
    assert run("report", "run", "-q") == (0, "", "")
    code, out, _ = run("report", "run", "--png", "--json")
    said = json.loads(out)
    assert said["headline"]["tone"] == "good"
    assert set(said["pictures"]) == PICTURES["single-head"]
    for path in said["pictures"].values():
        assert Path(path).read_bytes().startswith(b"\x89PNG")
    assert {chart["name"] for section in said["sections"] for chart in section["charts"]} == PICTURES["single-head"]


def test_without_the_extra_runs_still_end_and_say_how_to_get_it(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "report.html").read_bytes()
    for library in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            code, out, _ = run("recover", "demo:single-head?width=3", "--out", library)
            assert code == 0
            assert "pip install 'keyhole[report]', then keyhole report" in " ".join(out.split())
            assert not Path(library, "report.html").exists()
            code, out, err = run("report", "run")
            assert (code, out) == (2, "")
            assert one_line(err)
            assert "pip install 'keyhole[report]'" in err
    assert (folder / "report.html").read_bytes() == before
    assert run("report", "jinja2", "-q")[0] == 0


def test_a_run_survives_a_report_that_does_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(build, "as_html", broken)
    code, out, _ = run("recover", "demo:single-head?width=3", "--out", "run", "--json")
    assert code == 0
    assert "RuntimeError: a bug" in json.loads(out)["notes"][0]
    assert sorted(path.name for path in Path("run").iterdir())[-2:] == ["run.json", "truth.safetensors"]


def test_a_report_that_cannot_be_written_is_told(run: Run, folder: Path) -> None:
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    code, out, err = run("report", "run")
    assert (code, out) == (2, "")
    assert one_line(err)
    assert "cannot write run/report.html" in err
    assert list((folder / "report.html").iterdir()) == []
    assert not list(folder.glob(".*"))


def test_an_interrupt_while_the_report_is_made_leaves_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "as_html", stopped)
    code, out, _ = run("recover", "demo:single-head?width=3", "--out", "run", "--json")
    assert code == 0
    assert "keyhole report run makes it" in json.loads(out)["notes"][0]
    assert Path("run/run.json").exists()


def test_very_long_records_are_embedded_without_their_answers(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MOST_BYTES", 1000)
    for name in ("single-head", "model"):
        page = check_page(as_html(read_report(runs / name)))
        assert "they are in the run folder" in page.data
        assert '"answers"' not in page.data


# --- folders that are none --------------------------------------------------------------------------------------


def changed(name: str, **changes: Any) -> Any:
    def change(folder: Path) -> None:
        record = json.loads((folder / name).read_text())
        for place, value in changes.items():
            inner = record
            *way, last = place.split("__")
            for key in way:
                inner = inner[key]
            inner[last] = value
        (folder / name).write_text(json.dumps(record))

    return change


def without(*names: str) -> Any:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def cut(name: str) -> Any:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def other_family(folder: Path) -> None:
    kh.ReluNet(np.eye(6), np.zeros(6), np.ones(6), np.asarray(0.0)).save(folder / "radius.safetensors")


def newer_parameters(folder: Path) -> None:
    content = (folder / "params.safetensors").read_bytes()
    (folder / "params.safetensors").write_bytes(content.replace(b'\\"version\\": 1', b'\\"version\\": 2'))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (
            without("run.json"),
            "incomplete: the run that wrote params.safetensors did not come to its end; run it again",
        ),
        (without("params.safetensors"), "incomplete: params.safetensors is missing; restore it, or run"),
        (without("truth.safetensors"), "incomplete: truth.safetensors is missing"),
        (cut("run.json"), "holds no JSON"),
        (cut("params.safetensors"), "not a readable safetensors file"),
        (other_family, "radius.safetensors does not belong to params.safetensors"),
        (lambda folder: (folder / "run.json").write_bytes(b"\xff\xfe\x00"), "holds no JSON"),
        (lambda folder: (folder / "run.json").write_text("[" * 100_000), "holds no JSON"),
        (lambda folder: (folder / "run.json").write_text("[]"), "is no keyhole-run file"),
        (
            changed("run.json", version=2, keyhole="9.1"),
            "version 2, by Keyhole 9.1; this Keyhole reads up to 1: upgrade",
        ),
        (changed("run.json", version="one"), "its version is 'one'"),
        (changed("run.json", format="else"), "is no keyhole-run file"),
        (newer_parameters, "params.safetensors has format version 2; this Keyhole reads up to 1: upgrade it"),
        (changed("run.json", result=None), "result is missing"),
        (changed("run.json", result__outcome="GLORIOUS"), "there is no outcome 'GLORIOUS'"),
        (changed("run.json", result__queries=-1), "queries is negative"),
        (changed("run.json", result__queries=10**30), "absurdly large"),
        (changed("run.json", result__queries=1.5), "queries is not a whole number"),
        (changed("run.json", result__stages={"value": "many"}), "value is not a whole number"),
        (changed("run.json", heldout__answers=["a"]), "answers is no list of numbers"),
        (changed("run.json", heldout__answers=[1.0]), "1 held-out answers but 120 predictions"),
        (changed("run.json", label=["a"]), "label is not a text"),
        (changed("run.json", settings=3), "settings is not an object"),
        (changed("run.json", result__details={"noise": "gaussian"}), "is damaged (KeyError"),
    ],
)
def test_a_broken_folder_is_told_in_one_line_and_left_alone(run: Run, folder: Path, break_it: Any, said: str) -> None:
    break_it(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = run("report", "run", "--png")
    assert (code, out) == (2, "")
    assert one_line(err)
    assert said in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_is_no_run_folder_is_told(run: Run) -> None:
    Path("empty").mkdir()
    for name, said in [("nowhere", "no such folder"), ("box.py", "is a file"), ("empty", "is no run folder")]:
        code, out, err = run("report", name)
        assert (code, out) == (2, "")
        assert one_line(err)
        assert said in err
        assert "--out" in err
    assert list(Path("empty").iterdir()) == []


def test_no_file_outside_the_folder_is_read(runs: Path, folder: Path) -> None:
    """A folder may come from anywhere: what it says of its files does not count."""
    secret = folder.parent / "secret.safetensors"
    kh.SingleHead(np.full((6, 6), 7.0), np.ones(6)).save(secret)
    changed("run.json", files={"params": "../secret.safetensors"})(folder)
    (score,) = (chart for chart in read_report(folder).charts if chart.name == "score")
    assert np.max(np.abs(score.matrix)) < 7  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["single-head", "multi-head", "six-phase", "audit", "different", "diagnosis", "model"])
def test_nonsense_anywhere_in_a_record_is_shown_or_refused(
    runs: Path, tmp_path: Path, fresh_seed: int, name: str
) -> None:
    shutil.copytree(runs / name, tmp_path / name)
    (path,) = (tmp_path / name).glob("*.json")
    record = path.read_text()
    rng = random.Random(fresh_seed)
    refused = shown = 0
    for _ in range(40):
        broken = json.loads(record)
        *way, last = rng.choice(list(leaves(broken)))
        inner = broken
        for key in way:
            inner = inner[key]
        inner[last] = rng.choice([None, -1, 0, 1e308, 10**40, float("nan"), "", "$", [], {}, [{}], True, "x" * 10_000])
        path.write_text(json.dumps(broken))
        try:
            report = read_report(tmp_path / name)
        except FileError:
            refused += 1
            continue
        if shown < 2:
            check_page(as_html(report))
        shown += 1
    assert refused + shown == 40
    assert refused


def leaves(record: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record."""
    items = record.items() if isinstance(record, dict) else enumerate(record[:3]) if isinstance(record, list) else ()
    for key, value in items:
        yield (*way, key)
        yield from leaves(value, (*way, key))


# --- pictures ---------------------------------------------------------------------------------------------------


def test_thinned_out_matrices_keep_their_largest_entries(rng: np.random.Generator) -> None:
    matrix = rng.standard_normal((300, 129))
    small, steps = thin(matrix)
    assert (small.shape, steps) == ((100, 65), (3, 2))
    block = matrix[3:6, 2:4]
    assert small[1, 1] == block.ravel()[np.argmax(np.abs(block))]
    assert thin(matrix[:100, :100])[0] is not None
    assert np.array_equal(thin(matrix[:100, :100])[0], matrix[:100, :100])


@pytest.mark.parametrize(("usual", "largest"), [(0.4, 3.8e5), (1e-9, 1.0), (2.0, 250.0), (0.9, 91.0), (1e-3, 1e12)])
def test_labels_around_zero_do_not_touch(usual: float, largest: float) -> None:
    with canvas(4.8, 4.2) as figure:
        axis = figure.subplots()
        axis.plot([-largest, largest], [-largest, largest])
        through_zero(axis, usual, largest)
        figure.canvas.draw()
        boxes = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
        boxes.sort(key=lambda box: box.x0)
        assert len(boxes) >= 3
        assert all(one.x1 < two.x0 for one, two in pairwise(boxes))


def test_numbers_are_written_as_people_write_them() -> None:
    assert [short(number) for number in (0.0, 1.5, -0.25, float("nan"))] == ["0", "1.5", "−0.25", "unknown"]
    assert power(2.94e-14).replace("\u00a0", " ") == "2.9 × 10⁻¹⁴"


# --- in a browser -----------------------------------------------------------------------------------------------


def test_numbers_are_written_one_way_on_every_page(runs: Path) -> None:
    """As mathematics writes them, but in commands and targets; never as Python prints them."""
    assert typeset("a change of 1.1e-04 of it, 3e+12 times") == "a change of 1.1 × 10⁻⁴ of it, 3 × 10¹² times"
    for kept in ("noise:1e-03", "noise=1e-03", "--tolerance 1e-3", "0x1e+10", "e-mail", "version 2e-10x"):
        assert typeset(kept) == kept
    for page in runs.glob("*/report.html"):
        text = re.sub(r"<(script|style|svg).*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r"(?<![\w.=:])\d(?:\.\d+)?e[+-]\d\d", text), page


def test_a_browser_shows_it_without_a_word_of_complaint(runs: Path) -> None:
    """In both themes, on screen and phone: an empty console, no request, nothing too wide, nothing that axe minds."""
    playwright = pytest.importorskip("playwright.sync_api")
    complaints: list[str] = []
    grounds = {}
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        for scheme, shown in (("light", 1200), ("dark", 390)):
            page = browser.new_page(viewport={"width": 375, "height": 800}, color_scheme=scheme)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: asked(request.url, complaints))
            for number, name in enumerate(SAID):
                page.goto((runs / name / "report.html").as_uri())
                for width in (375, 1200, shown):
                    page.set_viewport_size({"width": width, "height": 800})
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, name
                if name in LOOKED_AT or number % 2 == (scheme == "dark"):  # axe takes half a second a page
                    complaints.extend(violations(page))
                if name in LOOKED_AT:
                    picture(page, f"report-{name}-{scheme}-{shown}")
                    picture(page, f"report-{name}-{scheme}-{shown}-deuteranopia", "deuteranopia")
            grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.focus("#theme-auto")
            page.keyboard.press("ArrowLeft" if scheme == "light" else "ArrowRight")  # to the other theme
            grounds[f"not {scheme}"] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.close()
    assert complaints == []
    assert grounds["light"] == grounds["not dark"] != grounds["dark"] == grounds["not light"]


def asked(address: str, complaints: list[str]) -> None:
    if not address.startswith(("file:", "data:")):
        complaints.append(address)


def test_shares_and_multiples_are_written_as_people_write_them() -> None:
    assert [percent(share) for share in (1.0, 0.996, 0.31, 0.026, 0.0003, 9e-11, 0.0)] == [
        "100 %",
        "100 %",
        "31 %",
        "2.6 %",
        "0.03 %",
        "less than 0.01 %",
        "0 %",
    ]
    assert [times(ratio) for ratio in (1.31, 130.2, 1204.0, 3e9)] == [
        "1.3 ×",
        "130 ×",
        "1,204 ×",
        "more than 1,000,000 ×",
    ]
    assert "e-" not in of_error_bar(8.8e-11)
    assert [of_error_bar(ratio) for ratio in (0.5, 4.0, float("nan"))] == [
        "50 % of its error bar",
        "4 × its error bar",
        "",
    ]
