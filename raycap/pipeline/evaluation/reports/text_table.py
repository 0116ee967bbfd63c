"""Plain-text tables for the terminal and logs."""

from __future__ import annotations

from collections.abc import Sequence

UNAVAILABLE = "unavailable"  # a cell that starts with this explains why a value is missing


def format_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The text of a table. rows: (label, one cell per column); labels are aligned left and cells right.

    A cell that starts with "unavailable" becomes "-". The lines after the table give the reasons, each once.
    """
    reasons: list[str] = []
    table = [["", *columns]]
    for label, cells in rows:
        reasons += [f"{name} {cell}" for name, cell in zip(columns, cells, strict=True) if cell.startswith(UNAVAILABLE)]
        table.append([label, *("-" if cell.startswith(UNAVAILABLE) else cell for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([label.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for label, *cells in table
    ]
    return "\n".join([*lines, *dict.fromkeys(reasons)])
