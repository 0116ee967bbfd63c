"""BERTScore with tiny models, against the package bert-score and against a plain implementation."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycap.jobs.score import score
from raycap.models.encoders.text_encoder import TextEncoder, TextEncoderSizes
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.sections import ScoreInputsSection, TextEncoderSection
from raycap.pipeline.data.language.bert_tokenizer import BertTokenizer
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores import encoders, grounding
from raycap.pipeline.evaluation.scores.encoders import FileTextEncoder
from raycap.pipeline.evaluation.scores.grounding import bert_score
from raycap.pipeline.evaluation.scores.metrics import UnavailableError
from raycap.pipeline.runs.preflight import check_score_inputs
from tests.conftest import small_config
from tests.support.golden import GOLDEN

FOLDER = GOLDEN / "bert_score"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
CAPTIONS, REFERENCES = EXPECTED["captions"], EXPECTED["references"]
NAMES = ["BERTScore", "BERTScore-P", "BERTScore-R"]
MODELS = ("bert", "roberta")
WORDS = ["a", "the", "Dog", "red", "horse's", "zebra", "21", "!", "café", "狗", "\N{DOG FACE}", "ß"]


def encoder(name: str, layer: int | None = 2, **options: Any) -> FileTextEncoder:
    return FileTextEncoder(TextEncoderSection(folder=str(FOLDER / name), layer=layer, **options))


def sizes(name: str) -> TextEncoderSizes:
    return TextEncoderSizes.read(json.loads((FOLDER / name / "config.json").read_text()))


def made_up(num_images: int, seed: int) -> tuple[list[str], list[list[str]]]:
    source = random.Random(seed)

    def caption() -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.choice([0, 1, 2, 3, 5, 9, 40])))

    return [caption() for _ in range(num_images)], [
        [caption() for _ in range(source.randint(1, 4))] for _ in range(num_images)
    ]


# the reference implementation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_the_slow_tokenizers(name: str) -> None:
    texts = [*CAPTIONS, *(text for image in REFERENCES for text in image)]
    expected = [ids for part in EXPECTED["ids"][name] for ids in part]
    assert [list(ids) for ids in encoder(name).ids(texts)] == expected
    assert max(map(len, expected)) == EXPECTED["max_tokens"] and min(map(len, expected)) == 2


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_of_each_layer(name: str) -> None:
    tensors, recorded = load_file(FOLDER / name / "model.safetensors"), np.load(FOLDER / "expected.npz")
    rows = EXPECTED["ids"][name][0][:7]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = torch.tensor(row)
    for layer in range(3):
        states = TextEncoder(tensors, sizes(name), layer, "cpu").encode(ids, lengths)
        for number, row in enumerate(rows):
            expected = torch.tensor(recorded[f"{name}_{number}"][layer])
            torch.testing.assert_close(states[number, : len(row)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("key", EXPECTED["scores"])
def test_scores_are_those_of_the_package(key: str) -> None:
    name, layer, idf, kind = key.split(", ")
    references = REFERENCES if kind == "all" else [texts[:1] for texts in REFERENCES]
    found = bert_score(encoder(name, int(layer[-1]), idf=idf == "idf"), CAPTIONS, references)
    np.testing.assert_allclose(found.T, EXPECTED["scores"][key], rtol=0, atol=1e-6)


# a plain implementation --------------------------------------------------------------------------------------------


def plain_states(name: str, ids: tuple[int, ...], layer: int) -> list[Tensor]:
    """The hidden states of one text: token by token, head by head, in float64."""
    t = {
        key.removeprefix("bert."): value.double()
        for key, value in load_file(FOLDER / name / "model.safetensors").items()
    }
    eps, first, num_heads = (1e-12, 0, 4) if name == "bert" else (1e-5, 2, 4)

    def norm(x: Tensor, key: str) -> Tensor:
        centered = x - x.mean()
        scaled = centered / (centered.square().mean() + eps).sqrt()
        return scaled * t[f"{key}.LayerNorm.weight"] + t[f"{key}.LayerNorm.bias"]

    def linear(x: Tensor, key: str) -> Tensor:
        return t[f"{key}.weight"] @ x + t[f"{key}.bias"]

    tables = [t[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")]
    states = [norm(tables[0][token] + tables[1][first + i] + tables[2][0], "embeddings") for i, token in enumerate(ids)]
    for number in range(layer):
        block, width = f"encoder.layer.{number}", len(states[0]) // num_heads
        queries, keys, values = (
            [linear(state, f"{block}.attention.self.{part}") for state in states] for part in ("query", "key", "value")
        )
        updated = []
        for i, state in enumerate(states):
            heads = []
            for head in range(num_heads):
                part = slice(width * head, width * (head + 1))
                logits = torch.stack([queries[i][part] @ key[part] / math.sqrt(width) for key in keys])
                heads.append(sum(w * value[part] for w, value in zip(logits.softmax(0), values, strict=True)))
            attended = linear(torch.cat(heads), f"{block}.attention.output.dense")  # type: ignore[arg-type]
            state = norm(state + attended, f"{block}.attention.output")
            hidden = linear(state, f"{block}.intermediate.dense")
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            updated.append(norm(state + linear(hidden, f"{block}.output.dense"), f"{block}.output"))
        states = updated
    return states


def plain_scores(
    name: str, layer: int, idf: bool, captions: list[str], references: list[list[str]]
) -> list[tuple[float, ...]]:
    """BERTScore of each image: pair by pair, token by token."""
    split = encoder(name).ids
    documents = [set(split([text])[0]) for image in references for text in image]

    def weight(token: int) -> float:
        return math.log((len(documents) + 1) / (sum(token in each for each in documents) + 1)) if idf else 1.0

    def mean(ids: tuple[int, ...], states: list[Tensor], others: list[Tensor]) -> float:
        total = weights = 0.0
        for token, state in list(zip(ids, states, strict=True))[1:-1]:
            nearest = max(float(state @ other / state.norm() / other.norm()) for other in others)
            total, weights = total + weight(token) * nearest, weights + weight(token)
        return total / weights if weights else 0.0

    scores = []
    for caption, texts in zip(captions, references, strict=True):
        best = (-math.inf,) * 3
        for text in texts:
            one, other = split([caption, text])
            precision = recall = 0.0
            if len(one) > 2 and len(other) > 2:
                states = [plain_states(name, ids, layer) for ids in (one, other)]
                precision, recall = mean(one, *states), mean(other, *reversed(states))
            total = precision + recall
            f1 = 2 * precision * recall / total if total else 0.0
            best = tuple(map(max, best, (precision, recall, f1)))  # type: ignore[assignment]
        scores.append(best)
    return scores


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("layer", "idf"), [(0, False), (1, True), (2, False)])
def test_scores_follow_their_definition(name: str, layer: int, idf: bool) -> None:
    captions, references = made_up(8, seed=layer)
    found = bert_score(encoder(name, layer, idf=idf), captions, references)
    np.testing.assert_allclose(found, plain_scores(name, layer, idf, captions, references), rtol=0, atol=1e-6)


def test_tokens_that_all_references_contain_have_no_weight() -> None:
    found = bert_score(encoder("bert", idf=True), ["dog", "dog cat"], [["dog"], ["a dog"]])
    assert found[0].tolist() == [0, 0, 0] and found[1][0] > 0


@pytest.mark.parametrize("name", MODELS)
def test_properties(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, (captions, references) = encoder(name), made_up(60, seed=5)
    found = bert_score(scorer, captions, references)
    texts = [text for text in captions if text.strip()]
    assert np.abs(bert_score(scorer, texts, [[text] for text in texts]) - 1).max() < 1e-6
    one = [image[:1] for image in references]
    forward = bert_score(scorer, captions, one)
    backward = bert_score(scorer, [text for (text,) in one], [[text] for text in captions])
    np.testing.assert_allclose(forward, backward[:, [1, 0, 2]], rtol=0, atol=1e-6)
    assert (forward <= found + 1e-6).all() and (found <= 1 + 1e-6).all()
    permuted = bert_score(scorer, captions, [image[::-1] for image in references])
    np.testing.assert_allclose(permuted, found, rtol=0, atol=1e-6)
    alone = [bert_score(scorer, [text], [image])[0] for text, image in zip(captions, references, strict=True)]
    np.testing.assert_allclose(alone, found, rtol=0, atol=1e-6)
    monkeypatch.setattr(grounding, "MAX_TOKENS_AT_ONCE", 50)
    monkeypatch.setattr(encoders, "TOKENS_PER_BATCH", 30)
    np.testing.assert_allclose(bert_score(scorer, captions, references), found, rtol=0, atol=1e-6)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many images nor an image with many references give large batches."""
    monkeypatch.setattr(grounding, "MAX_TOKENS_AT_ONCE", 200)
    monkeypatch.setattr(encoders, "TOKENS_PER_BATCH", 60)
    calls, batches = list[int](), list[int]()
    vectors, encode = FileTextEncoder.vectors, TextEncoder.encode

    def counted(self: FileTextEncoder, texts: Any) -> Any:
        calls.append(sum(map(len, texts)))
        return vectors(self, texts)

    def batched(self: TextEncoder, ids: Tensor, lengths: Tensor) -> Tensor:
        batches.append(ids.numel())
        return encode(self, ids, lengths)

    monkeypatch.setattr(FileTextEncoder, "vectors", counted)
    monkeypatch.setattr(TextEncoder, "encode", batched)
    captions, references = made_up(40, seed=2)
    bert_score(encoder("bert"), captions, [*references[:-1], [f"dog {number}" for number in range(100)]])
    assert len(calls) > 5 and max(calls) <= 200 and max(batches) <= 60


