"""The page itself in a real browser."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from keyhole.live import LiveServer, Runs
from keyhole.runs.store import ATTENTION
from keyhole.sentence.token_weights import TokenWeights, save_weights
from support.browsers import ARGUMENTS, ARTEFACTS, chromium
from support.live import BOX, PATIENCE, QUICK, SLOW, client, command, hurry, serving, start, until


def test_a_browser_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.browsers.shutil.which", lambda _: None)
    with pytest.raises(
        pytest.fail.Exception, match="need chromium, and could not install it: apt-get install chromium"
    ):
        chromium()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        try:
            yield found
        finally:
            found.close()


class Tab:
    """A page, what its console said, and its pictures."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.context = browser.new_context(viewport=options.pop("viewport", {"width": 1360, "height": 1000}), **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.said: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", self._asked)
        self.address = address
        self.page.goto(address)
        expect(self.page.locator("#field-width")).to_be_visible()
        expect(self.page.locator("#connection")).to_have_text("live")

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.said.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.address.partition("/#")[0]):
            self.said.append(f"asked for {request.url}")

    def picture(self, name: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"live-{name}.png", full_page=True)

    def text(self, name: str) -> str:
        return self.page.locator(f"#{name}").inner_text()

    def fill(self, **fields: str) -> None:
        self.page.select_option("#family", fields.pop("family"))
        for name, value in fields.items():
            self.page.fill(f"#field-{name}", value)

    def begin(self, form: dict[str, str]) -> None:
        self.fill(**form)
        self.page.click("#form button")


@pytest.fixture
def tabs(browser: Browser, server: LiveServer) -> Iterator[Callable[..., Tab]]:
    opened: list[Tab] = []

    def tab(address: str | None = None, **options: Any) -> Tab:
        opened.append(Tab(browser, address or server.address, **options))
        return opened[-1]

    yield tab
    for each in opened:
        each.context.close()
        assert each.said == [], "the console of the page must stay empty"


def wide(page: Page) -> int:
    found = page.evaluate("document.documentElement.scrollWidth")
    assert isinstance(found, int)
    return found


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_start_watch_stop_resume(tabs: Callable[..., Tab], server: LiveServer) -> None:
    tab = tabs()
    tab.picture("empty")
    tab.begin({"family": "single-head", "width": "20", "rate": "60"})
    page = tab.page
    expect(page.locator("#run-state")).to_have_text("running")
    expect(page.locator("#stages [aria-current] .name")).to_have_text(re.compile("directions|columns"))
    expect(page.locator("#pictures canvas[role=img]")).to_have_attribute("aria-label", re.compile("^score, 20 by 20"))
    expect(page.locator("#matrix-note")).to_contain_text("% has been read so far")
    expect(page.locator("#t-error")).to_contain_text("± ")
    before = number(tab.text("t-queries"))
    expect(page.locator("#t-queries")).not_to_have_text(str(before))
    tab.picture("running")
    page.click("#stop")
    expect(page.locator("#run-state")).to_have_text("stopped")
    expect(page.locator("#resume")).to_be_focused()
    kept = number(tab.text("t-queries"))
    assert kept > before
    assert f"{kept} answers are kept" in tab.text("action-note")
    tab.picture("stopped")
    hurry(server, tab.text("run-id"))
    page.click("#resume")
    expect(page.locator("#run-state")).to_have_text("certified")
    assert number(tab.text("t-journal")) == kept
    assert "relative distance" in tab.text("outcome-message")
    expect(page.locator("#heldout circle")).to_have_count(120)
    expect(page.locator("#files a")).to_have_count(3)
    (run,) = server.runs.all()
    result = run.snapshot()["ending"]["result"]
    assert number(tab.text("t-queries")) == result["queries"]
    error = tab.text("t-error")  # relative to the answers, which are not near zero
    assert re.fullmatch(r"0|\d(\.\d)? × 10⁻¹.", error)
    said = "exactly" if error == "0" else f"to {error} of their size"
    assert f"half of them predicted {said}" in tab.text("heldout-note")
    tab.picture("certified")


