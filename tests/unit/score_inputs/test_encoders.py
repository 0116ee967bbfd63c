"""CLIPScore and PAC-S with tiny random weights, against plain implementations of the tokenizer and the formulas."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from raycap.jobs.score import score
from raycap.models.encoders.dual_encoder import DualEncoder
from raycap.pipeline.data.language.subwords import ClipTokenizer
from raycap.pipeline.evaluation.scores.grounding import image_similarity, with_references
from tests.support.clip import IMAGE_SIZE, MERGES, NUM_PIECES, POSITIONS, clip_tensors

REFERENCES = {7: ["a red dog", "a photo on a dog"], 8: ["two cats"], 9: ["ein Hund", "a red", "in red"]}
CAPTIONS = {7: "A red dog!", 8: "a photo to a dog", 9: "red"}
NAMES = ["CLIPScore", "RefCLIPScore", "PAC-S", "RefPAC-S"]
MERGE_LINES = ["#version: 0.2", *map(" ".join, MERGES), "unused merge"]


def plain_ids(text: str) -> list[int]:
    """CLIP's ids of an ASCII text, merged pair by pair."""
    printable = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters = printable + [chr(256 + i) for i in range(256 - len(printable))]
    pieces = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in MERGES]
    found = []
    for word in re.findall(r"'s|'t|'re|'ve|'m|'ll|'d|[a-z]+|[0-9]|[^\sa-z0-9]+", text.lower()):
        parts = [*word[:-1], f"{word[-1]}</w>"]
        for left, right in MERGES:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == (left, right):
                    parts[i : i + 2] = [left + right]
                i += 1
        found += [pieces.index(part) for part in parts]
    return [NUM_PIECES - 2, *found, NUM_PIECES - 1]


@pytest.mark.parametrize("text", ["A photo  depicts", "red dogs on 12 dog's beds!?", "it's in", "", "inonto don't"])
def test_the_tokenizer_merges_by_rank(text: str) -> None:
    expected = plain_ids(text)
    assert ClipTokenizer(MERGE_LINES, NUM_PIECES).ids(text, 40) == expected + [0] * (40 - len(expected))


def test_the_tokenizer_cuts_long_texts_and_takes_other_scripts() -> None:
    tokenizer = ClipTokenizer(MERGE_LINES, NUM_PIECES)
    assert tokenizer.ids("dog " * 50, 6) == [NUM_PIECES - 2, *plain_ids("dog")[1:2] * 4, NUM_PIECES - 1]
    assert len([each for each in tokenizer.ids("कुत्ता 狗", 60) if each]) > 10  # pieces of bytes
    for lines in (MERGE_LINES[:3], ["a", *MERGE_LINES[1:]], ["x y z", *MERGE_LINES[2:]], ["zz yy", *MERGE_LINES[2:]]):
        with pytest.raises(ValueError, match=r"merges|lines of two pieces"):
            ClipTokenizer(lines, NUM_PIECES)


