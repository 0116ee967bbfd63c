"""The index of CIDEr-D: its passes over pieces against a plain form in memory, its selections, and failing disks."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.reference_cider import grams
from raycap.pipeline.training.rewards import cider_index
from raycap.pipeline.training.rewards.cider_index import Runs, Spill, build_index, distinct_keys

Images = Sequence[Sequence[Sequence[int]]]


def plain_parts(images: Images, caption_documents: bool, documents: set[int]) -> list[dict[str, Any]]:
    """By image: the norm of each caption and order, and (n-gram, [(reference, times, idf)]), from dictionaries."""
    frequency: dict[Any, int] = {}
    for number, captions in enumerate(images):
        counted = [set(grams(caption)) for caption in captions]
        for each in counted if caption_documents else [set().union(*counted)]:
            for gram in each if number in documents else ():
                frequency[gram] = frequency.get(gram, 0) + 1
    count = sum(len(images[number]) if caption_documents else 1 for number in documents)
    log_documents = math.log(max(count, 1))

    def idf(gram: Any) -> float:
        return log_documents - float(np.log(np.array([max(frequency.get(gram, 0), 1)]))[0])

    result = []
    for captions in images:
        entries: dict[Any, list[tuple[int, int, float]]] = {}
        norms = []
        for reference, caption in enumerate(captions):
            # the squares of a norm are added in the order of the n-grams' first positions, as `Counter` keeps them
            squares = [0.0] * 4
            for gram, times in grams(caption).items():
                squares[len(gram) - 1] += (times * idf(gram)) ** 2
                entries.setdefault(gram, []).append((reference, times, idf(gram)))
            norms += [float(np.sqrt(each)) for each in squares]
        result.append({"norms": norms, "entries": sorted(entries.values())})
    return result


def index_parts(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The same as `plain_parts`, from the tensors of an index. Checks their order."""
    t = {name: tensor.tolist() for name, tensor in tensors.items()}
    num_ngrams, result = len(t["ngrams.keys"]) - 1, []
    for image, (begin, end) in enumerate(pairwise(t["pair_offset"])):
        numbers = t["pair_ngram"][begin:end]
        assert numbers == sorted(set(numbers))
        buckets = [begin + number * (end - begin) // max(num_ngrams, 1) for number in numbers]
        assert t["pair_bucket"][begin:end] == [
            begin + sum(each < bucket for each in buckets) for bucket in range(begin, end)
        ]
        entries = []
        for pair in range(begin, end):
            places = range(t["pair_start"][pair], t["pair_start"][pair + 1])
            idf = t["idf"][t["pair_ngram"][pair]]
            entries.append([(t["entry_reference"][place], t["entry_times"][place], idf) for place in places])
        first, last = t["reference_offset"][image : image + 2]
        result.append({"norms": t["norm"][4 * first : 4 * last], "entries": sorted(entries)})
    return result


words = st.integers(0, 6)
captions = st.lists(st.one_of(st.lists(words, max_size=7), st.just([1, 2, 3, 1, 2, 3])), max_size=4)
all_images = st.lists(captions, max_size=7)


@given(all_images, st.booleans(), st.integers(1, 4000), st.integers(1, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_the_passes_give_what_the_definition_gives(
    images: list[list[list[int]]], caption_documents: bool, memory: int, step: int, data: st.DataObject
) -> None:
    """Bit by bit, for pieces of one image and more, ranges of a few keys, empty captions, and repeated captions."""
    chosen = data.draw(st.none() | st.sets(st.integers(0, max(len(images) - 1, 0)), max_size=len(images)))
    documents = None if chosen is None or not images else np.array(sorted(chosen), np.int64)
    options: Any = {"caption_documents": caption_documents, "documents": documents}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cider_index, "_STEP", step)
        path, other = Path(folder) / "index", Path(folder) / "other"
        index = build_index(iter(images), memory=memory, path=path, **options)
        build_index(images, path=other, **options)
        assert path.read_bytes() == other.read_bytes()
        tensors = load_file(path)
        assert sorted(each.name for each in Path(folder).iterdir()) == ["index", "other"]
        in_memory = build_index(images, memory=memory, **options)
    assert index.num_bytes == in_memory.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    everything = set(range(len(images)))
    plain = plain_parts(images, caption_documents, everything if documents is None else set(documents.tolist()))
    assert index_parts(tensors) == plain
    assert tensors["length"].tolist() == [max(len(caption) - 1, 0) for image in images for caption in image]
    with_captions = [number for number, image in enumerate(images) if image]
    if with_captions:
        rows, lengths, numbers = candidates(images, with_captions)
        scores = index.score(rows, lengths, numbers)
        assert torch.equal(scores, in_memory.score(rows, lengths, numbers))
        selected = torch.tensor(data.draw(st.lists(st.sampled_from(with_captions), unique=True).map(sorted)))
        part = index.select(selected.long(), data.draw(st.sampled_from([None, index.select(selected[:0].long())])))
        found, is_selected = part.score(rows, lengths, numbers), torch.isin(numbers, selected)
        assert torch.equal(found[is_selected], scores[is_selected]) and bool(found[~is_selected].isnan().all())


def candidates(images: Images, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Captions of each image, and of the next one and with an unknown word, as the arguments of `CiderD.score`."""
    pairs = [(image, list(images[image][-1])) for image in numbers]
    for image, other in pairwise([*numbers, numbers[0]]):
        pairs += [(image, [*images[other][0]]), (image, [*images[other][0], 9])]
    width = max(len(caption) for _, caption in pairs)
    rows = torch.tensor([caption + [0] * (width - len(caption)) for _, caption in pairs]).view(len(pairs), width)
    return rows, torch.tensor([len(caption) for _, caption in pairs]), torch.tensor([image for image, _ in pairs])


def test_captions_of_many_words_and_images_of_many_references() -> None:
    """Numbers that one byte does not hold."""
    images = [[[1] * 300, [1, 2]], [[2, 3, 4]] * 300, [[5, 1]]]
    index = build_index(images)
    tensors = index.select(torch.arange(3))
    rows, lengths, numbers = candidates(images, [0, 1, 2])
    assert torch.equal(index.score(rows, lengths, numbers), tensors.score(rows, lengths, numbers))
    score = index.score(torch.tensor([[2, 3, 4]]), torch.tensor([3]), torch.tensor([1])).item()
    assert score == pytest.approx(7.5)  # 10, without the quarter of the 4-grams


def zipf_images(count: int) -> Iterator[list[list[int]]]:
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 2001)
    for _ in range(count):
        drawn = rng.choice(2000, size=50, p=weights / weights.sum())
        yield [caption.tolist() for caption in drawn.reshape(5, 10)]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Of ten times the images, the arrays take no more memory, and no part of a file is read that is larger."""
    memory, peaks = 4 * 2**20, []
    tracemalloc.start()
    try:
        for count in (1000, 10_000):
            tracemalloc.reset_peak()
            begin = tracemalloc.get_traced_memory()[0]
            path = tmp_path / str(count)
            build_index(zipf_images(count), memory=memory, path=path)
            peaks.append(tracemalloc.get_traced_memory()[1] - begin)
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4 * memory
    assert max(peaks) < 1.5 * memory, peaks


def full_after(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets temporary files fail as on a full disk when this many bytes have been written to all of them."""
    original, written = tempfile.TemporaryFile, 0

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            nonlocal written
            written += len(data)
            if written > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: Full(original(**options)))


@pytest.mark.parametrize("limit", [1000, 100_000, 400_000])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_after(limit, monkeypatch)
    expected = f"the index of CIDEr-D cannot be built in {tmp_path}: No space left on device"
    with pytest.raises(OSError, match=f"^.Errno {errno.ENOSPC}. {expected}$"):
        build_index(zipf_images(200), memory=100_000, path=tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_under_the_index_leaves_nothing(tmp_path: Path) -> None:
    """The limit on the size of a file stands for a disk; a process of its own has it."""
    code = (
        "import resource, signal; from pathlib import Path\n"
        "from raycap.pipeline.training.rewards.cider_index import build_index\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        f"build_index([[[i, i + 1, i + 2]] for i in range(2000)], path=Path({str(tmp_path / 'index')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"cannot be built in {tmp_path}: File too large" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_file_that_was_cut_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Spill.read

    def cut(self: Spill, begin: int, end: int) -> np.ndarray:
        if not isinstance(self._file, tempfile._TemporaryFileWrapper) and hasattr(self._file, "truncate"):
            self._file.truncate(max(0, end * self.dtype.itemsize - 1))
        return original(self, begin, end)

    monkeypatch.setattr(Spill, "read", cut)
    with pytest.raises(OSError, match=r"cannot be built in .*: a temporary file ends 1 bytes too early"):
        build_index(zipf_images(50), memory=100_000, path=tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.sets(st.integers(0, 2**62), max_size=30), max_size=6), st.integers(1, 40), st.integers(1, 5))
@settings(deadline=None)
def test_a_merge_gives_all_keys_once_in_bounded_ranges(runs: list[set[int]], rows: int, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cider_index, "_STEP", step)
        merged = Runs(Spill(np.int64, 100, None))
        for keys in runs:
            merged.add(distinct_keys(np.array(sorted(keys), np.int64))[0])
        everything, found = np.array([], np.int64), []
        stored = merged.keys.read(0, len(merged.keys))
        for slices, distinct, number in merged.merge(rows):
            keys = np.concatenate([stored[begin:end] for begin, end in slices])
            assert np.array_equal(distinct[number], keys)
            assert len(keys) < rows + 2 * step * (len(runs) + 1)
            everything = np.concatenate([everything, distinct])
            found += [place for begin, end in slices for place in range(begin, end)]
    assert sorted(everything.tolist()) == sorted(set().union(*runs))
    assert np.array_equal(everything, distinct_keys(everything)[0]) and sorted(found) == list(range(len(stored)))
