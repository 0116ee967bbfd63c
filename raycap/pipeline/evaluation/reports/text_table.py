"""Plain-text tables and scores for the terminal and logs."""

from __future__ import annotations

from collections.abc import Sequence

from raycap.pipeline.evaluation.scores.metrics import MetricScores

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


def format_scores(scores: MetricScores) -> str:
    """The scores as text: one line per metric, then statistics of the captions, then the signature."""
    lines, width = [""], max(9, *map(len, scores.by_name))
    for name, score in scores.by_name.items():
        value = f"{score.value:.3f}" if score.value is not None else f"unavailable: {score.unavailable}"
        lines.append(f"  {name:<{width}} {value}")
    extras = scores.extras
    if "spice_categories" in extras:
        parts = (f"{name} {value:.3f}" for name, value in extras["spice_categories"].items() if value is not None)
        lines.append(f"  {'':<{width}} {', '.join(parts)}")
    repeated = ", ".join(f"{share:.1%} {n}-grams" for n, share in extras["repeated_ngrams"].items())
    endings = "" if extras["broken_endings"] is None else f"broken endings {extras['broken_endings']:.1%}, "
    lines += [
        "",
        f"  {len(scores.image_ids)} captions, {extras['mean_length']:.1f} words on average, "
        f"{extras['distinct_words']} distinct words",
        f"  {endings}doubled words {extras['doubled_words']:.1%}, captions that repeat: {repeated}",
    ]
    if extras["empty"]:
        empty = round(extras["empty"] * len(scores.image_ids))
        lines.append(f"  {empty} of the captions have no words: they match nothing and score 0")
    return "\n".join([*lines, f"  {scores.signature}", ""])
