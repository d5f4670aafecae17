"""A recovered head as one picture: matrices, spectrum and the held-out check. Needs the `report` extra."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.errors import UsageError
from keyhole.families import Family, SingleHead
from keyhole.recovery import Recovery
from keyhole.report.charts import FAR_APART, power
from keyhole.report.html.canvas import FAINT, FOUND, INK, TRUE, canvas, powers_of_ten, through_zero, tidy, to_png

SQUARE: Any = [["true", "found"], ["spectrum", "heldout"]]
WIDE: Any = [["found", "spectrum", "heldout"]]


def draw(result: Recovery, truth: Family | None = None, distance: float | None = None) -> bytes:
    """The picture as PNG. ImportError when matplotlib is missing: `canvas.INSTALL` says how to get it."""
    if not can_draw(result.params):
        raise UsageError(f"can draw a recovered single head, not {type(result.params).__name__}")
    found, true = _matrix(result.params), _matrix(truth)
    assert found is not None
    panels, size = (WIDE, (15.6, 5.4)) if true is None else (SQUARE, (10.6, 9.8))
    with canvas(*size) as figure:
        figure.set_layout_engine("constrained", w_pad=0.13, h_pad=0.13, wspace=0.03, hspace=0.03)
        figure.suptitle(_headline(result), fontsize=14.5, fontweight="bold", x=0.012, ha="left")
        axes = figure.subplot_mosaic(panels)
        _heat_maps(figure, axes, found, true, distance)
        _spectrum(axes["spectrum"], found, true, result.stats.details.get("rank"))
        _heldout(axes["heldout"], result)
        return to_png(figure)


def can_draw(params: Family | None) -> bool:
    """Whether parameters are one head, which is what this picture is of."""
    return params is not None and params.family == SingleHead.family


def _matrix(params: Family | None) -> Floats | None:
    return None if params is None else floats(params.anatomy.heads[0].score)


def _headline(result: Recovery) -> str:
    stats = result.stats
    verdict = "certified" if result.certified else f"not certified ({result.outcome.name})"
    cost = f"{stats.queries:,} queries"
    if stats.counting_bound:
        cost += f", {stats.ratio:.3f} × the fewest possible"
    return f"{result.params.anatomy.title if result.params else 'Nothing'}, {verdict}: {cost}"


def _heat_maps(figure: Any, axes: Any, found: Floats, true: Floats | None, distance: float | None) -> None:
    """Both matrices on one colour scale that is symmetric around zero."""
    maps = {"found": found} if true is None else {"true": true, "found": found}
    titles = {"true": "True score matrix", "found": "Recovered score matrix"}
    if distance is not None:
        titles["found"] = f"Recovered: {power(distance)} from the truth"
    limit = max(float(np.max(np.abs(matrix))) for matrix in maps.values()) or 1.0
    for name, matrix in maps.items():
        axis = axes[name]
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(titles[name])
        axis.set_xlabel("coordinate of the last token")
        axis.set_ylabel("coordinate of the attended token")
        axis.tick_params(length=0)
        axis.locator_params(integer=True, min_n_ticks=1, nbins=8)
    bar = figure.colorbar(image, ax=[axes[name] for name in maps], shrink=0.92, aspect=28, pad=0.015)
    bar.set_label("entry")
    bar.outline.set_visible(False)


def _spectrum(axis: Any, found: Floats, true: Floats | None, rank: int | None) -> None:
    """Singular values on a log scale, those beyond the detected rank greyed."""
    order = np.arange(1, len(found) + 1)
    size = float(np.clip(260 / len(found), 2.0, 7.0))
    series = [("recovered", found, {"marker": "o", "color": FOUND, "markersize": 0.55 * size})]
    if true is not None:
        ring = {"marker": "o", "markerfacecolor": "none", "color": TRUE, "markersize": 1.25 * size}
        series.insert(0, ("true", true, ring))
    drawn = False
    for label, matrix, look in series:
        values = np.linalg.svd(matrix, compute_uv=False)
        seen = values > 0
        drawn = drawn or bool(np.any(seen))
        axis.plot(order[seen], values[seen], linestyle="none", label=label, **look)
    if drawn:
        axis.set_yscale("log")
        powers_of_ten(axis.yaxis)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, high * 1e-3), high * 3)
    else:
        axis.set_yticks([])
        axis.text(0.5, 0.5, "all are exactly 0", ha="center", transform=axis.transAxes)
    end = 1.03 * len(found) + 0.8
    axis.set_xlim(1 - 0.03 * end, end)
    if rank is not None:
        axis.axvline(rank + 0.5, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), label=f"detected rank {rank}")
        axis.axvspan(rank + 0.5, end, color=FAINT, alpha=0.18, linewidth=0)
    axis.set_title("Singular values" if rank is None else f"Singular values: rank {rank} of {len(found)}")
    axis.set_xlabel("number")
    axis.set_ylabel("singular value of the score matrix")
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    axis.legend(loc="best")
    tidy(axis)


def _heldout(axis: Any, result: Recovery) -> None:
    """Prediction against answer with the line on which they agree."""
    certificate = result.certificate
    answers, predictions = certificate.answers, certificate.predictions
    axis.set_title("Held-out check: none was made")
    if answers.size:
        ends = np.array([min(answers.min(), predictions.min()), max(answers.max(), predictions.max())])
        ends += np.array([-0.06, 0.06]) * (float(np.ptp(ends)) or 1.0)
        axis.plot(ends, ends, color=FAINT, linewidth=1.2, label="prediction = answer", zorder=1)
        axis.plot(answers, predictions, "o", color=FOUND, alpha=0.75, markersize=6, label="fresh sequence", zorder=2)
        usual = float(np.median(np.abs(answers)))
        if 0 < FAR_APART * usual < np.max(np.abs(answers)):  # tokens of very different lengths: all should show
            through_zero(axis, usual, float(np.max(np.abs(answers))))
            ends *= 2.0  # room for the outermost, which a few per cent are not on this scale
        axis.set_xlim(*ends)
        axis.set_ylim(*ends)
        axis.legend(loc="upper left")
        axis.set_title(f"{answers.size} fresh answers within {power(certificate.worst_error)}")
    axis.set_aspect("equal")
    axis.set_xlabel("answer of the box")
    axis.set_ylabel("prediction from the recovered head")
    tidy(axis)
