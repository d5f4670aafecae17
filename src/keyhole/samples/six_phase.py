"""The six phases of Chen and Li."""

from typing import Any

MOST_HEADS = 4


def six_phase(*arguments: Any, **options: Any) -> Any:
    """Not there yet."""
    raise NotImplementedError
