"""The part "data": captioned images, read and prepared by the driver, and opened by a training worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raycap.jobs.bench.measuring import in_new_process
from raycap.jobs.bench.scale.measured import Measurement, measured
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.reading import build_vocabulary, longest_caption, read_dataset
from raycap.pipeline.data.vocabulary import TokenFiles, Vocabulary, write_tokens
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.training.batches import CaptionTokens

CAPTIONS_PER_IMAGE = 5
NUM_TEXTS, NUM_WORDS = 100_000, 10_000  # distinct captions of a synthetic data set, and their distinct words
ROWS_PER_PART = 100_000  # of the synthetic table, which is written a part at a time


def measure_data(rows: int, folder: Path) -> Iterator[Measurement]:
    """A data set of captioned images: read and prepared by the driver, opened by a training worker."""
    in_new_process(_write_data, rows, folder)
    yield measured("data: annotations", rows, _read_annotations, folder)
    yield measured("data: prepare", rows, _prepare, folder)
    yield measured("data: worker's start", rows, _start_worker, folder)


def _write_data(rows: int, folder: Path) -> None:
    """Writes a synthetic table of annotations, and the data set that a run makes of it."""
    rng = np.random.default_rng(0)
    words = rng.zipf(1.3, (NUM_TEXTS, 12)) % NUM_WORDS
    lengths = rng.integers(8, 13, NUM_TEXTS).tolist()
    texts = pa.array([" ".join(f"w{word}" for word in row[:n]) for row, n in zip(words, lengths, strict=True)])
    with (
        pq.ParquetWriter(folder / "table.parquet", _TABLE) as table,
        pa.ipc.new_file(folder / "data.arrow", SCHEMA) as data,
    ):
        for start in range(0, rows, ROWS_PER_PART):
            ids = pa.array(np.arange(start, min(start + ROWS_PER_PART, rows)))
            drawn = texts.take(pa.array(rng.integers(0, NUM_TEXTS, len(ids) * CAPTIONS_PER_IMAGE)))
            captions = pa.ListArray.from_arrays(np.arange(len(ids) + 1, dtype=np.int32) * CAPTIONS_PER_IMAGE, drawn)
            numbers = pc.utf8_lpad(pc.cast(ids, pa.string()), 12, "0")
            names = pc.binary_join_element_wise("images/", numbers, ".jpg", "")
            split = pa.array(np.where(np.asarray(ids) % 100 == 0, "val", "train"))
            table.write_table(pa.table([names, ids, split, captions], schema=_TABLE))
            keys = pc.binary_join_element_wise("0" * 52, numbers, "")
            uris = pc.binary_join_element_wise(f"{folder}/", names, "")
            data.write_table(pa.table([ids, split, uris, captions, keys], schema=SCHEMA), max_chunksize=4096)


_TABLE = pa.schema(
    [("image", pa.string()), ("id", pa.int64()), ("split", pa.string()), ("captions", pa.list_(pa.string()))]
)


def _section(folder: Path) -> DataSection:
    return DataSection(root=str(folder), annotations="table.parquet", train_splits=("train",), test_splits=("val",))


def _read_annotations(folder: Path) -> None:
    """What the driver does before it looks for the images' content."""
    read_dataset(_section(folder), folder)


def _prepare(folder: Path) -> None:
    """What `pipeline.runs.prepare` does with all captions."""
    dataset = Dataset.load(folder / "data.arrow")
    dataset.fingerprint()
    vocabulary = build_vocabulary(dataset, _section(folder))
    longest_caption(dataset.split("train"), vocabulary)
    dataset.save(folder / "prepared.arrow")
    (folder / "vocabulary.json").write_text(vocabulary.to_json())
    texts = dataset.texts_by_image(vocabulary.tokenizer)
    write_tokens(
        folder / "tokens", ([vocabulary.encode(vocabulary.tokenize(each)) for each in image] for image in texts)
    )


def _start_worker(folder: Path) -> None:
    """What a training worker does with the data set before its first step, with images that are read as pixels."""
    vocabulary = Vocabulary.load(folder / "vocabulary.json")
    train = Dataset.load(folder / "data.arrow").split("train")
    captions = CaptionTokens([TokenFiles.open(folder / "tokens")], train.rows, vocabulary.pad)
    images = Images(train, None, ImageTransform(32), max_pixels=10**8, threads=1)
    captions.padded(np.arange(64) * (len(captions) // 64))
    assert len(images) == len(train) and images.uri(len(images) - 1)
