"""One palette on report, live page and notebook cards, whose colours people of any colour vision tell apart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import keyhole
from keyhole.report.html.canvas import COOL, WARM
from keyhole.report.notebook import TONES

HOME = Path(keyhole.__file__).parent
REPORT, PAGE = ((HOME / name).read_text() for name in ("report/templates/report.css", "live/static/page.css"))
PALETTE = {name: each for name, *each in re.findall(r"--([a-z-]+): light-dark\((#\w{6}), (#\w{6})\)", REPORT)}
# Machado, Oliveira and Fernandes (2009) at full severity, on linear light.
VISION = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
# CIE 1976 differences: two are seen side by side, ten at a glance.
APART = 10.0
TOLD_APART = [
    ("found", "true"),
    ("good", "bad"),
    ("good", "plain"),
    ("bad", "plain"),
    ("found", "card"),
    ("true", "card"),
]
READ_ON = [
    ("ink", "card"),
    ("soft", "card"),
    ("soft", "page"),
    ("good", "good-soft"),
    ("bad", "bad-soft"),
    ("plain", "plain-soft"),
]


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(XYZ @ np.clip(light, 0, 1) / (XYZ @ np.ones(3)) + 1e-6)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(one: str, other: str, vision: str) -> float:
    matrix = np.array(VISION[vision])
    return float(np.linalg.norm(lab(matrix @ linear(one)) - lab(matrix @ linear(other))))


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(XYZ[1] @ linear(colour)) + 0.05 for colour in (one, other))
    return high / low


@pytest.mark.parametrize("vision", VISION)
def test_colours_that_mean_something_are_told_apart(vision: str) -> None:
    for one, other in TOLD_APART:
        for mode in (0, 1):
            assert apart(PALETTE[one][mode], PALETTE[other][mode], vision) > APART, (one, other, mode)
    warm, cool = ("#" + "".join(f"{round(255 * part):02x}" for part in colour) for colour in (WARM, COOL))
    assert apart(warm, cool, vision) > APART


def test_words_can_be_read_on_what_is_behind_them() -> None:
    for word, ground in READ_ON:
        for mode in (0, 1):
            assert contrast(PALETTE[word][mode], PALETTE[ground][mode]) >= 4.5, (word, ground, mode)


def test_there_is_one_palette() -> None:
    shared = {
        "good": "good",
        "bad": "bad",
        "good-soft": "good-soft",
        "bad-soft": "bad-soft",
        "ink": "ink",
        "card": "card",
    }
    shared |= {"accent": "found", "paper": "page", "faint": "soft", "line": "line"}
    for own, name in shared.items():
        assert re.findall(rf"--{own}: (#\w{{6}})", PAGE) == PALETTE[name], own
    assert [TONES["good"], TONES["bad"]] == [PALETTE["good"][0], PALETTE["bad"][0]]


def test_there_is_one_mark() -> None:
    """The site shows the file of the live page; reports, which load nothing, have its outline and colours."""
    mark = (HOME / "live/static/icon.svg").read_text()
    outline = re.search(r'path d="([^"]+)"', mark)
    assert outline
    assert f'path("{outline[1]}")' in REPORT
    assert all(f"background: {colour}" in REPORT for colour in re.findall(r'fill="(#\w{6})"', mark))


def test_report_page_and_site_have_one_type_scale() -> None:
    """Sizes have names, which mean the same everywhere; conf.py reads them in the style of reports."""
    scale, of_page = (dict(re.findall(r"--([a-z]+): ([\d.]+rem);", style)) for style in (REPORT, PAGE))
    assert len(scale) == 6
    assert scale == of_page
    site = (Path(__file__).parents[2] / "docs/assets/site.css").read_text()
    for style in (REPORT, PAGE, site):
        used = re.findall(r"font-size: var\(--([a-z]+)\)", style)
        assert used
        assert set(used) <= set(scale)
