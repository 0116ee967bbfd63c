"""Metrics that need more than the words of captions: CHAIR, CLIPScore, PAC-S and BERTScore.

CHAIR needs a file of words, with one line per object: its name, and after commas other words and phrases for it, as in
"dog, puppy, baby dog". The objects of each image come from COCO's annotations (instances_*.json), if they are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.sections import DataSection, ScoreInputsSection
from raycap.pipeline.data.caption_files import read_json
from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.data.synthetic.scene_captions import GRAMMARS
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.runtime.names import quoted, shorten
from raycap.pipeline.storage.untrusted.documents import read_document

if TYPE_CHECKING:  # not at run time, because the module imports torch
    from raycap.pipeline.evaluation.scores.encoders import BertEncoder

# English plurals that the rules of `_with_plurals` do not form: {end of the singular: end of the plural}
_PLURALS = {
    **{"man": "men", "person": "people", "child": "children", "foot": "feet", "goose": "geese", "mouse": "mice"},
    **{"knife": "knives", "leaf": "leaves", "shelf": "shelves", "calf": "calves", "wolf": "wolves", "scarf": "scarves"},
}
PROMPT = "A photo depicts "  # starts each caption and reference, as in the authors' code of CLIPScore and PAC-S
CLIP_WEIGHT, PAC_WEIGHT = 2.5, 2.0  # w in `image_similarity`
MAX_NAME = 200  # characters in a name of an object
IMAGES_AT_ONCE = 256  # BERTScore keeps the token vectors of so many images in memory


@dataclass(frozen=True)
class Objects:
    """The objects that CHAIR looks for. names: for each object, the words and phrases for it in `language`.

    In English, the plurals of a name are names too. annotated: {image id: annotated objects}, which are in the image in
    addition to the objects that its references name.
    """

    names: Mapping[str, Iterable[str]]
    language: str = ENGLISH
    annotated: Mapping[Any, Set[str]] | None = None

    @classmethod
    def read(cls, section: ScoreInputsSection, language: str, data: DataSection | None) -> Objects | None:
        """Reads the objects that a configuration names. Raises UserError if a file cannot be read.

        If the configuration names none, the result has the shapes of the synthetic data set, or is None for other data.
        """
        if section.objects is None:
            synthetic = None if data is None else data.synthetic
            return None if synthetic is None else cls(GRAMMARS[synthetic.language].shapes, synthetic.language)
        names = read_names(Path(section.objects).expanduser())
        if section.instances is None:
            return cls(names, language)
        return cls(names, language, read_instances(Path(section.instances).expanduser(), names))

    @cached_property
    def _phrases(self) -> dict[tuple[str, ...], str]:
        """{words of a name: object} for all names."""
        phrases = {}
        for object_name, names in self.names.items():
            for name in names:
                for form in _with_plurals(name) if self.language == ENGLISH else [name]:
                    phrases[tuple(metric_words(form, self.language))] = object_name
        phrases.pop((), None)  # of a name without words, such as "!"
        return phrases

    @cached_property
    def _max_words(self) -> int:
        return max(map(len, self._phrases), default=0)

    def mentions(self, words: Sequence[str]) -> list[str]:
        """The objects that a caption mentions, in order and with repetitions. words: of the caption.

        If several names start at the same word, the longest one counts.
        """
        found, start = [], 0
        while start < len(words):
            phrases = [tuple(words[start:end]) for end in range(start + 1, start + self._max_words + 1)]
            longest = next((phrase for phrase in reversed(phrases) if phrase in self._phrases), None)
            if longest is not None:
                found.append(self._phrases[longest])
            start += 1 if longest is None else len(longest)
        return found

    def in_image(self, image: object, references: Iterable[Sequence[str]]) -> set[str]:
        """The annotated objects of an image, and the objects that its references name. references: as words."""
        annotated = (self.annotated or {}).get(image, frozenset())
        return {object_name for words in references for object_name in self.mentions(words)} | annotated


def _with_plurals(name: str) -> list[str]:
    """An English name with its possible plurals. Some of them may not exist, which does no harm."""
    regular = [name, f"{name}s"]
    if name.endswith(("s", "x", "z", "ch", "sh", "o")):
        regular.append(f"{name}es")
    if name.endswith("y"):
        regular.append(f"{name[:-1]}ies")
    return regular + [name.removesuffix(end) + plural for end, plural in _PLURALS.items() if name.endswith(end)]


def read_names(path: Path) -> dict[str, tuple[str, ...]]:
    """Reads a file of words: {first name of a line, which is the object: all names}. Raises UserError if malformed."""
    try:
        lines = read_document(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"evaluation.inputs.objects: {path} cannot be read as text: {error}") from error
    objects: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}  # the object of each name
    for line in filter(str.strip, lines):
        first, *others = map(str.strip, line.split(","))
        for name in dict.fromkeys((first, *others)):
            if not name or len(name) > MAX_NAME:
                raise UserError(
                    f"evaluation.inputs.objects: {path} has the name {quoted(name)} in the line of {quoted(first)}; "
                    f"expected 1 to {MAX_NAME} characters between commas"
                )
            if name in owner:
                raise UserError(
                    f"evaluation.inputs.objects: {path} gives {quoted(name)} to {quoted(owner[name])} and to "
                    f"{quoted(first)}; every name must belong to one object"
                )
            owner[name] = first
        objects[first] = (first, *others)
    if not objects:
        raise UserError(f"evaluation.inputs.objects: {path} is empty; give one line per object")
    return objects


def read_instances(path: Path, names: Mapping[str, tuple[str, ...]]) -> dict[ImageId, set[str]]:
    """Reads the objects in each image, by image id, from COCO's annotations of objects.

    names: the names of each object. Raises UserError if the file is malformed or a category is not among the names.
    """
    data = read_json(path)
    object_of = {name: object_name for object_name, others in names.items() for name in others}
    try:
        categories = {category["id"]: category["name"] for category in data["categories"]}
        if unknown := [name for name in categories.values() if name not in object_of]:
            raise UserError(
                f"evaluation.inputs.instances: {path} has the categories {shorten(unknown)}, which are not in "
                "evaluation.inputs.objects; add them there"
            )
        found: defaultdict[Any, set[str]] = defaultdict(set)
        for annotation in data["annotations"]:
            found[annotation["image_id"]].add(object_of[categories[annotation["category_id"]]])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"evaluation.inputs.instances: {path} has no COCO annotations of objects ({type(error).__name__}: "
            f"{error}); expected categories and annotations with image_id and category_id"
        ) from error
    return dict(found)


def hallucinations(
    captions: Sequence[Sequence[str]], in_images: Sequence[Set[str]], objects: Objects
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the mentions of objects in each caption: the wrong ones (images,), and all mentions (images,).

    Source: Rohrbach et al. 2018 (arXiv 1809.02156). A mention is wrong if the object is not in the image. As in the
    paper, an object is in an image if it is annotated or if a reference names it. CHAIR_i is the number of wrong
    mentions divided by the number of all mentions. CHAIR_s is the share of captions with a wrong mention. captions: as
    words. in_images: the results of `Objects.in_image`.
    """
    mentions = [objects.mentions(words) for words in captions]
    wrong = [sum(name not in known for name in names) for names, known in zip(mentions, in_images, strict=True)]
    return np.array(wrong), np.array([len(names) for names in mentions])