def test_a_box_of_another_family_shows_its_questions_first(tabs: Callable[..., Tab], server: LiveServer) -> None:
    tab = tabs(color_scheme="dark")
    tab.begin({"family": "relu-net", "width": "6", "neurons": "8", "rate": "60"})
    expect(tab.page.locator("#questions-canvas")).to_be_visible()
    expect(tab.page.locator("#matrix-note")).to_contain_text("only at a later stage")
    expect(tab.page.locator("#stages .name").first).to_have_text("triage")
    expect(tab.page.locator("#stages .name").last).to_have_text("line")
    tab.picture("questions-dark")
    tab.page.click("#stop")
    expect(tab.page.locator("#run-state")).to_have_text("stopped")
    hurry(server, tab.text("run-id"))
    tab.page.click("#resume")
    expect(tab.page.locator("#run-state")).to_have_text("certified")
    expect(tab.page.locator("#pictures figcaption")).to_contain_text("weights into the neurons")


def test_nonsense_is_said_beside_the_field(browser: Browser, server: LiveServer) -> None:
    tab = Tab(browser, server.address)
    tab.begin({"family": "single-head", "width": "<b>wide</b>", "rank": "3", "noise": "loud"})
    page = tab.page
    expect(page.locator("#error-width")).to_have_text("Must be a whole number from 1 to 256.")
    expect(page.locator("#error-noise")).to_contain_text("Must be a number from 0")
    expect(page.locator("#error-rank")).to_be_empty()
    expect(page.locator("#field-width")).to_be_focused()
    expect(page.locator("#field-width")).to_have_attribute("aria-invalid", "true")
    tab.picture("nonsense")
    assert server.runs.all() == []
    tab.fill(family="single-head", width="4", rate="1000000")
    page.fill("#field-noise", "")
    page.press("#field-width", "Enter")
    expect(page.locator("#run-state")).to_have_text("certified")
    expect(page.locator("#error-width")).to_be_empty()
    # The browser itself notes the refusal; nothing else may be in its console.
    assert [said for said in tab.said if "422" not in said] == []
    assert len(tab.said) == 1
    tab.context.close()


def test_the_keyboard_alone_will_do(tabs: Callable[..., Tab]) -> None:
    tab = tabs()
    page, press = tab.page, tab.page.keyboard.press

    def tab_to(name: str) -> None:
        for _ in range(60):
            if page.evaluate("document.activeElement.id || document.activeElement.textContent") == name:
                style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style != "none", f"the focus on {name} does not show"
                return
            press("Tab")
        pytest.fail(f"Tab does not lead to {name}")

    tab_to("family")
    press("ArrowDown")  # several heads
    expect(page.locator("#field-heads")).to_be_visible()
    press("ArrowUp")
    tab_to("field-width")
    press("Control+A")
    page.keyboard.type("14")
    tab_to("field-rate")
    press("Control+A")
    page.keyboard.type("30")
    press("Enter")
    expect(page.locator("#run-state")).to_have_text("running")
    tab_to("stop")
    press("Enter")
    expect(page.locator("#resume")).to_be_focused()
    press("Space")
    expect(page.locator("#stop")).to_be_focused()
    expect(page.locator("#announce")).to_contain_text("running")
    press("Enter")
    expect(page.locator("#run-state")).to_have_text("stopped")
    # Every control has a name for those who cannot see it.
    for control in page.locator("input:visible, select:visible, button:visible, a:visible").all():
        named = control.evaluate("node => (node.labels?.[0] ?? node).textContent.trim()")
        assert named, control.evaluate("node => node.outerHTML")


def test_two_tabs_and_a_reload_agree(tabs: Callable[..., Tab], server: LiveServer) -> None:
    first = tabs()
    first.begin(SLOW)
    expect(first.page.locator("#run-state")).to_have_text("running")
    second = tabs(first.page.url)
    expect(second.page.locator("#run-state")).to_have_text("running")
    second.page.click("#stop")
    for tab in (first, second):
        expect(tab.page.locator("#run-state")).to_have_text("stopped")
    shown = ("run-id", "run-state", "t-queries", "t-journal", "t-time", "stages", "matrix-note", "command")
    assert [first.text(name) for name in shown] == [second.text(name) for name in shown]
    before = [first.text(name) for name in shown]
    first.page.reload()
    expect(first.page.locator("#run-state")).to_have_text("stopped")
    assert [first.text(name) for name in shown] == before
    assert len(server.runs.all()) == 1


