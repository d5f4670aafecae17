"""What tests of the commands share; the fixture `run` itself is in conftest.py."""

from collections.abc import Callable

# The command in an empty folder with the BOX of the test file as box.py: exit code, standard output, standard error.
Run = Callable[..., tuple[int, str, str]]


def one_line(err: str) -> bool:
    return err.startswith("keyhole: ") and err.count("\n") == 1
