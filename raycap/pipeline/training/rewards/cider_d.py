"""CIDEr-D of token ids against raw reference captions: the reward of SCST and the score of validation.

The reference captions are read in parts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.language.tokenizers import text_column
from raycap.pipeline.data.vocabulary import EOS, Vocabulary
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.evaluation.scores.cider import CiderD
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.runs.identity import RESULTS_VERSION
from raycap.pipeline.storage.atomic import atomic_folder, file_lock
from raycap.pipeline.storage.cache import REWARD_INDEXES
from raycap.pipeline.storage.digests import require_whole, write_digests
from raycap.pipeline.storage.path import cache_folder
from raycap.pipeline.training.rewards.cider_index import build_index

_BATCH = 1024  # images whose captions are Python lists at a time
logger = logging.getLogger(__name__)
DOCUMENT_SEED = 0  # of the sample of images whose references give the document frequencies
MAX_DEVICE_BYTES = 4 * 2**30  # an index of 120,000 images has 0.5 GB
MAX_CACHED = 8  # indexes per machine; those that were not used for the longest time are removed


class References:
    """The captions of each image. An image is numbered by its position, and the image ids only serve to look it up.

    ids: (I,) int64, distinct. read: the captions of the images with these numbers (n,), which ascend. For a data set
    they remain in the memory-mapped pages of its file.
    """

    def __init__(self, ids: np.ndarray, read: Callable[[np.ndarray], list[list[str]]]) -> None:
        self._ids, self._read = ids, read

    @classmethod
    def of(cls, dataset: Dataset, tokenizer: str | None = None) -> References:
        """Those of a data set, numbered as its rows: raw captions, or with a tokenizer the texts that it splits.

        The ids and the rows need 16 bytes of memory per image.
        """
        column, rows = text_column(tokenizer), dataset.rows
        ids: np.ndarray = dataset.values("image_id").to_numpy()

        def read(numbers: np.ndarray) -> list[list[str]]:
            return [texts for part in dataset.rounds(rows[numbers], column) for texts in part[column].to_pylist()]

        return cls(ids, read)

    @classmethod
    def of_texts(cls, texts: Mapping[int, Sequence[str]]) -> References:
        """The captions by image id."""
        captions = [list(each) for each in texts.values()]
        return cls(np.array(list(texts), np.int64), lambda numbers: [captions[each] for each in numbers.tolist()])

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> list[str]:
        """The captions of one image."""
        return self._read(np.array([index]))[0]

    def __iter__(self) -> Iterator[list[str]]:
        """The captions of each image."""
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[list[str]]]:
        """The captions of each image, for some images at a time, which are the same in every process."""
        for begin in range(0, len(self), _BATCH):
            yield self._read(np.arange(begin, min(begin + _BATCH, len(self))))

    def content(self) -> Iterator[bytes]:
        """Bytes that are equal if and only if all captions and their order are. Image ids do not count."""
        return (json.dumps(batch).encode() for batch in self.batches())

    def indices_of(self, images: Sequence[int]) -> np.ndarray:
        """The numbers (len(images),) int64 of these image ids. Raises KeyError for an id without captions."""
        wanted = np.asarray(images, np.int64)
        ids, order = self._sorted_ids
        position = np.minimum(np.searchsorted(ids, wanted), max(len(ids) - 1, 0))
        if len(unknown := wanted[ids[position] != wanted] if len(ids) else wanted):
            raise KeyError(int(unknown[0]))
        return order[position]

    @cached_property
    def _sorted_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The image ids in ascending order, and the number of each; 16 bytes per image."""
        order = np.argsort(self._ids)
        return self._ids[order], order


def sampled_documents(count: int, sample: int | None) -> np.ndarray | None:
    """The numbers (sample,), ascending, of a random sample among this many images; None for all of them."""
    if sample is None or sample >= count:
        return None
    return np.sort(np.random.default_rng(DOCUMENT_SEED).choice(count, sample, replace=False))


@dataclass(frozen=True)
class Documents:
    """What document frequencies count: images, or captions. images: of these, by number, ascending; None for all."""

    captions: bool = False
    images: np.ndarray | None = None


