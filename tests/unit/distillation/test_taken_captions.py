"""What a run takes of its teacher's captions: the best ones that it can learn, each image once."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runs.distillation.caption_store import CaptionStore
from raycap.pipeline.runs.distillation.taken_captions import (
    NO_WORD,
    NOT_FINISHED,
    TOO_LONG,
    UNKNOWN,
    Taker,
    count_taken,
    read_taken,
)
from raycap.pipeline.storage.path import storage_path

WORDS = Vocabulary.build([["a", "red", "cat", "on", "the", "mat"]], 1)


@pytest.mark.parametrize(
    ("caption", "problem"),
    [
        ("A red cat, on the mat.", None),
        ("a blue cat", UNKNOWN),
        ("a UNK cat", UNKNOWN),
        ("a red cat on the red mat", TOO_LONG),
        ("...", NO_WORD),
        ("", NO_WORD),
        (None, NOT_FINISHED),
    ],
)
def test_captions_that_cannot_be_learned_are_dropped(caption: str | None, problem: str | None) -> None:
    assert Taker(WORDS, max_positions=8, captions_per_image=1).problem(caption) == problem


def test_special_tokens_are_no_words() -> None:
    words = Vocabulary(WORDS.words, "tokens")
    assert Taker(words, 8, 1).problem("a UNK cat") == Taker(words, 8, 1).problem("a PAD cat") == UNKNOWN
    subwords = Vocabulary.train_subwords(["a red cat on the mat"] * 9, 300, 1)
    assert Taker(subwords, 80, 1).problem("a zebra") is None, "subwords have no unknown words"


@pytest.mark.parametrize("captions_per_image", [1, 2, 3])
def test_a_run_takes_the_best_captions_of_its_images(tmp_path: Path, captions_per_image: int) -> None:
    """Against a plain implementation, with chunks of other runs, images in two chunks, and images without captions."""
    generator = random.Random(captions_per_image)
    pool = ["a red cat", "the mat on a cat", "a blue cat", "cat", None, ".", "a red cat on the red mat"]
    stored = {f"key{number}": [generator.choice(pool) for _ in range(generator.randrange(4))] for number in range(50)}
    store = CaptionStore(storage_path(tmp_path / "store"))
    for _ in range(12):
        part = generator.sample(sorted(stored), 9)
        store.write(part, {key: stored[key] for key in part})
    keys = [f"key{number}" for number in generator.sample(range(70), 40)]
    present = [key for key in keys if any(key in table["key"].to_pylist() for table in store.read())]
    taker = Taker(WORDS, 8, captions_per_image)
    path = tmp_path / "run" / "distilled.arrow"
    dropped, sha256 = taker.take(store, pa.chunked_array([keys]), path)
    table = read_taken(path)
    taken = dict(zip(table["key"].to_pylist(), table["captions"].to_pylist(), strict=True))
    best = {key: stored[key][:captions_per_image] for key in present}
    assert taken == {key: [text for text in texts if taker.problem(text) is None] for key, texts in best.items()}
    assert len(table) == len(taken)
    problems = [taker.problem(text) for texts in best.values() for text in texts]
    assert dropped == {reason: problems.count(reason) for reason in sorted({each for each in problems if each})}
    assert taker.take(store, pa.chunked_array([keys]), path) == (dropped, sha256)

    images = [generator.choice(keys) for _ in range(80)]  # some have equal content
    columns = [range(80), ["train"] * 80, images, [["a"]] * 80, images]
    counts = [len(taken.get(key, [])) for key in images]
    expected = (sum(count > 0 for count in counts), sum(counts))
    assert count_taken(table, Dataset(pa.table(columns, schema=SCHEMA))) == expected


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "distilled.arrow"
    store = CaptionStore(storage_path(tmp_path / "store"))
    store.write(["key1"], {"key1": ["a cat"]})
    Taker(WORDS, 8, 1).take(store, pa.chunked_array([["key1"]]), path)
    for data in (b"", path.read_bytes()[:-20], b"no table at all"):
        path.write_bytes(data)
        with pytest.raises(DamagedError, match="distilled.arrow is damaged"):
            read_taken(path)
