"""The files of encoders that metrics use, whole and hostile: those of a CLIP, a BERT and a RoBERTa."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from raycap.pipeline.config.sections import EncoderSection, TextEncoderSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.encoders import FileEncoder, FileTextEncoder
from raycap.pipeline.evaluation.scores.grounding import bert_score
from raycap.pipeline.evaluation.scores.metrics import UnavailableError
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.clip import MERGES, clip_tensors
from tests.support.fuzz_models import mutated_safetensors
from tests.support.fuzzing import Case
from tests.support.golden import GOLDEN
from tests.support.mutations import hostile_json, mutated_bytes, mutated_text, replace_by_special

TEXTS = ["a red dog", "", "the café 狗 \N{DOG FACE}", "x " * 200]


def use_clip(folder: Path) -> None:
    """Encodes texts with the CLIP in a folder. Raises UserError with the reason for which it is unavailable."""
    files = EncoderSection(weights=str(folder / "clip.safetensors"), merges=str(folder / "merges.txt"))
    try:
        FileEncoder(files, {}, 1, StorageOptions()).texts(TEXTS)
    except UnavailableError as error:
        raise UserError(str(error)) from error


def use_text_encoder(folder: Path) -> None:
    """Computes BERTScore with the model in a folder. Raises UserError with the reason for which it is unavailable."""
    try:
        bert_score(FileTextEncoder(TextEncoderSection(folder=str(folder), layer=2)), TEXTS, [TEXTS] * len(TEXTS))
    except UnavailableError as error:
        raise UserError(str(error)) from error


def encoder_folders(folder: Path) -> Path:
    """A folder with one folder per encoder."""
    for name in ("bert", "roberta"):
        shutil.copytree(GOLDEN / "bert_score" / name, folder / name)
    (folder / "clip").mkdir()
    save_file(clip_tensors(), folder / "clip" / "clip.safetensors")
    (folder / "clip" / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, MERGES)]))
    return folder


def encoder(source: Path, case: Case) -> Callable[[], object]:
    """An encoder with one hostile file encodes texts."""
    random, folder = case.random, case.folder / "encoder"
    name = random.choice(("bert", "roberta", "clip"))
    shutil.copytree(source / name, folder)
    path = random.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    if random.random() < 0.05:
        replace_by_special(path, random)
    elif path.suffix == ".safetensors" and random.random() < 0.7:
        path.write_bytes(mutated_safetensors(data, random))
    elif path.suffix == ".json" and random.random() < 0.9:
        path.write_bytes(hostile_json(_reduced(json.loads(data)), random))
    elif path.suffix == ".txt" and random.random() < 0.7:
        path.write_text(mutated_text(data.decode(), random, {}))
    else:
        path.write_bytes(mutated_bytes(data, random))
    use = use_clip if name == "clip" else use_text_encoder
    return lambda: use(folder)


def _reduced(content: dict[str, object]) -> dict[str, object]:
    """The content of a tokenizer.json without parts that are not read, so that most changes hit one that is."""
    return {key: value for key, value in content.items() if key not in ("post_processor", "decoder", "added_tokens")}
