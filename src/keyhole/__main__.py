"""`python -m keyhole` is the command `keyhole`, and so is the script of that name."""

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Import the command line and run it; interrupted while that is under way, it says so in one line."""
    try:
        from keyhole.cli import main as command_line  # noqa: PLC0415 - an import takes long enough to be interrupted

        command_line()
    except KeyboardInterrupt:
        sys.stderr.write("keyhole: interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
