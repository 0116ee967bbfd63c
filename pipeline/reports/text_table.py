"""Plain-text tables for the terminal and logs."""

from __future__ import annotations

from collections.abc import Sequence

UNAVAILABLE = "unavailable"  # starts a cell that explains why a value is missing


def format_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Rows of (label, one cell per column), labels to the left and cells to the right.

    A cell that starts with "unavailable" becomes "-", and its reason follows below the table, each reason once.
    """
    reasons: list[str] = []
    table = [["", *columns]]
    for label, cells in rows:
        missing = [cell.startswith(UNAVAILABLE) for cell in cells]
        reasons += [f"{name} {cell}" for name, cell, lost in zip(columns, cells, missing, strict=True) if lost]
        table.append([label, *("-" if lost else cell for cell, lost in zip(cells, missing, strict=True))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([label.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for label, *cells in table
    ]
    return "\n".join([*lines, *dict.fromkeys(reasons)])
