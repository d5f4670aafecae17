"""Defences written as text, `round:3+clip:1`, and put around an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from keyhole.arrays import Array
from keyhole.audit.servers import Detection, Fresh, Projected, ReverseSigmoid, Unbent, UserNoise
from keyhole.errors import UsageError
from keyhole.noise import DIGITS, Noise
from keyhole.oracles import Budgeted, Cast, Labelled, Noisy, Oracle, Rounded, Wrapper

NONE = "none"
POSSIBLE = (
    f"{NONE}, clip:NORM, noise:DEVIATION, user-noise:DEVIATION, {', '.join(sorted(DIGITS))}, round:DECIMALS, "
    "reverse-sigmoid:STRENGTH, project:DIRECTIONS, labels, top:LABELS, detect:SHARE, budget:QUERIES, several joined by "
    "+, for example round:3+clip:1"
)


# Answers to clipped tokens are taken to be no larger than this.
LARGE = 16.0
# By field, in the order in which they are written: the text of it, and what it does in words.
FORMS = {
    "sigmoid": ("reverse-sigmoid:{}", "bending answers by a reverse sigmoid of {}"),
    "noise": ("noise:{}", "adding noise of {}"),
    "user_noise": ("user-noise:{}", "adding noise of {} fixed per user and query"),
    "dtype": ("{}", "answering in {}"),
    "decimals": ("round:{}", "rounding to {} decimals"),
    "labels": ("labels", "telling labels only"),
    "top": ("top:{}", "telling the {} largest labels only"),
    "clip": ("clip:{}", "clipping tokens to norm {}"),
    "directions": ("project:{}", "projecting tokens onto {} random directions"),
    "detect": ("detect:{}", "blocking clients with unusual queries ({} of honest ones)"),
    "limit": ("budget:{}", "allowing {:,} queries"),
}


@dataclass(frozen=True)
class Defence:
    """What a server does to tokens, answers and clients. The attacker knows all of it."""

    clip: float | None = None  # tokens longer than this are scaled down to it
    noise: float | None = None  # standard deviation of errors added to answers
    dtype: str | None = None  # that answers are rounded to
    decimals: int | None = None  # that answers are rounded to
    limit: int | None = None  # most queries a client may send
    labels: bool | None = None  # True: only the sign of an answer is told, or which of several outputs is largest
    user_noise: float | None = None  # standard deviation of errors that are fixed for a user and a query
    sigmoid: float | None = None  # strength of the reverse sigmoid that answers are bent by
    top: int | None = None  # so many of the largest outputs are told, in order
    detect: float | None = None  # share of honest queries that count as unusual
    directions: int | None = None  # that tokens are projected onto, drawn once and kept secret

    @property
    def text(self) -> str:
        """The defence as it is written, the same for the same defence."""
        return "+".join(self._parts(0)) or NONE

    @property
    def words(self) -> str:
        """What it does, as the beginning of a sentence."""
        return " and ".join(self._parts(1)) or "no defence"

    def _parts(self, form: int) -> Iterator[str]:
        for field, forms in FORMS.items():
            value = getattr(self, field)
            if value is not None:
                yield forms[form].format(_short(value) if isinstance(value, float) else value)

    @property
    def errors(self) -> Noise | None:
        """What the attacker knows of the errors this makes; None where it makes none."""
        if self.dtype is not None:
            return Noise.dtype(self.dtype)
        rounded = None if self.decimals is None else Noise.rounded(self.decimals)
        added = math.hypot(self.noise or 0.0, self.user_noise or 0.0)
        if not added:
            return rounded
        noisy = Noise.gaussian(added)
        if rounded is None:
            return noisy
        if rounded.deviation > noisy.deviation:  # noise moves answers across the steps of the rounding
            return Noise.bounded(rounded.radius + noisy.radius)
        return Noise.gaussian(math.hypot(noisy.deviation, rounded.deviation))

    @property
    def tells_labels(self) -> bool:
        """Whether labels are told and no numbers."""
        return bool(self.labels or self.top)

    @property
    def changes_tokens(self) -> bool:
        """Whether other tokens reach the oracle behind it, or come to it from an attacker."""
        return (self.clip, self.directions, self.user_noise) != (None, None, None)

    @property
    def changes_answers(self) -> bool:
        """Whether answers are other numbers behind it, or none."""
        parts = (self.noise, self.user_noise, self.dtype, self.decimals, self.sigmoid, self.labels, self.top)
        return parts.count(None) < len(parts)

    def _keeps_decimals_of(self, own: Noise) -> bool:
        """Whether answers that were rounded to decimals are found again behind the dtype: by rounding once more."""
        if self.dtype is None or self.clip is None or own.kind != "rounded":
            return False
        return LARGE * Noise.dtype(self.dtype).scale < own.scale

    def around(self, oracle: Oracle, seed: int = 0, *, known: bool = True) -> Oracle:
        """The oracle behind this defence, which its signature declares; `seed` is that of added noise.

        Where it is `known`, the attacker undoes what can be undone. Of several labels he reads the first.
        """
        name = f"{oracle.name} | {self.text}"
        own = oracle.signature.noise
        if self.sigmoid is not None and own.kind != "exact":  # to undo the bend stretches errors
            own = Noise.bounded(own.radius / (1 - self.sigmoid / 4)) if own.radius else Noise.parse("measure")
        oracle = self._with_tokens_changed(oracle, known=known)
        if self.sigmoid is not None:
            oracle = ReverseSigmoid(oracle, self.sigmoid)
            oracle = Unbent(oracle, self.sigmoid) if known else oracle
        if self.noise is not None:
            oracle = Noisy(oracle, self.noise, seed=seed)
        if self.user_noise is not None:
            oracle = UserNoise(oracle, self.user_noise)
            oracle = Fresh(oracle, seed=seed) if known else oracle
        if self.dtype is not None:
            oracle = Cast(oracle, self.dtype)
            if known and self._keeps_decimals_of(own):
                oracle = Rounded(oracle, own.decimals)
        if self.decimals is not None:
            oracle = Rounded(oracle, self.decimals)
        if self.tells_labels:
            oracle = Labelled(oracle)
        if self.detect is not None:
            oracle = Detection(oracle, self.detect)
        if self.limit is not None:
            oracle = Budgeted(oracle, self.limit)
        declared = oracle.signature
        if not self.tells_labels:
            added = None if self._keeps_decimals_of(own) else self.errors
            declared = declared.with_changes(noise=together(own, added or Noise.exact()))
        defended = Wrapper(oracle, declared)
        defended.name = name  # noise of another seed is the same defence: its answers share a journal
        return defended

    def _with_tokens_changed(self, oracle: Oracle, *, known: bool) -> Oracle:
        if self.directions is not None:
            oracle = Projected(oracle, self.directions)
        if self.clip is not None:
            limit = min(self.clip, oracle.signature.max_norm or math.inf)
            oracle = Clipped(oracle, limit)
            oracle = Wrapper(oracle, oracle.signature.with_changes(max_norm=limit)) if known else oracle
        return oracle


def together(own: Noise, added: Noise) -> Noise:
    """What answers that erred by themselves err by once more errors are added."""
    if "exact" in (own.kind, added.kind):
        return added if own.kind == "exact" else own
    if own.kind == added.kind == "rounded" and added.scale >= own.scale:
        return added.as_found()  # digits of fewer decimals, cut from rounded ones
    if not {own.kind, added.kind} <= {"gaussian", "bounded", "rounded"}:
        return Noise.parse("measure")  # errors that are relative to the answer, beside those that are not
    small, large = sorted((own, added), key=lambda noise: noise.deviation)
    if large.kind == "gaussian":
        return Noise.gaussian(math.hypot(small.deviation, large.deviation))
    return Noise.bounded(small.radius + large.radius)


class Clipped(Wrapper, stateful=False):
    """Scales tokens that are longer than `norm` down to it, as a server does that trusts no client."""

    def __init__(self, inner: Oracle, norm: float) -> None:
        super().__init__(inner, inner.signature.with_changes(max_norm=None))
        self.name = f"{inner.name} | clipped to norm {norm:g}"
        self.norm = norm

    def answer(self, tokens: Array) -> Array:
        """Clip, then ask."""
        xp = self.signature.space.xp
        norms = xp.linalg.vector_norm(tokens, axis=-1, keepdims=True)
        long = norms > self.norm
        # One spacing below the norm, so that what was scaled does not exceed it by a rounding.
        aim = self.norm * (1 - 4 * self.signature.space.spacing)
        scale = xp.where(long, aim / xp.where(long, norms, xp.ones_like(norms)), xp.ones_like(norms))
        return super().answer(tokens * scale)


def default_defences(bound: int, width: int = 1) -> tuple[Defence, ...]:
    """What a server might do, alone and together, to an oracle of this counting bound and width."""
    plain = [NONE, "clip:1", "round:3", "round:3+clip:1", "noise:1e-3", "noise:1e-3+clip:1"]
    texts = [*plain, "float32+clip:1", "bfloat16", "bfloat16+clip:1", "labels", "reverse-sigmoid:1", "user-noise:1e-3"]
    texts += [f"project:{width - width // 4}"] if width > 1 else []
    texts += ["detect:0.01", f"budget:{max(1, bound // 2)}"]
    return tuple(parse_defence(text) for text in texts)


def parse_defence(text: str) -> Defence:
    """The defence that `text` names; UsageError says what is wrong with it and what is possible."""
    if text.strip() == NONE:
        return Defence()
    found = Defence()
    for part in text.split("+"):
        word, colon, number = part.strip().partition(":")
        field, value = "dtype", cast(Any, word)
        if word in READERS and colon:
            field, value = READERS[word][0], _read(text, word, number)
        elif word == "labels" and not colon:
            field, value = "labels", True
        elif word not in DIGITS or colon:
            raise UsageError(f"cannot read {part!r} in the defence {text!r}; possible: {POSSIBLE}")
        if getattr(found, field) is not None:
            raise UsageError(f"the defence {text!r} says twice what becomes of the same thing ({part}): keep one")
        found = replace(found, **{field: value})
    added = (found.noise, found.user_noise)
    if found.dtype is not None and (found.decimals, *added) != (None, None, None):
        raise UsageError(f"the defence {text!r} changes answers in two ways: keep {found.dtype} or the rest")
    for alone, word in ((found.tells_labels, "labels"), (found.sigmoid is not None, "reverse-sigmoid")):
        if alone and (found.dtype, found.decimals, *added) != (None,) * 4:
            raise UsageError(f"the defence {text!r} changes answers in two ways: keep {word} or the rest")
    if (found.labels, found.top, found.sigmoid).count(None) < 2:
        raise UsageError(f"the defence {text!r} changes answers in two ways: keep one of labels, top, reverse-sigmoid")
    return found


def _whole(text: str, least: float) -> int:
    number = int(text)
    if number < least:
        raise ValueError(text)
    return number


def _between(text: str, most: float) -> float:
    number = _positive(text)
    if number >= most:
        raise ValueError(text)
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


# Word before the colon -> field, how its number is read, what it must be.
READERS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "clip": ("clip", _positive, "a positive number, for example clip:1"),
    "noise": ("noise", _positive, "a positive number, for example noise:1e-3"),
    "user-noise": ("user_noise", _positive, "a positive number, for example user-noise:1e-3"),
    "reverse-sigmoid": ("sigmoid", lambda text: _between(text, 4.0), "a number up to 4, for example reverse-sigmoid:1"),
    "project": ("directions", lambda text: _whole(text, 1), "a whole number from 1, for example project:4"),
    "top": ("top", lambda text: _whole(text, 1), "a whole number from 1, for example top:3"),
    "detect": ("detect", lambda text: _between(text, 0.5), "a share up to 0.5, for example detect:0.01"),
    "round": ("decimals", lambda text: _whole(text, -math.inf), "a whole number of decimals, for example round:3"),
    "budget": ("limit", lambda text: _whole(text, 1), "a whole number from 1, for example budget:5000"),
}


def _read(text: str, word: str, number: str) -> Any:
    _, read, wanted = READERS[word]
    try:
        return read(number)
    except ValueError:
        raise UsageError(f"{word}:{number} in the defence {text!r} makes no sense: {word}: takes {wanted}") from None


def _short(number: float) -> str:
    return f"{number:.12g}".replace("e+", "e")  # a plus joins defences
