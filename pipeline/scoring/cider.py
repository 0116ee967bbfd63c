"""CIDEr-D over integer n-gram keys, in batches, on a CPU or a GPU.

CIDEr-D is defined in section 6 of Vedantam et al. 2015 (n = 1..4, sigma = 6, times 10); the values equal those of
coco-caption's Python scorer. Words are ids, and an n-gram is one int64 key that is unique over all n. The index of the
references is a set of tensors, saved as one safetensors file, whose memory processes share. Every sum has a fixed
order, so equal inputs give equal bits on one machine.

Shapes: I images, C reference captions, V distinct n-grams of the references, P distinct (image, n-gram) pairs,
M (reference, n-gram) entries, R scored captions, T words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.scoring.ngram_keys import (
    N_MAX,
    Grams,
    HashTable,
    NgramKeys,
    Ragged,
    by_length,
    index_type,
    run_starts,
    take,
)

SIGMA = 6.0


class CiderD:
    """Scores captions (word ids) of images against their references, with document frequencies over the images.

    `CiderD.build` creates it. An image is identified by its position among the references. The index takes about 5 kB
    per image with five references. Processes that `load` the same file share its memory pages. `metadata` is a
    dictionary of JSON values, saved with the index.
    """

    def __init__(self, index: _Index, metadata: Mapping[str, Any]) -> None:
        self.metadata = dict(metadata)
        self.num_images = len(index.num_references)
        self._index = index
        self._log_documents = float(metadata["log_documents"])
        self._keys = NgramKeys(int(metadata["num_words"]), index.prefixes)

    @classmethod
    def build(
        cls,
        references: Sequence[Sequence[Sequence[int]]],
        *,
        caption_documents: bool = False,
        num_words: int = 0,
    ) -> CiderD:
        """The index of each image's reference captions, given as word-id sequences.

        num_words: size of the vocabulary; needed when scored captions may use higher word ids than the references.
        caption_documents: compute document frequencies over captions instead of images, as the meshed-memory
        transformer's reward does. The cost is a few sorts of all reference n-grams.
        """
        captions = Ragged.of([caption for image in references for caption in image])
        num_references = np.array([len(image) for image in references], np.int64)
        num_words = max(num_words, int(captions.words.max(initial=0)) + 1)
        keys = NgramKeys.build(num_words, captions)
        entries = _Entries.count(keys, captions)
        ngrams, ngram = HashTable.number(entries.key)
        postings = _Postings.build(entries.caption, ngram, num_references, max(len(ngrams), 1))

        # The document frequency of an n-gram is the number of images (or of captions) whose references contain it.
        frequency = np.bincount(ngram if caption_documents else postings.ngram, minlength=postings.num_ngrams)
        log_documents = math.log(max(len(captions) if caption_documents else len(references), 1))
        idf = log_documents - np.log(np.maximum(frequency, 1))
        weight = entries.times * idf[ngram]
        norm_slot = entries.caption * N_MAX + entries.order
        index = _Index(
            num_references=torch.from_numpy(num_references),
            length=torch.from_numpy(np.maximum(captions.lengths - 1.0, 0.0)),
            norm=torch.from_numpy(np.sqrt(np.bincount(norm_slot, weight**2, minlength=len(captions) * N_MAX))),
            idf=torch.from_numpy(idf),
            starts=torch.from_numpy(postings.starts),
            counts=torch.from_numpy(postings.counts),
            entry_reference=torch.from_numpy(entries.caption[postings.order].astype(np.int32)),
            entry_weight=torch.from_numpy(weight[postings.order]),
            ngrams=ngrams,
            pairs=postings.table,
            prefixes=keys.prefixes,
        )
        return cls(index, {"num_words": num_words, "log_documents": log_documents})

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        return CiderD(self._index.map(lambda tensor: tensor.to(device)), self.metadata)

    def save(self, path: Path) -> None:
        """Writes one safetensors file. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(self._index.tensors(), path, {"metadata": json.dumps(self.metadata)})
        except SafetensorError as error:  # for example a full disk
            raise OSError(f"{path} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> CiderD:
        """Memory-maps an index that `save` wrote. Raises ValueError when the file is incomplete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                names = file.keys()
                index = _Index.of({name: file.get_tensor(name) for name in names})
                return cls(index, json.loads(file.metadata()["metadata"]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a CIDEr-D index: {error}") from error

    def score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """CIDEr-D x 10 of each caption, float64 (R,).

        captions (R, T): word ids; row i has lengths[i] words and then padding. images (R,): positions among the
        references. The three tensors are on the index's device. An n-gram that no reference contains gets document
        frequency 1 and adds to the caption's norm. Captions of similar length are scored together, in parts of bounded
        memory.
        """
        scores = lengths.new_zeros(len(lengths), dtype=torch.float64)
        for part, width in by_length(lengths):
            scores[part] = self._score(captions[part, :width], lengths[part], images[part])
        return scores

    def _score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        index = self._index
        grams = self._keys.count(captions, lengths)
        ngram, in_references = index.ngrams.find(grams.key)
        # log_documents is the idf of document frequency 1. Index 0 avoids reading at a position without meaning.
        idf = take(index.idf, ngram.where(in_references, 0))
        weight = grams.times * torch.where(in_references, idf, self._log_documents)
        squares = captions.new_zeros((len(captions), captions.shape[1] * N_MAX), dtype=torch.float64)
        squares[grams.caption, grams.column] = weight.square()
        norm = squares.view(len(captions), -1, N_MAX).sum(1).sqrt()  # (R, n)

        # Pairs each caption n-gram with every reference of its image that contains it: one row of `row` and `entry`.
        gram = in_references.nonzero().squeeze(1)
        pair_key = take(images, take(grams.caption, gram)) * index.num_ngrams + take(ngram, gram)
        pair, matches = index.pairs.find(pair_key)
        gram, pair = gram[matches], pair[matches]
        starts, counts = take(index.starts, pair).long(), take(index.counts, pair).long()
        row = gram.repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        entry = torch.arange(len(row), device=row.device) + (starts - first).repeat_interleave(counts)

        reference_weight = take(index.entry_weight, entry)
        product = torch.minimum(take(weight, row), reference_weight) * reference_weight
        reference = take(index.entry_reference, entry).long()
        caption, order = take(grams.caption, row), take(grams.column, row) % N_MAX
        norms = take(norm.flatten(), caption * N_MAX + order) * take(index.norm, reference * N_MAX + order)
        delta = (take(lengths, caption) - 1).clamp(min=0) - take(index.length, reference)
        value = product / torch.where(norms > 0, norms, 1.0) * torch.exp(-delta.square() / (2 * SIGMA**2))
        matched = torch.segment_reduce(
            value, "sum", lengths=torch.bincount(caption, minlength=len(captions)), initial=0
        )
        return matched / N_MAX / index.num_references[images].clamp(min=1) * 10.0


@dataclass(frozen=True)
class _Index:
    """The tensors of an index.

    An entry is one n-gram of one reference. Entries are sorted by (image, n-gram, reference), so those of one (image,
    n-gram) pair are adjacent. `prefixes` are the tables of the references' 1-, 2- and 3-grams; the tuple is empty below
    2^15 words, where keys need no tables (see `NgramKeys`).
    """

    num_references: Tensor  # (I,) int64
    length: Tensor  # (C,) float64, number of bigrams of each caption: CIDEr-D's length
    norm: Tensor  # (C * 4,) float64, norm of the weights of each caption's n-grams of length n, at caption * 4 + n - 1
    idf: Tensor  # (V,) float64, inverse document frequency of each n-gram
    starts: Tensor  # (P,) position of each pair's first entry
    counts: Tensor  # (P,) number of each pair's entries
    entry_reference: Tensor  # (M,) int32, number of the reference caption
    entry_weight: Tensor  # (M,) float64, tf-idf of the n-gram in that caption
    ngrams: HashTable  # the keys of the V n-grams
    pairs: HashTable  # the P numbers image * num_ngrams + n-gram
    prefixes: tuple[HashTable, ...]

    @property
    def num_ngrams(self) -> int:
        return max(len(self.ngrams), 1)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name. The tensors of a table are named "<table>.keys" and "<table>.start"."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        tables = {"ngrams": self.ngrams, "pairs": self.pairs}
        tables |= {f"prefix{order}": table for order, table in enumerate(self.prefixes, 1)}
        for name, table in tables.items():
            tensors |= {f"{name}.keys": table.keys, f"{name}.start": table.start}
        return tensors

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Index:
        """The index with these tensors, named as in `tensors`. Raises KeyError when one is missing."""

        def table(name: str) -> HashTable:
            return HashTable(tensors[f"{name}.keys"], tensors[f"{name}.start"])

        plain = {name: tensor for name, tensor in tensors.items() if "." not in name}
        orders = range(1, N_MAX) if "prefix1.keys" in tensors else ()
        prefixes = tuple(table(f"prefix{order}") for order in orders)
        return cls(**plain, ngrams=table("ngrams"), pairs=table("pairs"), prefixes=prefixes)

    def map(self, change: Callable[[Tensor], Tensor]) -> _Index:
        """The index with `change` applied to every tensor."""
        return _Index.of({name: change(tensor) for name, tensor in self.tensors().items()})


@dataclass(frozen=True)
class _Entries:
    """The distinct n-grams of every reference caption: M rows of (caption, n-gram)."""

    caption: np.ndarray  # number of the caption
    order: np.ndarray  # n - 1
    key: np.ndarray  # of the n-gram
    times: np.ndarray  # float64, how often the caption contains the n-gram

    @classmethod
    def count(cls, keys: NgramKeys, captions: Ragged) -> _Entries:
        empty = torch.zeros(0, dtype=torch.long)
        rows, parts = [np.zeros(0, np.int64)], [Grams(empty, empty, empty, empty.double())]
        for numbers, words, lengths in captions.batches():
            parts.append(keys.count(words, lengths))
            rows.append(numbers[parts[-1].caption.numpy()])
        _, column, key, times = (torch.cat(columns).numpy() for columns in zip(*parts, strict=True))
        return cls(np.concatenate(rows), column % N_MAX, key, times)


@dataclass(frozen=True)
class _Postings:
    """Entries sorted by (image, n-gram, reference): all references of an image that hold an n-gram are adjacent."""

    order: np.ndarray  # (M,) entries[order] is sorted
    table: HashTable  # the pairs' keys; `starts` and `counts` have the order of this table
    starts: np.ndarray  # (P,) position of each pair's first entry
    counts: np.ndarray  # (P,) number of each pair's entries
    ngram: np.ndarray  # (P,) the n-gram of each pair, in sorted order
    num_ngrams: int

    @classmethod
    def build(cls, caption: np.ndarray, ngram: np.ndarray, num_references: np.ndarray, num_ngrams: int) -> _Postings:
        """Sorts the entries. caption, ngram (M,): the caption of each entry, and the number of its n-gram."""
        image = np.repeat(np.arange(len(num_references)), num_references)
        first_reference = np.repeat(np.cumsum(num_references) - num_references, num_references)
        reference = np.arange(len(image)) - first_reference  # a caption's position among the references of its image
        pair = image[caption] * num_ngrams + ngram
        order = np.argsort(pair * int(num_references.max(initial=1)) + reference[caption])
        pairs = pair[order]
        starts = run_starts(pairs)
        table, number = HashTable.build(pairs[starts])
        counts = np.diff(starts, append=len(pairs))
        return cls(
            order=order,
            table=table,
            starts=starts[number].astype(index_type(len(pairs))),
            counts=counts[number].astype(np.int32),
            ngram=pairs[starts] % num_ngrams,
            num_ngrams=num_ngrams,
        )
