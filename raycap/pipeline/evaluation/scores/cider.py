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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from raycap.pipeline.evaluation.scores.ngram_keys import (
    N_MAX,
    HashTable,
    by_length,
    count_ngrams,
    find_in_buckets,
    take,
)

SIGMA = 6.0


class CiderD:
    """Scores captions (word ids) of images against their references, with document frequencies over the images.

    `training.rewards.cider_index.build_index` creates it. An image is identified by its position among the references.
    Processes that `load` the same file share its memory pages. `metadata` has JSON values, saved with the index.

    The index has tables of all n-grams, 16 to 32 bytes for each distinct one, and for each image its own part, about
    2.5 kB with five references. The parts are in the order of the images. So a process that maps the file and scores
    some of the images reads their parts only, and `select` copies them. A pair is one (image, n-gram); an entry of
    the index is one n-gram of one reference. Pairs are sorted by image and n-gram, and entries by pair and reference.
    The tensors of the index by name:

        reference_offset (I + 1,)    number of the first reference caption of each image; at the end C
        length (C,) float64          number of bigrams of each caption: CIDEr-D's length
        norm (C * 4,) float64        norm of the weights of each caption's n-grams of length n, at caption * 4 + n - 1
        idf (V,) float64             inverse document frequency of each n-gram
        pair_offset (I + 1,)         number of the first pair of each image; at the end P
        pair_ngram (P + 1,)          number of the n-gram of each pair; the last one only makes that position readable
        pair_bucket (P + 1,)         first pair of each bucket, see `_find_pairs`; at the end P
        pair_start (P + 1,)          position of each pair's first entry; at the end M
        entry_reference (M,)         number of the reference among those of its image
        entry_times (M,)             how often the reference contains the n-gram
        ngrams.*                     table of the keys of the V n-grams
        bigrams.*                    table of the keys of the references' 2-grams
        selected (I,) int64          after `select`: the numbers of the images, ascending

    Integers without a type above have the smallest one that suffices.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        self.metadata = dict(metadata)
        self._tensors = dict(tensors)
        self._log_documents = float(metadata["log_documents"])
        self._bigrams, self._ngrams = (HashTable.of(tensors, name) for name in ("bigrams", "ngrams"))

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        return CiderD({name: tensor.to(device) for name, tensor in self._tensors.items()}, self.metadata)

    def select(self, images: Tensor, tables: CiderD | None = None) -> CiderD:
        """The index of these images (n,) int64, ascending and distinct, with the same document frequencies and scores.

        An image keeps its number. The parts of the images are copied. The tables of all n-grams are shared with this
        index, or with `tables`: an earlier selection, on whose device the new one is. Raises ValueError for an index
        that is itself a selection.
        """
        index = self._tensors
        if "selected" in index:
            raise ValueError("a part of a CIDEr-D index cannot be selected from; select from the index of all images")
        parts = [_part(index, some) for some in images.split(1 << 14)]
        own = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        pairs = own.pop("pairs")
        totals = {
            "reference_offset": own.pop("references").cumsum(0),
            "pair_offset": pairs.cumsum(0),
            "pair_start": own.pop("entries").cumsum(0),
        }
        own |= {name: F.pad(values, (1, 0)).to(index[name].dtype) for name, values in totals.items()}
        # `_part` counts the buckets of an image from its first pair.
        bucket = own["pair_bucket"] + own["pair_offset"][:-1].repeat_interleave(pairs)
        own["pair_bucket"] = torch.cat([bucket, own["pair_offset"][-1:]]).to(index["pair_bucket"].dtype)
        own["pair_ngram"] = F.pad(own["pair_ngram"], (0, 1))
        own["selected"] = images.contiguous()
        if tables is None:
            return CiderD(index | own, self.metadata)
        shared = tables._tensors
        return CiderD(shared | {name: part.to(shared["idf"].device) for name, part in own.items()}, self.metadata)

    @classmethod
    def load(cls, path: Path) -> CiderD:
        """Memory-maps an index that `build_index` wrote. Raises ValueError when the file is incomplete."""
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
        by its position among the references. The three tensors are on the index's device. An n-gram that no reference
        contains gets document frequency 1 and adds to the caption's norm. A caption of an image that was not selected
        (see `select`) has NaN. Captions of similar length are scored together, in parts of bounded memory.
        """
        scores = lengths.new_full((len(lengths),), math.nan, dtype=torch.float64)
        if not len(self._tensors.get("selected", lengths)):
            return scores
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
        rows, known = images, None
        if "selected" in index:
            rows = torch.searchsorted(index["selected"], images).clamp(max=len(index["selected"]) - 1)
            known = take(index["selected"], rows) == images
        gram = in_references.nonzero().squeeze(1)
        pair, matches = self._find_pairs(take(rows, take(grams.caption, gram)), take(ngram, gram))
        gram, pair = gram[matches], pair[matches]
        starts = take(index["pair_start"], pair).long()
        counts = take(index["pair_start"], pair + 1).long() - starts
        matched_gram = gram.repeat_interleave(counts)
        first_match = counts.cumsum(0) - counts  # the number of the first match of each element of `gram`
        number = torch.arange(len(matched_gram), device=gram.device)
        matched_entry = number + (starts - first_match).repeat_interleave(counts)

        reference_weight = take(index["entry_times"], matched_entry) * take(idf, matched_gram)
        product = torch.minimum(take(weight, matched_gram), reference_weight) * reference_weight
        caption, order = take(grams.caption, matched_gram), take(grams.column, matched_gram) % N_MAX
        first_reference = take(index["reference_offset"], rows).long()
        reference = take(first_reference, caption) + take(index["entry_reference"], matched_entry)
        norms = take(norm.flatten(), caption * N_MAX + order) * take(index["norm"], reference * N_MAX + order)
        delta = (take(lengths, caption) - 1).clamp(min=0) - take(index["length"], reference)
        value = product / torch.where(norms > 0, norms, 1.0) * torch.exp(-delta.square() / (2 * SIGMA**2))
        matched = torch.segment_reduce(
            value, "sum", lengths=torch.bincount(caption, minlength=len(captions)), initial=0
        )
        num_references = take(index["reference_offset"], rows + 1).long() - first_reference
        scores = matched / N_MAX / num_references.clamp(min=1) * 10.0
        return scores if known is None else scores.where(known, math.nan)

    def _find_pairs(self, rows: Tensor, ngram: Tensor) -> tuple[Tensor, Tensor]:
        """The pair of each n-gram (n,) and its image, given as a row of the index, and whether there is one.

        The n pairs of an image have n buckets, that of an n-gram being number * n // V. An n-gram's number comes from a
        hash, so a bucket has about one pair, and the buckets have the order of the pairs.
        """
        index = self._tensors
        offset = take(index["pair_offset"], rows).long()
        pairs = take(index["pair_offset"], rows + 1).long() - offset
        bucket = offset + ngram * pairs // max(len(self._ngrams), 1)
        position = take(index["pair_bucket"], bucket).long()
        end = take(index["pair_bucket"], bucket + (pairs > 0)).long()  # an image without n-grams has no bucket
        return find_in_buckets(index["pair_ngram"], ngram, position, end)


