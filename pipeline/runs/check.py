"""The findings behind `raycap check`: whether a data set is fit to train on, and what is unusual about it.

Every image is read and decoded once, in threads; only the manifest of content keys is written.
"""

from __future__ import annotations

import itertools
import logging
import os
import unicodedata
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset, build_vocabulary, read_annotations, require_splits
from pipeline.data.images import BadImage, decode_image
from pipeline.data.loading import data_root, snapshot_of
from pipeline.data.vocabulary import tokenize
from pipeline.errors import UserError
from pipeline.features.regions import missing_regions
from pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)

MAX_WORDS = 60  # COCO's longest caption has 57 tokens
MIN_IMAGES_FOR_CIDER = 200  # with fewer, the standard error of the mean is above 0.06 of 1.0
SMALL_SIDE = 400  # COCO's photographs have short sides from 400 up; sets that were shrunk have 224 or 256
SHORT_SIDE_BINS = (0, 64, 128, 224, 256, 320, 384, 480, 640, 1024, 2048)
EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """`error`: training on the data would be wrong."""

    kind: Literal["error", "warning"]
    text: str


@dataclass
class Findings:
    """The result of a check: statistics as plain values by name, and one finding per problem."""

    statistics: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def error(self, text: str) -> None:
        self.findings.append(Finding("error", text))

    def warn(self, text: str) -> None:
        self.findings.append(Finding("warning", text))

    @property
    def ok(self) -> bool:
        return not any(finding.kind == "error" for finding in self.findings)


def check_data(config: RunConfig, checked_keys: pa.Array | None = None) -> Findings:
    """All findings. Raises UserError for a data set that cannot be read at all or lacks a split.

    Cost: every image is read and decoded once; region features are only looked up. With `checked_keys` (content keys)
    only the other images are, and `data.max_bad_fraction` is a fraction of those.
    """
    result = Findings()
    dataset, problems = read_annotations(config.data, data_root(config), config.storage.options)
    require_splits(dataset, config.data)
    logger.info(f"reading {len(dataset)} images")
    dataset, missing = snapshot_of(dataset, config)
    _check_captions(result, dataset, problems)
    _check_vocabulary(result, dataset, config)
    unchecked = dataset
    if checked_keys is not None:
        known = pc.is_in(dataset.table["key"], value_set=checked_keys)
        unchecked = Dataset(dataset.table.filter(pc.invert(known)))
    if config.has_backbone:
        undecodable, sizes = _decode_all(unchecked, config)
    else:  # the images themselves are not needed
        undecodable, sizes = missing_regions(unchecked, config), np.empty((0, 2), np.int64)
    _check_images(result, unchecked, config, missing, undecodable)
    _check_duplicates(result, dataset, config)
    _check_resolution(result, sizes, config.backbone.image_size)
    _check_splits(result, dataset, config)
    result.statistics["fingerprint"] = dataset.known().without(sorted(undecodable)).fingerprint()
    return result


def _check_captions(result: Findings, dataset: Dataset, problems: list[str]) -> None:
    """`problems`: a sentence for each caption that is not text."""
    empty, long, repeated, strange, wordless, total = [], [], [], [], [], 0
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for uri, split, captions in zip(*(dataset.column(name) for name in ("uri", "split", "captions")), strict=True):
        words = [tokenize(caption) for caption in captions]
        total += len(captions)
        counts[split][len(captions)] += 1
        empty += [uri for tokens in words if not tokens]
        long += [uri for tokens in words if len(tokens) > MAX_WORDS]
        strange += [uri for caption in captions if caption.strip() and not _is_text(caption)]
        if len({" ".join(tokens) for tokens in words}) < len(words):
            repeated.append(uri)
        if not any(words):
            wordless.append(uri)
    result.statistics["captions"] = {
        "total": total,
        "per_image": {split: dict(sorted(counter.items())) for split, counter in sorted(counts.items())},
        "empty": len(empty),
        "huge": len(long),
        "repeated": len(repeated),
        "not_text": len(strange) + len(problems),
    }
    if problems:
        result.error(f"{len(problems)} captions are not text: {problems[0]}")
    if wordless:
        result.error(f"{len(wordless)} images have no caption with a word in it: {_examples(wordless)}")
    for uris, problem in (
        (strange, "captions contain control or replacement characters"),
        (empty, "captions are empty and would be left out"),
        (long, f"captions have more than {MAX_WORDS} words"),
        (repeated, "images repeat one of their own captions"),
    ):
        if uris:
            result.warn(f"{len(uris)} {problem}: {_examples(uris)}")
    single = [split for split, counter in counts.items() if max(counter) == 1]
    if single:
        result.warn(f"one caption per image in {', '.join(single)}: CIDEr-D is reliable only with several")


def _is_text(caption: str) -> bool:
    """False when a wrong encoding or a binary file left its traces; newlines and tabs are allowed."""
    return not any(
        character == "\ufffd"
        or (unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and character not in "\n\r\t")
        for character in caption
    )


