"""The splits and ids of images for which a data set names none."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from raycap.pipeline.data.formats.files import read_file
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.storage.path import StoragePath

ID_BITS = 63


@dataclass(frozen=True)
class Splits:
    """Lists of images by split, and fractions for images that are in no list and have no split of their own."""

    lists: Mapping[str, str] = field(default_factory=dict)  # {image name or id: split}
    fractions: Mapping[str, float] = field(default_factory=dict)  # {split: fraction}; empty: all are in train
    seed: int = 0

    def listed(self, *names: str) -> str | None:
        """The split of the list that contains one of these names or ids of an image."""
        if not self.lists:  # the usual case of a million rows
            return None
        return next((self.lists[name] for name in names if name in self.lists), None)

    def drawn(self, name: str) -> str:
        """The split of an image by a hash of its name, so that it does not depend on the other images."""
        if not self.fractions:
            return "train"
        digest = _digest(f"{self.seed} {name}")
        position = int.from_bytes(digest[:6], "big") / 2**48 * sum(self.fractions.values())
        for split, fraction in sorted(self.fractions.items()):
            position -= fraction
            if position < 0:
                return split
        return max(self.fractions)


def id_of_name(name: str) -> int:
    """An image's id: the first 63 bits of the sha256 of its name in the data set.

    It does not depend on other images. Two of n images have equal ids with probability n^2 / 2^64: 5e-8 for a million
    images and 5e-4 for a hundred million. Reading a data set refuses repeated ids.
    """
    return int.from_bytes(_digest(name)[:8], "big") >> (64 - ID_BITS)


def _digest(name: str) -> bytes:
    """The sha256 of a name. Raises UserError for a name that is not UTF-8."""
    try:
        return hashlib.sha256(name.encode()).digest()
    except UnicodeEncodeError as error:
        raise UserError(f"the name {quoted(name)} of an image is not text in UTF-8; rename the file") from error


def read_split_lists(root: StoragePath, lists: Mapping[str, str]) -> dict[str, str]:
    """{image name or id: split} from files of lines with a file name and optionally an id.

    Without an id, a file name that is a number is the id.
    """
    split_of: dict[str, str] = {}
    for split, name in lists.items():
        path = root / name
        lines = read_file(path).decode("utf-8", errors="replace").splitlines()
        for words in filter(None, map(str.split, lines)):
            filename = words[0].rsplit("/", 1)[-1]
            if split_of.setdefault(filename, split) != split:
                raise UserError(f"data.split_lists: {quoted(filename)} is in {split_of[filename]} and again in {path}")
            if len(words) > 1:
                split_of.setdefault(words[1], split)
            elif filename.isdecimal() and len(filename) < 20:  # a longer number is no id
                split_of[str(int(filename))] = split
    return split_of
