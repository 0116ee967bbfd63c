"""WebDataset: tar archives in which files with the same key, such as 17.jpg and 17.json, are one sample."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple, cast

from raycap.models.config import Values
from raycap.pipeline.data.formats.files import IMAGE_ENDINGS, is_hidden, is_image, opened, prefix_of, unused_kind
from raycap.pipeline.data.formats.rows import Rows, as_texts
from raycap.pipeline.data.formats.source import Source, lines_of
from raycap.pipeline.data.images import ImageLocation
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line, quoted
from raycap.pipeline.storage.untrusted.documents import parse_json, require_mapping

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")
MAX_MEMBERS = 10_000_000  # files, folders and all other members of an archive
MAX_HEADER_BYTES = 2**16  # limit of all headers of a member, which may have a long name
LONG_NUMBER = re.compile(rb"\d{256}")
MAX_TEXT_BYTES = 2**20  # limit of the text file or JSON file of an image


class TarMember(NamedTuple):
    """A file in an archive. Its content is `length` bytes from byte `start` of the archive on."""

    name: str
    start: int
    length: int


class _Headers:
    """A file for tarfile that refuses headers of more than MAX_HEADER_BYTES per member, which take memory and time.

    left: the bytes that may still be read for the next member.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell, self.left = file, file.seek, file.tell, MAX_HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.left:
            raise tarfile.ReadError(f"headers of more than {MAX_HEADER_BYTES} bytes")
        self.left -= size
        data = self.file.read(size)
        if LONG_NUMBER.search(data):  # tarfile's time is the square of its length before Python 3.11.10
            raise tarfile.ReadError("a number of more than 255 digits in a header")
        return data


def tar_members(file: BinaryIO, title: str, left_out: list[tuple[str, str]] | None = None) -> Iterator[TarMember]:
    """The regular files in an archive, in its order. Folders, links and devices are left out.

    title: the archive's name in errors. left_out: gets (kind, name) of each link. Raises UserError for damaged
    archives, sparse files, more than MAX_MEMBERS members, and a name that occurs twice or is not UTF-8.
    """
    size, names = file.seek(0, os.SEEK_END), set[str]()
    file.seek(0)
    try:
        headers = _Headers(file)
        with tarfile.open(fileobj=cast("BinaryIO", headers), mode="r:", errors="strict") as archive:
            for number, member in enumerate(iter(archive.next, None)):
                archive.members.clear()  # type: ignore[attr-defined]  # or tarfile would keep all in memory
                archive.pax_headers = {}  # global headers, which tarfile would copy for each member
                headers.left = MAX_HEADER_BYTES
                if number >= MAX_MEMBERS:
                    raise UserError(f"{title} has more than {MAX_MEMBERS} members; divide it")
                if member.size < 0 or archive.offset < member.offset_data:  # else tarfile would read in a loop
                    raise tarfile.ReadError("a negative size")
                if left_out is not None and (member.islnk() or member.issym()):
                    left_out.append(("links in archives", member.name))
                if not member.isreg():
                    continue
                if member.issparse():
                    raise UserError(f"{title} has the sparse file {quoted(member.name)}; pack it without --sparse")
                if member.size > size - member.offset_data:
                    raise UserError(f"{title} ends within {quoted(member.name)}; copy it again")
                if member.name in names:
                    raise UserError(f"{title} has the file {quoted(member.name)} a second time; pack it again")
                names.add(member.name)
                yield TarMember(member.name, member.offset_data, member.size)
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile took a damaged header for the end
                raise tarfile.ReadError(f"it is damaged at byte {archive.offset}")
    except UserError:  # a UserError is a ValueError, but its message needs no addition
        raise
    except (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError) as error:
        remedy = "unpack it to a plain tar if it is compressed; else copy or pack it again"
        raise UserError(f"{title} is not a whole tar archive: {one_line(error)}; {remedy}") from error


@dataclass
class Sample:
    """One sample: the image, captions and JSON values from an archive's files with the same key."""

    image: TarMember | None = None
    captions: list[str] = field(default_factory=list)  # lines of the text file
    entry: Values = field(default_factory=dict)  # content of the JSON file


