"""What became of a box: right, admitted, refused, wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace

import numpy as np

from benchmarks.fuzz.alignment import EPS, worst_ratio
from benchmarks.fuzz.boxes import Box, Random
from benchmarks.fuzz.inputs import AROUND_KINKS, batches
from benchmarks.fuzz.maps import Floats, Params

RELATIVE = 1e-6  # differences below this share of an answer are none
OFTEN = 0.05  # of a class of inputs
NEAR_BOUNDARY = 2e-3  # share of labels that may be off: those of sequences nearer to a boundary than its radius
# Random corners of the box of radii, and by how much more the worst of all corners moves answers: of logits that
# nearly decide it is not enough to take what these corners do so many times, so that those of a larger box count too.
DRAWS, FACTOR = 8, 3.0
# Outcomes by which a recovery from coarse answers says that they are too coarse.
ADMISSIONS = {"TOO_NOISY", "UNCERTIFIED", "SATURATED", "INCONSISTENT", "NOT_IDENTIFIABLE"}

# Columns of the table, the good ones first.
VERDICTS = (
    "right",
    "equivalent",  # certified as another member, and the same function on every class
    "admitted",  # not certified, and no member
    "documented",  # a member that is not certified, as its page says
    "refused",  # a member that should have been certified
    "outside",  # certified with an entry outside its radius
    "member wrong",
    "foreign wrong",
    "rare",  # certified, wrong on less than OFTEN of every class that is drawn without looking into the box
    "trapdoor",  # certified, and no such class shows that it is wrong
    "crash",
    "hang",
)
BAD = ("refused", "outside", "member wrong", "foreign wrong", "rare", "crash", "hang")


@dataclass(frozen=True)
class Found:
    """What a recovery said, as arrays of its own."""

    outcome: str
    message: str = ""
    family: str = ""
    function: Callable[[Floats], Floats] | None = None
    params: Params | None = None
    radius: Params | None = None
    noise: float = 0.0  # by which answers err, as the certificate says of itself

    @property
    def certified(self) -> bool:
        return self.outcome == "CERTIFIED"


@dataclass(frozen=True)
class Verdict:
    """A column of the table, and why."""

    name: str
    detail: str = ""
    ratio: float | None = None  # the largest error over its radius, of members
    shares: Mapping[str, float] = field(default_factory=dict)  # of each class that is wrong


def judge(group: str, box: Box, found: Found, rng: Random) -> Verdict:
    """The verdict on a box of one group."""
    if group == "member":
        return _member(box, found, rng)
    if not found.certified:
        return Verdict("admitted", found.outcome)
    shares = wrong_shares(box, found, rng, max(box.error, found.noise))  # what is less than the noise nobody can see
    name = "trapdoor" if box.trapdoor and not shares else _wrong(shares, "foreign wrong")
    return Verdict(name, f"certified as {found.family}", shares=shares)


def _member(box: Box, found: Found, rng: Random) -> Verdict:
    if not found.certified:
        coarse = bool(box.error) or box.float32
        # Noise may hide a family, and must not make it look like another.
        excused = (
            found.outcome in ADMISSIONS or (box.limit and found.outcome != "WRONG_FAMILY") if coarse else box.limit
        )
        return Verdict("documented" if excused else "refused", f"{found.outcome}: {box.limit or found.message}")
    ratio = None
    if box.params is not None and found.params is not None and found.radius is not None:
        ratio = worst_ratio(box.params, found.params, found.radius)
    if ratio is not None and ratio <= 1 and _computes_its_parameters(box, found, rng):
        return Verdict("right", ratio=ratio)
    shares = wrong_shares(box, found, rng)
    shares = {each: share for each, share in shares.items() if not box.labels or share > NEAR_BOUNDARY}
    name = _wrong(shares, "member wrong")
    if ratio is not None and name != "member wrong":
        name = "outside"
    return Verdict(name, f"certified as {found.family}", ratio, shares)


def _wrong(shares: Mapping[str, float], name: str) -> str:
    """The verdict on what is wrong on these shares of each class, by those drawn without looking into the box."""
    if not shares:
        return "equivalent"
    blind = max((share for each, share in shares.items() if each != AROUND_KINKS), default=0.0)
    return name if blind >= OFTEN else "rare" if blind > 0 else "trapdoor"


def _computes_its_parameters(box: Box, found: Found, rng: Random) -> bool:
    """Whether the recovered function is that of its arrays."""
    tokens = box.size * rng.standard_normal((4, 3, box.width))
    assert found.params is not None
    assert found.function is not None
    own = found.params.map()(tokens)
    apart = np.abs(columns(found.function(tokens)) - own)
    return bool(np.max(apart) <= RELATIVE * np.max(np.abs(own)) + 1e-300)


# --- functions ------------------------------------------------------------------------------------------------------


def columns(answers: object) -> Floats:  # (n,) or (n, p) -> (n, p)
    array = np.asarray(answers, dtype=float)
    return array[:, None] if array.ndim == 1 else array


def wrong_shares(box: Box, found: Found, rng: Random, unseen: float = 0.0) -> dict[str, float]:
    """The share of sequences of each class on which the recovered function is not that of the box.

    Differences within the claimed radii, a small share of the answer, or `unseen` are none.
    """
    assert found.function is not None
    wrong: Counter[str] = Counter()
    total: Counter[str] = Counter()
    corners = [_corner(found.params, found.radius, rng, times) for times in (1.0, FACTOR) for _ in range(DRAWS)]
    with np.errstate(all="ignore"):
        for name, tokens in batches(box, rng):
            true, own = columns(box.truth(tokens)), columns(found.function(tokens))
            sizes = np.max(np.where(np.isnan(true), 0.0, np.abs(true)), axis=1)
            if "norms" not in name:
                sizes = np.full(len(sizes), np.max(sizes))
            least = np.maximum(RELATIVE * sizes[:, None], unseen)
            missed = _beyond(true, own, least)
            if np.any(missed) and corners[0] is not None:
                part = tokens[missed]
                middle = found.params.map()(part)
                moved = [np.abs(corner.map()(part) - middle) for corner in corners if corner is not None]
                claimed = FACTOR * np.max(np.nan_to_num(moved, nan=np.inf), axis=0)
                missed = _beyond(true[missed], own[missed], np.maximum(claimed, least[missed]))
            wrong[name] += int(np.sum(missed))
            total[name] += len(tokens)
    return {name: wrong[name] / total[name] for name in total if wrong[name]}


def _beyond(true: Floats, own: Floats, allowed: Floats) -> Floats:  # (n, p) each -> (n,)
    if true.shape != own.shape:
        return np.ones(len(true), dtype=bool)
    apart = np.abs(true - own)
    both = np.isfinite(true)  # a box that says nan or inf there is not compared
    return np.any(both & ~(apart <= allowed), axis=1)


def _corner(params: Params | None, radius: Params | None, rng: Random, times: float = 1.0) -> Params | None:
    """Parameters moved by so many radii, and by what they are rounded to, in random directions."""
    if params is None or radius is None:
        return None
    return _moved(params, radius, rng, times)


def _moved(params: object, radius: object, rng: Random, times: float) -> object:
    if isinstance(params, np.ndarray):
        largest = float(np.max(np.abs(params), initial=0.0))
        wide = times * np.minimum(np.nan_to_num(np.asarray(radius, dtype=float), nan=0.0), 1e3 * largest + 1.0)
        return params + rng.choice([-1.0, 1.0], params.shape) * (wide + 8 * EPS * largest)
    if isinstance(params, tuple):
        return tuple(_moved(own, wide, rng, times) for own, wide in zip(params, radius, strict=True))
    if not is_dataclass(params):
        return params
    names = [each.name for each in fields(params)]
    return replace(params, **{name: _moved(getattr(params, name), getattr(radius, name), rng, times) for name in names})
