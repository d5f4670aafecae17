"""Attention by parts: length law × link × position bias × normaliser, and the parts that files may name."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any

from keyhole.arrays import Array, like, namespace
from keyhole.errors import FileError, UsageError
from keyhole.families.parts.length_laws import LengthTable, LogLength, NoLengthLaw, RootLength
from keyhole.families.parts.links import Exp, Linear, Relu, Sigmoid, Softcap, Squared, Tabulated
from keyhole.families.parts.normalisers import Count, Entmax, NoNormaliser, PlusOne, Sink, Sparsemax, Sum, TopK
from keyhole.families.parts.position_biases import Alibi, Causal, DistanceTable, NoPositionBias, Window
from keyhole.families.parts.protocols import LARGEST_EXPONENT, Link, Normaliser, Part, PositionBias

# Masses that are powers of logits follow their first-order change up to this factor, where the sum of masses moves by
# less than half of itself.
FIRST_ORDER, LOST_SUM = 2.0, 0.5

# Sigmoid weights stand by themselves: no learner reads them over a sum.
SIGMOID_BESIDE = ("none", "count")

_LINK, _NORMALISER, _POSITION_BIAS, _LENGTH_LAW = Exp(), Sum(), NoPositionBias(), NoLengthLaw()  # of a softmax


@dataclass(frozen=True)
class Attention:
    """How logits become weights: normaliser(position_bias(link(length_law(logits))))."""

    link: Link = _LINK
    normaliser: Normaliser = _NORMALISER
    position_bias: PositionBias = _POSITION_BIAS
    length_law: Link = _LENGTH_LAW
    absent: Array | None = field(default=None, compare=False)  # (batch, length) added to energies: −inf beside zeros

    def __post_init__(self) -> None:
        if self.link.is_power and not self.normaliser.takes_powers:
            raise UsageError(
                f"the normaliser {self.normaliser.name!r} orders tokens by their energies, which the link "
                f"{self.link.name!r} has none of: take the link 'exp'"
            )

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by kind."""
        return {kind: getattr(self, kind) for kind in KINDS}

    def arrays(self) -> dict[str, Array]:
        """The constants of all parts, by names such as link.cap."""
        return {f"{kind}.{name}": array for kind, part in self.parts.items() for name, array in part.arrays().items()}

    def with_arrays(self, named: dict[str, Array]) -> Attention:
        """A copy with other constants; TypeError for names that it does not have."""
        own: dict[str, dict[str, Array]] = {kind: {} for kind in KINDS}
        for path, array in named.items():
            kind, _, name = path.partition(".")
            if kind not in own or not name:
                raise TypeError(f"attention has no {path!r}")
            own[kind][name] = array
        return Attention(**{kind: part.with_arrays(own[kind]) for kind, part in self.parts.items()})  # type: ignore[arg-type]

    def like(self, tokens: Array) -> Attention:
        """A copy with constants in the library, dtype and device of `tokens`."""
        named = self.arrays()
        return self.with_arrays({name: like(array, tokens) for name, array in named.items()}) if named else self

    def check(self) -> None:
        """UsageError for constants out of their range, or that are no numbers."""
        for name, array in self.arrays().items():
            if bool(namespace(array).any(namespace(array).isnan(array))):
                raise UsageError(f"{name} is no number")
        for part in self.parts.values():
            part.check()

    @property
    def numbers(self) -> int:
        """How many constants there are."""
        return sum(part.numbers for part in self.parts.values())

    @property
    def is_softmax(self) -> bool:
        """Whether all parts are those of a softmax."""
        return self is SOFTMAX or self == SOFTMAX

    @property
    def can_pad(self) -> bool:
        """Whether tokens of no mass change nothing: how many there are and where does not count."""
        return (
            self.length_law == _LENGTH_LAW
            and self.position_bias == _POSITION_BIAS
            and type(self.normaliser) in (Sum, Sink)
            and not self.link.is_power
        )

    @property
    def ignores_shifts(self) -> bool:
        """Whether the same added to all logits of a sequence changes no weight."""
        return self.link == SOFTMAX.link and self.normaliser.ignores_shifts

    def scaled(self, logits: Array) -> Array:
        """Logits times what the length law says."""
        return self.length_law(logits)

    def energies(self, logits: Array) -> Array:
        """The energies of tokens."""
        energies = self.position_bias(self.link(self.length_law(logits)))
        if self.absent is None:
            return energies
        return energies + (self.absent if energies.ndim == 2 else self.absent[:, None, :])

    def weights(self, logits: Array) -> Array:
        """The weights of tokens, along the last axis."""
        signs = self.link.signs(self.length_law(logits))
        energies = self.energies(logits)
        return self.normaliser(energies) if signs is None else self.normaliser(energies, signs)

    def slopes(self, logits: Array) -> Array | float:
        """The derivative of each energy by its logit."""
        return self.length_law.slopes(logits) * self.link.slopes(self.length_law(logits))

    def energy_radii(self, logits: Array, radius: Array) -> Array:
        """How far energies are off where logits are by up to `radius`; at poles of power links to first order."""
        xp = namespace(logits)
        found = xp.abs(self.slopes(logits) * radius)
        if self.link == SOFTMAX.link or self.link.is_power:
            return found
        # A link that saturates bends: its slope here says little of tokens whose logits are far off.
        scaled, wide = self.length_law(logits), xp.abs(self.length_law.slopes(logits) * radius)
        here = self.link(scaled)
        ends = (scaled + wide, scaled - wide)
        found = reduce(xp.maximum, (xp.abs(self.link(each) - here) for each in ends), found)
        known = reduce(operator.and_, (self.link.is_known(each) for each in ends))
        return found if known is True else xp.where(known, found, xp.inf * xp.ones_like(found))

    def energy_rounding(self, logits: Array, rounding: float) -> Array | float:
        """How far an oracle's own rounding of its parts moves energies: a few digits of their size."""
        if self.is_softmax:
            return 0.0  # energies are logits, whose rounding is known
        xp, energies = namespace(logits), self.energies(logits)
        return rounding * xp.where(xp.isfinite(energies), xp.abs(energies), xp.zeros_like(energies))

    def constant_radii(self, changes: dict[str, Array], logits: Array) -> Array | float:
        """How far energies are off where constants are, other than those of the normaliser, by up to `changes`."""
        xp, scaled = namespace(logits), self.length_law(logits)
        total: Array | float = 0.0
        linked = self.link(scaled)
        for path, change in changes.items():
            kind, _, name = path.partition(".")
            if kind == "normaliser":
                continue
            part: Any = self.parts[kind]
            before = {"length_law": logits, "link": scaled, "position_bias": linked}[kind]
            apart = [part.moved(name, step)(before) - part(before) for step in (change, -change)]
            # Where nothing is to be seen, nothing moves.
            apart = [xp.abs(xp.where(xp.isfinite(part(before)), each, xp.zeros_like(each))) for each in apart]
            moved = xp.maximum(*apart)
            total = total + (self.energy_radii_of_scaled(scaled, moved) if kind == "length_law" else moved)
        return total

    def energy_radii_of_scaled(self, scaled: Array, radius: Array) -> Array:
        """How far energies are off where logits behind the length law are."""
        return Attention(self.link).energy_radii(scaled, radius)

    def weight_radii(self, changes: dict[str, Array], logits: Array, weights: Array) -> Array | float:
        """How far weights are off where the constants of the normaliser are by up to `changes`."""
        xp, total = namespace(logits), 0.0
        for path, change in changes.items():
            kind, _, name = path.partition(".")
            if kind == "normaliser":
                other = [replace(self, normaliser=self.normaliser.moved(name, step)) for step in (change, -change)]
                total = total + xp.maximum(*(xp.abs(each.weights(logits) - weights) for each in other))
        return total

    def answer_radii(  # (…, n), (…, n), (…, n, p), (…, p), (…, n) -> (…, p)
        self, logits: Array, weights: Array, values: Array, answers: Array, radii: Array, surely: bool = False
    ) -> Array:
        """How far answers move where energies do by up to `radii`; `surely` also where these are beyond any use."""
        xp = namespace(logits)
        energies = self.energies(logits)
        radii = xp.where(xp.isfinite(energies), radii, xp.zeros_like(radii))
        if not self.link.is_power:
            worst = xp.max(radii, axis=-1)
            bound = self.normaliser.bound(energies, weights, values, answers, radii)
            lost = 2 * worst > LARGEST_EXPONENT
            if not surely or self.is_softmax or not bool(xp.any(lost)):
                return bound
            # Any token may then have the weight of any other.
            farthest = xp.max(xp.abs(values - answers[..., None, :]), axis=-2)
            return xp.where(lost[..., None], xp.maximum(bound, farthest), bound)
        # A token whose logit may have the other sign may have the weight that it would have there.
        none = xp.all(weights == 0, axis=-1)
        weights = xp.where(radii >= 1, self.normaliser(energies), xp.abs(weights))
        pulls = xp.abs(self.normaliser.pulls(weights, values, answers))
        lost = xp.sum(xp.abs(weights) * radii, axis=-1) >= LOST_SUM
        unknown = xp.where(lost, xp.inf * xp.ones_like(radii[..., 0]), xp.zeros_like(radii[..., 0]))
        bound = FIRST_ORDER * xp.sum(pulls * radii[..., None], axis=-2) + unknown[..., None]
        if not self.normaliser.divides or not bool(xp.any(none)):
            return bound
        # Nothing over nothing: what an oracle makes of it is its own affair, mostly zero or the mean.
        return xp.where(
            none[..., None], xp.maximum(bound, xp.max(xp.abs(values - answers[..., None, :]), axis=-2)), bound
        )

    @property
    def words(self) -> dict[str, str]:
        """The parts that are not those of softmax attention, as text."""
        usual = SOFTMAX.parts
        return {kind: json.dumps([part.name, part.words]) for kind, part in self.parts.items() if part != usual[kind]}

    @classmethod
    def of_words(cls, words: dict[str, str], arrays: dict[str, Array]) -> Attention:
        """The attention of words and constants; FileError for a part that is not known."""
        own: dict[str, dict[str, Array]] = {kind: {} for kind in KINDS}
        for path, array in arrays.items():
            kind, _, name = path.partition(".")
            if kind not in words or not name:
                raise TypeError(f"a head has no {path!r}")
            own[kind][name] = array
        return cls(**{kind: _part(kind, text, own[kind]) for kind, text in words.items()})  # type: ignore[arg-type]