def _part(index: Mapping[str, Tensor], images: Tensor) -> dict[str, Tensor]:
    """The tensors of some images, with buckets that count from the first pair of their image.

    Instead of the offsets, it has the numbers of references and of pairs of each image, and of entries of each pair.
    """
    captions, references = _ranges(index["reference_offset"], images)
    pair, pairs = _ranges(index["pair_offset"], images)
    entry, entries = _ranges(index["pair_start"], pair)
    first = take(index["pair_offset"], images).repeat_interleave(pairs)
    columns = (captions[:, None] * N_MAX + torch.arange(N_MAX, device=images.device)).flatten()
    return {
        "references": references,
        "pairs": pairs,
        "entries": entries,
        "length": take(index["length"], captions),
        "norm": take(index["norm"], columns),
        "pair_ngram": take(index["pair_ngram"], pair),
        "pair_bucket": take(index["pair_bucket"], pair) - first,
        "entry_reference": take(index["entry_reference"], entry),
        "entry_times": take(index["entry_times"], entry),
    }


def _ranges(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The positions from offsets[row] to offsets[row + 1] of each row, joined, and the number of positions of each."""
    begin = take(offsets, rows).long()
    counts = take(offsets, rows + 1).long() - begin
    first = counts.cumsum(0) - counts
    total = int(counts.sum())
    return torch.arange(total, device=rows.device) + (begin - first).repeat_interleave(counts), counts
