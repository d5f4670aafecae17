"""A run folder in, `report.html` out; and a recovered head as one picture. Needs the `report` extra."""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.errors import FileError, KeyholeError, UsageError
from keyhole.families import Family, SingleHead
from keyhole.optional import KEYHOLE_VERSION
from keyhole.recovery import Recovery, of_error_bar, power, typeset
from keyhole.report.content import Report
from keyhole.report.html.canvas import INSTALL, canvas, to_png
from keyhole.report.html.drawing import as_element, as_png, paint
from keyhole.report.sections.certificate import heldout_section
from keyhole.report.sections.other_kinds import report_of_audit, report_of_diagnosis, report_of_model, report_of_verdict
from keyhole.report.sections.parameters import sections_of
from keyhole.report.sections.run import detected_ranks, report_of_run
from keyhole.runs.folders import prepare_folder, write_file
from keyhole.runs.reader import AGAIN, Saved, SavedAudit, SavedDiagnosis, SavedModel, SavedRun, read_folder
from keyhole.runs.store import REPORT, plain

PICTURES = "pictures"
# A record larger than this is embedded without its held-out answers, which the pictures show.
MOST_BYTES = 1_500_000


def read_report(folder: Path) -> Report:
    """What there is to say of a run folder; FileError says what is wrong with one."""
    saved = read_folder(folder)
    try:
        with np.errstate(all="ignore"):
            return report_of_saved(saved)
    except KeyholeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise FileError(f"what {folder} holds is damaged ({type(error).__name__}: {error}): {AGAIN}") from error


def report_of_saved(saved: Saved) -> Report:
    """What there is to say of whatever a command or a call came to."""
    if isinstance(saved, SavedRun):
        return report_of_run(saved)
    if isinstance(saved, SavedAudit):
        return report_of_audit(saved)
    if isinstance(saved, SavedModel):
        return report_of_model(saved)
    return report_of_diagnosis(saved) if isinstance(saved, SavedDiagnosis) else report_of_verdict(saved)


def write_report(folder: Path) -> tuple[Path, Report]:
    """Make the report of a run folder, whole or not at all. ImportError where the `report` extra is missing."""
    report = read_report(folder)
    return write_file(folder, REPORT, as_html(report).encode("utf-8", errors="replace")), report


def write_pictures(folder: Path, report: Report) -> dict[str, Path]:
    """Every picture of a report as a PNG file on white, by its name."""
    target = folder / PICTURES
    prepare_folder(target)
    return {chart.name: write_file(target, f"{chart.name}.png", as_png(chart)) for chart in report.charts}


def try_report(folder: Path) -> tuple[Path | None, str | None]:
    """The report, or a note that says why there is none: a result without a report is still a result."""
    try:
        return write_report(folder)[0], None
    except ImportError as error:
        return None, f"no report: {error}; get it with {INSTALL}, then {_command(folder)}"
    except KeyboardInterrupt:
        return None, f"no report: interrupted; the result is complete, and {_command(folder)} makes it"
    except Exception as error:
        return None, f"no report: {type(error).__name__}: {error}; the result itself is complete"


def _command(folder: Path) -> str:
    return shlex.join(["keyhole", "report", str(folder)])


def as_html(report: Report) -> str:
    """The report as one page that needs nothing but itself."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - most uses of Keyhole write no page
    from markupsafe import Markup  # noqa: PLC0415

    folder = files("keyhole.report") / "templates"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["typeset"] = typeset
    template = environment.from_string((folder / "report.html").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        style=Markup((folder / "report.css").read_text(encoding="utf-8")),
        picture=lambda chart: Markup(as_element(chart)),
        record=_embedded(report),
        made_by=KEYHOLE_VERSION,
    )


def draw_head(result: Recovery, truth: Family | None = None, distance: float | None = None) -> bytes:
    """A recovered head as one PNG: its score matrix, the true one, their spectrum and the held-out check."""
    params, certificate = result.params, result.certificate
    if params is None or params.family != SingleHead.family:
        raise UsageError(f"can draw a recovered single head, not {type(params).__name__}")
    sections = [*sections_of(params, None, truth, detected_ranks(result)), heldout_section(result, "sequences")]
    charts = {chart.name: chart for section in sections for chart in section.charts}
    titles = {name: chart.title for name, chart in charts.items()}
    if distance is not None:
        titles["score"] = f"Recovered: {power(distance)} from the truth"
    count = certificate.answers.size
    within = f"{count} fresh: worst {of_error_bar(certificate.worst_ratio)}"
    titles["heldout"] = within if count else "Held-out check: none was made"
    panels: Any = [["score-true", "score"], ["spectrum", "heldout"]]
    if "score-true" not in charts:
        panels = [["score", "spectrum", "heldout"]]
    with canvas(*((10.6, 9.8) if "score-true" in charts else (15.6, 5.4))) as figure:
        figure.set_layout_engine("constrained", w_pad=0.13, h_pad=0.13, wspace=0.03, hspace=0.03)
        figure.suptitle(_summary(result), fontsize=14.5, fontweight="bold", x=0.012, ha="left")
        for name, axis in figure.subplot_mosaic(panels).items():
            if name in charts:
                paint(figure, axis, charts[name])
            axis.set_title(titles[name])
        return to_png(figure)


def _summary(result: Recovery) -> str:
    stats = result.stats
    verdict = "certified" if result.certified else f"not certified ({result.outcome.name})"
    cost = f"{stats.queries:,} queries"
    if stats.counting_bound:
        cost += f", {stats.ratio:.3f} × the fewest possible"
    return f"{result.params.anatomy.title if result.params else 'Nothing'}, {verdict}: {cost}"


def _embedded(report: Report) -> dict[str, Any]:
    """The whole record, or all but the longest lists where it is too long for a page."""
    record: dict[str, Any] = plain(report.record)
    return record if len(json.dumps(record)) <= MOST_BYTES else _shortened(record)


def _shortened(record: Any) -> Any:
    """A record without its held-out answers, of a run or of every layer of a model."""
    if not isinstance(record, dict):
        return record
    note = "left out of this page for their number: they are in the run folder"
    return {name: note if name == "heldout" else _shortened(value) for name, value in record.items()}
