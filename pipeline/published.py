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