# files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    shutil.copytree(FOLDER / "roberta", tmp_path / "model")
    (tmp_path / "baseline.tsv").write_text("LAYER,P,R,F\n0,0.1,0.1,0.1\n1,0.3,0.4,0.35\n2,0.5,0.6,0.55\n")
    rows = [{"image_id": image, "caption": text} for image, texts in enumerate(REFERENCES) for text in texts]
    contents = {
        "references": {"images": [], "annotations": rows},
        "predictions": [{"image_id": image, "caption": text} for image, text in enumerate(CAPTIONS)],
        "inputs": {"bert": {"folder": str(tmp_path / "model"), "layer": 1}},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return {name: tmp_path / f"{name}.json" for name in contents} | {"model": tmp_path / "model"}


def run_score(files: dict[str, Path], **options: Any) -> Any:
    return score(files["references"], files["predictions"], **{"metrics": NAMES, "inputs": files["inputs"]} | options)


def change_inputs(files: dict[str, Path], **values: Any) -> None:
    inputs = json.loads(files["inputs"].read_text())
    files["inputs"].write_text(json.dumps({"bert": inputs["bert"] | values}))


def test_score_computes_bert_score(files: dict[str, Path]) -> None:
    scores = run_score(files)
    precision, recall, f1 = EXPECTED["scores"]["roberta, layer 1, no idf, all"]
    for name, expected in zip(NAMES, (f1, precision, recall), strict=True):
        assert scores.by_name[name].per_image == pytest.approx(expected, abs=1e-6)
        assert scores.values[name] == pytest.approx(np.mean(expected), abs=1e-6)
    digests = r"[0-9a-f]{10}-[0-9a-f]{10}-[0-9a-f]{10}"
    assert re.search(rf"\|bert:{digests}-L1-no-idf\|raycap:", scores.signature)
    change_inputs(files, baseline=str(files["model"].parent / "baseline.tsv"), idf=True)
    rescaled = run_score(files, language="de")
    columns = np.array(EXPECTED["scores"]["roberta, layer 1, idf, all"])
    baseline = np.array([[0.3], [0.4], [0.35]])
    expected = (columns - baseline) / (1 - baseline)
    for name, row in zip(NAMES, (2, 0, 1), strict=True):
        assert rescaled.by_name[name].per_image == pytest.approx(expected[row].tolist(), abs=3e-6)
    assert re.search(rf"\|bert:{digests}-L1-idf-rescaled-[0-9a-f]{{10}}\|raycap:", rescaled.signature)
    tensors = load_file(files["model"] / "model.safetensors")
    (files["model"] / "model.safetensors").unlink()
    torch.save(tensors, files["model"] / "pytorch_model.bin")
    change_inputs(files, baseline=None, idf=False)
    assert run_score(files).values == scores.values


def with_json(name: str, **values: Any) -> Callable[[Path], None]:
    """Changes values of a JSON file of the model; keys of nested mappings are joined by __."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for key, value in values.items():
            *parents, last = key.split("__")
            place = content
            for parent in parents:
                place = place[parent]
            place[last] = value
        (folder / name).write_text(json.dumps(content))

    return change


def with_tensors(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path) | {key.replace("__", "."): value for key, value in values.items()}
        save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)

    return change


def written(name: str, data: bytes | None) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink() if data is None else (folder / name).write_bytes(data) and None


WORD, BIAS = "embeddings__word_embeddings__weight", "encoder__layer__0__output__dense__bias"
TOKENS = json.loads((FOLDER / "roberta" / "tokenizer.json").read_text())["model"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (written("model.safetensors", None), "model.safetensors cannot be used"),
        (written("model.safetensors", b"nothing"), "model.safetensors cannot be used"),
        (written("config.json", None), "config.json cannot be used"),
        (written("config.json", b"[" * 10**5), "nested too deeply"),
        (written("tokenizer.json", b"{}"), "it has no mapping model"),
        (with_json("config.json", model_type="gpt2"), "neither bert nor roberta"),
        (with_json("config.json", hidden_act="relu"), "its hidden_act is not gelu"),
        (with_json("config.json", position_embedding_type="relative_key"), "not absolute"),
        (with_json("config.json", num_attention_heads=5), "no multiple of 5"),
        (with_json("config.json", num_hidden_layers=10**9), "num_hidden_layers is no number from 1 to 200"),
        (with_json("config.json", num_hidden_layers=3), "it lacks the tensor encoder.layer.2"),
        (with_json("config.json", num_hidden_layers=1), "are unknown"),
        (with_json("config.json", vocab_size=10**6), "and config.json gives"),
        (with_json("config.json", max_position_embeddings=True), "max_position_embeddings is no number"),
        (with_json("config.json", layer_norm_eps="1"), "layer_norm_eps"),
        (with_json("config.json", pad_token_id=24), "max_position_embeddings are too few"),
        (with_tensors(**{WORD: None}), "it lacks the tensor embeddings.word_embeddings.weight and 0 more"),
        (with_tensors(**{BIAS: torch.zeros(31)}), r"has the shape (31,), and config.json gives (32,)"),
        (with_tensors(extra=torch.zeros(1)), "the tensor 'extra' and 0 more are unknown"),
        (with_tensors(**{f"roberta.{BIAS}": torch.zeros(32)}), "is there twice"),
        (with_tensors(**{BIAS: torch.full((32,), math.nan)}), "not finite"),
        (with_json("tokenizer.json", model__vocab={"a": 0}), "its vocabulary lacks <s>"),
        (with_json("tokenizer.json", model__vocab=TOKENS["vocab"] | {"<s>": 340}), "no number below 340"),
        (with_json("tokenizer.json", model__vocab=TOKENS["vocab"] | {"<s>": 1}), "two pieces have one id"),
        (with_json("tokenizer.json", model__vocab=TOKENS["vocab"] | {"x" * 2000: 1}), "vocabulary has 341 pieces"),
        (with_json("tokenizer.json", model__merges=None), "no list of at most 1000000 merges"),
        (with_json("tokenizer.json", model__merges=5), "no list of at most 1000000 merges"),
        (with_json("tokenizer.json", model__merges=["a"]), "no pair of pieces"),
        (with_json("tokenizer.json", model__merges=[["a", "zz"]]), "lacks 'zz'"),
        (with_json("tokenizer.json", model__dropout=0.5), "options that RoBERTa's tokenizer does not have"),
        (with_json("tokenizer.json", model__type="Unigram"), "its model is not BPE"),
        (with_json("tokenizer.json", normalizer={"type": "NFC"}), "its normalizer is not null"),
        (with_json("tokenizer.json", pre_tokenizer={"type": "Split"}), "its pre_tokenizer is not ByteLevel"),
    ],
)
def test_other_files_make_it_unavailable(files: dict[str, Path], change: Callable[[Path], None], words: str) -> None:
    change(files["model"])
    scores = run_score(files)
    assert all(value is None for value in scores.values.values()) and "bert:" not in scores.signature
    assert words in (scores.by_name["BERTScore"].unavailable or "")
    assert len(scores.by_name["BERTScore"].unavailable) < 500


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer": 3}, "the layer 3 is none of its 2 layers"),
        ({"layer": None}, "set evaluation.inputs.bert.layer to a number up to 2"),
        ({"baseline": "missing"}, "is no table of baselines"),
    ],
)
def test_other_settings_make_it_unavailable(files: dict[str, Path], values: dict[str, Any], words: str) -> None:
    change_inputs(files, **values)
    assert words in (run_score(files).by_name["BERTScore"].unavailable or "")
    assert "evaluation.inputs.bert.folder" in run_score(files, inputs=None).by_name["BERTScore"].unavailable


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no table"),
        ("LAYER\tP\tR\tF\n1\t0\t0\t0\n", "its first line is not"),
        ("LAYER,P,R,F\n0,0.1,0.1,0.1\n", "it has no line of layer 1"),
        ("LAYER,P,R,F\n1,0.1,0.1\n", "no three numbers"),
        ("LAYER,P,R,F\n1,0.1,0.1,1\n", "no three numbers"),
        ("LAYER,P,R,F\n1,0.1,0.1,nan\n", "no three numbers"),
        ("LAYER,P,R,F\n1,0.1,0.1,x\n", "is no table of baselines"),
        ("x" * 10**5, "is no table of baselines"),
    ],
)
def test_other_tables_of_baselines(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "table.tsv").write_text(text)
    with pytest.raises(UnavailableError, match=words):
        encoder("bert", 1, baseline=str(tmp_path / "table.tsv")).baseline  # noqa: B018 - it reads the file


BERT_TOKENS = json.loads((FOLDER / "bert" / "tokenizer.json").read_text())


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("model", {"unk_token": "?!"}, "lacks the unk_token '?!'"),
        ("model", {"unk_token": [1]}, "lacks the unk_token"),
        ("model", {"continuing_subword_prefix": 7}, "continuing_subword_prefix"),
        ("model", {"max_input_chars_per_word": 10**9}, "max_input_chars_per_word"),
        ("normalizer", {"lowercase": None}, "neither true nor false"),
        ("normalizer", {"type": "Precompiled"}, "its normalizer is not BertNormalizer"),
        ("pre_tokenizer", {"type": None}, "its pre_tokenizer is not BertPreTokenizer"),
    ],
)
def test_other_word_pieces_are_refused(part: str, values: dict[str, Any], words: str) -> None:
    content = BERT_TOKENS | {part: BERT_TOKENS[part] | values}
    with pytest.raises(ValueError, match=re.escape(words)):
        BertTokenizer(content, "bert", 170)


def test_the_options_of_word_pieces_are_used() -> None:
    tokenizer = BertTokenizer(BERT_TOKENS, "bert", 170)
    cased = BertTokenizer(BERT_TOKENS | {"normalizer": BERT_TOKENS["normalizer"] | {"lowercase": False}}, "bert", 170)
    assert tokenizer.ids("DOG", 9) == tokenizer.ids("dog", 9) == cased.ids("dog", 9) != cased.ids("DOG", 9)
    older = BERT_TOKENS | {"model": {key: value for key, value in BERT_TOKENS["model"].items() if key != "type"}}
    assert BertTokenizer(older, "bert", 170).ids("a red dog", 9) == tokenizer.ids("a red dog", 9)
    marks = tokenizer.ids("[SEP] dog [MASK]", 40)
    assert marks[0] == 2 and marks[-1] == 3 and not {2, 3, 4} & {*marks[1:-1]}, "marks in a text are text"
    roberta = encoder("roberta").ids(["</s> dog <mask>"])[0]
    assert not {0, 2, 339} & {*roberta[1:-1]}


def test_the_padding_of_a_roberta_is_1_where_its_file_has_none() -> None:
    """As in the package transformers. The first position follows from it."""
    for name, first in (("bert", 0), ("roberta", 2)):
        values = json.loads((FOLDER / name / "config.json").read_text())
        del values["pad_token_id"]
        assert TextEncoderSizes.read(values) == sizes(name) and sizes(name).first_position == first


def test_merges_may_be_lines_or_pairs() -> None:
    content = json.loads((FOLDER / "roberta" / "tokenizer.json").read_text())
    assert isinstance(content["model"]["merges"][0], list)
    lines = content | {"model": content["model"] | {"merges": [" ".join(pair) for pair in content["model"]["merges"]]}}
    tokenizers = [BertTokenizer(each, "roberta", 340) for each in (content, lines)]
    assert all(tokenizers[0].ids(text, 24) == tokenizers[1].ids(text, 24) for text in CAPTIONS)


def test_names_of_old_files() -> None:
    """Google's weights have gamma and beta in their normalizations, and parts for the pretraining."""
    tensors = load_file(FOLDER / "bert" / "model.safetensors")
    assert all(name.startswith(("bert.", "cls.")) for name in tensors)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old |= {"bert.pooler.dense.weight": torch.zeros(2), "bert.embeddings.position_ids": torch.zeros(1, 2)}
    ids, lengths = torch.tensor([[2, 16, 3]]), torch.tensor([3])
    states = [TextEncoder(each, sizes("bert"), 2, "cpu").encode(ids, lengths) for each in (tensors, old)]
    assert torch.equal(*states)


def test_published_layers() -> None:
    values = json.loads((FOLDER / "roberta" / "config.json").read_text())
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50265}
    assert TextEncoderSizes.read(values | large).published_layer == 17
    assert TextEncoderSizes.read(values | large | {"vocab_size": 50266}).published_layer is None
    base = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    for pieces, layer in ((30522, 9), (21128, 8), (31090, None)):
        assert (
            TextEncoderSizes.read(values | base | {"model_type": "bert", "vocab_size": pieces}).published_layer == layer
        )
    long = {"max_position_embeddings": 5000}
    assert [TextEncoderSizes.read(values | each).max_tokens for each in ({}, long)] == [24, 512]


def test_the_files_are_named() -> None:
    section = ScoreInputsSection(bert=TextEncoderSection(folder="/models/x", baseline="/b.tsv"))
    assert section.files() == {
        "evaluation.inputs.bert.folder/model.safetensors": "/models/x/model.safetensors",
        "evaluation.inputs.bert.folder/config.json": "/models/x/config.json",
        "evaluation.inputs.bert.folder/tokenizer.json": "/models/x/tokenizer.json",
        "evaluation.inputs.bert.baseline": "/b.tsv",
    }


def test_missing_files_are_found_before_a_run(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "bert", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    config = parse_config(
        small_config(tmp_path) | {"evaluation": {"inputs": {"bert": {"folder": str(tmp_path / "model")}}}}
    )
    with pytest.raises(UserError, match=r"evaluation.inputs.bert.folder/tokenizer.json: .* does not exist"):
        check_score_inputs(config)
