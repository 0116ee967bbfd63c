"""WebDataset: tar archives in which files with the same key, such as 17.jpg and 17.json, are one sample."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from raycap.pipeline.data.formats.source import IMAGE_ENDINGS, Rows, Source, as_list, as_texts, lines_of, opened
from raycap.pipeline.data.images import ImageLocation
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.storage.untrusted.documents import parse_json, require_mapping
from raycap.pipeline.storage.untrusted.tar_headers import TarMember, tar_members

MAX_TEXT_BYTES = 2**20  # of the captions or the JSON of an image
_KEY = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)  # the key ends at the first dot after the last slash


@dataclass
class Sample:
    """The files of an archive with the same key."""

    image: TarMember | None = None
    captions: list[str] = field(default_factory=list)  # of the text file
    entry: dict[str, Any] = field(default_factory=dict)  # of the JSON file


def read_samples(source: Source) -> list[Sample]:
    """The samples of an archive that have an image, in its order. No image is read. Raises UserError."""
    title = f"annotation file {source.annotations}"
    kept = [name for column in ("captions", "id", "split") for name in source.column_names[column]]
    samples: dict[str, Sample] = {}
    with opened(source.annotations) as file:
        for member in tar_members(file, title):
            match = _KEY.fullmatch(member.name.removeprefix("./"))
            if match is None:
                continue
            key, ending = match[1], match[2].lower()
            sample = samples.setdefault(key, Sample())
            if f".{ending}" in IMAGE_ENDINGS:
                if sample.image is not None:
                    names = f"{quoted(sample.image.name)} and {quoted(member.name)}"
                    raise UserError(f"{title} has two images of one sample, {names}; pack it again with one of them")
                sample.image = member
            elif ending == "txt":
                sample.captions = lines_of(_read(file, member, title), f"{title}: {member.name}")
            elif ending == "json":
                label = f"{title}: {quoted(member.name)}"
                entry = require_mapping(parse_json(_read(file, member, title), label, strict=False), label)
                sample.entry = {name: entry[name] for name in kept if name in entry}  # a JSON file may be long
    return [sample for sample in samples.values() if sample.image is not None]


def _read(file: BinaryIO, member: TarMember, title: str) -> bytes:
    """The content of a small file in an archive. Raises UserError."""
    if member.length > MAX_TEXT_BYTES:
        problem = f"has {member.length} bytes of captions in {quoted(member.name)}; the limit is {MAX_TEXT_BYTES}"
        raise UserError(f"{title} {problem}")
    file.seek(member.start)
    return file.read(member.length)


def add_samples(source: Source, samples: Sequence[Sample], rows: Rows) -> None:
    """Adds the images of an archive. Captions are the lines of the text file, or in the JSON file as in a table."""
    if not samples:
        raise UserError(f"annotation file {source.annotations} contains no image; give a tar of images and captions")
    for sample in samples:
        assert sample.image is not None
        member = sample.image
        location = f"{source.annotations}: {quoted(member.name)}"
        name = source.member_prefix + member.name
        image_id, split = source.id_and_split(sample.entry, (member.name.rsplit("/", 1)[-1],), name, location)
        captions = sample.captions or as_list(source.value(sample.entry, "captions", location))
        uri = ImageLocation(source.annotations, (member.start, member.length), member.name).uri
        rows.add(image_id, split, uri, as_texts(captions, location, rows), location)