class CiderDReward:
    """CIDEr-D of sampled token ids (SOS ... EOS PAD) against reference captions, which the vocabulary tokenizes.

    References keep all their words, including those outside the model's vocabulary. Subwords are no words: with them,
    sampled captions and references are split into the words of the language's metrics. This happens on the host, once
    per distinct caption of a call, and takes 0.1 to 0.3 ms per caption.

    eos: counts EOS as a word at the end of every reference and of every caption that ended, so that a caption cut off
    at the length limit scores lower.
    documents: what the document frequencies count.
    cache: a folder that stores the index over the references under the hash of its content. The index is built once per
    machine and memory-mapped by every process. If the folder cannot be written, each process builds an index for
    itself. None: the index belongs to this object, in files without names. `training.rewards.cider_index` has the cost.
    device: of the captions to score. An index of up to MAX_DEVICE_BYTES is moved there. Of a larger one, the tables of
    all n-grams are moved, and each call moves the parts of its images (see `CiderD.select`).
    """

    def __init__(
        self,
        references: References,
        vocabulary: Vocabulary,
        *,
        eos: bool,
        documents: Documents = Documents(),
        device: torch.device | str = "cpu",
        cache: Path | None = None,
        language: str = ENGLISH,
    ) -> None:
        self.references = references
        self.eos, self.eos_id = eos, vocabulary.eos

        def build(path: Path | None, folder: Path | None = None) -> CiderD:
            return _build(references, vocabulary, language, eos, documents, path, folder)

        if cache is None:
            folder = cache_folder()
            scorer = build(None, folder if os.access(folder, os.W_OK) else None)
        else:
            content = [RESULTS_VERSION, eos, documents.captions, language, vocabulary.to_json()]
            digest = hashlib.sha256(json.dumps(content).encode())
            digest.update(b"all" if documents.images is None else documents.images.tobytes())
            for part in references.content():
                digest.update(part)
            scorer = _cached(cache, digest.hexdigest()[:32], build)
        scores = scorer.metadata.get("ground_truth")
        # CIDEr-D of ground-truth captions with EOS and without it (see `_build`)
        self.ground_truth: tuple[float, float] | None = (scores[0], scores[1]) if scores else None
        self._all: CiderD | None = None  # the index on the host, from which each call selects its images
        if torch.device(device).type != "cpu" and scorer.num_bytes > MAX_DEVICE_BYTES:
            self._all, scorer = scorer, scorer.select(torch.zeros(0, dtype=torch.int64))
        self.scorer = scorer.to(device)
        self._vocabulary, self._language = vocabulary, language
        # The ids of the references' words; None where they are the vocabulary's.
        words = scorer.metadata.get("words")
        self._word_ids = None if words is None else {word: number for number, word in enumerate(words)}
        ignored = [vocabulary.pad, vocabulary.sos]
        ignored += [number for word, number in vocabulary.ids.items() if not word.strip()]  # tokens of white space
        self._ignored = torch.tensor(ignored, device=device)

    @property
    def device(self) -> torch.device:
        """That of the captions to score."""
        return self._ignored.device

    def indices_of(self, images: Sequence[int]) -> Tensor:
        """The numbers (len(images),) int64, on the reward's device, under which the reward has these image ids."""
        return torch.from_numpy(self.references.indices_of(images)).to(self.device)

    def __call__(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """CIDEr-D, a float64 tensor (R,) in the usual scale of 0 to 10, of R captions.

        tokens: (R, T) on the reward's device; those after the first EOS are ignored. indices: (R,) the captions'
        images, numbered by `indices_of`.
        """
        if self._word_ids is not None:
            return self._score(*self._metric_words(tokens, self._word_ids), indices)
        is_eos = tokens == self.eos_id
        num_eos_before = is_eos.cumsum(1) - is_eos.long()
        is_word = (num_eos_before == 0) & ~torch.isin(tokens, self._ignored)
        if not self.eos:
            is_word &= ~is_eos
        order = (~is_word).long().argsort(stable=True, dim=1)  # moves the words to the front and keeps their order
        return self._score(tokens.gather(1, order), is_word.sum(1), indices)

    def _score(self, words: Tensor, lengths: Tensor, indices: Tensor) -> Tensor:
        """The scores (R,) of captions of words (R, W) with padding."""
        scorer = self.scorer
        if self._all is not None:
            scorer = self._all.select(indices.unique().cpu(), scorer)
        return scorer.score(words, lengths, indices)

    def _metric_words(self, tokens: Tensor, word_ids: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        """The words (R, W) of the texts of captions of subwords, with padding, and their numbers (R,)."""
        rows = [tuple(row) for row in tokens.tolist()]
        encoded: dict[tuple[int, ...], Tensor] = {}
        for row in dict.fromkeys(rows):
            words = _words_of(self._vocabulary.decode(row), self._language)
            words += [EOS] if self.eos and self.eos_id in row else []
            new_ids: dict[str, int] = {}  # of words that no reference has; they differ from all others
            ids = [
                word_ids[word] if word in word_ids else len(word_ids) + new_ids.setdefault(word, len(new_ids))
                for word in words
            ]
            encoded[row] = torch.tensor(ids, dtype=torch.int64)
        captions = [encoded[row] for row in rows]
        lengths = torch.tensor([len(caption) for caption in captions], device=tokens.device)
        return pad_sequence(captions, batch_first=True).to(tokens.device), lengths


def _words_of(caption: str, language: str) -> list[str]:
    """The words of a raw caption on which CIDEr-D is computed. A PTB token with a space in it ("1 1/2") is two."""
    return [word for token in metric_words(caption, language) for word in token.split()]


def _build(
    references: References,
    vocabulary: Vocabulary,
    language: str,
    eos: bool,
    documents: Documents,
    path: Path | None,
    folder: Path | None,
) -> CiderD:
    """The index over the references, with two scores of ground truth in its metadata (see `check_reward`).

    With subwords the metadata also has the words of the references in the order of their ids. path, folder: see
    `build_index`.

    The first caption of each image is scored against its other captions: once with EOS and once without. The scores are
    means over the first 1000 images with several captions, or None if no image has several.
    """
    has_words = vocabulary.subwords is None
    ids = dict(vocabulary.ids) if has_words else {EOS: 0}
    metadata: dict[str, Any] = {}

    def encode(caption: str) -> list[int]:
        """Word ids of a caption. A word outside of the vocabulary gets the next free id."""
        words = vocabulary.tokenize(caption) if has_words else _words_of(caption, language)
        words = [word for word in words if word.strip()] + ([EOS] if eos else [])
        return [ids.setdefault(word, len(ids)) for word in words]

    def encoded() -> Iterator[list[list[int]]]:
        """The captions of each image. At the end, `metadata` is complete."""
        with_several: list[list[list[int]]] = []
        for texts in references:
            captions = [encode(text) for text in texts]
            if len(captions) > 1 and len(with_several) < 1000:
                with_several.append(captions)
            yield captions
        metadata["ground_truth"] = _ground_truth(with_several, eos)
        if not has_words:
            metadata["words"] = list(ids)

    return build_index(
        encoded(),
        caption_documents=documents.captions,
        documents=documents.images,
        path=path,
        folder=folder,
        metadata=metadata,
    )


def _ground_truth(images: list[list[list[int]]], eos: bool) -> list[float] | None:
    """The mean CIDEr-D of each image's first caption against the others, and that of the captions without EOS."""
    if not images:
        return None
    others = build_index(captions[1:] for captions in images)
    first = [torch.tensor(captions[0], dtype=torch.int64) for captions in images]
    lengths, indices = torch.tensor([len(caption) for caption in first]), torch.arange(len(first))
    tokens = pad_sequence(first, batch_first=True)
    # A caption without its last token is one without EOS.
    return [others.score(tokens, (lengths - cut).clamp(min=0), indices).mean().item() for cut in (0, int(eos))]


def _cached(folder: Path, digest: str, build: Callable[[Path | None], CiderD]) -> CiderD:
    """Loads the index from its file. The first process builds and writes it while other processes wait.

    So does the first process that finds the file damaged.
    """
    indexes = folder / REWARD_INDEXES
    path = indexes / digest / "index.safetensors"
    try:
        with file_lock(indexes / f"{digest}.lock"):
            try:
                require_whole(path)
                os.utime(path.parent)  # marks the index as used now
                return CiderD.load(path)
            except (DamagedError, ValueError) as error:
                if path.parent.exists():
                    logger.warning(f"damaged   {error}; it is built again")
            with atomic_folder(path.parent) as temporary:
                build(temporary / path.name)
                write_digests(temporary)
            by_last_use = sorted(indexes.glob("[!.]*/"), key=lambda each: each.stat().st_mtime_ns)
            for old in by_last_use[:-MAX_CACHED]:
                shutil.rmtree(old, ignore_errors=True)  # processes that have it memory-mapped can still read it
                old.with_suffix(".lock").unlink(missing_ok=True)
            return CiderD.load(path)
    except OSError as error:  # the folder cannot be written
        logger.warning(f"reward    {error}; this process builds an index for itself")
        return build(None)
