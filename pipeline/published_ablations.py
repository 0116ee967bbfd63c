"""The ablations that the papers of the Meshed-Memory Transformer and of Ada-ClustFormer print, row by row.

Karpathy test, after SCST, beam 5; scores over 100 (CIDEr-D 131.2 is 1.312). A row's settings are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrintedRow:
    """A row: its name, what it sets in the section `model`, and its scores."""

    name: str
    settings: dict[str, Any]
    scores: dict[str, float]


@dataclass(frozen=True)
class PrintedTable:
    """A table of a paper; differences are to the row `baseline`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[PrintedRow, ...]
    baseline: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the section `model` that tell its rows apart; each row sets all of them."""
        return tuple(self.rows[0].settings)


_SIX = ("BLEU-1", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
_FIVE = _SIX[1:]


def _row(name: str, settings: dict[str, Any], columns: Sequence[str], values: Sequence[float]) -> PrintedRow:
    return PrintedRow(name, settings, dict(zip(columns, values, strict=True)))


def _meshed(
    name: str, score: float, slots: int, connection: str, gates: str = "sigmoid", layers: int = 3, *, aoa: bool = False
) -> PrintedRow:
    settings = {"memory_slots": slots, "connection": connection, "gates": gates, "encoder_layers": layers}
    settings |= {"decoder_layers": layers, "attention": "on_attention" if aoa else "dot_product"}
    return _row(name, settings, ("CIDEr-D",), (score,))


_MESHED = (
    PrintedTable(
        "Table 1, memory and connection (Meshed-Memory Transformer)",
        ("CIDEr-D",),
        (
            _meshed("Transformer, 6 layers", 1.218, 0, "last", layers=6),
            _meshed("Transformer, 3 layers", 1.236, 0, "last"),
            _meshed("Transformer, attention on attention", 1.291, 0, "last", aoa=True),
            _meshed("one-to-one, no memory", 1.284, 0, "one_to_one"),
            _meshed("one-to-one", 1.292, 40, "one_to_one"),
            _meshed("meshed, no memory", 1.294, 0, "meshed"),
            _meshed("meshed, softmax gates", 1.303, 40, "meshed", "softmax"),
            _meshed("meshed, sigmoid gates", 1.312, 40, "meshed"),
        ),
        baseline=1,
    ),
    PrintedTable(
        "Table 6, memory slots (Meshed-Memory Transformer)",
        _SIX,
        tuple(
            _row(f"{slots} slots", {"memory_slots": slots}, _SIX, values)
            for slots, values in (
                (0, (0.804, 0.383, 0.290, 0.582, 1.294, 0.226)),
                (20, (0.807, 0.389, 0.290, 0.584, 1.299, 0.227)),
                (40, (0.808, 0.391, 0.292, 0.586, 1.312, 0.226)),
                (60, (0.800, 0.379, 0.289, 0.581, 1.296, 0.225)),
                (80, (0.800, 0.382, 0.290, 0.583, 1.289, 0.229)),
            )
        ),
    ),
    PrintedTable(
        "Table 7, layers (Meshed-Memory Transformer)",
        _SIX,
        tuple(
            _row(f"{layers} layers", {"encoder_layers": layers, "decoder_layers": layers}, _SIX, values)
            for layers, values in (
                (2, (0.805, 0.386, 0.290, 0.584, 1.285, 0.228)),
                (3, (0.808, 0.391, 0.292, 0.586, 1.312, 0.226)),
                (4, (0.808, 0.386, 0.291, 0.585, 1.296, 0.226)),
            )
        ),
    ),
)


def _clustered(
    name: str,
    values: Sequence[float],
    encoder: str = "2d",
    decoder: str = "1d",
    stacking: str = "matrix",
    sampling: int = 2,
    window: int | None = None,
) -> PrintedRow:
    settings = {"encoder_clusters": encoder, "decoder_clusters": decoder, "stacking": stacking}
    return _row(name, settings | {"sampling": sampling, "window": window}, _FIVE, values)


_CLUSTFORMER = (
    PrintedTable(
        "Table 1 (Ada-ClustFormer)",
        _FIVE,
        (
            _clustered("base", (0.400, 0.297, 0.596, 1.344, 0.234), "none", "none"),
            _clustered("decoder only", (0.402, 0.298, 0.599, 1.351, 0.237), "none"),
            _clustered("encoder 2-D only", (0.404, 0.298, 0.600, 1.359, 0.237), "2d", "none"),
            _clustered("encoder 1-D only", (0.400, 0.294, 0.594, 1.345, 0.232), "1d", "none"),
            _clustered("without equation 6", (0.391, 0.287, 0.588, 1.326, 0.228), stacking="none"),
            _clustered("sampling 4", (0.398, 0.290, 0.593, 1.355, 0.230), sampling=4),
            _clustered("fixed window 2", (0.398, 0.292, 0.591, 1.349, 0.229), window=2),
            _clustered("full", (0.411, 0.301, 0.602, 1.378, 0.241)),
        ),
    ),
)

# by what a search's `compare` names
TABLES: dict[str, tuple[PrintedTable, ...]] = {"meshed_memory": _MESHED, "clustformer": _CLUSTFORMER}
NOTE = (
    "Means of the validation captions beside the paper's (Karpathy test after SCST, beam 5); +/- is the difference to "
    "the row {baseline}."
)