def test_compare_on_a_phone_too(tabs: Callable[..., Tab], server: LiveServer) -> None:
    for form in (QUICK, QUICK, {**QUICK, "width": "8", "rank": "2"}):
        identity = start(server, form)
        until(lambda name=identity: server.runs.get(name).state == "done", "runs to end")
    latest, twin, first = (run.id for run in server.runs.all())
    tab = tabs()
    tab.page.click("#to-compare")
    expect(tab.page.locator("#apart")).to_contain_text("No distance")
    tab.page.check(f"#choices input[value={first}]")
    expect(tab.page.locator("#apart-table tbody tr")).to_have_count(3)
    expect(tab.page.locator("#names th")).to_have_text([latest, twin, first])
    expect(tab.page.locator("#compare canvas[role=img]")).to_have_count(3)
    tab.picture("compare-three")
    tab.page.uncheck(f"#choices input[value={latest}]")
    expect(tab.page.locator("#apart")).to_contain_text("What they found is")
    assert re.fullmatch(r"0|\d(\.\d)? × 10⁻¹.", tab.page.locator("#apart strong").inner_text())
    rows = dict(row.split("\t", 1) for row in tab.page.locator("#rows tr").all_inner_texts())
    assert rows["Outcome"] == "certified\tcertified"
    assert rows["Queries over that"] == "1.167 ×\t1.167 ×"
    expect(tab.page.locator("#compare canvas[role=img]")).to_have_count(2)
    tab.picture("compare")
    tab.page.reload()
    expect(tab.page.locator("#apart")).to_contain_text("What they found is")
    tab.page.click("#leave-compare")
    expect(tab.page.locator("#run-id")).to_have_text(latest)
    phone = tabs(viewport={"width": 360, "height": 740}, color_scheme="dark")
    expect(phone.page.locator("#run-state")).to_have_text("certified")
    assert wide(phone.page) <= 360
    phone.picture("phone-dark")
    phone.page.click("#to-compare")
    expect(phone.page.locator("#rows tr")).to_have_count(11)
    assert wide(phone.page) <= 360
    phone.picture("phone-compare-dark")


def test_many_heads_are_a_grid_with_one_of_them_large(tabs: Callable[..., Tab], server: LiveServer) -> None:
    identity = start(server, {"family": "multi-head", "width": "8", "heads": "6", "outputs": "8", "rate": "1000000"})
    until(lambda: server.runs.get(identity).state == "done", "the run to end")
    tab = tabs()
    small = tab.page.locator("#pictures button.small")
    expect(small).to_have_count(6)
    large = tab.page.locator("#pictures figcaption")
    expect(large).to_contain_text("score of head 0")
    small.nth(3).focus()
    tab.page.keyboard.press("Enter")
    expect(large).to_contain_text("score of head 3")
    expect(small.nth(3)).to_be_focused()
    expect(small.nth(3)).to_have_attribute("aria-pressed", "true")
    tab.picture("heads")
    phone = tabs(viewport={"width": 360, "height": 740}, color_scheme="dark")
    expect(phone.page.locator("#pictures button.small")).to_have_count(6)
    assert wide(phone.page) <= 360
    phone.picture("phone-heads-dark")