def read_samples(source: Source) -> tuple[list[Sample], list[tuple[str, str]]]:
    """The samples of an archive that have an image, in its order, and (kind, name) of what is left out.

    Files belong together if their names before the last dot are equal. If a.b.jpg has no text of its own, it belongs to
    a.txt and a.json, as by WebDataset's rule. No image is read. Raises UserError.
    """
    title = f"annotation file {source.annotations}"
    samples: dict[str, Sample] = {}
    left_out: list[tuple[str, str]] = []
    with opened(source.annotations) as file:
        for member in tar_members(file, title, left_out):
            name = member.name.removeprefix("./")
            key = name.rpartition(".")[0]
            if kind := unused_kind(name):
                left_out.append((kind, name))
            if is_hidden(name) or not name.lower().endswith((".txt", ".json", *IMAGE_ENDINGS)):
                continue
            sample = samples.setdefault(key, Sample())
            if is_image(name):
                if sample.image is not None:
                    names = f"{quoted(sample.image.name)} and {quoted(member.name)}"
                    raise UserError(f"{title} has two images of one sample, {names}; pack it again with one of them")
                sample.image = member
                continue
            label = f"{title}: {quoted(member.name)}"
            with nullcontext() if key == _first_key(key) else suppress(UserError):  # 17.boxes.json may have any content
                if name.lower().endswith(".txt"):
                    sample.captions = lines_of(_read(file, member, title), label)
                else:
                    entry = require_mapping(parse_json(_read(file, member, title), label, strict=False), label)
                    kept = [name for column in ("captions", "id", "split") for name in source.columns_in(entry, column)]
                    sample.entry = {name: entry[name] for name in kept}  # no other keys, to save memory
    for key, sample in samples.items():
        whole = samples.get(_first_key(key), sample)
        has_captions = sample.captions or source.columns_in(sample.entry, "captions")
        if sample.image is None or has_captions or whole is sample:
            continue
        if whole.image is None:
            whole.image = sample.image
        else:
            left_out.append(("images beside another image of their sample", sample.image.name))
        sample.image = None
    for key, sample in samples.items():
        if sample.image is None and (sample.captions or sample.entry):
            left_out.append(("texts beside no image", key))
    return [sample for sample in samples.values() if sample.image is not None], left_out


def _first_key(key: str) -> str:
    """The key by WebDataset's rule, which ends at the first dot of the name."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}"


def _read(file: BinaryIO, member: TarMember, title: str) -> bytes:
    """The content of a small file in an archive. Raises UserError."""
    if member.length > MAX_TEXT_BYTES:
        problem = f"has {member.length} bytes of captions in {quoted(member.name)}; the limit is {MAX_TEXT_BYTES}"
        raise UserError(f"{title} {problem}")
    file.seek(member.start)
    return file.read(member.length)


def add_samples(source: Source, found: tuple[list[Sample], list[tuple[str, str]]], rows: Rows) -> None:
    """Adds the images of an archive. If a sample has no lines in a text file, its captions are from the JSON file."""
    samples, left_out = found
    if not samples:
        raise UserError(f"annotation file {source.annotations} contains no image; give a tar of images and captions")
    for kind, name in left_out:
        rows.leave_out(kind, prefix_of(source.annotations_name) + name)
    for sample in samples:
        assert sample.image is not None
        member = sample.image
        location = f"{source.annotations}: {quoted(member.name)}"
        name = prefix_of(source.annotations_name) + member.name
        image_id, split = source.id_and_split(sample.entry, member.name, name, location, rows)
        is_in_json = not sample.captions or source.columns_in(sample.entry, "captions")
        in_json = source.captions(sample.entry, location) if is_in_json else []
        captions = sample.captions or in_json
        if in_json and in_json != captions:
            rows.leave_out("captions in JSON beside a text with other captions", name)
        uri = ImageLocation(source.annotations, (member.start, member.length), member.name).uri
        rows.add(image_id, split, uri, as_texts(captions, location, rows), location)
