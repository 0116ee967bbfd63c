"""CIDEr-D over integer n-gram keys, in batches, on a CPU or a GPU.

CIDEr-D (Vedantam et al. 2015, section 6; n = 1..4, sigma = 6, times 10), equal to coco-caption's Python scorer. Words
are ids, and an n-gram is one int64 key that is unique over all n. The index of the references is a set of tensors,
saved as one safetensors file that processes map and share. Scoring consists of comparisons, look-ups and segment sums
in a fixed order, so equal inputs give equal bits on one machine.

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

    Built by `CiderD.build`; an image is identified by its position among the references. The index takes about 5 kB per
    image with five references. Processes that `load` the same file share its memory pages. `metadata` holds JSON
    values, stored with the index.
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

        num_words: a number above every id that scored captions may hold, where that is more than the references hold.
        caption_documents: count every caption as a document, as the meshed-memory transformer's reward does. Cost: a
        few sorts of all reference n-grams.
        """
        captions = Ragged.of([caption for image in references for caption in image])
        num_references = np.array([len(image) for image in references], np.int64)
        num_words = max(num_words, int(captions.words.max(initial=0)) + 1)
        keys = NgramKeys.build(num_words, captions)
        entries = _Entries.count(keys, captions)
        ngrams, ngram = HashTable.number(entries.key)
        postings = _Postings.build(entries.caption, ngram, num_references, max(len(ngrams), 1))

        # Document frequency: the number of images (or of captions) whose references hold an n-gram.
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
        """Memory-maps what `save` wrote. Raises ValueError when the file is incomplete."""
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

        captions (R, T): word ids, of which the first lengths (R,) count. images (R,): positions among the references.
        All three on the index's device. An n-gram that no reference holds counts in the caption's norm with document
        frequency 1. Captions of similar length are scored together, in parts of bounded memory.
        """
        scores = lengths.new_zeros(len(lengths), dtype=torch.float64)
        for part, width in by_length(lengths):
            scores[part] = self._score(captions[part, :width], lengths[part], images[part])
        return scores

    def _score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        index = self._index
        grams = self._keys.count(captions, lengths)
        ngram, known = index.ngrams.find(grams.key)
        weight = grams.times * torch.where(known, take(index.idf, ngram.where(known, 0)), self._log_documents)
        squares = captions.new_zeros((len(captions), captions.shape[1] * N_MAX), dtype=torch.float64)
        squares[grams.caption, grams.column] = weight.square()
        norm = squares.view(len(captions), -1, N_MAX).sum(1).sqrt()  # (R, n)

        # Each caption n-gram that some reference of its image holds, repeated for every reference that holds it.
        gram = known.nonzero().squeeze(1)
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
    """The tensors of an index. Entries are sorted by (image, n-gram, reference); `starts`, `counts` give each pair's.

    `prefixes` are the tables of the references' 1-, 2- and 3-grams; empty below 2^15 words (see `NgramKeys`).
    """

    num_references: Tensor  # (I,) int64
    length: Tensor  # (C,) float64, number of bigrams
    norm: Tensor  # (C * 4,) float64, of each caption's weights of order n
    idf: Tensor  # (V,) float64
    starts: Tensor  # (P,) first entry of a pair
    counts: Tensor  # (P,) number of entries of a pair
    entry_reference: Tensor  # (M,) int32, the caption
    entry_weight: Tensor  # (M,) float64, tf-idf
    ngrams: HashTable  # keys of the V n-grams
    pairs: HashTable  # image * num_ngrams + n-gram, of the P pairs
    prefixes: tuple[HashTable, ...]

    @property
    def num_ngrams(self) -> int:
        return max(len(self.ngrams), 1)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, those of tables as "name.keys" and "name.start"."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        tables = {"ngrams": self.ngrams, "pairs": self.pairs}
        tables |= {f"prefix{order}": table for order, table in enumerate(self.prefixes, 1)}
        for name, table in tables.items():
            tensors |= {f"{name}.keys": table.keys, f"{name}.start": table.start}
        return tensors

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Index:
        """From what `tensors` gave. Raises KeyError for a missing one."""

        def table(name: str) -> HashTable:
            return HashTable(tensors[f"{name}.keys"], tensors[f"{name}.start"])

        plain = {name: tensor for name, tensor in tensors.items() if "." not in name}
        orders = range(1, N_MAX) if "prefix1.keys" in tensors else ()
        prefixes = tuple(table(f"prefix{order}") for order in orders)
        return cls(**plain, ngrams=table("ngrams"), pairs=table("pairs"), prefixes=prefixes)

    def map(self, change: Callable[[Tensor], Tensor]) -> _Index:
        """The index with every tensor changed."""
        return _Index.of({name: change(tensor) for name, tensor in self.tensors().items()})


@dataclass(frozen=True)
class _Entries:
    """The distinct n-grams of every reference caption, M rows."""

    caption: np.ndarray  # number of the caption
    order: np.ndarray  # n - 1
    key: np.ndarray
    times: np.ndarray  # float64, uses in the caption

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

    order: np.ndarray  # (M,) sorts the entries
    table: HashTable  # of the pairs' keys; `starts` and `counts` are in its order
    starts: np.ndarray  # (P,)
    counts: np.ndarray  # (P,)
    ngram: np.ndarray  # (P,) the n-gram of each pair, in sorted order
    num_ngrams: int

    @classmethod
    def build(cls, caption: np.ndarray, ngram: np.ndarray, num_references: np.ndarray, num_ngrams: int) -> _Postings:
        """caption, ngram (M,): an entry's caption and the number of its n-gram, below `num_ngrams`."""
        image = np.repeat(np.arange(len(num_references)), num_references)
        first_reference = np.repeat(np.cumsum(num_references) - num_references, num_references)
        reference = np.arange(len(image)) - first_reference  # a caption's number among its image's references
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
