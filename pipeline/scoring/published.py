"""Scores that papers print for these systems, and whether our scores can be compared with them.

All values are the printed ones divided by 100 (131.2 becomes 1.312). Unless a row names another protocol, they are for
the 5,000 test images of Karpathy's split of COCO, after SCST and with beam 5. The papers' CIDEr is
CIDEr-D with the document frequencies of the scored split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COCO_TEST = 5_000
ABLATION_COLUMNS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
_SIX = ("BLEU-1", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
_FIVE = _SIX[1:]


@dataclass(frozen=True)
class PrintedRow:
    """A row of a paper's table: its name, its scores, its keys of the section `model`, and how it was decoded."""

    name: str
    scores: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    beam_size: int = 5
    protocol: str = "beam 5"


@dataclass(frozen=True)
class AblationRow(PrintedRow):
    """A row of ExpansionNet v2's ablation; attention replaces an expansion that is None."""

    macs: float = 0.0  # multiply-accumulates of the captioner, without the backbone, for 5,000 images and captions

    @property
    def static_expansion(self) -> tuple[int, ...] | None:
        groups: tuple[int, ...] | None = self.settings["static_expansion"]
        return groups

    @property
    def dynamic_expansion(self) -> int | None:
        vectors: int | None = self.settings["dynamic_expansion"]
        return vectors


@dataclass(frozen=True)
class PrintedTable:
    """A table of a paper. Reports show differences from the row with the index `baseline`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[PrintedRow, ...]
    baseline: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the section `model` in which the rows differ; each row sets all of them."""
        return tuple(self.rows[0].settings)


def _row(name: str, columns: Sequence[str], values: Sequence[float], **settings: Any) -> PrintedRow:
    return PrintedRow(name, dict(zip(columns, values, strict=True)), settings)


# ---- Final scores


def _nocaps(split: str, name: str, cider: float, spice: float) -> PrintedRow:
    scores = {"CIDEr-D": cider, "SPICE": spice}
    return PrintedRow(f"ExpansionNet v2, nocaps {name} (paper)", scores, {}, split, beam_size=3, protocol="beam 3, XE")


# The printed final scores of each model.name
ROWS: dict[str, tuple[PrintedRow, ...]] = {
    "expansionnet_v2": (
        _row("ExpansionNet v2, cross entropy (paper)", _SIX, (0.781, 0.381, 0.301, 0.589, 1.282, 0.235)),
        _row("ExpansionNet v2, SCST (paper)", _SIX, (0.828, 0.415, 0.303, 0.605, 1.404, 0.245)),
        _row("ExpansionNet v2, ensemble, SCST (paper)", _SIX, (0.835, 0.427, 0.306, 0.611, 1.437, 0.247)),
        _nocaps("in-domain", "in-domain", 0.838, 0.126),
        _nocaps("near-domain", "near-domain", 0.792, 0.124),
        _nocaps("out-domain", "out-of-domain", 0.540, 0.093),
        _nocaps("all", "all", 0.729, 0.114),
    ),
    "meshed_memory": (
        _row("Meshed-Memory Transformer, SCST (paper)", _SIX, (0.808, 0.391, 0.292, 0.586, 1.312, 0.226)),
    ),
}


def published_rows(model: str, split: str, uris: Sequence[str], beam_size: int) -> list[tuple[PrintedRow, str]]:
    """The printed rows of a system on a split, each with the reason why our score cannot be compared, or ""."""
    return [(row, _difference(row, uris, beam_size)) for row in ROWS.get(model, ()) if row.split == split]


def _difference(row: PrintedRow, uris: Sequence[str], beam_size: int) -> str:
    """The reason why our score cannot be compared with a printed row; "" when it can."""
    if row.split == "test":
        coco = sum(uri.rsplit("/", 1)[-1].startswith("COCO_val2014_") for uri in uris)
        if coco < len(uris) or len(uris) != COCO_TEST:
            ours = f"{coco} of ours are COCO's" if coco < len(uris) else f"ours has {len(uris):,}"
            return f"not comparable: printed for the {COCO_TEST:,} images of Karpathy's COCO test split, {ours}"
    if row.beam_size != beam_size:
        return f"not comparable: printed for beam {row.beam_size}, ours is {beam_size}"
    return ""


# ---- ExpansionNet v2: Table I (first cross-entropy stage, Karpathy validation, beam 3) with the costs of Table VI


def _ablation(groups: tuple[int, ...] | None, vectors: int | None, values: Sequence[float], macs: float) -> AblationRow:
    settings = {"static_expansion": groups, "dynamic_expansion": vectors}
    return AblationRow(
        f"G {groups}, N_E {vectors}",
        dict(zip(ABLATION_COLUMNS, values, strict=True)),
        settings,
        split="validation",
        beam_size=3,
        protocol="beam 3, XE",
        macs=macs,
    )


