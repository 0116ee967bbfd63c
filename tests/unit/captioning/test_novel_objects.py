"""Novel objects: constraint files, and captions that satisfy them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.constraints import ImageConstraints, build_automata, read_constraints
from raycap.pipeline.evaluation.captioning.search import CaptionSearch
from raycap.pipeline.evaluation.results import ConstraintCounts, ImageCaption, RankedCaption, SplitScores
from raycap.pipeline.runtime.context import LocalContext
from tests.support.bundles import WORDS, make_bundle
from tests.support.few_images import FewImages, caption_split, half
from tests.support.models import follow

WHOLE = LocalContext()


def test_constraints_are_read_from_lines(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(
        '{"image_id": 3, "constraints": ["horse", ["traffic light", "stoplight"]], "at_least": 1}\n\n'
        '{"image_id": 5, "constraints": ["cart"]}\n'
    )
    both, one = (("horse",), ("traffic light", "stoplight")), ImageConstraints((("cart",),))
    assert read_constraints(tmp_path / "c.jsonl") == {3: ImageConstraints(both, 1), 5: one}


def test_a_word_outside_the_vocabulary_is_refused() -> None:
    automata = build_automata({7: ImageConstraints((("red cat", "mat"),))}, WORDS, "c.jsonl")
    ids = WORDS.ids
    assert automata[7].num_satisfied[follow(automata[7], [ids["red"], ids["cat"]])] == 1
    assert automata[7].num_satisfied[follow(automata[7], [ids["red"], ids["mat"]])] == 1
    assert automata[7].num_satisfied[follow(automata[7], [ids["red"], ids["sits"], ids["cat"]])] == 0
    with pytest.raises(UserError, match="image 7 needs the word 'dog', which is not among the model's 11 words"):
        build_automata({7: ImageConstraints((("red dog",),))}, WORDS, "c.jsonl")
    with pytest.raises(UserError, match="without a word"):
        build_automata({7: ImageConstraints((("...",),))}, WORDS, "c.jsonl")
    many = tuple((word,) for word in ("a", "cat", "mat", "on", "red", "sits", "the", "red mat", "on the"))
    with pytest.raises(UserError, match="image 8: 9 constraints need more than 256 states"):
        build_automata({8: ImageConstraints(many)}, WORDS, "c.jsonl")


def entry_of(found: dict[int, list[RankedCaption]], automata: dict[int, Any]) -> dict[str, Any]:
    """The entry of these captions in scores.json."""
    images = {image: ImageCaption(tuple(ranked)) for image, ranked in found.items()}
    return SplitScores("test", images, ConstraintCounts.of(images, automata)).to_json()


def test_captions_satisfy_their_constraints_and_others_do_not_change(tmp_path: Path) -> None:
    bundle = load_bundle(make_bundle(tmp_path / "bundle", backbone=False))
    torch.manual_seed(3)
    images = FewImages(torch.randn(5, 4, 16))
    settings = EvaluationSection(beam_size=3, max_length=9, batch_size=2, num_results=2)
    wanted = {2: ImageConstraints((("mat",), ("red cat", "sits"))), 5: ImageConstraints((("the",),))}
    automata = build_automata(wanted, WORDS, "c")
    search = CaptionSearch(settings, WORDS)
    plain, _ = caption_split([bundle.captioner], [images], search, WHOLE)
    found, _ = caption_split([bundle.captioner], [images], search, WHOLE, automata)
    for image in (1, 3, 4):
        assert found[image][0].caption == plain[image][0].caption
        assert found[image][0].num_satisfied is None
    assert all(own.num_satisfied == 2 and "mat" in own.caption.split() for own in found[2])
    assert all("red cat" in own.caption or "sits" in own.caption for own in found[2])
    assert all(own.num_satisfied == 1 and "the" in own.caption.split() for own in found[5])
    entry = entry_of(found, automata)
    assert entry["constraints"] == {"images": 2, "not_held": []}
    # captions are too short for all words, so that they hold as many as fit
    short = settings.model_copy(update={"max_length": 3})
    three = (("mat",), ("sits",), ("the",))
    automata |= build_automata({2: ImageConstraints(three)}, WORDS, "c")
    cut, _ = caption_split([bundle.captioner], [images], CaptionSearch(short, WORDS), WHOLE, automata)
    entry = entry_of(cut, automata)
    assert entry["constraints"]["not_held"] == [2]
    automata |= build_automata({2: ImageConstraints(three, at_least=2)}, WORDS, "c")
    two, _ = caption_split([bundle.captioner], [images], search, WHOLE, automata)
    assert two[2][0].num_satisfied is not None and two[2][0].num_satisfied >= 2
    entry = entry_of({image: [replace(own[0], num_satisfied=2)] for image, own in two.items()}, automata)
    assert entry["constraints"]["not_held"] == [], "2 of 3 are as many as required"


def test_each_shard_captions_its_images_and_reports_unreadable_ones(tmp_path: Path) -> None:
    bundle = load_bundle(make_bundle(tmp_path / "bundle", backbone=False))
    images = FewImages(torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(3)))
    settings = EvaluationSection(beam_size=2, max_length=9, batch_size=2)
    search = CaptionSearch(settings, WORDS, skip_unreadable=True)
    whole, unreadable = caption_split([bundle.captioner], [images], search, WHOLE)
    assert list(whole) == [1, 2, 3, 4, 5, 6, 7] and not unreadable
    images.unreadable = {3}
    shards = [caption_split([bundle.captioner], [images], search, half(rank)) for rank in (0, 1)]
    assert [list(hypotheses) for hypotheses, _ in shards] == [[1, 3, 5, 7], [2, 6]]
    assert [reasons for _, reasons in shards] == [{}, {4: "row 3 is damaged"}]
    for hypotheses, _ in shards:
        assert all(ranked[0].caption == whole[image][0].caption for image, ranked in hypotheses.items())
    with pytest.raises(BadImage, match="row 3"):
        caption_split([bundle.captioner], [images], CaptionSearch(settings, WORDS), WHOLE)