def test_what_heads_attend_to_is_shown_beside_the_model(browser: Browser, finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / finished.name
    shutil.copytree(finished, copy)
    words = ("[CLS]", "the", "<key>", "turns")
    found = np.stack([np.full((4, 4), 0.25), 0.1 * np.ones((4, 4)) + 0.6 * np.eye(4)[::-1]])
    save_weights(copy / ATTENTION, "the key turns", {"layer": TokenWeights(words, found, found - 1e-4)})
    with serving(tmp_path / "runs") as server, client(server) as asked:
        tab = Tab(browser, f"{server.address}/#run={finished.name}")
        expect(tab.page.locator("#attention-note")).to_contain_text("“the key turns” as the heads see it")
        assert "further than 1.0 × 10⁻⁴ from the attention that the model" in tab.text("attention-note")
        large = tab.page.locator("#attention-large figure")
        assert large.locator("figcaption").all_inner_texts() == ["Head 1, recovered", "Head 1, of the model"]
        assert large.first.locator("rect title").nth(3).text_content() == "[CLS] → turns: 0.700"
        assert large.first.locator("text").all_text_contents().count("<key>") == 2
        tab.page.locator("#attention-heads button").first.click()
        expect(large.locator("figcaption").first).to_have_text("Head 0, recovered")
        expect(tab.page.locator("#attention-heads button").first).to_have_attribute("aria-pressed", "true")
        tab.picture("attention")
        tab.context.close()
        assert tab.said == []
        (copy / ATTENTION).write_bytes(b"nonsense")
        reply = asked.get(f"/api/runs/{finished.name}/attention")
        assert reply.status_code == 404
        (copy / ATTENTION).unlink()
        assert asked.get(f"/api/runs/{finished.name}/attention").status_code == 404


def test_tags_and_a_note_are_kept_and_found_again(tabs: Callable[..., Tab], server: LiveServer) -> None:
    names = [start(server, QUICK) for _ in range(4)]
    until(lambda: all(server.runs.get(name).state == "done" for name in names), "runs to end")
    tab = tabs(f"{server.address}/#run={names[1]}")
    page = tab.page
    page.click("#remarks summary")
    page.fill("#new-tags", "baseline, <i>paper</i>, " + "x" * 40)
    page.fill("#new-note", "asked twice")
    page.click("#remarks-form button")
    expect(page.locator("#error-tags")).to_contain_text("32 characters")
    page.fill("#new-tags", "baseline, <i>paper</i>")
    page.click("#remarks-form button")
    expect(page.locator("#tags .chip")).to_have_text(["baseline", "<i>paper</i>"])
    expect(page.locator("#note")).to_have_text("asked twice")
    expect(page.locator("#runs li")).to_have_count(4)
    page.fill("#filter", "Baseline")
    expect(page.locator("#runs li")).to_have_count(1)
    expect(page.locator("#runs small")).to_contain_text("#baseline")
    tab.picture("tags")
    page.reload()
    expect(page.locator("#tags .chip")).to_have_count(2)
    tab.said = [said for said in tab.said if "422" not in said]  # which browsers print of their own accord


def test_what_is_shown_stays_text(browser: Browser, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "evil-words"
    folder.mkdir(parents=True)
    for path in finished.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    evil = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
    about = json.loads((folder / "live.json").read_text())
    (folder / "live.json").write_text(json.dumps({**about, "label": evil}))
    result = json.loads((folder / "run.json").read_text())
    result["result"]["message"] = evil
    (folder / "run.json").write_text(json.dumps(result))
    with serving(tmp_path / "runs") as server:
        tab = Tab(browser, server.address)
        expect(tab.page.locator("#run-title")).to_have_text(evil)
        expect(tab.page.locator("#outcome-message")).to_contain_text(evil)
        assert tab.page.locator("main img, main script, nav img").count() == 0
        assert "owned" not in tab.page.title()
        assert tab.said == []
        server.stop()
        expect(tab.page.locator("#connection")).to_have_text("the server has ended")
        tab.context.close()


def test_a_report_follows_and_opens(browser: Browser, tmp_path: Path) -> None:
    with LiveServer(Runs(tmp_path)) as server:
        tab = Tab(browser, server.address)
        tab.begin(QUICK)
        expect(tab.page.locator("#run-state")).to_have_text("certified")
        tab.page.click("#files a:text('report.html')")
        expect(tab.page.locator("h1")).to_be_visible()
        assert tab.page.url.endswith("/files/report.html")
        assert tab.page.locator("img, svg").count() > 2
        tab.picture("report")
        assert tab.said == []
        tab.context.close()


def test_watch_a_run_of_the_command_line(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(BOX)
    words = ["recover", "python:box.py:make", "--journal", "answers.db", "--out", "found"]
    with command(tmp_path, *words, "--watch") as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        tab = Tab(browser, address)
        expect(tab.page.locator("#run-title")).to_have_text("python:box.py:make")
        expect(tab.page.locator("#pictures canvas[role=img]")).to_be_visible()
        tab.page.click("#stop")
        expect(tab.page.locator("#run-state")).to_have_text("stopped")
        tab.picture("watched")
        out, err = process.communicate(timeout=PATIENCE)
        tab.context.close()
    assert (process.returncode, out) == (130, "")
    again = shlex.split(err.partition("To resume: keyhole ")[2])
    assert again == words
    done = subprocess.run(
        [sys.executable, "-m", "keyhole", *again, "--watch", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["certified"]
    assert 0 < said["new_queries"] < said["queries"] + said["heldout_queries"]  # some came from the journal
    assert (tmp_path / "found" / "run.json").exists()
