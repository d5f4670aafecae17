"""What recovered heads attend to in a sentence, beside the model: all of them small, and one large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from keyhole.report.charts import Chart, TokenMap, heat_map, short
from keyhole.report.content import Panel, Scale, Section
from keyhole.sentence.token_weights import TokenWeights

# Heads that can be opened beside the one that is large.
MOST_FOLDED = 24
# Squares of those, each with its weight in words: more would make the page of a long sentence too large.
MOST_SQUARES = 10_000


def attention_section(sentence: str, layers: Mapping[str, TokenWeights]) -> Section | None:
    """The overview of layers and heads, the head that shows most, and others on demand."""
    heads = [(name, number) for name, each in layers.items() for number in range(len(each.found))]
    if not heads:
        return None
    several = len(layers) > 1
    heads.sort(key=lambda place: -layers[place[0]].focus[place[1]])
    (first, number), others = heads[0], heads[1:]
    best = {name: next(place for place in heads if place[0] == name) for name in layers}
    shown = [best[name] for name in layers if best[name] != heads[0]] if several else others
    length = len(layers[first].words)
    folded = shown[: min(MOST_FOLDED, MOST_SQUARES // (2 * length**2))]
    folded = folded if several else sorted(folded)
    said = [
        f"“{sentence}” as the heads see it: every row is a token that looks, every column one that is looked at, and "
        "weights of a row add up to at most one. The vectors are those that the model itself gives each layer."
    ]
    apart = [each.apart for each in layers.values() if each.apart is not None]
    if apart:
        said.append(
            f"No weight of the recovered heads is further than {short(max(apart))} from the attention that the model "
            "computes itself. The order of heads is that of the recovery."
        )
    if several:
        said.append("Below, all heads as layer·head; under them the head of each layer that shows most.")
    if len(folded) < len(shown):
        said.append(f"Of {len(shown)} further heads {len(folded)} are here to be opened.")
    large = tuple(_large(layers[first], number, _title(layers, first, number), "attention"))
    columns = max(len(each.found) for each in layers.values())
    return Section(
        "What the heads attend to",
        tuple(said),
        charts=large,
        panels=tuple(_overview(layers)),
        scale=Scale("0", "1", "rows look, columns are looked at"),
        columns=columns if several else 0,
        folded=tuple(
            Panel(
                _title(layers, *place),
                (_strongest(layers[place[0]], place[1]),),
                tuple(_large(layers[place[0]], place[1], _title(layers, *place), f"attention-{index}")),
            )
            for index, place in enumerate(folded)
        ),
    )


def _title(layers: Mapping[str, TokenWeights], name: str, number: int) -> str:
    return f"Head {number}" if len(layers) == 1 else f"Layer {list(layers).index(name)}, head {number}"


def _large(weights: TokenWeights, number: int, title: str, name: str) -> Iterator[Chart]:
    """The head, and the same of the model itself."""
    yield _map(name, f"{title}, recovered", weights.words, weights.found[number])
    if weights.original is not None:
        yield _map(f"{name}-original", f"{title}, of the model", weights.words, weights.original[number])


def _map(name: str, title: str, words: tuple[str, ...], matrix: np.ndarray) -> TokenMap:
    best = np.argmax(matrix, axis=1)
    listed = "; ".join(
        f"{word} at {words[j]} ({matrix[i, j]:.2f})" for i, (word, j) in enumerate(zip(words, best, strict=True))
    )
    return TokenMap(
        name, title, f"Attention of {title.lower()}, what each token looks at most: {listed}.", words, matrix
    )


def _overview(layers: Mapping[str, TokenWeights]) -> Iterator[Panel]:
    for name, weights in layers.items():
        for number, matrix in enumerate(weights.found):
            title, layer = _title(layers, name, number), list(layers).index(name)
            chart = heat_map(f"overview-{layer}-{number}", f"{title}, recovered", matrix, 1.0, bare=True)
            if len(layers) > 1:  # of which many stand close together
                yield Panel(f"{layer}·{number}", (), (chart,))
            else:
                yield Panel(title, (_strongest(weights, number),), (chart,))


def _strongest(weights: TokenWeights, number: int) -> str:
    """The pair of different tokens with the largest weight beyond what the looked-at one has from all."""
    matrix = weights.found[number]
    beyond = matrix - np.mean(matrix, axis=0)
    np.fill_diagonal(beyond, -1.0)
    i, j = np.unravel_index(int(np.argmax(beyond)), beyond.shape)
    return f"{weights.words[i]} looks at {weights.words[j]}: {matrix[i, j]:.2f}"
