"""Tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

# Columns a table may take, whatever the terminal has: rich cuts figures to fit, and half a figure is a wrong one.
WIDEST = 1000


def print_whole(table: Table) -> None:
    """Print a table in one piece, wider than the terminal where it must be."""
    Console(highlight=False, width=WIDEST).print(table)
