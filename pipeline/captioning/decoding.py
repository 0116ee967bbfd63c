"""Finds captions as the section `evaluation` says: by beam search, or by drawing them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from models.decoding import Captions, Memories, Models, beam_search, by_score, image_draws, sample
from models.score_rules import ScoreRules
from pipeline.config.sections import EvaluationSection
from pipeline.data.vocabulary import UNK, Vocabulary
from pipeline.scoring.diagnostics import OPEN_ENDINGS


def score_rules(settings: EvaluationSection, vocabulary: Vocabulary) -> ScoreRules:
    """The rules of a search with their words in a vocabulary."""
    ranking = settings.ranking
    open_endings = tuple(vocabulary.ids[word] for word in sorted(OPEN_ENDINGS & vocabulary.ids.keys()))
    normalization = ranking if isinstance(ranking, float) else ranking == "mean"
    return ScoreRules(settings.decoding, vocabulary.ids[UNK], open_endings, normalization)


def beam_options(settings: EvaluationSection, vocabulary: Vocabulary) -> dict[str, Any]:
    """The options of `beam_search`."""
    options = {key: getattr(settings, key) for key in ("beam_size", "max_length", "num_results")}
    return options | {"rules": score_rules(settings, vocabulary)}


def find_captions(
    models: Models, memories: Memories, settings: EvaluationSection, vocabulary: Vocabulary, images: Iterable[object]
) -> Captions:
    """The captions of each image, best first.

    images: a text or number for each image, on which its drawn captions depend besides `decoding.seed`; read only to
    draw captions.
    """
    if not settings.decoding.sampling:
        return beam_search(models, memories, **beam_options(settings, vocabulary))
    rules, count, length = score_rules(settings, vocabulary), settings.num_results, settings.max_length
    seeds = [_seed(settings.decoding.seed, image) for image in images]
    draws = image_draws(seeds, count, length)
    captions = sample(models, memories, num_samples=count, max_length=length, rules=rules, draws=draws)
    return by_score(captions, rules.length_normalization)


def _seed(seed: int, image: object) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {image}".encode()).digest()[:7])
