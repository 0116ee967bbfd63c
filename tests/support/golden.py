"""Values and checkpoints recorded from the reference implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.import_ import import_checkpoint
from pipeline.captioning.bundle import Bundle, load_bundle

GOLDEN = Path(__file__).resolve().parents[1] / "parity" / "golden"
EXPANSIONNET = GOLDEN / "expansionnet_v2"
EXPANSIONNET_SETTINGS = ("model.static_expansion=[4,8,16]", "model.num_heads=4")


def import_expansionnet(checkpoint: str, folder: Path, **options: Any) -> Bundle:
    import_checkpoint(
        "expansionnet_v2",
        checkpoint=EXPANSIONNET / checkpoint,
        tokens=EXPANSIONNET / "tokens.pickle",
        out=folder,
        overrides=EXPANSIONNET_SETTINGS,
        **options,
    )
    return load_bundle(folder)