def test_the_formulas() -> None:
    source = np.random.default_rng(0)
    images, captions, references = (source.normal(size=(n, 5)) for n in (6, 6, 11))
    images, captions, references = (x / np.linalg.norm(x, axis=1)[:, None] for x in (images, captions, references))
    counts = [1, 3, 2, 1, 3, 1]
    similarity = image_similarity(images, captions, 2.5)
    found, start = with_references(similarity, captions, references, counts), 0
    assert (similarity == 0).any() and (found == 0).any() and (found > 0).any()
    for i, count in enumerate(counts):
        assert similarity[i] == pytest.approx(2.5 * max(float(images[i] @ captions[i]), 0))
        nearest = max(0.0, *(float(captions[i] @ references[j]) for j in range(start, start + count)))
        expected = 2 / (1 / similarity[i] + 1 / nearest) if similarity[i] and nearest else 0.0
        assert found[i] == pytest.approx(expected)
        start += count


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Images, references, captions, and the files of two encoders."""
    source = np.random.default_rng(1)
    rows = [{"image_id": image, "caption": text} for image, texts in REFERENCES.items() for text in texts]
    (tmp_path / "images").mkdir()
    for image, size in zip(REFERENCES, [(40, 32), (32, 50), (64, 64)], strict=True):
        pixels = source.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{image}.png")
    inputs: dict[str, Any] = {}
    for seed, key in enumerate(("clip", "pac")):
        save_file(clip_tensors(seed), tmp_path / f"{key}.safetensors")
        inputs[key] = {"weights": str(tmp_path / f"{key}.safetensors"), "merges": str(tmp_path / "merges.txt.gz")}
    (tmp_path / "merges.txt.gz").write_bytes(gzip.compress("\n".join(MERGE_LINES).encode()))
    names = [{"id": image, "file_name": f"{image}.png"} for image in REFERENCES]
    contents = {
        "references": {"images": names, "annotations": rows},
        "predictions": [{"image_id": image, "caption": text} for image, text in CAPTIONS.items()],
        "inputs": inputs,
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return {name: tmp_path / f"{name}.json" for name in contents} | {"images": tmp_path / "images"}


def plain_scores(key: str, files: dict[str, Path], weight: float) -> tuple[list[float], list[float]]:
    """The scores of each image without and with references."""
    tensors = clip_tensors(("clip", "pac").index(key))
    encoder = DualEncoder(tensors, "quick_gelu", "cpu")

    def text(caption: str) -> torch.Tensor:
        ids = plain_ids(f"A photo depicts {caption}")
        ids = ids if len(ids) <= POSITIONS else [*ids[: POSITIONS - 1], ids[-1]]
        return encoder.encode_texts(torch.tensor([ids]))[0]

    alone, referenced = [], []
    mean, std = torch.tensor([[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]])
    for image, caption in CAPTIONS.items():
        with Image.open(files["images"] / f"{image}.png") as picture:
            width, height = picture.size
            scale = IMAGE_SIZE / min(width, height)
            resized = picture.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
        left, top = (round((side - IMAGE_SIZE) / 2) for side in resized.size)
        square = np.asarray(resized.crop((left, top, left + IMAGE_SIZE, top + IMAGE_SIZE)), np.float32) / 255
        pixels = ((torch.tensor(square) - mean) / std).permute(2, 0, 1)[None]
        similarity = weight * max(float(encoder.encode_images(pixels)[0] @ text(caption)), 0.0)
        nearest = max(0.0, *(float(text(caption) @ text(reference)) for reference in REFERENCES[image]))
        alone.append(similarity)
        total = similarity + nearest
        referenced.append(2 * similarity * nearest / total if total else 0.0)
    return alone, referenced


def run_score(files: dict[str, Path], **options: Any) -> Any:
    return score(files["references"], files["predictions"], **{"metrics": NAMES, "inputs": files["inputs"]} | options)


def test_score_computes_clip_score_and_pac_s(files: dict[str, Path]) -> None:
    scores = run_score(files, images=files["images"])
    for key, weight, names in (("clip", 2.5, NAMES[:2]), ("pac", 2.0, NAMES[2:])):
        for name, expected in zip(names, plain_scores(key, files, weight), strict=True):
            assert scores.by_name[name].per_image == pytest.approx(expected, abs=1e-5), name
            assert scores.values[name] == pytest.approx(np.mean(expected), abs=1e-5)
    parts = dict(part.split(":", 1) for part in scores.signature.split("|"))
    digest = r"[0-9a-f]{10}"
    assert all(re.fullmatch(f"{digest}-{digest}-(quick_)?gelu", parts[key]) for key in ("clip", "pac"))
    assert parts["clip"] != parts["pac"]
    assert max(scores.by_name["CLIPScore"].per_image) > 0


def test_what_is_missing_makes_them_unavailable(files: dict[str, Path]) -> None:
    def reason(**options: Any) -> str:
        scores = run_score(files, **options)
        assert all(value is None for value in scores.values.values()) and "clip:" not in scores.signature
        return scores.by_name["RefCLIPScore"].unavailable or ""

    assert "give `raycap score` --images" in reason()
    assert "evaluation.inputs.clip" in reason(inputs=None)
    assert "defined for English" in reason(language="de")
    picture = files["images"] / "8.png"
    data = picture.read_bytes()
    picture.write_bytes(b"no image")
    assert "8.png cannot be read: not an image" in reason(images=files["images"])
    picture.write_bytes(data)
    merges = files["images"].parent / "merges.txt.gz"
    merges.write_bytes(b"a b\n")
    assert "merges.txt.gz is no file of CLIP's merges" in reason(images=files["images"])
    merges.unlink()
    assert "merges.txt.gz is no file of CLIP's merges" in reason(images=files["images"])
    for key in ("clip", "pac"):
        (files["images"].parent / f"{key}.safetensors").write_bytes(b"nothing")
    assert "clip.safetensors cannot be used" in reason(images=files["images"])