SOFTMAX = Attention()
KINDS = tuple(each.name for each in fields(Attention) if each.compare)
_OWN: dict[str, tuple[type[Part], ...]] = {
    "link": (Exp, Softcap, Sigmoid, Linear, Squared, Relu, Tabulated),
    "normaliser": (Sum, Sink, PlusOne, Count, NoNormaliser, Sparsemax, Entmax, TopK),
    "position_bias": (NoPositionBias, Alibi, DistanceTable, Window, Causal),
    "length_law": (NoLengthLaw, LogLength, RootLength, LengthTable),
}
PARTS: dict[tuple[str, str], type[Any]] = {(kind, part.name): part for kind, parts in _OWN.items() for part in parts}


def register(kind: str, part: type[Any]) -> None:
    """Make a part of this kind (link, normaliser, position_bias, length_law) one that files may name."""
    if kind not in KINDS:
        raise UsageError(f"there is no part {kind!r} of attention; known: {', '.join(KINDS)}")
    PARTS[kind, part.name] = part


def part_names(kind: str) -> list[str]:
    """The names of parts of a kind."""
    return [name for own, name in PARTS if own == kind]


def _part(kind: str, text: str, arrays: dict[str, Array]) -> Part:
    try:
        name, own = json.loads(text)
    except ValueError as error:
        raise FileError(f"names the {kind.replace('_', ' ')} of a head in words that cannot be read") from error
    if (kind, name) not in PARTS:
        raise FileError(
            f"holds the unknown {kind.replace('_', ' ')} {name!r}; known: {', '.join(part_names(kind))}: upgrade "
            "Keyhole, or register the part first where it is yours"
        )
    made: Part = PARTS[kind, name](**{**own, **arrays})
    return made