def image_similarity(images: np.ndarray, captions: np.ndarray, weight: float) -> np.ndarray:
    """CLIPScore or PAC-S of each image (images,): w * max(cos(image, caption), 0), from unit vectors (images, D).

    weight: w. Sources: CLIPScore with w = 2.5, Hessel et al. 2021 (arXiv 2104.08718). PAC-S with w = 2 and another
    encoder, Sarto et al. 2023 (arXiv 2303.12112). Each caption was encoded with PROMPT before it.
    """
    cosine: np.ndarray = (images * captions).sum(1)
    return weight * np.maximum(cosine, 0.0)


def with_references(
    similarity: np.ndarray, captions: np.ndarray, references: np.ndarray, num_references: Sequence[int]
) -> np.ndarray:
    """RefCLIPScore or RefPAC-S of each image (images,).

    The score is the harmonic mean of two values: `similarity` (the result of `image_similarity`), and the largest
    max(cos(caption, reference), 0) over the image's references. The score is 0 if one of them is 0. Sources: as for
    `image_similarity`. captions (images, D) and references (sum of num_references, D): unit vectors.
    """
    counts = np.array(num_references, np.int64)
    first = np.cumsum(counts) - counts
    cosine = (np.repeat(captions, counts, axis=0) * references).sum(1)
    nearest = np.maximum(np.maximum.reduceat(cosine, first), 0.0)
    total = similarity + nearest
    return np.divide(2 * similarity * nearest, total, out=np.zeros(len(total)), where=total > 0)


def bert_score(encoder: BertEncoder, captions: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """BERTScore of each image (images, 3): precision, recall and F1, each the largest one over the references.

    Source: Zhang et al. 2020 (arXiv 1904.09675) and its package bert-score 0.3.12. Each token of a caption is matched
    with the nearest token of the reference, and each token of the reference with the nearest one of the caption. The
    precision is the mean cosine over the caption's tokens, and the recall is the mean cosine over the reference's
    tokens. The marks at both ends of a text can be matched, but have no weight in the means. A text without tokens
    scores 0. All tokens have equal weights. The package gives equal values if it scores one pair at a time without idf.
    In a batch it also matches tokens with padding of the value 0.
    """
    caption_ids = encoder.ids(captions)
    all_reference_ids = iter(encoder.ids([text for texts in references for text in texts]))
    reference_ids = [[next(all_reference_ids) for _ in texts] for texts in references]
    scores = np.full((len(captions), 3), -np.inf)
    for start in range(0, len(captions), IMAGES_AT_ONCE):
        part = range(start, min(start + IMAGES_AT_ONCE, len(captions)))
        texts = list(dict.fromkeys(ids for image in part for ids in (caption_ids[image], *reference_ids[image])))
        vectors = dict(zip(texts, encoder.vectors(texts), strict=True))
        for image in part:
            caption = caption_ids[image]
            for reference in reference_ids[image]:
                values = greedy_match(vectors[caption], vectors[reference])
                scores[image] = np.maximum(scores[image], values)
    return scores


def greedy_match(caption: np.ndarray, reference: np.ndarray) -> tuple[float, float, float]:
    """The precision, recall and F1 of one pair of texts, from the unit vectors (T, W) of their tokens and marks."""
    if min(len(caption), len(reference)) <= 2:  # one of the texts has only its two marks
        return 0.0, 0.0, 0.0
    cosine = caption.astype(np.float64) @ reference.astype(np.float64).T
    precision, recall = float(cosine.max(1)[1:-1].mean()), float(cosine.max(0)[1:-1].mean())
    total = precision + recall
    return precision, recall, 2 * precision * recall / total if total else 0.0
