"""`python -m benchmarks NAME [--save]`: print a table; with --save also keep it in benchmarks/results.

Tables that take long are made row by row. Every row is kept as soon as it is measured: `--resume` takes the rows that
an earlier run kept, and `--only TEXT` measures those whose name has TEXT in it, again if need be, and no others.
A table may have options of its own: `python -m benchmarks fuzz --help`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path

from benchmarks.support.rows import Kept

HERE = Path(__file__).parent
HELP = ("-h", "--help")


def main() -> None:
    names = sorted(path.stem for path in (HERE / "tables").glob("*.py") if path.stem != "__init__")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=names)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    parser.add_argument("--resume", action="store_true", help="do not measure again what an earlier run kept")
    parser.add_argument("--only", metavar="TEXT", help="measure only rows whose name has TEXT")
    arguments, further = parser.parse_known_args([each for each in sys.argv[1:] if each not in HELP] or sys.argv[1:])
    module = importlib.import_module(f"benchmarks.tables.{arguments.name}")
    table = module.table
    if hasattr(module, "add_options"):
        module.add_options(parser)
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    arguments = parser.parse_args()
    if hasattr(module, "add_options"):
        text = table(arguments)
    elif inspect.signature(table).parameters:
        text = table(Kept(HERE / ".rows" / f"{arguments.name}.json", arguments.only, resume=arguments.resume))
    elif arguments.resume or arguments.only:
        parser.error(f"{arguments.name} is measured as a whole")
    else:
        text = table()
    print(text)
    if arguments.save:
        (HERE / "results" / f"{arguments.name}.md").write_text(
            f"Printed by `python -m benchmarks {arguments.name}`.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
