"""The keys of `evaluation.decoding` in evaluations, services, `raycap caption` and protocols."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.jobs.caption import caption
from raycap.jobs.cli import main
from raycap.models.config import PLAIN, Decoding
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, load_bundle
from raycap.pipeline.evaluation.captioning.constraints import ImageConstraints, build_automata
from raycap.pipeline.evaluation.captioning.search import CaptionSearch
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.comparison.protocol import Protocol
from raycap.pipeline.runtime.context import LocalContext
from tests.support.bundles import WORDS, make_bundle, write_images
from tests.support.few_images import FewImages, caption_split, half

SAMPLED = Decoding(sampling=True, temperature=1.5, top_k=9, top_p=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return load_bundle(folder)


def pixels(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_an_evaluation_follows_the_rules(tmp_path: Path) -> None:
    captioner = load_bundle(make_bundle(tmp_path / "bundle", backbone=False)).captioner
    with torch.no_grad():
        captioner.model.lm_head.bias[WORDS.ids["UNK"]] += 20.0  # type: ignore[union-attr, index, operator]
    images = FewImages(torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(3)))

    def captions(**keys: Any) -> list[str]:
        settings = EvaluationSection(max_length=10, beam_size=4, decoding=Decoding(**keys))
        found, _ = caption_split([captioner], [images], CaptionSearch(settings, WORDS), LocalContext())
        return [ranked[0].caption for ranked in found.values()]

    assert all("UNK" in text for text in captions(suppress_unk=False))
    assert all("UNK" not in text for text in captions())
    for text in captions(min_length=7, no_repeat_ngram=1, no_open_endings=True):
        words = text.split()
        assert len(words) >= 5 and len(set(words)) == len(words) and words[-1] not in ("a", "the")


def test_drawn_captions_depend_on_image_and_seed_only(tmp_path: Path) -> None:
    """Batches and workers do not matter. The captions of an image are in the order of their scores."""
    captioner = load_bundle(make_bundle(tmp_path / "bundle", backbone=False)).captioner
    images = FewImages(torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(3)))

    def captions(context: LocalContext, seed: int = 0, batch_size: int = 3) -> dict[int, list[str]]:
        settings = EvaluationSection(
            beam_size=1, num_results=3, max_length=9, batch_size=batch_size, decoding=replace(SAMPLED, seed=seed)
        )
        found, _ = caption_split([captioner], [images], CaptionSearch(settings, WORDS), context)
        for ranked in found.values():
            lengths = [min([*each.ids, WORDS.eos].index(WORDS.eos) + 1, len(each.ids)) for each in ranked]
            means = [each.log_prob / length for each, length in zip(ranked, lengths, strict=True)]
            assert means == sorted(means, reverse=True)
        return {image: [each.caption for each in ranked] for image, ranked in found.items()}

    whole = captions(LocalContext())
    assert captions(LocalContext(), batch_size=7) == whole == captions(half(0)) | captions(half(1))
    assert captions(LocalContext(), seed=1) != whole
    assert all(len(texts) == 3 for texts in whole.values()) and len({texts[0] for texts in whole.values()}) > 1


def test_a_service_takes_the_bundles_rules_and_others_in_their_place(folder: Path, tmp_path: Path) -> None:
    recorded = Protocol(beam_size=4, decoding=Decoding(min_length=6, no_repeat_ngram=2))
    bundle = load_bundle(make_bundle(tmp_path / "recorded", protocol=recorded))
    service = CaptionService(bundle)
    assert service.search.decoding == recorded.decoding
    assert all(len(found.tokens) >= 4 for found in service.caption(pixels(4)))
    changed = CaptionService(bundle, search={"decoding": {"beam_groups": 2}, "ranking": 0.6}).search
    assert changed.decoding == replace(recorded.decoding, beam_groups=2)
    assert (changed.ranking, changed.beam_size, changed.max_length) == (0.6, 4, 12)
    assert CaptionService(load_bundle(folder)).search.decoding == PLAIN, "older bundles are searched as before"
    for search, words in (
        ({"decoding": {"sampling": True}}, "evaluation.beam_size is 4; set it to 1"),
        ({"decoding": {"top": 1}}, "unknown key evaluation.decoding.top"),
        ({"precision": "bfloat16"}, "evaluation.precision cannot be given here; known: beam_size, "),
        ({"decoding": {"min_length": 90}}, "min_length = 90 is above evaluation.max_length = 20"),
    ):
        with pytest.raises(UserError, match=words):
            CaptionService(bundle, search=search)


def test_the_command_sets_keys_of_the_search(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, out = write_images(tmp_path / "images", 3), tmp_path / "captions.jsonl"
    drawn = ["--beam", "1", "--set", "evaluation.decoding.sampling=true", "--set", "evaluation.decoding.top_p=0.9"]
    assert main(["caption", *images, "--model", str(folder), "--out", str(out), "--n-best", "3", *drawn]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(len(row["n_best"]) == 3 and row["decoding"]["top_p"] == 0.9 for row in rows)
    assert "ranking" not in rows[0]
    written = out.read_text()
    assert main(["caption", *images, "--model", str(folder), "--out", str(out), "--n-best", "3", *drawn]) == 0
    assert out.read_text() == written
    with pytest.raises(UserError, match=r"was written with .*'decoding': \{.*'top_p': 0.9.*, not .*'decoding': None"):
        caption(images, str(folder), out=str(out), beam_size=1, num_results=1)
    plain = tmp_path / "plain.jsonl"
    assert caption(images, str(folder), out=str(plain)) == 0
    assert "decoding" not in json.loads(plain.read_text().splitlines()[0])
    with pytest.raises(UserError, match=r"was written with \{'decoding': None\}, not .*'min_length': 8"):
        caption(images, str(folder), out=str(plain), set_=["evaluation.decoding.min_length=8"])
    capsys.readouterr()


def test_constraints_go_with_rules_and_not_with_groups(tmp_path: Path) -> None:
    captioner = load_bundle(make_bundle(tmp_path / "bundle", backbone=False)).captioner
    images = FewImages(torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3)))
    settings = EvaluationSection(beam_size=3, max_length=10, decoding=Decoding(min_length=7, no_repeat_ngram=1))
    automata = build_automata({1: ImageConstraints((("mat",),))}, WORDS, "c")
    search = CaptionSearch(settings, WORDS)
    found, _ = caption_split([captioner], [images], search, LocalContext(), automata)
    words = found[1][0].caption.split()
    assert "mat" in words and len(words) >= 5 and len(set(words)) == len(words)
