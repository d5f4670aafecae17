"""Attention of which only a label is told: the sign of its answer, or the largest of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.errors import UsageError
from keyhole.families.base import Anatomy, Family
from keyhole.families.files import register
from keyhole.families.multi_head import MultiHead
from keyhole.families.single_head import SingleHead

SIGNS = (-1, 1)
# A change of a part shows in a label if it may move the answer by so many times its distance from the boundary.
FLIPS = 3.0
# Labels are sure so many radii from the boundary: radii of entries add in quadrature, and held-out queries lie close.
SURE = 4.0
# Sequences are moved onto a boundary by steps of so many sizes, refined so often, and are then off it by parts of the
# step between these powers of ten.
GRID, REFINED, PARTS = 33, 8, (0.5, 5.0)


@register
@dataclass(frozen=True, eq=False)
class Labels(Family):
    """The label of attention(X): of one output its sign, labels[1] above zero, else of several the largest's label.

    A threshold b is an output bias −b. A positive factor of values and bias changes no label, nor does a row that is
    added to the values of all outputs.
    """

    attention: SingleHead | MultiHead
    labels: tuple[int, ...] = SIGNS  # what the oracle answers: below and above zero, or one label per output

    family: ClassVar[str] = "labels"

    def __post_init__(self) -> None:
        if not isinstance(self.attention, SingleHead | MultiHead):
            raise UsageError("Labels.attention must be a SingleHead or a MultiHead")
        object.__setattr__(self, "labels", tuple(int(label) for label in self.labels))
        wanted = 2 if self.attention.outputs is None else self.attention.outputs
        if len(self.labels) != wanted or len(set(self.labels)) != wanted:
            raise UsageError(f"Labels needs {wanted} different labels, not {self.labels}")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.attention.width

    @property
    def outputs(self) -> int | None:
        """An answer is one label."""
        return None

    @property
    def label_names(self) -> tuple[int, ...]:
        """What is answered."""
        return self.labels

    def numbers(self) -> SingleHead | MultiHead:
        """The attention."""
        return self.attention

    @property
    def heads(self) -> tuple[SingleHead, ...]:
        """Those of the attention."""
        return self.attention.anatomy.heads

    @property
    def words(self) -> dict[str, str]:
        """The family of the attention and its words, and the labels."""
        labels = ",".join(map(str, self.labels))
        return {"attention_family": self.attention.family, "labels": labels, **self.attention.words}

    @property
    def span(self) -> int:
        """How far two labels can be apart."""
        return max(self.labels) - min(self.labels)

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) whole numbers
        """The labels of a batch of sequences."""
        xp, answers = namespace(tokens), self.attention(tokens)
        ranks = xp.astype(answers > 0, xp.int64) if answers.ndim == 1 else xp.argmax(answers, axis=-1)
        table = xp.asarray(self.labels, dtype=xp.int64, device=tokens.device)
        return xp.take(table, ranks, axis=0)

    def _margins(self, tokens: Array, moves: Array) -> Array:  # -> (batch,)
        """What is left between the winner and any other answer when every answer moves against it; at most 0: none."""
        xp, answers = namespace(tokens), self.attention(tokens)
        if answers.ndim == 1:
            return xp.abs(answers) - moves
        winner = xp.argmax(answers, axis=-1)[:, None]
        is_winner = xp.arange(answers.shape[1], device=tokens.device)[None, :] == winner
        own = xp.max(xp.where(is_winner, moves, xp.zeros_like(moves)), axis=-1)[:, None]
        left = (xp.max(answers, axis=-1)[:, None] - answers) - (own + moves)
        return xp.min(xp.where(is_winner, xp.full_like(left, xp.inf), left), axis=-1)

    def _unsure(self, tokens: Array, moves: Array) -> Array:  # -> (batch,): 0, or how far labels can be apart
        xp = namespace(tokens)
        margins = self._margins(tokens, moves)
        wide = xp.full_like(margins, float(self.span))
        return xp.where(margins > 0, xp.zeros_like(margins), wide)  # nan is unsure too

    def padded(self, absent: Array) -> Labels | None:  # (batch, length)
        """The labels of attention with no weight on what pads sequences; None where it counts tokens or places."""
        attention = self.attention.padded(absent)
        return None if attention is None else Labels(attention, self.labels)

    def error_bar(self, radius: Labels, tokens: Array, rounding: float) -> Array:  # -> (batch,)
        """0 where the attention is farther from the boundary than its radius, else how far labels can be apart."""
        moves = self.attention.error_bar(radius.attention, tokens, rounding)  # type: ignore[arg-type]
        return self._unsure(tokens, SURE * moves)

    def effects(self, change: Labels, tokens: Array) -> Iterator[tuple[str, Array]]:
        """How far labels are apart where a change of each part alone, of the size of `change`, may flip them."""
        for name, moves in self.attention.effects(change.attention, tokens):  # type: ignore[arg-type]
            if name.startswith("value") and self.width == 1:  # of one number nothing but its sign shows, in every label
                yield name, namespace(tokens).zeros_like(tokens[:, 0, 0]) + self.span
                continue
            yield name, self._unsure(tokens, moves / FLIPS)

    def onto_boundary(self, tokens: Floats, rng: np.random.Generator) -> Floats:  # (length, width) -> (length, width)
        """All tokens moved by one vector until two labels are nearly as likely, off by a random part of the way."""
        answers = np.atleast_2d(floats(self.attention(tokens[None])).T).T  # (1, outputs)
        values = np.sum([floats(head.value_columns) for head in self.heads], axis=0)
        one, two = np.argsort(-answers[0])[:2] if answers.shape[1] > 1 else (0, None)
        direction = values[:, one] - (0.0 if two is None else values[:, two])
        size = float(direction @ direction)
        if not size > 0:
            return tokens

        def margins(steps: Floats, attention: Family = self.attention) -> Floats:  # (steps,) -> (steps,)
            moved = floats(attention(tokens[None] + (steps[:, None] * direction)[:, None, :]))
            return moved if two is None else moved[:, one] - moved[:, two]

        # Where all tokens weigh the same the answer moves by the step times the squared norm.
        margin = float(margins(np.zeros(1))[0])
        steps = -margin / size * np.linspace(0.0, 4.0, GRID)
        for _ in range(REFINED):
            signs = np.sign(margins(steps))
            (jumps,) = np.nonzero(signs[1:] != signs[:-1])
            if not jumps.size:
                return tokens
            steps = np.linspace(steps[jumps[0]], steps[jumps[0] + 1], GRID)
        # What attention does there, or the way there: parts of either.
        pulled = float(margins(steps[:1], self.attention.without_attention())[0]) / size
        off = rng.choice([pulled, steps[0], -steps[0]]) * 10.0 ** -rng.uniform(*PARTS)
        return np.asarray(tokens + (steps[0] + off) * direction)

    def as_single_tokens(self, tokens: Array) -> Array | None:  # (batch, length, width) -> (batch, width)
        """Those of the attention."""
        return self.attention.as_single_tokens(tokens)

    def simplest(self) -> Labels:
        """The parameters in the smallest family that holds them: one head inside is a SingleHead."""
        return replace(self, attention=self.attention.simplest())

    def without_attention(self) -> Labels:
        """A copy in which all tokens weigh the same."""
        return replace(self, attention=self.attention.without_attention())

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest values."""
        return self.attention.loudest()

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`; inf when none has any."""
        return self.attention.token_norm(size)

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, as the attention names them."""
        return self.attention.arrays()

    @classmethod
    def of_arrays(cls, *, attention_family: str = "", labels: str = "", **arrays: Array) -> Labels:
        """Labels of the attention of these arrays, of a family named in words."""
        kinds: dict[str, type[SingleHead | MultiHead]] = {each.family: each for each in (SingleHead, MultiHead)}
        if attention_family not in kinds:
            raise TypeError(f"labels are of no attention of the family {attention_family!r}")
        return cls(kinds[attention_family].of_arrays(**arrays), tuple(int(label) for label in labels.split(",")))

    @property
    def anatomy(self) -> Anatomy:
        """The heads of the attention."""
        inner = self.attention.anatomy
        what = "the sign" if self.attention.outputs is None else f"the largest of {self.attention.outputs} outputs"
        return replace(inner, title=f"{inner.title}, of which {what} is told")

    @property
    def counting_bound(self) -> int:
        """As many labels as there are numbers: a label holds a bit of one of them, so accuracy multiplies this."""
        return int(sum(np.prod(array.shape) for array in self.arrays().values()))
