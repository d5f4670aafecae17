"""From logits to the weights of tokens, by four parts: length law, link, position bias and normaliser."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Protocol

from keyhole.arrays import Array, namespace
from keyhole.errors import FileError, UsageError

# Logits and energies are (batch, length) for one query per sequence, (batch, queries, length) for several, which are
# then the tokens themselves in their order.


class Link(Protocol):
    """Energies of tokens, the logarithms of what the normaliser weighs, from their logits, entry by entry.

    A length law is of this kind too: logits from logits, by the length of the sequence.
    """

    name: ClassVar[str]

    def __call__(self, logits: Array) -> Array:
        """The energies."""
        ...

    def slopes(self, logits: Array) -> Array | float:
        """The derivative of each energy by its logit."""
        ...


class PositionBias(Protocol):
    """What the distance of a token from its query adds to its energy; −inf hides the token."""

    name: ClassVar[str]

    def __call__(self, energies: Array) -> Array:
        """The energies with what is added."""
        ...


class Normaliser(Protocol):
    """Weights of tokens from their energies."""

    name: ClassVar[str]

    def __call__(self, energies: Array) -> Array:
        """The weights, along the last axis."""
        ...

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:  # (…, n), (…, n, p), (…, p) -> (…, n, p)
        """The derivative of every answer Σ weight·value by the energy of every token."""
        ...


@dataclass(frozen=True)
class Exp:
    """Weights in proportion to exp(logit): energies are logits."""

    name: ClassVar[str] = "exp"

    def __call__(self, logits: Array) -> Array:
        """The logits."""
        return logits

    def slopes(self, logits: Array) -> Array | float:  # noqa: ARG002
        """One."""
        return 1.0


@dataclass(frozen=True)
class NoLengthLaw(Exp):
    """Logits as they are, whatever the length."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True)
class NoPositionBias:
    """Every distance is like every other."""

    name: ClassVar[str] = "none"

    def __call__(self, energies: Array) -> Array:
        """The energies."""
        return energies


@dataclass(frozen=True)
class Sum:
    """exp(energy) over the sum of it: weights add up to one."""

    name: ClassVar[str] = "sum"

    def __call__(self, energies: Array) -> Array:
        """The weights, along the last axis."""
        xp = namespace(energies)
        weights = xp.exp(energies - xp.max(energies, axis=-1, keepdims=True))
        return weights / xp.sum(weights, axis=-1, keepdims=True)

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:
        """weight·(value − answer)."""
        return weights[..., None] * (values - answers[..., None, :])


@dataclass(frozen=True)
class Attention:
    """How logits become weights: normaliser(position_bias(link(length_law(logits))))."""

    link: Link = Exp()
    normaliser: Normaliser = Sum()
    position_bias: PositionBias = NoPositionBias()
    length_law: Link = NoLengthLaw()

    def weights(self, logits: Array) -> Array:
        """The weights of tokens, along the last axis."""
        return self.normaliser(self.position_bias(self.link(self.length_law(logits))))

    def slopes(self, logits: Array) -> Array | float:
        """The derivative of each energy by its logit."""
        return self.length_law.slopes(logits) * self.link.slopes(self.length_law(logits))

    @property
    def words(self) -> dict[str, str]:
        """The parts that are not those of softmax attention, as text."""
        found = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {kind: json.dumps([own.name, asdict(own)]) for kind, (own, usual) in found.items() if own != usual}

    @classmethod
    def of_words(cls, words: dict[str, str]) -> Attention:
        """The attention of words as `words` gives them; FileError for a part that is not known."""
        return cls(**{kind: _part(kind, text) for kind, text in words.items()})  # type: ignore[arg-type]


SOFTMAX = Attention()
KINDS = tuple(each.name for each in fields(Attention))
PARTS: dict[tuple[str, str], type] = {
    (kind, getattr(SOFTMAX, kind).name): type(getattr(SOFTMAX, kind)) for kind in KINDS
}


def register(kind: str, part: type) -> None:
    """Make a part of this kind (link, normaliser, position_bias, length_law) one that files may name."""
    if kind not in KINDS:
        raise UsageError(f"there is no part {kind!r} of attention; known: {', '.join(KINDS)}")
    PARTS[kind, part.name] = part  # type: ignore[attr-defined]


def _part(kind: str, text: str) -> Link | Normaliser | PositionBias:
    try:
        name, numbers = json.loads(text)
    except ValueError as error:
        raise FileError(f"names the {kind.replace('_', ' ')} of a head in words that cannot be read") from error
    if (kind, name) not in PARTS:
        known = ", ".join(each for own, each in PARTS if own == kind)
        raise FileError(
            f"holds the unknown {kind.replace('_', ' ')} {name!r}; known: {known}: upgrade Keyhole, or register the "
            "part first where it is yours"
        )
    made: Link | Normaliser | PositionBias = PARTS[kind, name](**numbers)
    return made
