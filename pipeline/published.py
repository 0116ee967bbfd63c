"""Scores that papers print for the systems here, and whether a score of ours may stand beside them.

Values as printed, over 100, on the 5,000 test images of Karpathy's split of COCO or on nocaps's validation set;
their CIDEr is CIDEr-D with the document frequencies of the scored split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