def _check_vocabulary(result: Findings, dataset: Dataset, config: RunConfig) -> None:
    try:
        result.statistics["vocabulary"] = len(build_vocabulary(dataset, config.data))
    except UserError as error:
        result.error(str(error))


def _decode_all(dataset: Dataset, config: RunConfig) -> tuple[dict[str, str], np.ndarray]:
    """{key: reason} of images that cannot be decoded, and (width, height) of the others."""
    table = dataset.known().table
    unique = dict(zip(table["key"].to_pylist(), table["uri"].to_pylist(), strict=True))
    reasons: dict[str, str] = {}

    def decode(item: tuple[str, str]) -> tuple[int, int] | None:
        key, uri = item
        try:
            return decode_image(StoragePath(uri, config.storage.options).read_bytes(), config.data.max_pixels).size
        except (BadImage, OSError) as error:
            reasons[key] = str(error)
            return None

    with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:  # Pillow decodes without the interpreter's lock
        sizes = [size for size in pool.map(decode, unique.items()) if size]
    return reasons, np.array(sizes, np.int64).reshape(-1, 2)


def _check_images(
    result: Findings, dataset: Dataset, config: RunConfig, missing: dict[str, str], undecodable: dict[str, str]
) -> None:
    """missing: {uri: reason}; undecodable: {key: reason}."""
    unreadable = [
        (uri, undecodable[key])
        for uri, key in zip(dataset.column("uri"), dataset.column("key"), strict=True)
        if key in undecodable
    ]
    unreadable += missing.items()
    result.statistics["unreadable"] = dict(unreadable)
    if not unreadable:
        return
    text = f"{len(unreadable)} of {len(dataset)} images cannot be used"
    examples = "; ".join(f"{uri}: {reason}" for uri, reason in unreadable[:EXAMPLES])
    if len(unreadable) / len(dataset) > config.data.max_bad_fraction:
        result.error(f"{text}, more than data.max_bad_fraction = {config.data.max_bad_fraction}: {examples}")
    else:
        result.warn(f"{text} and would be left out: {examples}")


def _check_duplicates(result: Findings, dataset: Dataset, config: RunConfig) -> None:
    by_key: dict[str, list[tuple[str, str]]] = defaultdict(list)
    known = dataset.known()
    for key, split, uri in zip(*(known.column(name) for name in ("key", "split", "uri")), strict=True):
        by_key[key].append((split, uri))
    train = set(config.data.train_splits)
    held_out = {config.data.val_split, *config.data.test_splits} - train
    leaks, elsewhere = [], 0
    for copies in by_key.values():
        splits = {split for split, _ in copies}
        if splits & train and splits & held_out:
            leaks.append(" = ".join(f"{uri} ({split})" for split, uri in copies[:2]))
        elif len(copies) > 1:
            elsewhere += len(copies) - 1
    result.statistics["duplicates"] = {"across_splits": len(leaks), "elsewhere": elsewhere}
    if leaks:
        result.error(f"{len(leaks)} images are in training and in a held-out split: {_examples(leaks)}")
    if elsewhere:
        result.warn(f"{elsewhere} images repeat another image of their split")


def _check_resolution(result: Findings, sizes: np.ndarray, image_size: int) -> None:
    """`sizes` (N, 2) in pixels."""
    if not len(sizes):
        return
    short = sizes.min(1)
    histogram = np.histogram(short, bins=[*SHORT_SIDE_BINS, np.iinfo(np.int64).max])[0]
    edges = [f"{low}-{high - 1}" for low, high in itertools.pairwise(SHORT_SIDE_BINS)] + [f"{SHORT_SIDE_BINS[-1]}+"]
    bins = zip(edges, histogram, strict=True)
    result.statistics["short_side"] = {name: int(count) for name, count in bins if count}
    common, times = Counter(short.tolist()).most_common(1)[0]
    if times > 0.5 * len(short) and common < SMALL_SIDE and len(short) > 1:
        result.warn(
            f"the photographs look shrunken: {times} of {len(short)} have a short side of exactly {common} px; "
            f"published scores are from the originals"
        )
    enlarged = int((short < image_size).sum())
    if enlarged > 0.1 * len(short):
        result.warn(f"{enlarged} images are smaller than backbone.image_size = {image_size} and get enlarged")


def _check_splits(result: Findings, dataset: Dataset, config: RunConfig) -> None:
    counts = {item["values"]: item["counts"] for item in pc.value_counts(dataset.table["split"]).to_pylist()}
    result.statistics["splits"] = dict(sorted(counts.items()))
    for split in dict.fromkeys((config.data.val_split, *config.data.test_splits)):
        count = counts[split]
        if count < 2:
            result.error(f"split {split} has {count} image: CIDEr-D is 0 for every caption of a single document")
        elif count < MIN_IMAGES_FOR_CIDER:
            result.warn(
                f"split {split} has {count} images: CIDEr-D on fewer than {MIN_IMAGES_FOR_CIDER} is mostly noise"
            )


def _examples(items: list[str]) -> str:
    return ", ".join(items[:EXAMPLES]) + (" ..." if len(items) > EXAMPLES else "")
