"""Tables for people at a terminal and for pipes: coloured and folded there, plain aligned text here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

# How a cell's first word is coloured on a terminal.
STYLES = {
    "ok": "green",
    "ready": "green",
    "warn": "yellow",
    "missing": "yellow",
    "bad": "bold red",
    "-": "dim",
}


def print_table(
    rows: Sequence[Sequence[str]],
    *,
    header: Sequence[str] = (),
    title: str = "",
    right: Sequence[int] = (),  # columns aligned to the right: numbers
    file: TextIO | None = None,
) -> None:
    """Print rows of equal length. Piped, nothing is folded or cut: one line per row."""
    file = file or sys.stdout
    if getattr(file, "isatty", lambda: False)():
        _print_rich(rows, header, title, right, file)
    else:
        print(plain_table(rows, header=header, title=title, right=right), file=file)


def plain_table(
    rows: Sequence[Sequence[str]],
    *,
    header: Sequence[str] = (),
    title: str = "",
    right: Sequence[int] = (),
) -> str:
    """The table as aligned text."""
    lines = [*([header] if header else []), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    texts = [title] if title else []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ]
        texts.append(("  " if title else "") + "  ".join(cells).rstrip())
    return "\n".join(texts)


def _print_rich(
    rows: Sequence[Sequence[str]],
    header: Sequence[str],
    title: str,
    right: Sequence[int],
    file: TextIO,
) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file)
    if title:
        console.print(Text(title, style="bold"))
    if not rows:
        return
    table = Table(
        box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0), header_style="dim"
    )
    for column in range(len(rows[0])):
        last = column == len(rows[0]) - 1
        table.add_column(
            header[column] if header else "",
            justify="right" if column in right else "left",
            no_wrap=not last,
            overflow="fold",
        )
    for row in rows:
        # Text, not markup: '[atari]' in a cell is meant literally.
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(Padding(table, (0, 0, 0, 2 if title else 0)))
