"""`python -m benchmarks NAME [--save]`: print a table; with --save also keep it in benchmarks/results."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

HERE = Path(__file__).parent
SKIPPED = {"__init__", "__main__", "figures", "heads", "minilm", "strange_boxes", "summaries", "tables"}


def main() -> None:
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in SKIPPED)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=names)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    arguments = parser.parse_args()
    text = importlib.import_module(f"benchmarks.{arguments.name}").table()
    print(text)
    if arguments.save:
        (HERE / "results" / f"{arguments.name}.md").write_text(
            f"Printed by `python -m benchmarks {arguments.name}`.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
