"""The section about a net: its kinks, where they look, and the answer along a line."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import ReluNet
from keyhole.gauge.nets import Kinks, kinks_of
from keyhole.report.charts import Chart, HeatMap, Plot, Series, heat_map, short
from keyhole.report.content import Section

# Places on the line along which a net is shown, and how much further than most of the kinks it goes.
LINE_PLACES, BEYOND = 401, 1.15


def net_section(net: ReluNet, truth: ReluNet | None, behind: bool = False) -> Section:
    """Kinks and neurons."""
    kinks = kinks_of(net)
    true = None if truth is None or truth.width != net.width else kinks_of(truth)
    word = "kink" if net.activation == "relu" else "bend"
    what = "The net behind attention" if behind else "The net"
    said = [
        f"{what} has {net.neurons} {_activation(net)} neuron{'s' * (net.neurons != 1)} on tokens of width {net.width}. "
        f"Each makes the answer bend along a hyperplane, its {word}; how far from the origin it is and how "
        "much the slope changes there is what answers show of a neuron."
    ]
    if net.skip is not None:
        said.append("Beside its neurons it has an affine skip.")
    charts: list[Chart] = []
    if kinks.offset.size:
        charts = [_kinks(kinks, true, word), _directions(kinks, word), _line(net, kinks, word)]
    return Section("The net", tuple(said), charts=tuple(charts))


def _activation(net: ReluNet) -> str:
    return {"relu": "ReLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)", "silu": "SiLU"}[net.activation]


def _kinks(kinks: Kinks, truth: Kinks | None, word: str) -> Plot:
    series = [Series("recovered", np.abs(kinks.offset), kinks.loads())]
    if truth is not None:
        series.insert(0, Series("true", np.abs(truth.offset), truth.loads(), "true"))
    far, loads = np.abs(kinks.offset), kinks.loads()
    words = (
        f"Scatter of {far.size} neurons: {word}s lie {short(float(np.min(far)))} to {short(float(np.max(far)))} from "
        f"the origin, and the slope changes there by {short(float(np.min(loads)))} to {short(float(np.max(loads)))}."
    )
    if truth is not None:
        words += f" The {truth.offset.size} true ones are drawn as rings around them."
    across, up = f"distance of the {word} from the origin", "change of slope"
    return Plot("kinks", f"{word.capitalize()}s of {far.size} neurons", words, tuple(series), across, up)


def _directions(kinks: Kinks, word: str) -> HeatMap:
    order = np.argsort(-kinks.loads())
    normals = kinks.normal[order]
    signs = np.sign(normals[np.arange(len(normals)), np.argmax(np.abs(normals), axis=1)])
    title = f"Directions of the {word}s, the loudest neuron first"
    ways = {"across": "coordinate of the token", "down": "neuron"}
    return heat_map("directions", title, normals * np.where(signs == 0, 1, signs)[:, None], 1.0, **ways)


def _line(net: ReluNet, kinks: Kinks, word: str) -> Plot:
    """The answer along one line through the tokens, with the kinks that it crosses."""
    direction = np.random.default_rng(0).standard_normal(net.width)
    direction /= np.linalg.norm(direction)
    slopes = kinks.normal @ direction
    crossed = -kinks.offset[slopes != 0] / slopes[slopes != 0]
    reach = BEYOND * float(np.quantile(np.abs(crossed), 0.8)) if crossed.size else 1.0
    reach = reach or 1.0
    crossed = np.sort(crossed[np.abs(crossed) <= reach])
    places = np.union1d(np.linspace(-reach, reach, LINE_PLACES), crossed)
    plain = net.like(np.zeros(1))

    def answer(along: Floats) -> Floats:
        found = floats(plain(along[:, None, None] * direction))
        return found if found.ndim == 1 else found[:, 0]

    curve = answer(places)
    series = (
        Series("answer", places, curve, "line"),
        Series(f"{word}s", crossed, answer(crossed) if crossed.size else np.empty(0)),
    )
    words = (
        f"Plot of the recovered net's {'first ' if net.outputs else ''}answer along a random line through the origin: "
        f"it goes from {short(float(curve[0]))} to {short(float(curve[-1]))} and crosses {crossed.size} {word}s, which "
        "are marked."
    )
    across, up = "place on the line", "answer"
    return Plot("line", f"Along a line: {crossed.size} {word}s crossed", words, series, across, up)
