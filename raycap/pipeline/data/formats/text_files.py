"""A folder of images, each with a text file of the same name: dog.jpg and dog.txt, with one caption per line."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from raycap.pipeline.data.formats.source import Rows, Source, as_texts, errors_named, is_image, lines_of
from raycap.pipeline.errors import UserError

MAX_TEXT_BYTES = 2**20  # of the captions of an image
_NUM_THREADS, _FILES_PER_SLICE = 8, 10_000


def read_text_files(source: Source) -> Iterator[tuple[str, list[str]]]:
    """The name and captions of each image in a folder and those below it, sorted by name. Raises UserError."""
    folder = source.annotations
    texts: dict[str, set[str]] = {}  # by ending, as .txt or .TXT, the names before it

    def image_names() -> Iterator[str]:
        for name, _ in folder.walk():
            if "/." in f"/{name}":
                continue
            if is_image(name):
                yield name
            elif name.lower().endswith(".txt"):
                texts.setdefault(name[-4:], set()).add(name[:-4])

    with errors_named(folder):
        images = iter(sorted(image_names()))

    def read(name: str) -> tuple[str, list[str]]:
        stem = name.rpartition(".")[0]
        text = next((stem + ending for ending in sorted(texts, reverse=True) if stem in texts[ending]), None)
        if text is None:
            return name, []
        with errors_named(folder / text):
            return name, lines_of((folder / text).read_bytes(MAX_TEXT_BYTES), str(folder / text))

    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # requests to S3 mostly wait
        while part := list(islice(images, _FILES_PER_SLICE)):
            yield from pool.map(read, part)


def add_text_files(source: Source, images: Iterator[tuple[str, list[str]]], rows: Rows) -> None:
    """Adds the images of a folder, which have no ids, and splits only if the source, a list or a fraction gives one."""
    count = rows.count
    for name, captions in images:
        location = str(source.annotations / name)
        listed = name, name.rsplit("/", 1)[-1]
        image_id, split = source.id_and_split({}, listed, source.member_prefix + name, location)
        rows.add(image_id, split, location, as_texts(captions, location, rows), location)
    if rows.count == count:
        folder = source.annotations
        if not folder.is_remote and not folder.path.exists():
            raise UserError(f"folder {folder} does not exist; data.annotations is relative to data.root")
        raise UserError(f"folder {source.annotations} contains no image; give the folder that holds them")
