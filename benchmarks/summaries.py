"""Tables of the README and the documentation that repeat committed results: `python -m benchmarks.summaries`.

A page has `<!-- table: NAME -->` and `<!-- end of table -->`; what stands between them is replaced. With --check
nothing is written, and the exit code is 1 where a page is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.support.rows import markdown
from keyhole.recovery import typeset

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(?P<begin><!-- table: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)

Row = dict[str, str]


def result_rows(name: str, column: str) -> Iterator[Row]:
    """Rows of the table in benchmarks/results/NAME.md that has the column."""
    header: list[str] = []
    for line in (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif column in header and not set(line) <= set("|-: "):
            yield dict(zip(header, cells, strict=True))


def first_number(text: str) -> float:
    """The first number of a cell, in which figures may stand beside each other."""
    found = re.search(r"\d[\d.,]*(?:e[+-]?\d+)?", text)
    if found is None:
        raise ValueError(f"no number in {text!r}")
    return float(found[0].rstrip(",").replace(",", ""))


def comparison() -> str:
    """Distillation beside Keyhole, for the same boxes and as many queries."""
    wanted = [
        ("exact", "16", "1 ×"),
        ("exact", "32", "1 ×"),
        ("exact", "32", "2 ×"),
        ("normal errors of 0.001, norms ≤ 1", "16", "10 ×"),
        ("rounded to 3 decimals, norms ≤ 1", "16", "10 ×"),
    ]
    found = {
        (row["answers"], row["d"], row["queries"].partition("(")[2].rstrip(")")): row
        for row in result_rows("distillation", "Adam error")
    }
    rows = []
    for key in wanted:
        row = found[key]
        asked, seconds = (
            row["queries"].split()[0],
            [float(each) for each in row["seconds: Adam, L-BFGS, Keyhole"].split(",")],
        )
        errors = [f"{first_number(row[f'{learner} error']):.0e}" for learner in ("Adam", "L-BFGS", "Keyhole")]
        used = sum(int(each) for each in row["Keyhole queries"].split("+"))
        times = [f"{each:.0f} s" if each >= 1 else f"{each:.2f} s" for each in seconds]
        cells = [f"{error}, {time}" for error, time in zip(errors, times, strict=True)]
        rows.append([key[0], key[1], f"{int(asked):,}", *cells[:2], f"**{errors[2]}**, {times[2]}", f"{used:,}"])
    columns = ["answers", "width", "queries", "distillation, Adam", "distillation, L-BFGS", "Keyhole", "its queries"]
    return markdown(columns, rows)


def picked(name: str, columns: list[str], keep: Callable[[Row], bool]) -> str:
    """Some rows and columns of a committed table, as they stand there."""
    rows = [row for row in result_rows(name, columns[0]) if keep(row)]
    return markdown(columns, [[row[column] for column in columns] for row in rows])


def single_head() -> str:
    columns = ["target", "d", "runs", "queries − bound: median, most", "relative error: median, worst", "uncertified"]
    return picked("single_head", [*columns, "radius misses"], lambda row: row["d"] in ("32", "256"))


def low_rank() -> str:
    columns = ["(d, r)", "runs", "queries − (r(2d − r) + d): median, 99 %, most", "error: median, worst", "rank right"]
    return picked("low_rank", [*columns, "certified"], lambda _: True)


def sensing() -> str:
    ratio = "measurements / r(2d − r)"
    columns = ["solver", "d", "r", ratio, "certified and exact (≤ 1e-8)", "certified but wrong"]
    columns.append("relative error: median, worst")
    return picked("sensing", columns, lambda row: row["r"] == "4" and row[ratio] in ("1.00", "1.10", "1.25", "2.00"))


def residual() -> str:
    columns = ["heads, d", "size of attention", "runs", "queries", "without the residual", "score error: median, worst"]
    return picked("residual", [*columns, "certified", "outside their radius"], lambda _: True)


def normalised() -> str:
    columns = ["block", "heads, d", "size of weights", "runs", "queries", "distance: median, worst"]
    return picked("normalised", [*columns, "fresh answers off by", "certified"], lambda _: True)


def low_rank_tolerance() -> str:
    columns = ["d, r, τ", "queries: median, most", "over r(2d − r) + d", "error: median, worst", "certified"]
    return picked("low_rank_tolerance", [*columns, "outside their radius"], lambda _: True)


def published() -> str:
    columns = ["box, d = 8", "learner", "queries: median", "over the bound", "score error: median, worst", "success"]
    return picked("published", [*columns, "certified"], lambda _: True)


def naming() -> str:
    """Kinds by groups of parts: boxes, and what became of them."""
    found: dict[str, list[Row]] = {}
    for row in result_rows("naming", "misnamed"):
        parts = row["parts that are not those of a softmax"]
        group = next(name for word, name in NAMING_GROUPS.items() if word in parts)
        found.setdefault(group, []).append(row)
    rows = []
    for group, members in found.items():
        counts = [sum(int(row[column]) for row in members) for column in ("named", "other", "misnamed")]
        asked = [int(word) for row in members for word in row["queries"].split() if word != "to"]
        rows.append([group, len(members), *(f"{count:,}" for count in counts), f"{min(asked)} to {max(asked)}"])
    return markdown(["attention", "kinds", "named", "other", "misnamed", "queries"], rows)


# The first word that the parts of a kind have in them.
NAMING_GROUPS = {
    "no name": "what has no name",
    "form: rotary": "rotary, with and without softcap or sink",
    "form: qk-norm": "normed keys and queries, also rotary",
    "form: gaussian": "Gaussian kernels",
    "features": "features of elu + 1, of exp and of ReLU",
    "link: linear": "linear, squared, ReLU",
    "link: squared": "linear, squared, ReLU",
    "link: relu": "linear, squared, ReLU",
    "normaliser": "another normaliser, alone or with other parts",
    "link": "softcap, alone or with a position bias or length law",
    "position bias": "a position bias, alone or with a length law",
    "length law": "a length law",
    "none": "softmax, with and without biases",
}


def labels() -> str:
    columns = ["labels", "width", "ε", "certified and all within radii", "queries", "over the entropy: median, most"]
    return picked("labels", [*columns, "worst entry of W over ε·rms"], lambda _: True)


PART_COLUMNS = [
    "parts",
    "runs",
    "queries − bound: median, most",
    "error: median, worst",
    "error over its radius, worst",
]


def _parts(*kinds: str) -> str:
    columns = ["parts", "runs", "queries − bound: median, most", "error: median, worst", "error over its radius, worst"]
    columns.append("certified and right")
    return picked("parts", columns, lambda row: not kinds or any(kind in row["parts"] for kind in kinds))


def parts() -> str:
    return _parts()


def parts_links() -> str:
    return _parts("softcap", "sigmoid")


def parts_unknown() -> str:
    columns = ["unknown link", "runs", "queries − (d² + d): median, most", "error: median, worst"]
    return picked("parts_unknown", [*columns, "error over its radius, worst", "certified and right"], lambda _: True)


def parts_normalisers() -> str:
    return _parts("sink", "plus one", "max", "top-k")


def parts_positions() -> str:
    return _parts("ALiBi", "table", "window", "log n", "sqrt")


def parts_bounded() -> str:
    columns = ["parts, norms ≤ 3, d = 16", "runs", "certified and right", "certified and wrong", "error: median, worst"]
    return picked("parts_bounded", [*columns, "queries − bound: median"], lambda _: True)


def parts_biased() -> str:
    columns = ["parts and a score bias, d = 8", "runs", "certified and right", "certified and wrong"]
    return picked("parts_bounded", [*columns, "error: median, worst", "queries − bound: median"], lambda _: True)


def parts_noise() -> str:
    columns = ["normal, 1e-3", "at most 1e-3, the sign of the answer", "3 decimals", "normal, 1e-4, norms ≤ 3"]
    columns = ["parts, d = 6", *columns, "at most 1e-5, the sign, norms ≤ 3", "4 decimals, norms ≤ 3"]
    return picked("parts_noise", [*columns, "certified and wrong", "error over its radius, worst"], lambda _: True)


def parts_float32() -> str:
    columns = ["parts, answers of float32", "runs", "certified", "right within their radii", "error: median, worst"]
    return picked("parts", columns, lambda _: True)


def score_forms() -> str:
    columns = ["head", "(d, d_k)", "runs", "queries − bound: median, most", "bound", "error: median, worst", "right"]
    return picked("score_forms", [*columns, "certified", "within radii"], lambda _: True)


def coverage() -> str:
    """Architectures, and what became of the parts of a layer."""
    columns = ["architecture", "attention", "with residual", "attention-block", "layer"]
    return picked("coverage", columns, lambda _: True)


SUMMARIES = (
    comparison,
    single_head,
    low_rank,
    low_rank_tolerance,
    sensing,
    residual,
    normalised,
    labels,
    naming,
    published,
)
SUMMARIES += (
    parts,
    parts_links,
    parts_unknown,
    parts_normalisers,
    parts_positions,
    parts_float32,
    parts_noise,
    parts_bounded,
    parts_biased,
    score_forms,
    coverage,
)
TABLES = {each.__name__.replace("_", "-"): each for each in SUMMARIES}


def refreshed(text: str) -> str:
    """A page with its tables as the committed results are now, numbers as mathematics writes them."""

    def table(found: re.Match[str]) -> str:
        written = re.sub(
            r"(?<=\de)([+-]?)(\d+)\b", lambda power: f"{power[1] or '+'}{power[2]:>02}", TABLES[found["name"]]()
        )
        return f"{found['begin']}\n{typeset(written)}\n\n{found['end']}"

    return TABLE.sub(table, text)


def pages() -> list[Path]:
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summaries", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is stale")
    check = parser.parse_args().check
    stale = [
        page for page in pages() if refreshed(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")
    ]
    for page in stale:
        print(page.relative_to(ROOT))
        if not check:
            page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
