"""What a recovery returns: one frozen value with outcome, parameters, certificate and statistics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from keyhole.families import F_co
from keyhole.optional import on_demand

# Characters of a message that a notebook or a prompt shows.
LONGEST_WORDS = 400
# Shares below and ratios beyond are said to be so: no sentence has an exponent in it.
LEAST_SHARE, MOST_TIMES = 1e-4, 1e6
# Digits that are raised above the line.
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# A number as Python writes it, which people do not: two digits of an exponent at least, and its sign.
WRITTEN = re.compile(r"(?<![\w.=:])(\d(?:\.\d+)?)e([+-]\d{2,})(?!\w)")


class Outcome(Enum):
    """How a recovery ended. The value is a sentence that names the cause and what to do about it."""

    CERTIFIED = "Recovered: fresh held-out answers were predicted within the error bar."
    UNCERTIFIED = (
        "Recovered, but not certified: held-out queries could not be afforded or say too little of a part, or the "
        "error bar is as large as the answers. Raise the budget, heldout, the token norm or the precision of the "
        "oracle."
    )
    NOT_IDENTIFIABLE = (
        "The answers do not depend on the parameters asked for, so no queries can reveal them: nothing to mend."
    )
    WRONG_FAMILY = (
        "The answers contradict the assumed family. Try another method, or declare the noise, the "
        "dtype or the norm bound of the oracle if it belongs to the family after all."
    )
    INCONSISTENT = (
        "The oracle answers the same question differently each time. Declare its noise, e.g. "
        "noise=Noise.gaussian(scale), or switch off dropout and sampling in the box."
    )
    SATURATED = (
        "Softmax weights stayed at 0 or 1 within their error bar. Lower max_norm, or use an oracle of higher precision."
    )
    TOO_NOISY = (
        "The errors of an answer are as large as what it could reveal. Allow longer tokens (max_norm), or use an "
        "oracle of higher precision or less noise."
    )
    TOO_FEW_MEASUREMENTS = (
        "The measurements do not determine the parameters. Ask for more, e.g. measurements=, or use an adaptive method "
        "such as single-head."
    )
    TOO_FEW_EXAMPLES = (
        "There are too few examples for so many parameters. Bring as many as the message names, or ask for fewer heads "
        "or a lower rank."
    )
    PARITY_LIKE = (
        "The examples look like a parity: no restart explains them, and no model of low order predicts them. No "
        "statistical-query method learns parities, descent among them; elimination over bits does where nothing "
        "errs, and "
        "where the box can be asked, queries may."
    )
    BUDGET_EXHAUSTED = (
        "The budget ended before the recovery did. Raise it and run again with the same journal: what was "
        "answered is not asked again."
    )
    TIME_EXHAUSTED = (
        "The arithmetic of the method took longer than allowed, the oracle's own time apart. Raise max_seconds and run "
        "again with the same journal, or try another method or seed."
    )
    ARITHMETIC_FAILED = (
        "The arithmetic of the method failed on these answers: a singular matrix, an overflow, or numbers that are not "
        "finite. Try another method or seed, or bound the token norm (max_norm)."
    )
    ORACLE_FAILED = "The oracle failed. Mend it and run again with the same journal: answers so far are kept."


def percent(share: float) -> str:
    """A share of one as people write it: less than 0.01 %, 0.3 %, 2.6 %, 100 %."""
    if 0 < share < LEAST_SHARE:
        return f"less than {100 * LEAST_SHARE:g} %"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def times(ratio: float) -> str:
    """How many times as large something is: 3.3 ×, 1,204 ×, more than 1,000,000 ×."""
    if ratio >= MOST_TIMES:
        return f"more than {MOST_TIMES:,.0f} ×"
    return f"{ratio:,.0f} ×" if ratio >= 10 else f"{ratio:.2g} ×"


def power(number: float) -> str:
    """A number as mathematics writes it: 2.9 × 10⁻¹⁴, in letters that can be bold."""
    if not number:
        return "0"
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits}\u00a0×\u00a010{str(int(exponent)).translate(RAISED)}"  # never broken over two lines


def typeset(text: str) -> str:
    """A text with its numbers as mathematics writes them, 4.4e-14 as 4.4 × 10⁻¹⁴; those behind = and : are commands."""

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}\u00a0×\u00a010{str(int(found[2])).translate(RAISED)}" if float(found[1]) else "0"

    return WRITTEN.sub(written, text)


def of_error_bar(ratio: float) -> str:
    """An error over its error bar in words; nothing where that is not known."""
    if not np.isfinite(ratio):
        return ""
    return f"{percent(ratio)} of its error bar" if ratio <= 1 else f"{times(ratio)} its error bar"


def typical_error(predictions: npt.NDArray[np.float64], answers: npt.NDArray[np.float64]) -> float:
    """The median of errors over the size of their answer, or over a typical size where that is more."""
    errors, sizes = np.abs(predictions - answers), np.abs(answers)
    sizes = np.maximum(sizes, np.median(sizes))
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.median(np.where(errors == 0, 0.0, errors / sizes)))


@dataclass(frozen=True)
class Tested:
    """How many held-out queries of one kind were predicted within their radii, and what follows."""

    label: str  # all, a class of lengths, or domain: inputs of the user
    queries: int
    informative: int  # those whose predictions would have shown an error of the estimate
    bound: float  # at 95 % confidence at most this share of such queries is not predicted within its radius
    of_labels: bool = False  # whether predictions are labels, which are right or wrong

    def __str__(self) -> str:
        if not self.informative:
            return f"no informative query among {self.queries}"
        return f"{self.informative} of {self.queries} informative, at most {percent(self.bound)} mispredicted"


@dataclass(frozen=True, repr=False)
class Certificate(Generic[F_co]):
    """What was checked at the end, and how sure the parameters are."""

    radius: F_co | None = None  # entrywise radii, as parameters of the same family; None where unknown
    standard_error: F_co | None = None  # standard errors, likewise, where errors are random
    heldout_queries: int = 0
    worst_error: float = float("nan")  # largest |prediction − answer|
    worst_ratio: float = float("nan")  # largest |prediction − answer| over its radius; certified iff ≤ 1
    resolution: float = float("nan")  # radii over what the answers vary by, root mean squares
    assumptions: tuple[str, ...] = ()
    predictions: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    answers: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    tested: tuple[Tested, ...] = ()  # what the queries say: all together, by length, and of the user's own inputs
    untested: tuple[str, ...] = ()  # parts, and classes of lengths, that too few queries informed about

    @property
    def of_labels(self) -> bool:
        """Whether labels were predicted, which are right or wrong."""
        return any(each.of_labels for each in self.tested)

    @property
    def typical_error(self) -> float:
        """The median of the errors of held-out answers over the size of their answer; nan where there are none."""
        return typical_error(self.predictions, self.answers) if self.answers.size else float("nan")

    @property
    def statement(self) -> str:
        """What the held-out queries say of queries that were not asked."""
        if not self.tested or not self.tested[0].informative:
            return ""
        said = [_statement(each) for each in self.tested if each.label in STATED]
        silent = [each.label for each in self.tested if each.label not in STATED and not each.informative]
        return "; ".join([*said, f"nothing is said of sequences of {', '.join(silent)}"] if silent else said)

    def __repr__(self) -> str:
        bars = "" if self.radius is None else f"radii {self.radius!r}, "
        return f"Certificate({bars}{self.heldout_queries} held-out queries, worst {self.worst_ratio:.2g} of its radius)"

    def heldout(self) -> dict[str, npt.NDArray[np.float64]]:
        """Predictions and answers of the held-out queries, as run folders keep them."""
        return {"predictions": self.predictions, "answers": self.answers}


@dataclass(frozen=True)
class Stats:
    """What a recovery cost."""

    queries: int = 0  # sequences this recovery used, journal included, held-out ones apart
    new_queries: int = 0  # of all its sequences, those that reached the oracle now
    heldout_queries: int = 0  # sequences spent on the certificate
    counting_bound: int = 0  # the fewest queries any method can do with
    seconds: float = 0.0
    oracle_seconds: float = 0.0
    stages: Mapping[str, int] = field(default_factory=dict)  # queries per stage, held-out ones apart
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what the method found out on its way

    @property
    def ratio(self) -> float:
        """Queries over the counting bound."""
        return self.queries / self.counting_bound if self.counting_bound else float("nan")


@dataclass(frozen=True, repr=False)
class Recovery(Generic[F_co]):
    """The result of `keyhole.recover`."""

    outcome: Outcome
    message: str  # the particulars: figures, cause, remedy
    params: F_co | None  # what was recovered; None, or a partial estimate, where the outcome is not CERTIFIED
    certificate: Certificate[F_co]
    stats: Stats
    method: str
    oracle: str = ""  # the name of the oracle; empty where it was learned from examples

    @property
    def certified(self) -> bool:
        """True only if the held-out answers were predicted within the radius."""
        return self.outcome is Outcome.CERTIFIED

    def __repr__(self) -> str:
        """The outcome, what it cost and what was recovered, in three lines."""
        stats = self.stats
        cost = f"{stats.queries:,} {'queries' if self.oracle or not stats.queries else 'examples'}"
        if stats.counting_bound:
            cost += f" where {stats.counting_bound:,} is the fewest possible ({stats.ratio:.3f} ×)"
        cost += f", {stats.heldout_queries:,} held out" if stats.heldout_queries else ""
        message = self.message if len(self.message) <= LONGEST_WORDS else f"{self.message[: LONGEST_WORDS - 1]}…"
        return f"{self.outcome.name} by {self.method}: {message}\n{cost}\n{self.params!r}"

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        card: str = on_demand("report.notebook").card_of_recovery(self)
        return card

    def report(self) -> Any:
        """Everything there is to say of it, which notebooks show as a page; `.save(path)` writes that page."""
        return on_demand("report.notebook").report_of(self)

    def plot(self) -> Any:
        """Score matrices, spectra and the held-out check as one matplotlib figure. Needs the `report` extra."""
        return on_demand("report.notebook").figure_of(self)

    def save(self, folder: str | PathLike[str], *, force: bool = False) -> dict[str, Path]:
        """Write a run folder, as the command line does with --out, its report too where the extra is installed.

        The paths by what they are. A folder that belongs to another run is refused unless `force` is set.
        """
        paths: dict[str, Path] = on_demand("report.notebook").save_recovery(self, folder, force)
        return paths

    def summary(self) -> dict[str, Any]:
        """Everything but the parameters, as plain data for JSON."""
        stats, certificate = self.stats, self.certificate
        return {
            "method": self.method,
            "outcome": self.outcome.name,
            "certified": self.certified,
            "message": self.message,
            "remedy": None if self.certified else self.outcome.value,
            "queries": stats.queries,
            "counting_bound": stats.counting_bound,
            "ratio": _finite(stats.ratio),
            "new_queries": stats.new_queries,
            "heldout_queries": stats.heldout_queries,
            "worst_error": _finite(certificate.worst_error),
            "worst_ratio": _finite(certificate.worst_ratio),
            "resolution": _finite(certificate.resolution),
            "assumptions": list(certificate.assumptions),
            "tested": [asdict(each) for each in certificate.tested],
            "statement": certificate.statement,
            "untested": list(certificate.untested),
            "seconds": stats.seconds,
            "oracle_seconds": stats.oracle_seconds,
            "stages": dict(stats.stages),
            "details": dict(stats.details),
        }


STATED = {"all": "such queries", "domain": "inputs of the domain"}


def _statement(tested: Tested) -> str:
    what = "labels" if tested.of_labels else "queries"
    kind = f"informative held-out {what}" if tested.label == "all" else "inputs of the domain"
    within = ", as far as labels are right" if tested.of_labels else " within their radii"
    return (
        f"{tested.informative} {kind} were predicted{within}: at 95 % confidence at most "
        f"{percent(tested.bound)} of {STATED[tested.label]} are not"
    )


def _finite(number: float) -> float | None:
    """The number, or None for what JSON cannot say."""
    return float(number) if np.isfinite(number) else None
