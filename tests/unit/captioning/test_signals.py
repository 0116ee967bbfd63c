"""The signals of captions, from which the confidence follows: in evaluations and in served models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.models.base import Features
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.constraints import ImageConstraints, build_automata
from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_images
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.confidence import SIGNALS, Linear
from raycap.pipeline.runtime.context import LocalContext
from tests.support.bundles import WORDS, make_bundle, with_confidence
from tests.support.few_images import FewImages, caption_split, half

WHOLE = LocalContext()


@torch.no_grad()
def test_signals_depend_on_image_and_model_only(tmp_path: Path) -> None:
    """Batches, workers and further captions do not matter. Ensembles, constrained searches and training have none."""
    captioner = load_bundle(make_bundle(tmp_path / "bundle", backbone=False)).captioner
    images = FewImages(torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(3)))

    def signals(context: LocalContext = WHOLE, **keys: Any) -> dict[int, tuple[float, ...]]:
        settings = EvaluationSection(**({"beam_size": 3, "max_length": 9, "batch_size": 3} | keys))
        search = CaptionSearch(settings, WORDS)
        found, _ = caption_split([captioner], [images], search, context)
        assert all(not each.signals for ranked in found.values() for each in ranked[1:])
        return {image: ranked[0].signals for image, ranked in found.items()}

    whole = signals()
    assert len(whole) == 7 and all(len(each) == len(SIGNALS) for each in whole.values())
    assert len({each[-1] for each in whole.values()}) > 1, "the energies differ"
    for others in (
        signals(batch_size=7),
        signals(batch_size=1),
        signals(half(0)) | signals(half(1)),
        signals(num_results=3),
    ):
        assert others.keys() == whole.keys()
        for image, each in whole.items():
            assert others[image] == pytest.approx(each, abs=1e-4)
    settings = EvaluationSection(beam_size=3, max_length=9, batch_size=3)
    found, _ = caption_split([captioner], [images], CaptionSearch(settings, WORDS), WHOLE)
    for row, ranked in enumerate(found.values()):
        memory = captioner.encode(Features(images.features[row : row + 1]))
        caption = [token for token in ranked[0].ids if token != WORDS.pad]
        logits = captioner.model.decode(memory, torch.tensor([caption[:-1]]))[0]
        assert len(caption) > 6, "the first tokens are not all tokens"
        assert ranked[0].signals[-1] == pytest.approx(-float(logits.logsumexp(-1)[:4].mean()), abs=1e-4)
    both, _ = caption_split([captioner] * 2, [images] * 2, CaptionSearch(settings, WORDS), WHOLE)
    assert all(ranked[0].signals == () for ranked in both.values())
    automata = build_automata({2: ImageConstraints((("mat",),))}, WORDS, "c")
    constrained, _ = caption_split([captioner], [images], CaptionSearch(settings, WORDS), WHOLE, automata)
    assert all(ranked[0].signals == () for ranked in constrained.values())
    best = caption_images(captioner, images, WORDS, settings, WHOLE)
    assert [each.caption for each in best.values()] == [ranked[0].caption for ranked in found.values()]
    assert all(each.signals == () for each in best.values())


def test_a_served_model_judges_by_the_signals_of_an_evaluation(tmp_path: Path) -> None:
    """The number of captions and the other images of the batch do not matter."""
    bundle = load_bundle(with_confidence(make_bundle(tmp_path / "bundle")))
    service, (fit,) = CaptionService(bundle), bundle.confidences
    bundle.confidences = (replace(fit, log_odds=Linear((*[0.0] * (len(SIGNALS) - 1), -0.3), -2.0)),)
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    search = CaptionSearch(service.search.model_copy(update={"batch_size": 2}), bundle.vocabulary)
    evaluated, _ = caption_split([bundle.captioner], [FewImages(pixels)], search, WHOLE)
    judged = [(each.confidence, each.expected_ciderd) for each in service.caption(pixels)]
    expected = [bundle.confidences[0].judge(ranked[0].signals) for ranked in evaluated.values()]
    more = service.changed_search({}, num_results=2)
    alone = [(each.confidence, each.expected_ciderd) for image in pixels for each in service.caption(image[None], more)]
    assert len({confidence for confidence, _ in judged}) == 5, "by the energy alone, which differs"
    for first, second, third in zip(judged, expected, alone, strict=True):
        assert second is not None and None not in (*first, *third)
        assert first == pytest.approx(second, abs=1e-4) and first == pytest.approx(third, abs=1e-4)
