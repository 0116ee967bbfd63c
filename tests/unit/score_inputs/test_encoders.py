"""CLIPScore, PAC-S and BERTScore with tiny models, against the packages' own transforms and plain formulas."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import BertModel, RobertaModel

from raycap.jobs.score import score
from raycap.pipeline.config.sections import TextEncoderSection
from raycap.pipeline.evaluation.scores import encoders, grounding
from raycap.pipeline.evaluation.scores.encoders import BertEncoder
from raycap.pipeline.evaluation.scores.grounding import bert_score, image_similarity, with_references
from tests.support.golden import GOLDEN

FOLDER = GOLDEN / "bert_score"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
BERT_NAMES = ["BERTScore", "BERTScore-P", "BERTScore-R"]
CLIP_NAMES = ["CLIPScore", "RefCLIPScore", "PAC-S", "RefPAC-S"]
REFERENCES = {7: ["a red dog", "a photo on a dog"], 8: ["two cats"], 9: ["ein Hund", "a red", "in red"]}
CAPTIONS = {7: "A red dog!", 8: "a photo to a dog", 9: "red"}
TINY_CLIP = {
    "embed_dim": 24,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def write_tiny_clip(path: Path, seed: int = 0) -> Any:
    """Writes random weights of the model tiny-clip, which open_clip then knows, and returns the model."""
    (path.parent / "tiny-clip.json").write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(path.parent / "tiny-clip.json")
    torch.manual_seed(seed)
    model = open_clip.CLIP(**TINY_CLIP).eval()
    constants = {"context_length": torch.tensor(16), "vocab_size": torch.tensor(49408)}  # as in OpenAI's files
    save_file(model.state_dict() | constants, path)
    return model


def write_captions(folder: Path, references: dict[int, list[str]], captions: dict[int, str], inputs: Any) -> None:
    rows = [{"image_id": image, "caption": text} for image, texts in references.items() for text in texts]
    names = [{"id": image, "file_name": f"{image}.png"} for image in references]
    predictions = [{"image_id": image, "caption": text} for image, text in captions.items()]
    (folder / "references.json").write_text(json.dumps({"images": names, "annotations": rows}))
    (folder / "predictions.json").write_text(json.dumps(predictions))
    (folder / "inputs.json").write_text(json.dumps(inputs))


def run_score(folder: Path, names: list[str], **options: Any) -> Any:
    defaults: dict[str, Any] = {"metrics": names, "inputs": folder / "inputs.json"}
    return score(folder / "references.json", folder / "predictions.json", **defaults | options)


# CLIP -------------------------------------------------------------------------------------------------------------


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


def test_clip_score_and_pac_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "BATCH", 2)
    source, pictures = np.random.default_rng(1), dict[int, Image.Image]()
    for image, size in zip(REFERENCES, [(40, 32), (32, 50), (64, 64)], strict=True):
        pictures[image] = Image.fromarray(source.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        pictures[image].save(tmp_path / f"{image}.png")
    models = {key: write_tiny_clip(tmp_path / f"{key}.safetensors", seed) for seed, key in enumerate(("clip", "pac"))}
    inputs = {key: {"model": "tiny-clip", "weights": str(tmp_path / f"{key}.safetensors")} for key in models}
    write_captions(tmp_path, REFERENCES, CAPTIONS, inputs)
    scores = run_score(tmp_path, CLIP_NAMES, images=tmp_path)
    transform, tokenize = open_clip.image_transform(32, is_train=False), open_clip.get_tokenizer("tiny-clip")
    for (key, model), weight in zip(models.items(), (2.5, 2.0), strict=True):

        @torch.inference_mode()
        def text(caption: str, model: Any = model) -> torch.Tensor:
            return model.encode_text(tokenize(f"A photo depicts {caption}"), normalize=True)[0]

        for row, (image, caption) in enumerate(CAPTIONS.items()):
            with torch.inference_mode():
                vector = model.encode_image(transform(pictures[image])[None], normalize=True)[0]
            similarity = weight * max(float(vector @ text(caption)), 0.0)
            nearest = max(0.0, *(float(text(caption) @ text(reference)) for reference in REFERENCES[image]))
            total = similarity + nearest
            expected = similarity, 2 * similarity * nearest / total if total else 0.0
            names = CLIP_NAMES[:2] if key == "clip" else CLIP_NAMES[2:]
            found = [scores.by_name[name].per_image[row] for name in names]
            assert found == pytest.approx(expected, abs=1e-5)
    assert max(scores.by_name["CLIPScore"].per_image) > 0
    parts = dict(part.split(":", 1) for part in scores.signature.split("|"))
    assert re.fullmatch(r"tiny-clip-[0-9a-f]{10}", parts["clip"]) and parts["clip"] != parts["pac"]

    def reason(**options: Any) -> str:
        scores = run_score(tmp_path, CLIP_NAMES, **options)
        assert all(value is None for value in scores.values.values()) and "clip:" not in scores.signature
        return scores.by_name["RefCLIPScore"].unavailable or ""

    assert "give `raycap score` --images" in reason()
    assert "evaluation.inputs.clip" in reason(inputs=None)
    assert "defined for English" in reason(language="de")
    (tmp_path / "8.png").write_bytes(b"no image")
    assert "8.png cannot be read: not an image" in reason(images=tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "pac.safetensors")
    (tmp_path / "clip.safetensors").write_bytes(b"nothing")
    assert "clip.safetensors are no weights of tiny-clip" in reason(images=tmp_path)
    for name in ("no-such-model", "hf-hub:someone/clip", "ViT-B-16-SigLIP", "roberta-ViT-B-32"):
        write_captions(tmp_path, REFERENCES, CAPTIONS, {key: inputs[key] | {"model": name} for key in inputs})
        assert "none of open_clip's models with the text tower of CLIP" in reason(images=tmp_path), name


# BERTScore --------------------------------------------------------------------------------------------------------


def encoder(name: str, layer: int = 2) -> BertEncoder:
    return BertEncoder(TextEncoderSection(folder=str(FOLDER / name), layer=layer))


def made_up(num_images: int, seed: int) -> tuple[list[str], list[list[str]]]:
    source = random.Random(seed)
    words = ["a", "the", "Dog", "red", "horse's", "zebra", "21", "!", "café", "狗", "\N{DOG FACE}", "ß"]

    def caption() -> str:
        return " ".join(source.choice(words) for _ in range(source.choice([0, 1, 2, 3, 5, 9, 40])))

    return [caption() for _ in range(num_images)], [
        [caption() for _ in range(source.randint(1, 4))] for _ in range(num_images)
    ]


@pytest.mark.parametrize("key", EXPECTED["scores"])
def test_scores_are_those_of_the_package_bert_score(key: str) -> None:
    name, layer, kind = key.split(", ")
    references = EXPECTED["references"] if kind == "all" else [texts[:1] for texts in EXPECTED["references"]]
    found = bert_score(encoder(name, int(layer[-1])), EXPECTED["captions"], references)
    np.testing.assert_allclose(found.T, EXPECTED["scores"][key], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "layer"), [("bert", 2), ("roberta", 1)])
def test_scores_follow_their_definition(name: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pair by pair and token by token, each text alone in the whole model of transformers."""
    model = {"bert": BertModel, "roberta": RobertaModel}[name].from_pretrained(FOLDER / name).eval()
    (captions, references), split = made_up(8, seed=layer), encoder(name).ids

    @torch.inference_mode()
    def states(ids: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0].double()

    def mean(ids: tuple[int, ...], others: tuple[int, ...]) -> float:
        cosines = [[float(one @ other / one.norm() / other.norm()) for other in states(others)] for one in states(ids)]
        return statistics.fmean(map(max, cosines[1:-1]))

    expected = []
    for caption, texts in zip(captions, references, strict=True):
        best = (-math.inf,) * 3
        for text in texts:
            one, other = split([caption, text])
            has_words = min(len(one), len(other)) > 2
            precision, recall = (mean(one, other), mean(other, one)) if has_words else (0.0, 0.0)
            total = precision + recall
            f1 = 2 * precision * recall / total if total else 0.0
            best = tuple(map(max, best, (precision, recall, f1)))  # type: ignore[assignment]
        expected.append(best)
    np.testing.assert_allclose(bert_score(encoder(name, layer), captions, references), expected, atol=1e-6)
    monkeypatch.setattr(grounding, "IMAGES_AT_ONCE", 3)
    monkeypatch.setattr(encoders, "BATCH", 2)
    np.testing.assert_allclose(bert_score(encoder(name, layer), captions, references), expected, atol=1e-6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Captions, and the folder `model` with a RoBERTa."""
    shutil.copytree(FOLDER / "roberta", tmp_path / "model")
    inputs = {"bert": {"folder": str(tmp_path / "model"), "layer": 1}}
    write_captions(tmp_path, dict(enumerate(EXPECTED["references"])), dict(enumerate(EXPECTED["captions"])), inputs)
    return tmp_path


def test_score_computes_bert_score(folder: Path) -> None:
    scores = run_score(folder, BERT_NAMES)
    precision, recall, f1 = EXPECTED["scores"]["roberta, layer 1, all"]
    for name, expected in zip(BERT_NAMES, (f1, precision, recall), strict=True):
        assert scores.by_name[name].per_image == pytest.approx(expected, abs=1e-6)
    digests = r"[0-9a-f]{10}-[0-9a-f]{10}-[0-9a-f]{10}"
    assert re.search(rf"\|bert:{digests}-L1\|raycap:", scores.signature)
    assert run_score(folder, BERT_NAMES, language="de").values == scores.values
