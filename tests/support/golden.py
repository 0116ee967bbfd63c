"""Values and checkpoints recorded from the reference implementations."""

from __future__ import annotations

import pickle
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.import_ import import_checkpoint
from raycap.pipeline.evaluation.captioning.bundle import Bundle, load_bundle

GOLDEN = Path(__file__).resolve().parents[1] / "parity" / "golden"
EXPANSIONNET = GOLDEN / "expansionnet_v2"
MESHED_MEMORY = GOLDEN / "meshed_memory"
MESHED_WORDS = ["<unk>", "<pad>", "<bos>", "<eos>", *(f"word{n}" for n in range(13))]
EXPANSIONNET_SETTINGS = ("model.static_expansion=[4,8,16]", "model.num_heads=4")
SWIN_SIZES = ("embed_dim=8", "depths=[2,2,2]", "num_heads=[2,2,4]", "window_size=3", "image_size=48")
SWIN_SETTINGS = tuple(f"backbone.{size}" for size in SWIN_SIZES)  # of the recorded Swin


def import_expansionnet(checkpoint: str, folder: Path, settings: Sequence[str] = ()) -> Bundle:
    import_checkpoint(
        "expansionnet_v2",
        checkpoint=EXPANSIONNET / checkpoint,
        tokens=EXPANSIONNET / "tokens.pickle",
        out=folder,
        overrides=[*EXPANSIONNET_SETTINGS, *settings],
    )
    return load_bundle(folder)


def write_published_form(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """A pickle as the reference's vocabulary is one: an object of a class `data.vocab.Vocab` with three tables."""
    module = types.ModuleType("data.vocab")

    class Vocab:
        pass

    def _default_unk_index() -> int:
        return 0

    for thing in (Vocab, _default_unk_index):
        thing.__module__, thing.__qualname__ = "data.vocab", thing.__name__
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, "data", types.ModuleType("data"))
    monkeypatch.setitem(sys.modules, "data.vocab", module)
    vocabulary: Any = Vocab()
    vocabulary.freqs = Counter({word: 5 + index for index, word in enumerate(words)})
    vocabulary.itos = words
    vocabulary.stoi = defaultdict(_default_unk_index, {word: index for index, word in enumerate(words)})
    vocabulary.vectors = None
    for name, value in changes.items():
        setattr(vocabulary, name, value)
    path.write_bytes(pickle.dumps(vocabulary, 3))
    monkeypatch.delitem(sys.modules, "data.vocab")
    return path
