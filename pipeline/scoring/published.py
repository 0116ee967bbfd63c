"""Scores that papers print for the systems here, and whether a score of ours may stand beside them.

Values as printed, over 100, on the 5,000 test images of Karpathy's split of COCO or on nocaps's validation set;
their CIDEr is CIDEr-D with the document frequencies of the scored split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COCO_TEST = 5_000
_COLUMNS = ("BLEU-1", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")


@dataclass(frozen=True)
class Published:
    """One printed row; `protocol` is what the paper says about the decoding."""

    model: str
    name: str
    scores: dict[str, float]
    split: str = "test"
    ensemble: bool = False
    protocol: str = "beam 5"


@dataclass(frozen=True)
class AblationRow:
    """A row of ExpansionNet v2's ablation: encoder G and decoder N_E (None: attention), its printed scores over 100
    (Table I: first cross-entropy stage, Karpathy validation, beam 3) and multiply-accumulates (Table VI)."""

    static_expansion: tuple[int, ...] | None
    dynamic_expansion: int | None
    values: tuple[float, ...]
    macs: float  # of 5,000 images and a caption each, the captioner alone

    @property
    def scores(self) -> dict[str, float]:
        return dict(zip(ABLATION_COLUMNS, self.values, strict=True))


ABLATION_COLUMNS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
ABLATION = (
    AblationRow(None, None, (0.753, 0.592, 0.454, 0.346, 0.284, 0.570, 1.158, 0.216), 9.28e12),
    AblationRow((16,), None, (0.764, 0.606, 0.466, 0.355, 0.286, 0.572, 1.178, 0.219), 9.62e12),
    AblationRow((32,), None, (0.759, 0.599, 0.461, 0.352, 0.289, 0.571, 1.179, 0.223), 9.70e12),
    AblationRow((64,), None, (0.763, 0.604, 0.464, 0.355, 0.288, 0.571, 1.177, 0.220), 9.88e12),
    AblationRow(None, 4, (0.772, 0.614, 0.474, 0.362, 0.289, 0.577, 1.197, 0.223), 9.40e12),
    AblationRow(None, 8, (0.769, 0.615, 0.479, 0.371, 0.291, 0.578, 1.208, 0.223), 9.43e12),
    AblationRow(None, 16, (0.767, 0.614, 0.478, 0.368, 0.290, 0.577, 1.212, 0.222), 9.48e12),
    AblationRow((64,), 16, (0.774, 0.619, 0.482, 0.373, 0.292, 0.580, 1.222, 0.223), 10.08e12),
    AblationRow((128,) * 5, 16, (0.778, 0.623, 0.483, 0.372, 0.293, 0.583, 1.228, 0.225), 13.26e12),
    AblationRow((256,) * 5, 16, (0.774, 0.620, 0.482, 0.372, 0.292, 0.580, 1.225, 0.222), 16.80e12),
    AblationRow((512,) * 5, 16, (0.773, 0.617, 0.479, 0.370, 0.293, 0.580, 1.227, 0.224), 23.88e12),
    AblationRow((32, 64, 128, 256, 512), 16, (0.776, 0.620, 0.482, 0.372, 0.294, 0.581, 1.235, 0.225), 15.21e12),
)


def _row(model: str, name: str, values: Sequence[float], ensemble: bool = False) -> Published:
    return Published(model, name, dict(zip(_COLUMNS, values, strict=True)), ensemble=ensemble)


ROWS = (
    _row("expansionnet_v2", "ExpansionNet v2, cross entropy (paper)", (0.781, 0.381, 0.301, 0.589, 1.282, 0.235)),
    _row("expansionnet_v2", "ExpansionNet v2, SCST (paper)", (0.828, 0.415, 0.303, 0.605, 1.404, 0.245)),
    _row(
        "expansionnet_v2", "ExpansionNet v2, ensemble, SCST (paper)", (0.835, 0.427, 0.306, 0.611, 1.437, 0.247), True
    ),
    _row("meshed_memory", "Meshed-Memory Transformer, SCST (paper)", (0.808, 0.391, 0.292, 0.586, 1.312, 0.226)),
    *(
        Published("expansionnet_v2", f"ExpansionNet v2, {name} (paper)", scores, split, protocol="beam 3, XE")
        for split, name, scores in (
            ("in-domain", "nocaps in-domain", {"CIDEr-D": 0.838, "SPICE": 0.126}),
            ("near-domain", "nocaps near-domain", {"CIDEr-D": 0.792, "SPICE": 0.124}),
            ("out-domain", "nocaps out-of-domain", {"CIDEr-D": 0.540, "SPICE": 0.093}),
            ("all", "nocaps all", {"CIDEr-D": 0.729, "SPICE": 0.114}),
        )
    ),
)


def published_rows(model: str, split: str, uris: Sequence[str], beam_size: int) -> list[tuple[Published, str]]:
    """The printed rows of a system on a split, each with the reason why ours cannot be compared ("" when it can)."""
    found = []
    for row in ROWS:
        if row.model == model and row.split == split:
            found.append((row, _difference(row, uris, beam_size)))
    return found


def _difference(row: Published, uris: Sequence[str], beam_size: int) -> str:
    if row.split == "test":
        coco = sum(uri.rsplit("/", 1)[-1].startswith("COCO_val2014_") for uri in uris)
        if coco < len(uris) or len(uris) != COCO_TEST:
            ours = f"{coco} of ours are COCO's" if coco < len(uris) else f"ours has {len(uris):,}"
            return f"not comparable: printed for the {COCO_TEST:,} images of Karpathy's COCO test split, {ours}"
    asked = int(row.protocol.split()[1].rstrip(","))
    return "" if asked == beam_size else f"not comparable: printed for beam {asked}, ours is {beam_size}"


# The ablations that the papers of the Meshed-Memory Transformer and of Ada-ClustFormer print, row by row.
# Karpathy test, after SCST, beam 5; scores over 100 (CIDEr-D 131.2 is 1.312). A row's settings are ours.


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


def _printed_row(name: str, settings: dict[str, Any], columns: Sequence[str], values: Sequence[float]) -> PrintedRow:
    return PrintedRow(name, settings, dict(zip(columns, values, strict=True)))


def _meshed(
    name: str, score: float, slots: int, connection: str, gates: str = "sigmoid", layers: int = 3, *, aoa: bool = False
) -> PrintedRow:
    settings = {"num_memory_slots": slots, "connection": connection, "gates": gates, "num_encoder_layers": layers}
    settings |= {"num_decoder_layers": layers, "attention": "on_attention" if aoa else "dot_product"}
    return _printed_row(name, settings, ("CIDEr-D",), (score,))


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
            _printed_row(f"{slots} slots", {"num_memory_slots": slots}, _SIX, values)
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
            _printed_row(f"{layers} layers", {"num_encoder_layers": layers, "num_decoder_layers": layers}, _SIX, values)
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
    return _printed_row(name, settings | {"sampling": sampling, "window": window}, _FIVE, values)


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
