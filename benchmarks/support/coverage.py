"""One part of one layer of a random model: opened, compared with the model's own run, recovered, and judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.architectures import random_model
from keyhole.arrays import Array, to_numpy
from keyhole.errors import KeyholeError
from keyhole.oracles import Oracle, Wrapper
from keyhole.oracles.transformers.own_run import first, hidden_place, own_inputs, run
from keyhole.oracles.transformers.places import Place
from keyhole.oracles.transformers.precision import computed_in_full

# Parts by what the table calls them; attention with its residual is asked as attention, its last token added.
PARTS = {
    "attention": "attention",
    "with residual": "attention",
    "attention-block": "attention-block",
    "layer": "layer",
}
# Answers of oracle and model may differ by so many roundings; a function is recovered up to this part of its answers.
ROUNDINGS, RECOVERED = 1e4, 1e-6
# Fresh sequences of each of these lengths, and tokens of a run of the model.
LENGTHS, EACH, RUN = (1, 2, 3, 5, 8), 6, 12
# Seconds and queries; a processor that does other things too takes several times as long.
MAX_SECONDS, BUDGET = 600.0, 20_000


@dataclass(frozen=True)
class Cell:
    """What became of one part."""

    opened: bool
    equal: bool
    outcome: str
    error: float
    certified: bool
    queries: int

    @property
    def recovered(self) -> bool:
        """Whether the certified function is that of the model."""
        return self.certified and self.error <= RECOVERED

    @property
    def wrongly(self) -> bool:
        """Whether something is certified that is not the function."""
        return self.certified and not self.error <= RECOVERED


class WithResidual(Wrapper):
    """An oracle with its last token added to every answer."""

    def answer(self, tokens: Array) -> Array:
        return self.inner(tokens) + tokens[:, -1, :]


def measure(name: str, part: str, std: float, seed: int = 0) -> Cell:
    """One cell of the table."""
    model = random_model(name, seed, std)
    try:
        opened = kh.TransformersOracle(model, 0, PARTS[part], precision="float64")  # type: ignore[arg-type]
    except KeyholeError as error:
        return Cell(False, False, f"refused: {error}", float("nan"), False, 0)
    given, expected = within(opened.place, part)
    oracle: Oracle = WithResidual(opened) if part == "with residual" else opened
    size = float(np.max(np.abs(expected)))
    off = float(np.max(np.abs(to_numpy(oracle(given)) - expected)))
    equal = off <= ROUNDINGS * np.finfo(float).eps * size if part != "attention-block" else True  # compared at opening
    result = kh.recover(oracle, seed=seed, throw=False, budget=BUDGET, max_seconds=MAX_SECONDS)
    sets = [(given, to_numpy(oracle(given)) if part == "attention-block" else expected)]
    rng = np.random.default_rng([seed, 1])
    for length in LENGTHS:
        tokens = oracle.signature.space.asarray(rng.standard_normal((EACH, length, oracle.signature.width)))
        sets.append((tokens, to_numpy(oracle(tokens))))
    error = float("nan") if result.params is None else max(_error(result.params, *each) for each in sets)
    return Cell(True, equal, result.outcome.name, error, result.certified, result.stats.queries)


def within(place: Place, part: str) -> tuple[Any, np.ndarray]:
    """What the part was given in a run of the model of its own, and what it answered at the last position."""
    begin, end = (place.layer, place.layer) if part in ("layer", "attention-block") else (place.entries[0], place.exit)
    given: list[Any] = []
    answered: list[Any] = []

    def note(_module: Any, args: Any, named: Any) -> None:
        where = hidden_place(args, named)
        if where is not None:
            given.append(named[where] if isinstance(where, str) else args[where])

    def hooks() -> list[Any]:
        return [
            begin.register_forward_pre_hook(note, with_kwargs=True),
            end.register_forward_hook(lambda _module, _args, outputs: answered.append(first(outputs))),
        ]

    with computed_in_full():
        run(place.model, own_inputs(place.model, 2, RUN, seed=7), hooks)
    tokens = given[0].detach()
    last = to_numpy(answered[0].detach())[:, -1]
    return tokens, last + to_numpy(tokens)[:, -1] if part == "with residual" else last


def _error(params: Any, tokens: Any, expected: np.ndarray) -> float:
    found = np.asarray(params(to_numpy(tokens)))
    if found.shape != expected.shape:
        return float("inf")
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
