"""The weights of heads on the tokens of a sentence: what they are, their file, and which head shows most."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, floats
from keyhole.errors import FileError, UsageError
from keyhole.families import Family, FormHead, MultiHead, SingleHead
from keyhole.families.files import load_arrays, save_arrays
from keyhole.optional import on_demand

FAMILY = "attention-on-a-sentence"


@dataclass(frozen=True)
class TokenWeights:
    """What the heads of one layer attend to: row i of a head is the share of every token in what token i looks at."""

    words: tuple[str, ...]  # (length,)
    found: Floats  # (heads, length, length), of the recovered heads
    original: Floats | None = None  # the same of the model itself, its heads in the order of those found

    @property
    def apart(self) -> float | None:
        """The largest difference between the two."""
        return None if self.original is None else float(np.max(np.abs(self.found - self.original), initial=0.0))

    @property
    def focus(self) -> Floats:  # (heads,)
        """How far each head is from looking at all tokens alike, or at one of them whichever token looks.

        The mutual information of looking token and looked-at one, in nats: what the picture of a head shows.
        """
        rows = self.found / np.maximum(np.sum(self.found, axis=-1, keepdims=True), np.finfo(float).tiny)
        mean = np.mean(rows, axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(rows > 0, rows * np.log(rows / mean), 0.0)
        return np.asarray(np.sum(terms, axis=-1).mean(axis=-1))

    def looks(self, head: int) -> list[tuple[str, str, float]]:
        """Every token, the one that it gives most weight, and how much."""
        best = np.argmax(self.found[head], axis=1)
        return [
            (word, self.words[j], float(self.found[head, i, j]))
            for i, (word, j) in enumerate(zip(self.words, best, strict=True))
        ]

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        card: str = on_demand("report.notebook").card_of_weights(self)
        return card


def heads_of_any(params: Family) -> Sequence[SingleHead | FormHead]:
    """The heads of parameters, whatever is around them; UsageError where there are none."""
    if params.anatomy.heads and params.anatomy.form is None:
        return params.anatomy.heads
    return MultiHead.of(params).heads


def weights_of_heads(params: Family, tokens: Floats, *, causal: bool) -> Floats:  # (length, width) -> (heads, n, n)
    """The weights of all heads on these tokens; where `causal`, of every token on those up to it."""
    found = []
    for head in heads_of_any(params):
        own = head.like(tokens)
        if not causal:
            found.append(floats(own.attention.weights(own.form.logits(tokens[None], tokens[None])))[0])
            continue
        weights = np.zeros((len(tokens), len(tokens)))
        for last in range(len(tokens)):
            seen = tokens[None, : last + 1]
            logits = own.form.logits(seen, seen[:, -1, :])
            weights[last, : last + 1] = floats(own.attention.weights(logits)).reshape(-1)
        found.append(weights)
    return np.stack(found)


def matched_order(found: Floats, original: Floats) -> Floats | None:
    """The original heads in the order of those found; None where there are not as many."""
    if found.shape != original.shape:
        return None
    cost = np.max(np.abs(found[:, None] - original[None]), axis=(2, 3))
    return original[linear_sum_assignment(cost)[1]]


def save_weights(path: str | PathLike[str], sentence: str, layers: Mapping[str, TokenWeights]) -> None:
    """Write the weights of layers, by their names, as one safetensors file."""
    arrays: dict[str, Any] = {}
    for name, each in layers.items():
        arrays[f"{name}.found"] = each.found.astype(np.float32)
        if each.original is not None:
            arrays[f"{name}.original"] = each.original.astype(np.float32)
    words = next(iter(layers.values())).words if layers else ()
    save_arrays(path, FAMILY, arrays, {"sentence": sentence, "words": json.dumps(list(words))})


def load_weights_on(path: str | PathLike[str]) -> tuple[str, dict[str, TokenWeights]]:
    """What `save_weights` wrote; FileError for anything else."""
    family, arrays = load_arrays(path)
    try:
        sentence, words = str(arrays.pop("sentence")), json.loads(str(arrays.pop("words")))
        if family != FAMILY or not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UsageError("no weights on words")
        layers = {}
        for name in [each.removesuffix(".found") for each in arrays if each.endswith(".found")]:
            found, original = (arrays.get(f"{name}.{which}") for which in ("found", "original"))
            for each in (found, original):
                if each is not None and (each.ndim != 3 or each.shape[1:] != (len(words), len(words))):
                    raise UsageError(f"{name} has weights of shape {each.shape} on {len(words)} words")
                if each is not None and not np.all(np.isfinite(each)):
                    raise UsageError(f"{name} has weights that are no numbers")
            assert found is not None
            layers[name] = TokenWeights(tuple(words), floats(found), None if original is None else floats(original))
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} does not hold what heads attend to ({error}): make it again") from error
    return sentence, layers