ABLATION = (
    _ablation(None, None, (0.753, 0.592, 0.454, 0.346, 0.284, 0.570, 1.158, 0.216), 9.28e12),
    _ablation((16,), None, (0.764, 0.606, 0.466, 0.355, 0.286, 0.572, 1.178, 0.219), 9.62e12),
    _ablation((32,), None, (0.759, 0.599, 0.461, 0.352, 0.289, 0.571, 1.179, 0.223), 9.70e12),
    _ablation((64,), None, (0.763, 0.604, 0.464, 0.355, 0.288, 0.571, 1.177, 0.220), 9.88e12),
    _ablation(None, 4, (0.772, 0.614, 0.474, 0.362, 0.289, 0.577, 1.197, 0.223), 9.40e12),
    _ablation(None, 8, (0.769, 0.615, 0.479, 0.371, 0.291, 0.578, 1.208, 0.223), 9.43e12),
    _ablation(None, 16, (0.767, 0.614, 0.478, 0.368, 0.290, 0.577, 1.212, 0.222), 9.48e12),
    _ablation((64,), 16, (0.774, 0.619, 0.482, 0.373, 0.292, 0.580, 1.222, 0.223), 10.08e12),
    _ablation((128,) * 5, 16, (0.778, 0.623, 0.483, 0.372, 0.293, 0.583, 1.228, 0.225), 13.26e12),
    _ablation((256,) * 5, 16, (0.774, 0.620, 0.482, 0.372, 0.292, 0.580, 1.225, 0.222), 16.80e12),
    _ablation((512,) * 5, 16, (0.773, 0.617, 0.479, 0.370, 0.293, 0.580, 1.227, 0.224), 23.88e12),
    _ablation((32, 64, 128, 256, 512), 16, (0.776, 0.620, 0.482, 0.372, 0.294, 0.581, 1.235, 0.225), 15.21e12),
)


# ---- Meshed-Memory Transformer


def _meshed_memory(
    name: str,
    score: float,
    slots: int,
    connection: str,
    gates: str = "sigmoid",
    layers: int = 3,
    *,
    attention_on_attention: bool = False,
) -> PrintedRow:
    settings = {"num_memory_slots": slots, "connection": connection, "gates": gates, "num_encoder_layers": layers}
    settings |= {"num_decoder_layers": layers, "attention": "on_attention" if attention_on_attention else "dot_product"}
    return _row(name, ("CIDEr-D",), (score,), **settings)


_MESHED = (
    PrintedTable(
        "Table 1, memory and connection (Meshed-Memory Transformer)",
        ("CIDEr-D",),
        (
            _meshed_memory("Transformer, 6 layers", 1.218, 0, "last", layers=6),
            _meshed_memory("Transformer, 3 layers", 1.236, 0, "last"),
            _meshed_memory("Transformer, attention on attention", 1.291, 0, "last", attention_on_attention=True),
            _meshed_memory("one-to-one, no memory", 1.284, 0, "one_to_one"),
            _meshed_memory("one-to-one", 1.292, 40, "one_to_one"),
            _meshed_memory("meshed, no memory", 1.294, 0, "meshed"),
            _meshed_memory("meshed, softmax gates", 1.303, 40, "meshed", "softmax"),
            _meshed_memory("meshed, sigmoid gates", 1.312, 40, "meshed"),
        ),
        baseline=1,
    ),
    PrintedTable(
        "Table 6, memory slots (Meshed-Memory Transformer)",
        _SIX,
        tuple(
            _row(f"{slots} slots", _SIX, values, num_memory_slots=slots)
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
            _row(f"{layers} layers", _SIX, values, num_encoder_layers=layers, num_decoder_layers=layers)
            for layers, values in (
                (2, (0.805, 0.386, 0.290, 0.584, 1.285, 0.228)),
                (3, (0.808, 0.391, 0.292, 0.586, 1.312, 0.226)),
                (4, (0.808, 0.386, 0.291, 0.585, 1.296, 0.226)),
            )
        ),
    ),
)


# ---- Ada-ClustFormer


def _ada_clustformer(
    name: str,
    values: Sequence[float],
    encoder: str = "2d",
    decoder: str = "1d",
    stacking: str = "matrix",
    sampling: int = 2,
    window: int | None = None,
) -> PrintedRow:
    settings = {"encoder_clusters": encoder, "decoder_clusters": decoder, "stacking": stacking}
    return _row(name, _FIVE, values, **settings, sampling=sampling, window=window)


_CLUSTFORMER = (
    PrintedTable(
        "Table 1 (Ada-ClustFormer)",
        _FIVE,
        (
            _ada_clustformer("base", (0.400, 0.297, 0.596, 1.344, 0.234), "none", "none"),
            _ada_clustformer("decoder only", (0.402, 0.298, 0.599, 1.351, 0.237), "none"),
            _ada_clustformer("encoder 2-D only", (0.404, 0.298, 0.600, 1.359, 0.237), "2d", "none"),
            _ada_clustformer("encoder 1-D only", (0.400, 0.294, 0.594, 1.345, 0.232), "1d", "none"),
            _ada_clustformer("without equation 6", (0.391, 0.287, 0.588, 1.326, 0.228), stacking="none"),
            _ada_clustformer("sampling 4", (0.398, 0.290, 0.593, 1.355, 0.230), sampling=4),
            _ada_clustformer("fixed window 2", (0.398, 0.292, 0.591, 1.349, 0.229), window=2),
            _ada_clustformer("full", (0.411, 0.301, 0.602, 1.378, 0.241)),
        ),
    ),
)

# The tables for each value of a search's key `compare`
TABLES: dict[str, tuple[PrintedTable, ...]] = {"meshed_memory": _MESHED, "clustformer": _CLUSTFORMER}
NOTE = (
    "Means of the validation captions beside the paper's (Karpathy test after SCST, beam 5); +/- is the difference to "
    "the row {baseline}."
)
