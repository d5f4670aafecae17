"""Logits of tokens beside what their distances add, which a token and its opposite in one place tell apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import KnownHeads
from keyhole.methods.multi_head.vector.scores_last import ScoreReader
from keyhole.methods.multi_head.vector.values import VectorValues


@dataclass
class Offsets:
    """Logits of a copy of the last token at some distances over what all copies from `between` on weigh together."""

    between: int
    values: Floats  # (heads, k, last tokens), the nearest last, at distance between + 1; nan where not asked
    errors: Floats  # deviations

    def asked(self) -> Integers:
        """Which last tokens were."""
        return np.flatnonzero(~np.isnan(self.values[0, 0])).astype(np.int64)

    @property
    def distances(self) -> Integers:  # (k,)
        """Of each copy."""
        return self.between + np.arange(self.values.shape[1], 0, -1, dtype=np.int64)

    def drawn(self, rng: np.random.Generator) -> Offsets:
        """The same with errors as large as those it may have, of their own or common to all last tokens."""
        common = rng.standard_normal((*self.values.shape[:2], 1))
        drawn = self.errors * (common + rng.standard_normal(self.values.shape))
        return Offsets(self.between, self.values + drawn, self.errors)


# Offsets make some weights small, which shorter tokens do not change: errors may be so many times the usual one.
UNUSUAL = 2.0**12


class BiasedReader(ScoreReader):
    """Forms of all heads less offsets, which are asked once for every last token and number of tokens between."""

    unusual = UNUSUAL

    def __init__(self, queries: VectorQueries, start: KnownHeads, values: VectorValues) -> None:
        super().__init__(queries, start, values)
        self.offsets: dict[int, Offsets] = {}
        self._first: dict[int, Floats] = {}  # forms of the first block and their errors: (2, heads, k, last tokens)

    def ask(self, block: int, columns: Integers) -> Steps[tuple[Floats, Floats]]:  # -> twice (heads, k, columns)
        """Forms u·(M·g + c) of a block of tokens with some of the last tokens, and their radii."""
        between = self.queries.between
        yield from self._ask_offsets(columns)
        if block == 0:
            forms, errors = self._first[between][:, :, :, columns]
            return forms, errors
        logits, errors, scale = yield from self.ask_logits(block, columns)
        offsets, size = self.offsets[between], self.blocks[block].size
        forms = (logits - offsets.values[:, -size:, columns]) / scale
        return forms, np.hypot(errors, offsets.errors[:, -size:, columns]) / scale

    def _ask_offsets(self, columns: Integers) -> Steps[None]:
        """Those beside last tokens that were not asked yet."""
        between = self.queries.between
        if between not in self.offsets:
            shape = (2, self.heads, self.blocks[0].size, self.width + 1)
            self.offsets[between] = Offsets(between, *np.full(shape, np.nan))
            self._first[between] = np.full(shape, np.nan)
        offsets = self.offsets[between]
        new = columns[np.isnan(offsets.values[0, 0, columns])]
        if not new.size:
            return
        one, one_errors, scale = yield from self.ask_logits(0, new)
        two, two_errors, other = yield from self.ask_logits(0, new, sign=-1.0)
        total = scale + other
        offsets.values[:, :, new] = (one * other + two * scale) / total
        offsets.errors[:, :, new] = np.hypot(one_errors * other, two_errors * scale) / total
        self._first[between][0][:, :, new] = (one - two) / total
        self._first[between][1][:, :, new] = np.hypot(one_errors, two_errors) / total
