"""Given word vectors: the file, the two projections and the tied output, the bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_model, cost
from raycap.models.config import (
    ClustFormerConfig,
    ExpansionNetConfig,
    MeshedMemoryConfig,
    ModelConfig,
    ModelSizes,
)
from raycap.models.decoding.search import beam_search
from raycap.models.layers import TiedOutput, WordVectors, fill_word_vectors
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.reading import build_vocabulary, read_dataset
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.data.word_vectors import describe_missing, read_word_vectors
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, save_bundle
from raycap.pipeline.runs.identity import config_identity
from raycap.pipeline.runs.prepare import prepare
from tests.conftest import small_config, write_karpathy
from tests.support.logs import on_message

WORDS = Vocabulary.build([["a", "red", "cat", "sits", "."]], 1)
SIZES = ModelSizes(6, len(WORDS), 9, WORDS.sos, WORDS.eos, WORDS.pad)
SMALL = {
    "d_model": 8,
    "d_ff": 8,
    "num_heads": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "word_vector_width": 3,
}
SYSTEMS: list[ModelConfig] = [
    ExpansionNetConfig(**SMALL, static_expansion=(4,)),  # type: ignore[arg-type]
    ExpansionNetConfig(**SMALL, name="transformer"),  # type: ignore[arg-type]
    MeshedMemoryConfig(**SMALL),  # type: ignore[arg-type]
    ClustFormerConfig(**SMALL),  # type: ignore[arg-type]
]
LINES = ["the 9 9 9", "cat 0.5 -1 2", ". . . 1 2 3", "red 1 0 1e-1", "cat 7 7 7", ". 4 5 6"]


def glove(folder: Path, lines: list[str] = LINES) -> Path:
    (folder / "glove.txt").write_text("\n".join(lines) + "\n")
    return folder / "glove.txt"


def test_vectors_of_the_words_are_found_and_the_others_named(tmp_path: Path) -> None:
    vectors, given = read_word_vectors(glove(tmp_path), WORDS.words, 3)
    rows = {word: vectors[row].tolist() for word, row in WORDS.ids.items() if given[row]}
    assert rows == {"cat": [0.5, -1, 2], "red": [1, 0, pytest.approx(0.1)], ".": [4, 5, 6]}
    assert describe_missing(WORDS.words, given) == ("3 of 5 words have a given vector; drawn at random: a, sits")
    headed, _ = read_word_vectors(glove(tmp_path, ["6 3", *LINES]), WORDS.words, 3)
    assert np.array_equal(vectors, headed)


@pytest.mark.parametrize("config", SYSTEMS, ids=lambda config: config.name)
def test_logits_are_products_with_the_given_vectors(config: ModelConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(config, SIZES).eval()
    vectors, given = (torch.from_numpy(part) for part in read_word_vectors(glove(tmp_path), WORDS.words, 3))
    fill_word_vectors(model, vectors, given)
    words, output = model.token_embedding, model.lm_head
    assert isinstance(words, WordVectors) and isinstance(output, TiedOutput)
    assert torch.equal(words.weight[given], vectors[given])
    assert bool((words.weight[~given] != 0).all()) and words.weight.std() < 6
    states: list[torch.Tensor] = []
    hook = output.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    features = torch.randn(2, 4, 6)
    tokens = torch.tensor([[WORDS.sos, 5, 6], [WORDS.sos, 7, 4]])
    logits = model(Features(features), tokens)
    hook.remove()
    expected = (states[0] @ output.weight.T + output.bias) @ words.weight.T
    torch.testing.assert_close(logits, expected)
    # not trained, gradients reach both projections
    logits.sum().backward()
    assert words.weight.grad is None and not words.weight.requires_grad
    assert words.to_model.weight.grad is not None and output.weight.grad is not None
    # a step gives what teacher forcing gives
    with torch.no_grad():
        cache = model.init_cache(model.encode(Features(features)), 1)
        for place in range(3):
            step, cache = model.step(tokens[:, place], cache)
            torch.testing.assert_close(step, logits[:, place], rtol=1e-4, atol=1e-5)
    counted = cost(config, SIZES, image_tokens=4, caption_tokens=3)
    plain = cost(type(config)(**{**vars(config), "word_vector_width": None}), SIZES, image_tokens=4, caption_tokens=3)
    assert counted.executed - plain.executed == 3 * (2 * 3 * 8 + 3 * 9 - 8 * 9)


def test_the_bundle_needs_no_file(tmp_path: Path) -> None:
    file = glove(tmp_path)
    config = MeshedMemoryConfig(**SMALL, word_vectors=str(file), train_word_vectors=True)  # type: ignore[arg-type]
    model = build_model(config, SIZES).eval()
    assert model.token_embedding.weight.requires_grad  # type: ignore[union-attr]
    save_bundle(tmp_path / "bundle", Captioner(model), WORDS, name="glove", info={})
    file.unlink()
    loaded = load_bundle(tmp_path / "bundle").captioner.model
    assert "glove.txt" not in (tmp_path / "bundle" / "config.yaml").read_text()
    features = Features(torch.randn(3, 4, 6))
    one, two = (beam_search(each, each.encode(features), beam_size=2, max_length=6) for each in (model, loaded))
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.scores, two.scores)


def test_a_run_starts_with_the_vectors_and_its_identity_is_their_content(tmp_path: Path) -> None:
    more = tmp_path / "more.txt"
    more.write_text("Lavender\nteddy bear\n")
    file = glove(tmp_path, ["lavender 1 2 3", "a 4 5 6"])

    def configuration(**changes: object) -> object:
        keys = {"model__word_vectors": str(file), "model__word_vector_width": 3, "data__extra_vocabulary": str(more)}
        return parse_config(small_config(tmp_path / "results", **(keys | changes)))

    lines: list[str] = []
    with on_message(lines.append):
        folder = prepare(configuration())
    assert any("2 of " in line and "words have a given vector; drawn at random: above" in line for line in lines), lines
    from safetensors.torch import load_file

    weights = load_file(folder.path / "init" / "model.safetensors")["token_embedding.weight"]
    place = folder.vocabulary.ids["lavender"]
    assert weights.shape == (len(folder.vocabulary), 3) and weights[place].tolist() == [1, 2, 3]
    assert {"teddy", "bear"} <= folder.vocabulary.ids.keys()
    one = config_identity(configuration())  # type: ignore[attr-defined]
    moved = file.rename(tmp_path / "moved.txt")
    assert config_identity(configuration(model__word_vectors=str(moved))) == one  # type: ignore[attr-defined]
    moved.write_text("lavender 1 2 4\na 4 5 6\n")
    assert config_identity(configuration(model__word_vectors=str(moved))) != one  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="set it to 3"):
        prepare(configuration(model__word_vectors=str(moved), model__word_vector_width=5))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs model.word_vector_width"):
        configuration(model__word_vector_width=None)


def test_more_words_join_the_vocabulary(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "data", {"train": 2, "val": 1, "test": 1})
    (tmp_path / "more.txt").write_text("Traffic light\n\npicture\n")
    keys = {"root": str(root), "train_splits": ["train"], "min_count": 1}
    plain, more = (DataSection(**keys, extra_vocabulary=file) for file in (None, str(tmp_path / "more.txt")))  # type: ignore[arg-type]
    dataset = read_dataset(plain, root)
    words = set(build_vocabulary(dataset, plain).words)
    assert set(build_vocabulary(dataset, more).words) == words | {"traffic", "light"}
    with pytest.raises(UserError, match=r"data\.extra_vocabulary .* cannot be read"):
        build_vocabulary(dataset, plain.model_copy(update={"extra_vocabulary": str(tmp_path / "none")}))
