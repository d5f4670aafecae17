"""Results where they are looked at most: cards for notebooks, one figure of a recovery, and run folders from Python."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import islice
from os import PathLike
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from keyhole.audit.result import Audit
from keyhole.families import Family
from keyhole.methods.diagnosis.diagnose import Diagnosis
from keyhole.optional import KEYHOLE_VERSION
from keyhole.recovery import Recovery
from keyhole.report.build import report_of_saved, try_report
from keyhole.report.charts import Chart, HeatMap, Plot, TokenMap, short
from keyhole.report.content import Headline, Report
from keyhole.report.html.canvas import FAINT, FOUND, TRUE, canvas, lasting
from keyhole.report.html.drawing import as_element, paint
from keyhole.report.sections.attention import attention_section
from keyhole.report.sections.parameters import sections_of
from keyhole.runs.reader import SavedAudit, SavedDiagnosis, SavedRun, SavedVerdict
from keyhole.runs.store import RUN, reserve_folder, write_run
from keyhole.sentence.token_weights import TokenWeights
from keyhole.verify.verdict import Verdict

# Pictures of a card and of a figure: the first of a report, matrices of heads among them.
CARD_PICTURES, FIGURE_PICTURES = 4, 12
COLUMNS, SIDE = 4, 3.6  # of a figure: pictures in a row, inches of each
TITLE = 32  # letters in a line of a picture's title
TONES = {"good": "#0e5f50", "bad": "#b84200", "plain": FOUND}
STYLE = (
    f".keyhole-card{{--ink:currentColor;--line:{FAINT};--found:{FOUND};--true:{TRUE};--faint:{FAINT};--card:transparent;"
    f"border:1px solid {FAINT};border-radius:8px;padding:.8em 1em;max-width:62em;font-family:system-ui,sans-serif}}"
    ".keyhole-card h4{margin:0 0 .3em}.keyhole-card p{margin:.2em 0}"
    ".keyhole-card .tiles{display:flex;flex-wrap:wrap;gap:.4em 2em;margin:.6em 0}"
    ".keyhole-card .tiles b{font-size:1.2em}"
    ".keyhole-card .pictures{display:flex;flex-wrap:wrap;gap:1em}"
    ".keyhole-card figure{margin:0;width:13em}.keyhole-card figure>:first-child{width:100%;height:auto}"
    ".keyhole-card img.pixels{image-rendering:pixelated}.keyhole-card figcaption{font-size:.85em}"
)


def report_of(result: Recovery) -> Report:
    """Everything there is to say of a recovery."""
    with np.errstate(all="ignore"):
        return report_of_saved(SavedRun(_record(result), result, _label(result)))


def save_recovery(result: Recovery, folder: str | PathLike[str], force: bool) -> dict[str, Path]:
    """Write a run folder and, where the extra is installed, its report; the paths by what they are."""
    path, settings = Path(folder), _settings(result)
    with reserve_folder(path, RUN, settings, force=force):
        files = write_run(path, result, settings, result.oracle, label=_label(result))
    page, _ = try_report(path)
    return files if page is None else {**files, "report": page}


def figure_of(result: Recovery) -> Any:
    """Matrices of heads, spectra and the held-out check of a recovery in one matplotlib figure."""
    report = report_of(result)
    shown = (chart for chart in _pictures(report) if isinstance(chart, HeatMap | Plot))
    charts = list(islice(shown, FIGURE_PICTURES))
    rows = max(1, -(-len(charts) // COLUMNS))
    across = max(1, min(len(charts), COLUMNS))
    with canvas(SIDE * across, SIDE * rows) as figure:
        figure.set_layout_engine("constrained")
        for number, chart in enumerate(charts, 1):
            axis = figure.add_subplot(rows, across, number)
            paint(figure, axis, chart)
            axis.set_title(fill(chart.title, TITLE))
        figure.suptitle(report.headline.title, fontweight="bold", x=0.01, ha="left")
        return lasting(figure)


# --- cards --------------------------------------------------------------------------------------------------------


def card_of_recovery(result: Recovery) -> str:
    """A recovery: how it ended, what it cost, and its first pictures."""
    return _card(report_of(result))


def card_of_params(params: Family) -> str:
    """Parameters: what they are, and their matrices."""
    sections = tuple(sections_of(params, None, None))
    shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in islice(params.arrays().items(), CARD_PICTURES))
    title = params.anatomy.title
    return _card(Report(params.family, title, Headline("plain", params.family, title, shapes), (), sections, {}))


def card_of_weights(weights: TokenWeights) -> str:
    """What heads attend to in a sentence: the head that shows most beside the model, and all of them small."""
    section = attention_section(" ".join(weights.words), {"": weights})
    sections = () if section is None else (section,)
    title = f"{len(weights.found)} heads on {len(weights.words)} tokens"
    said = "" if weights.apart is None else f"at most {short(weights.apart)} from the model's own attention"
    return _card(Report("attention", title, Headline("plain", "attention", title, said), (), sections, {}))


def card_of_verdict(verdict: Verdict) -> str:
    """A verification."""
    return _card(report_of_saved(SavedVerdict({}, verdict, "the oracle", "the parameters")))


def card_of_diagnosis(diagnosis: Diagnosis) -> str:
    """What an oracle was found to be, with the evidence."""
    report = report_of_saved(SavedDiagnosis({}, diagnosis, "the oracle", "the oracle"))
    rows = "".join(
        f"<tr><td>{escape(each.what)}</td><td>{escape(each.found)}</td><td>{escape(each.evidence)}</td></tr>"
        for each in diagnosis.findings
    )
    return _card(report, f"<table>{rows}</table>")


def card_of_audit(audit: Audit) -> str:
    """What each defence achieves."""
    return _card(report_of_saved(SavedAudit({}, audit)), "".join(f"<p>{escape(each)}</p>" for each in audit.sentences))


def _card(report: Report, more: str = "") -> str:
    headline = report.headline
    tone = TONES[headline.tone]
    tiles = "".join(
        f"<div><b>{escape(tile.figure)}</b><br>{escape(tile.label)}<br><small>{escape(tile.note)}</small></div>"
        for tile in report.tiles
    )
    said = [headline.said, *([headline.remedy] if headline.remedy else [])]
    return (
        f'<style>{STYLE}</style><div class="keyhole-card">'
        f'<h4><span style="color:{tone}">{escape(headline.word)}</span> '
        f"{escape(headline.title)}</h4>{''.join(f'<p>{escape(each)}</p>' for each in said)}"
        f'<div class="tiles">{tiles}</div>{more}<div class="pictures">{_drawn(report)}</div></div>'
    )


def _drawn(report: Report) -> str:
    """The first pictures; none where the libraries that draw are not installed."""
    try:
        return "".join(
            f"<figure>{as_element(chart)}<figcaption>{escape(chart.title)}</figcaption></figure>"
            for chart in islice(_pictures(report), CARD_PICTURES)
        )
    except ImportError:
        return ""


def _pictures(report: Report) -> Iterator[Chart]:
    """The pictures of a report, matrices first."""
    yield from sorted(report.charts, key=lambda chart: not isinstance(chart, HeatMap | TokenMap))


def _label(result: Recovery) -> str:
    return result.oracle or ("examples" if result.params is None else result.params.anatomy.title)


def _settings(result: Recovery) -> dict[str, Any]:
    """What stands for settings where a recovery was asked for in Python."""
    subject = {"target": result.oracle} if result.oracle else {"data": "examples"}
    return {**subject, "method": result.method}


def _record(result: Recovery) -> dict[str, Any]:
    settings = _settings(result)
    return {"keyhole": KEYHOLE_VERSION, "settings": settings, "result": result.summary()}
