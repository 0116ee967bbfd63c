"""How images get their splits, and the ids that are made of names."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raycap.pipeline.config.sections import SPLIT_WORDS
from raycap.pipeline.data.formats.files import is_image, read_file
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import plain_name, quoted
from raycap.pipeline.storage.path import StoragePath


@dataclass(frozen=True)
class Splits:
    """How images get their splits: from lists, or by fractions for images without any split."""

    lists: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # the result of `read_split_lists`
    fractions: Mapping[str, float] = field(default_factory=dict)  # {split: fraction}; if empty, all images are in train
    seed: int = 0
    by_folder: bool = False  # whether folders for validation and test decide

    def listed(self, names: Sequence[str]) -> tuple[str, str] | None:
        """The split whose list contains one of an image's names and ids, and the name in the list, or None.

        A list may also name images without the endings of their names.
        """
        stems = (name.rpartition(".")[0] for name in names if is_image(name))
        for name in map(plain_name, itertools.chain(names, stems) if self.lists else ()):
            for known in (*_ends(name), name if "/" in name else f"/{name}"):
                if known in self.lists:
                    return self.lists[known]
        return None

    def drawn(self, name: str) -> str:
        """The split of an image, chosen by its folder, or by a hash of its name, which other images do not change."""
        if self.by_folder and (split := split_in_name(name.rpartition("/")[0])) not in (None, "train"):
            return split
        if not self.fractions:
            return "train"
        digest = _digest(f"{self.seed} {name}")
        position = int.from_bytes(digest[:6], "big") / 2**48 * sum(self.fractions.values())
        splits = sorted(self.fractions)
        ends = itertools.accumulate(self.fractions[split] for split in splits)
        return next((split for split, end in zip(splits, ends, strict=True) if position < end), splits[-1])


def split_in_name(name: str, *, first: bool = False) -> str | None:
    """The split that a path such as data/train-0001.parquet names, or None.

    If there are several, the last one, because it is that of the file. first: the first one instead.
    """
    words = [word for word in re.findall("[a-z]+", name.lower()) if word in SPLIT_WORDS]
    return SPLIT_WORDS[words[0 if first else -1]] if words else None


def id_of_name(name: str) -> int:
    """An image's id: the first 63 bits of the sha256 of its name in the data set.

    Among a million images, two ids are equal with probability 5e-8. A data set with equal ids cannot be read.
    """
    return int.from_bytes(_digest(name)[:8], "big") >> 1


def _digest(name: str) -> bytes:
    """The sha256 of a name. Raises UserError for a name that is not UTF-8."""
    try:
        return hashlib.sha256(name.encode()).digest()
    except UnicodeEncodeError as error:
        raise UserError(f"the name {quoted(name)} of an image is not text in UTF-8; rename the file") from error


def _ends(name: str) -> Iterator[str]:
    """Yields a path, and the paths that remain when its first folders are removed one after the other."""
    while name:
        yield name
        name = name.partition("/")[2]


def read_split_lists(root: StoragePath, lists: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """{end of an image's path, or its id: (its split, its name in the list)}.

    lists: {split: file}. Each line has an image's path, and optionally its id. If a line has no id and its file name is
    a number, the number also counts as the id. The file name alone of a line with folders has the key /NAME, because
    it stands only for an image without folders.
    """
    split_of: dict[str, tuple[str, str]] = {}
    for split, name in lists.items():
        path = root / name
        lines = read_file(path).decode("utf-8-sig", errors="replace").splitlines()
        for line in filter(None, map(str.strip, map(plain_name, lines))):
            possible = line.split(), [line], line.rsplit(None, 1)  # a file name may contain blanks
            words = next((words for words in possible if is_image(words[0])), line.split())
            name = words[0]
            known, _ = split_of.setdefault(name, (split, name))
            if known != split:
                raise UserError(f"data.split_lists: {quoted(name)} is in {known} and again in {path}")
            *folders, filename = _ends(name)
            for end in (*folders[1:], f"/{filename}" if folders else filename):
                split_of.setdefault(end, (split, name))
            if len(words) > 1:
                split_of.setdefault(words[1], (split, name))
            elif filename.isdecimal() and len(filename) < 20:  # a longer number cannot be an id of 64 bits
                split_of[str(int(filename))] = split, name
    return split_of
