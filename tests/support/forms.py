"""One data set in every form in which captioned images are exchanged."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.synthetic.scenes import write_dataset


class Captioned(NamedTuple):
    """An image of the data set."""

    image_id: int
    name: str  # of its file, such as scene_000001.png
    split: str
    captions: list[str]
    content: bytes


def scenes(folder: Path, count: int = 60, size: int = 32) -> list[Captioned]:
    """Synthetic scenes, which are first written to a folder in Karpathy's layout."""
    write_dataset(folder, SceneConfig(count, size, 3))
    entries = json.loads((folder / "dataset.json").read_text())["images"]
    return [
        Captioned(
            entry["cocoid"],
            entry["filename"],
            entry["split"],
            [sentence["raw"] for sentence in entry["sentences"]],
            (folder / entry["filepath"] / entry["filename"]).read_bytes(),
        )
        for entry in entries
    ]


def write_images(folder: Path, images: Sequence[Captioned]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        (folder / image.name).write_bytes(image.content)


def write_karpathy(folder: Path, images: Sequence[Captioned]) -> dict[str, Any]:
    write_images(folder / "images", images)
    entries = [
        {
            "filepath": "images",
            "filename": image.name,
            "cocoid": image.image_id,
            "split": image.split,
            "sentences": [{"raw": caption} for caption in image.captions],
        }
        for image in images
    ]
    (folder / "dataset.json").write_text(json.dumps({"images": entries}))
    return {}


def write_coco(folder: Path, images: Sequence[Captioned]) -> dict[str, Any]:
    write_images(folder / "images", images)
    sources = []
    for split in dict.fromkeys(image.split for image in images):
        part = [image for image in images if image.split == split]
        content = {
            "images": [{"id": image.image_id, "file_name": image.name} for image in part],
            "annotations": [
                {"image_id": image.image_id, "caption": caption} for image in part for caption in image.captions
            ],
        }
        (folder / f"captions_{split}.json").write_text(json.dumps(content))
        sources.append({"annotations": f"captions_{split}.json", "images": "images", "split": split})
    return {"sources": sources}


def write_table(folder: Path, images: Sequence[Captioned]) -> dict[str, Any]:
    write_images(folder / "images", images)
    rows = [
        {"image": image.name, "captions": image.captions, "id": image.image_id, "split": image.split}
        for image in images
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "captions.parquet")
    return {"annotations": "captions.parquet", "images": "images"}


def write_metadata_lines(folder: Path, images: Sequence[Captioned]) -> dict[str, Any]:
    write_images(folder, images)
    rows = [
        {"file_name": image.name, "text": image.captions, "number": image.image_id, "part": image.split}
        for image in images
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"annotations": "metadata.jsonl", "columns": {"id": "number", "split": "part"}}


def write_metadata_csv(folder: Path, images: Sequence[Captioned]) -> dict[str, Any]:
    write_images(folder, images)
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "text", "id", "split"])
        writer.writerows(
            [image.name, caption, image.image_id, image.split] for image in images for caption in image.captions
        )
    return {"annotations": "metadata.csv"}


def write_parquet_shards(folder: Path, images: Sequence[Captioned], **options: Any) -> dict[str, Any]:
    """Hugging Face's Parquet: the struct of bytes and path, in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(images) // 3)
    for number in range(3):
        rows = [
            {
                "image": {"bytes": image.content, "path": image.name},
                "caption": image.captions,
                "id": image.image_id,
                "split": image.split,
            }
            for image in images[size * number : size * (number + 1)]
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"part-{number}.parquet", **options)
    return {"annotations": "part-*.parquet"}


def write_tars(folder: Path, images: Sequence[Captioned], format_: int = tarfile.PAX_FORMAT) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(images) // 3)
    for number in range(3):
        with tarfile.open(folder / f"shard-{number:03}.tar", "w", format=format_) as archive:
            for image in images[size * number : size * (number + 1)]:
                key, _, ending = image.name.partition(".")
                record = {"id": image.image_id, "split": image.split, "width": 3}
                add_file(archive, f"{key}.{ending}", image.content)
                add_file(archive, f"{key}.json", json.dumps(record).encode())
                add_file(archive, f"{key}.txt", "\n".join(image.captions).encode())
    return {"annotations": "shard-{000..002}.tar"}


def add_file(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_text_files(folder: Path, images: Sequence[Captioned]) -> dict[str, Any]:
    """Writes a text file beside each image. This form has no ids."""
    shutil.rmtree(folder, ignore_errors=True)
    for image in images:
        write_images(folder / image.split, [image])
        (folder / image.split / f"{image.name.partition('.')[0]}.txt").write_text("\n".join(image.captions) + "\n")
    splits = dict.fromkeys(image.split for image in images)
    return {"sources": [{"annotations": split, "split": split} for split in splits]}


# {form: a function that writes it to a folder and returns the keys of the section `data`}
FORMS: dict[str, Callable[[Path, Sequence[Captioned]], dict[str, Any]]] = {
    "karpathy": write_karpathy,
    "coco": write_coco,
    "table": write_table,
    "metadata.jsonl": write_metadata_lines,
    "metadata.csv": write_metadata_csv,
    "parquet": write_parquet_shards,
    "webdataset": write_tars,
    "text": write_text_files,
}
