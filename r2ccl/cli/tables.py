"""Tables on a terminal, drawn by rich if it is installed (``pip install 'r2ccl[cli]'``).

Without a terminal, or without rich, the commands print plain lines, which scripts can read. rich is
an optional dependency, because rich and its own dependency for syntax colors take 13 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Styles of the levels of `r2ccl.cli.diagnosis.DoctorFinding`.
LEVEL_STYLES = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}


def terminal() -> Console | None:
    """Return the console on which to draw tables; None if plain lines must be printed instead."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(highlight=False)


def draw(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: int = 0,
    styles: Sequence[str] = (),
) -> None:
    """Draw a table; text that is too long for the terminal continues on the next line.

    Parameters
    ----------
    console : Console
        Result of `terminal`.
    title : str
    columns : sequence of str
        Headings; if all are empty, there is no line of headings.
    rows : iterable of sequence of str
        Cells of each row, one per column.
    numbers : int
        Number of trailing columns that contain numbers and are aligned to the right.
    styles : sequence of str
        Name of a rich style for each row; by default, rows have no style.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD,
        show_header=any(columns), pad_edge=False,
    )  # fmt: skip
    first_number = len(columns) - numbers
    for number, name in enumerate(columns):
        is_number = number >= first_number
        table.add_column(
            Text(name), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style=styles[number] if styles else None)
    console.print(table)


__all__ = ["LEVEL_STYLES", "draw", "terminal"]
