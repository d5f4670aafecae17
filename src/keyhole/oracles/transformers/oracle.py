"""One layer of a transformers model as an oracle that takes vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from keyhole.arrays import FLOAT32, Array, to_numpy
from keyhole.errors import UsageError
from keyhole.families import MultiHead
from keyhole.families.torch_layouts import heads_of
from keyhole.noise import Noise
from keyhole.oracles.positions import Positions
from keyhole.oracles.torch import TorchOracle, convert, identity
from keyhole.oracles.transformers.folder import open_model
from keyhole.oracles.transformers.hints import hints_of
from keyhole.oracles.transformers.parts import PARTS, LayerPart
from keyhole.oracles.transformers.places import place_in
from keyhole.oracles.transformers.precision import (
    Precision,
    check_precision,
    computed_in,
    computed_in_full,
    is_narrowed,
)
from keyhole.oracles.transformers.surroundings import Surroundings

Part = Literal["attention", "attention-block", "layer"]
# Sequences on which heads of the weights must answer as the module does, and how many roundings they may be off.
TRIAL, ROUNDINGS = (4, 6), 1e4


class TransformersOracle(TorchOracle):
    """One layer of a transformers model, asked with vectors through the model's own code.

    `model` is a transformers model in eval mode, or a folder that holds one; nothing is ever fetched, and no code of
    the folder runs. `layer` counts from 0, from the end if negative; layers that a model shares count once. `part` is

    - "attention": heads and output projection, without residual and normalisation;
    - "attention-block": the same with the residual and the normalisation that the model has, before or behind;
    - "layer": the whole layer, the feed-forward part included.

    Layers are found by running the model once, whatever its architecture. Masks, windows, positions and rotary tables
    are those that the model gives the layer for sequences of the length that is asked. When it is opened, the oracle is
    compared with a run of the model, and refused where it differs. `answers="labels"`: only the number of the largest
    output is told. The other arguments are those of `TorchOracle`; the dtype is that of the stored weights unless
    given.

    Many models compute softmax, norms or rotary tables in float32 whatever their weights are. Where that shows, answers
    are known to have no more digits. `precision="float64"` asks a copy in float64, and all of it in full.
    """

    def __init__(
        self,
        model: Any,
        layer: int | Literal["all"],
        part: Part = "attention",
        *,
        positions: Positions = "last",
        dtype: Any = None,
        precision: Precision = None,
        device: Any = None,
        max_norm: float | None = None,
        max_length: int | None = None,
        noise: Noise | str | None = None,
        batch_limit: int | None = None,
        answers: Literal["numbers", "labels"] = "numbers",
        name: str | None = None,
    ) -> None:
        if part not in PARTS:
            raise UsageError(f"part must be one of {', '.join(PARTS)}, not {part!r}")
        if layer == "all":
            raise UsageError("one oracle is one layer: keyhole.recover_model(model) recovers all of them")
        check_precision(precision, dtype)
        dtype = precision or dtype
        model = convert(open_model(model, type(self).__name__), dtype, device)
        self.precision, self.part = precision, part
        with computed_in(precision):
            self.place = place_in(model, layer)
            self._asked: LayerPart = PARTS[part](self.place)
            self._surroundings = Surroundings(self.place.model, self._asked.module)
            self._told = _largest if answers == "labels" else _all
            super().__init__(
                self._asked.module,
                self.place.width,
                positions=positions,
                dtype=dtype,
                device=device,
                batch_first=True,
                call=lambda _module, tokens: self._told(self._ask_part(tokens, self._surroundings)),
                max_norm=max_norm,
                max_length=max_length if max_length is not None else self._surroundings.longest(),
                noise=noise,
                batch_limit=batch_limit,
                answers=answers,
                name=name,
            )
            self._asked.check(self._surroundings, self.signature.space.eps)
        in_float64 = self.signature.space.dtype == self.signature.space.xp.float64
        self.narrowed = precision is None and in_float64 and self._is_narrowed()
        if self.narrowed:
            space = replace(self.signature.space, coarse=max(self.signature.space.coarse, FLOAT32))
            self.signature = self.signature.with_changes(space=space)
        if name is None:
            where = "" if isinstance(positions, str) else f" at position {positions}"
            where += " | labels" if answers == "labels" else ""
            where += " | in full" if precision else ""
            self.name = f"{identity(self.module)} {part}{self._surroundings.words}{where}"

    def answer(self, tokens: Array) -> Array:
        """Ask the layer, in the precision that was asked for."""
        with computed_in(self.precision):
            return super().answer(tokens)

    def facts(self) -> dict[str, Any]:
        """Whether answers in float64 have the digits of float32, and what to do about it."""
        if not self.narrowed:
            return {}
        return {"precision": "the model computes in float32 inside; precision='float64' asks it in full"}

    @cached_property
    def hints(self) -> tuple[Mapping[str, Any], ...]:
        """What parts its attention may have, by its config and modules: to choose what is tried, and no more."""
        with computed_in(self.precision):
            return hints_of(self.place, self._surroundings, self, block=self.part == "attention-block")

    def _ask_part(self, tokens: Array, surroundings: Surroundings) -> Any:
        return self._asked.ask(tokens, surroundings.of(*tokens.shape[:2]))

    def _is_narrowed(self) -> bool:
        """Whether the model, in float64, answers otherwise when all of it is computed so."""
        drawn = np.random.default_rng(0).standard_normal((*TRIAL, self.signature.width))
        tokens = self.signature.space.asarray(drawn)
        answers = self._ask_part(tokens, self._surroundings)
        with computed_in_full():
            in_full = self._ask_part(tokens, Surroundings(self.place.model, self._asked.module))
        return is_narrowed(answers, in_full)

    def heads(self) -> MultiHead:
        """The heads inside, to compare a recovery with; UsageError where the part is more than a sum of heads."""
        if self.part != "attention":
            raise UsageError(f"the part {self.part!r} is more than its heads: ask the part 'attention' for them")
        heads = heads_of(self.module)
        space = self.signature.space
        drawn = np.random.default_rng(0).standard_normal((*TRIAL, self.signature.width))
        tokens = space.asarray(drawn)
        answers = self(tokens) if self.signature.positions == "last" else self(tokens)[:, -1, ...]
        off = abs(to_numpy(answers) - heads(to_numpy(tokens)))
        if not float(off.max()) <= ROUNDINGS * space.eps * float(abs(to_numpy(answers)).max()):
            raise UsageError(
                f"{type(self.module).__name__} is no sum of heads: its weights answer otherwise than it does, by "
                f"{float(off.max()):.2g}, so that positions, a window, norms or caps count"
            )
        return heads


def _all(outputs: Any) -> Any:
    return outputs


def _largest(outputs: Any) -> Any:  # (batch, length, outputs) -> (batch, length)
    return outputs.argmax(dim=-1)
