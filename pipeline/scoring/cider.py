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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.scoring.ngram_keys import N_MAX, HashTable, Ragged, bigram_keys, by_length, count_ngrams, index_type, take

SIGMA = 6.0


class CiderD:
    """Scores captions (word ids) of images against their references, with document frequencies over the images.

    `CiderD.build` creates it. An image is identified by its position among the references. The index takes about 5 kB
    per image with five references. Processes that `load` the same file share its memory pages. `metadata` has JSON
    values, saved with the index. An entry of the index is one n-gram of one reference. Entries are sorted by (image,
    n-gram, reference), so those of one (image, n-gram) pair are adjacent. The tensors of the index by name:

        num_references (I,) int64
        length (C,) float64          number of bigrams of each caption: CIDEr-D's length
        norm (C * 4,) float64        norm of the weights of each caption's n-grams of length n, at caption * 4 + n - 1
        idf (V,) float64             inverse document frequency of each n-gram
        starts, counts (P,)          position of each pair's first entry, and number of each pair's entries
        entry_reference (M,) int32   number of the reference caption
        entry_weight (M,) float64    tf-idf of the n-gram in that caption
        ngrams.*                     table of the keys of the V n-grams
        pairs.*                      table of the P numbers image * V + n-gram
        bigrams.*                    table of the keys of the references' 2-grams
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        self.metadata = dict(metadata)
        self._tensors = dict(tensors)
        self._log_documents = float(metadata["log_documents"])
        tables = (HashTable.of(tensors, name) for name in ("bigrams", "ngrams", "pairs"))
        self._bigrams, self._ngrams, self._pairs = tables

    @classmethod
    def build(cls, references: Sequence[Sequence[Sequence[int]]], *, caption_documents: bool = False) -> CiderD:
        """The index of each image's reference captions, given as word-id sequences.

        caption_documents: compute document frequencies over captions instead of images, as the meshed-memory
        transformer's reward does. The cost is a few sorts of all reference n-grams.
        """
        captions = Ragged([caption for image in references for caption in image])
        num_references = np.array([len(image) for image in references], np.int64)
        num_captions = len(captions.lengths)
        # This includes 2-grams that join two captions. Nothing looks them up, so they only make the table larger.
        bigrams, _ = HashTable.build(np.unique(bigram_keys(captions.words[:-1], captions.words[1:])))
        caption, column, key, times = _entries(captions, bigrams)
        distinct, inverse = np.unique(key, return_inverse=True)
        ngrams, bucket_order = HashTable.build(distinct)
        ngram = np.argsort(bucket_order)[inverse]  # the position of each key in the table

        # Sort the entries by (image, n-gram, reference). Adjacent entries with the same image and n-gram form a pair.
        num_ngrams = max(len(ngrams), 1)
        pair = np.repeat(np.arange(len(references)), num_references)[caption] * num_ngrams + ngram
        order = np.lexsort((caption, pair))
        pair_key, starts, counts = np.unique(pair[order], return_index=True, return_counts=True)
        pairs, number = HashTable.build(pair_key)

        # The document frequency of an n-gram is the number of images (or of captions) whose references contain it.
        frequency = np.bincount(ngram if caption_documents else pair_key % num_ngrams, minlength=num_ngrams)
        log_documents = math.log(max(num_captions if caption_documents else len(references), 1))
        idf = log_documents - np.log(np.maximum(frequency, 1))
        weight = times * idf[ngram]
        norm = np.sqrt(np.bincount(caption * N_MAX + column % N_MAX, weight**2, minlength=num_captions * N_MAX))
        arrays = {
            "num_references": num_references,
            "length": np.maximum(captions.lengths - 1.0, 0.0),
            "norm": norm,
            "idf": idf,
            "starts": starts[number].astype(index_type(len(pair))),
            "counts": counts[number].astype(np.int32),
            "entry_reference": caption[order].astype(np.int32),
            "entry_weight": weight[order],
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensors |= bigrams.tensors("bigrams") | ngrams.tensors("ngrams") | pairs.tensors("pairs")
        return cls(tensors, {"log_documents": log_documents})

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        return CiderD({name: tensor.to(device) for name, tensor in self._tensors.items()}, self.metadata)

    def save(self, path: Path) -> None:
        """Writes one safetensors file. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(self._tensors, path, {"metadata": json.dumps(self.metadata)})
        except SafetensorError as error:  # for example a full disk
            raise OSError(f"{path} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> CiderD:
        """Memory-maps an index that `save` wrote. Raises ValueError when the file is incomplete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not iterable)
                return cls(tensors, json.loads(file.metadata()["metadata"]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a CIDEr-D index: {error}") from error

    def score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """CIDEr-D of each caption on its usual scale from 0 to 10, float64 (R,).

        captions (R, T): word ids; row i has lengths[i] words and then padding. images (R,): the image of each caption,
        as its index in the argument `references` of `build`. The three tensors are on the index's device. An n-gram
        that no reference contains gets document frequency 1 and adds to the caption's norm. Captions of similar length
        are scored together, in parts of bounded memory.
        """
        scores = lengths.new_zeros(len(lengths), dtype=torch.float64)
        for part, width in by_length(lengths):
            scores[part] = self._score(captions[part, :width], lengths[part], images[part])
        return scores

    def _score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """The scores (R,) of one part of the captions; the arguments are those of `score`."""
        index = self._tensors
        grams = count_ngrams(captions, lengths, self._bigrams)
        ngram, in_references = self._ngrams.find(grams.key)
        # log_documents is the idf of document frequency 1. An n-gram that was not found has no valid position, so
        # position 0 is read instead.
        idf = take(index["idf"], ngram.where(in_references, 0))
        weight = grams.times * torch.where(in_references, idf, self._log_documents)
        squares = captions.new_zeros((len(captions), captions.shape[1] * N_MAX), dtype=torch.float64)
        squares[grams.caption, grams.column] = weight.square()
        norm = squares.view(len(captions), -1, N_MAX).sum(1).sqrt()  # (R, n)

        # Match each n-gram of a caption with every reference of its image that contains it. Match i consists of the
        # n-gram matched_gram[i] of `grams` and the entry matched_entry[i] of the index.
        gram = in_references.nonzero().squeeze(1)
        pair_key = take(images, take(grams.caption, gram)) * max(len(self._ngrams), 1) + take(ngram, gram)
        pair, matches = self._pairs.find(pair_key)
        gram, pair = gram[matches], pair[matches]
        starts, counts = take(index["starts"], pair).long(), take(index["counts"], pair).long()
        matched_gram = gram.repeat_interleave(counts)
        first_match = counts.cumsum(0) - counts  # the number of the first match of each element of `gram`
        number = torch.arange(len(matched_gram), device=gram.device)
        matched_entry = number + (starts - first_match).repeat_interleave(counts)

        reference_weight = take(index["entry_weight"], matched_entry)
        product = torch.minimum(take(weight, matched_gram), reference_weight) * reference_weight
        reference = take(index["entry_reference"], matched_entry).long()
        caption, order = take(grams.caption, matched_gram), take(grams.column, matched_gram) % N_MAX
        norms = take(norm.flatten(), caption * N_MAX + order) * take(index["norm"], reference * N_MAX + order)
        delta = (take(lengths, caption) - 1).clamp(min=0) - take(index["length"], reference)
        value = product / torch.where(norms > 0, norms, 1.0) * torch.exp(-delta.square() / (2 * SIGMA**2))
        matched = torch.segment_reduce(
            value, "sum", lengths=torch.bincount(caption, minlength=len(captions)), initial=0
        )
        return matched / N_MAX / index["num_references"][images].clamp(min=1) * 10.0


def _entries(captions: Ragged, bigrams: HashTable) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The distinct n-grams of every caption, as arrays (M,): number of the caption; column, key, times of `Grams`."""
    empty = torch.zeros(0, dtype=torch.long)
    parts = [(empty, empty, empty, empty.double())]
    for numbers, words, lengths in captions.batches():
        grams = count_ngrams(words, lengths, bigrams)
        parts.append((take(numbers, grams.caption), grams.column, grams.key, grams.times))
    caption, column, key, times = (torch.cat(columns).numpy() for columns in zip(*parts, strict=True))
    return caption, column, key, times
