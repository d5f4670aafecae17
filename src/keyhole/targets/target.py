"""An oracle to recover, with what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from keyhole.errors import FileError, UsageError
from keyhole.families import Family
from keyhole.gauge import distance
from keyhole.noise import Noise
from keyhole.oracles import Oracle, Wrapper


@dataclass(frozen=True)
class Target:
    """An oracle to recover. A journal is bound to the oracle's name, which therefore identifies the oracle."""

    text: str  # names the oracle again
    oracle: Oracle
    label: str  # what the oracle is, in words
    truth: Family | None = None  # its parameters, where they are known

    def with_declared(self, max_norm: float | None = None, noise: Noise | None = None) -> Target:
        """A copy with this bound on token norms and this noise in its signature."""
        signature = self.oracle.signature
        if max_norm is not None:
            own = signature.max_norm
            if own is not None and max_norm > own:
                raise UsageError(f"max_norm {max_norm} exceeds the {own} that the target {self.text} allows")
            signature = signature.with_changes(max_norm=max_norm)
        if noise is not None:
            signature = signature.with_changes(noise=noise)
        return self if signature is self.oracle.signature else replace(self, oracle=Wrapper(self.oracle, signature))

    def distance(self, params: Family | None) -> float | None:
        """How far parameters are from the truth; None where it is not known, or they are of another family."""
        if self.truth is None or params is None or params.family != self.truth.family:
            return None
        if params.tells_labels and params.words != self.truth.words:  # of other classes
            return None
        return distance(params, self.truth)


def path_of(text: str, example: str) -> Path:
    """The path that a text names; UsageError shows the example where it names none."""
    if not text:
        raise UsageError(f"the target names no file; write {example}")
    return Path(text).expanduser()


def read_bytes(path: Path) -> bytes:
    """The content of a file; FileError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class Knob:
    """One number a demo can be given."""

    kind: type[int] | type[float]
    default: float | None
    least: float
    most: float = float("inf")

    def read(self, text: str) -> float:
        """The number in `text`; ValueError where it cannot be meant."""
        number = self.kind(text)
        if not self.least <= number <= self.most or number == float("inf"):
            raise ValueError(f"{text} is not {self}")
        return number

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        upper = "" if self.most == float("inf") else f" to {self.most:g}"
        default = "" if self.default is None else f", {self.default:g} if left out"
        return f"{kind} from {self.least:g}{upper}{default}"


@dataclass(frozen=True)
class Choice:
    """One of some names a demo can be given."""

    names: tuple[str, ...]
    default: None = None

    def read(self, text: str) -> str:
        """The name in `text`; ValueError where it is none of them."""
        if text not in self.names:
            raise ValueError(f"{text} is not {self}")
        return text

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


# How a value behind a key is read (ValueError or KeyError where it cannot be), and what `str` of says what it is.
Keys = Mapping[str, tuple[Callable[[str], Any], object]]


def read_options(text: str, keys: Keys, owner: str) -> dict[str, Any]:
    """The values in a text such as `key=value&key=value`; UsageError says what is wrong and what is possible."""
    try:
        pairs = parse_qsl(text.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(text))
    except ValueError as error:
        raise UsageError(f"cannot read {text!r} ({error}): write key=value&key=value") from error
    given: dict[str, Any] = {}
    for name, value in pairs:
        if name not in keys:
            possible = "; ".join(f"{key}: {words}" for key, (_, words) in keys.items())
            raise UsageError(f"{owner} has no {name!r}; possible: {possible}")
        if name in given:
            raise UsageError(f"{owner} was given {name!r} twice: keep one")
        read, words = keys[name]
        try:
            given[name] = read(value)
        except (ValueError, KeyError):
            raise UsageError(f"{name}={value} makes no sense in {owner}: {name} is {words}") from None
    return given
