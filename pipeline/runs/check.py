"""Is a data set fit to train on, and what is odd about it: the findings behind `raycap check`.

Every image is read and decoded once, in threads; nothing is written but the manifest of content keys.
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
from pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)


HUGE_WORDS = 60  # COCO's longest caption has 57 tokens
FEW_FOR_CIDER = 200  # below, document frequencies and the mean are noise: the standard error is above 0.06 of 1.0
SMALL_SIDE = 400  # COCO's photographs have short sides from 400 up; sets that were shrunk have 224 or 256
BINS = (0, 64, 128, 224, 256, 320, 384, 480, 640, 1024, 2048)
EXAMPLES = 3


@dataclass
class Findings:
    """What a check found. `facts` are plain values; a finding of kind "error" makes training wrong."""

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, str]] = field(default_factory=list)

    def add(self, kind: Literal["error", "warning"], text: str) -> None:
        self.findings.append({"kind": kind, "text": text})

    @property
    def ok(self) -> bool:
        return not any(finding["kind"] == "error" for finding in self.findings)


def check_data(config: RunConfig, looked_at: pa.Array | None = None) -> Findings:
    """All findings. Raises UserError for a data set that cannot be read at all or lacks a split.

    Cost: one read and one decoding of every image, of region features a look-up; of those only whose content keys are
    not in `looked_at`, which are then what `data.max_bad_fraction` is a share of.
    """
    found = Findings()
    dataset, problems = read_annotations(config.data, data_root(config), config.storage.options)
    require_splits(dataset, config.data)
    logger.info(f"reading {len(dataset)} images")
    dataset, unreadable = snapshot_of(dataset, config)
    _check_captions(found, dataset, problems)
    _check_vocabulary(found, dataset, config)
    fresh = dataset
    if looked_at is not None:
        fresh = Dataset(dataset.table.filter(pc.invert(pc.is_in(dataset.table["key"], value_set=looked_at))))
    if config.has_backbone:
        reasons, sizes = _decode_all(fresh, config)
    else:  # the photographs need not be here
        from pipeline.features.regions import missing_regions

        reasons, sizes = missing_regions(fresh, config), np.empty((0, 2), np.int64)
    _check_images(found, fresh, config, unreadable, reasons)
    _check_duplicates(found, dataset, config)
    _check_resolution(found, sizes, config.backbone.image_size)
    _check_splits(found, dataset, config)
    good = dataset.known().without(sorted(reasons))
    found.facts["fingerprint"] = good.fingerprint()
    return found


def _check_captions(found: Findings, dataset: Dataset, problems: list[str]) -> None:
    empty, huge, repeated, strange, without, total = [], [], [], [], [], 0
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for uri, split, captions in zip(*(dataset.column(name) for name in ("uri", "split", "captions")), strict=True):
        words = [tokenize(caption) for caption in captions]
        total += len(captions)
        counts[split][len(captions)] += 1
        empty += [uri for tokens in words if not tokens]
        huge += [uri for tokens in words if len(tokens) > HUGE_WORDS]
        strange += [uri for caption in captions if caption.strip() and not _is_text(caption)]
        if len({" ".join(tokens) for tokens in words}) < len(words):
            repeated.append(uri)
        if not any(words):
            without.append(uri)
    found.facts["captions"] = {
        "total": total,
        "per_image": {split: dict(sorted(counter.items())) for split, counter in sorted(counts.items())},
        "empty": len(empty),
        "huge": len(huge),
        "repeated": len(repeated),
        "not_text": len(strange) + len(problems),
    }
    if problems:
        found.add("error", f"{len(problems)} captions are not text: {problems[0]}")
    if without:
        found.add("error", f"{len(without)} images have no caption with a word in it: {_some(without)}")
    if strange:
        found.add("warning", f"{len(strange)} captions hold control or replacement characters: {_some(strange)}")
    if empty:
        found.add("warning", f"{len(empty)} captions are empty and would be left out: {_some(empty)}")
    if huge:
        found.add("warning", f"{len(huge)} captions have more than {HUGE_WORDS} words: {_some(huge)}")
    if repeated:
        found.add("warning", f"{len(repeated)} images repeat one of their own captions: {_some(repeated)}")
    single = [split for split, counter in counts.items() if max(counter) == 1]
    if single:
        found.add("warning", f"one caption an image in {', '.join(single)}: CIDEr-D needs several to mean much")


def _is_text(caption: str) -> bool:
    """False for what a broken encoding or a binary file leaves behind; a newline or tab inside is still text."""
    return not any(
        character == "\ufffd"
        or (unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and character not in "\n\r\t")
        for character in caption
    )


def _check_vocabulary(found: Findings, dataset: Dataset, config: RunConfig) -> None:
    try:
        found.facts["vocabulary"] = len(build_vocabulary(dataset, config.data))
    except UserError as error:
        found.add("error", str(error))


def _decode_all(dataset: Dataset, config: RunConfig) -> tuple[dict[str, str], np.ndarray]:
    """{key: reason} of images that cannot be decoded, and (width, height) of the others."""
    table = dataset.known().table
    unique = dict(zip(table["key"].to_pylist(), table["uri"].to_pylist(), strict=True))
    reasons: dict[str, str] = {}

    def look(item: tuple[str, str]) -> tuple[int, int] | None:
        key, uri = item
        try:
            return decode_image(StoragePath(uri, config.storage.options).read_bytes(), config.data.max_pixels).size
        except (BadImage, OSError) as error:
            reasons[key] = str(error)
            return None

    with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:  # Pillow decodes without the interpreter's lock
        sizes = [size for size in pool.map(look, unique.items()) if size]
    return reasons, np.array(sizes, np.int64).reshape(-1, 2)


def _check_images(
    found: Findings, dataset: Dataset, config: RunConfig, unreadable: dict[str, str], reasons: dict[str, str]
) -> None:
    troubled = [
        (uri, reasons[key])
        for uri, key in zip(dataset.column("uri"), dataset.column("key"), strict=True)
        if key in reasons
    ]
    troubled += unreadable.items()
    found.facts["unreadable"] = dict(troubled)
    if troubled:
        share = len(troubled) / len(dataset)
        text = f"{len(troubled)} of {len(dataset)} images cannot be used"
        examples = "; ".join(f"{uri}: {reason}" for uri, reason in troubled[:EXAMPLES])
        if share > config.data.max_bad_fraction:
            found.add("error", f"{text}, more than data.max_bad_fraction = {config.data.max_bad_fraction}: {examples}")
        else:
            found.add("warning", f"{text} and would be left out: {examples}")


def _check_duplicates(found: Findings, dataset: Dataset, config: RunConfig) -> None:
    by_key: dict[str, list[tuple[str, str]]] = defaultdict(list)
    known = dataset.known()
    for key, split, uri in zip(*(known.column(name) for name in ("key", "split", "uri")), strict=True):
        by_key[key].append((split, uri))
    train = set(config.data.train_splits)
    held_out = {config.data.val_split, *config.data.test_splits} - train
    leaks, within = [], 0
    for copies in by_key.values():
        splits = {split for split, _ in copies}
        if splits & train and splits & held_out:
            leaks.append(" = ".join(f"{uri} ({split})" for split, uri in copies[:2]))
        elif len(copies) > 1:
            within += len(copies) - 1
    found.facts["duplicates"] = {"across_splits": len(leaks), "elsewhere": within}
    if leaks:
        found.add("error", f"{len(leaks)} images are in training and in a held-out split: {_some(leaks)}")
    if within:
        found.add("warning", f"{within} images repeat another one of their split")


def _check_resolution(found: Findings, sizes: np.ndarray, image_size: int) -> None:
    if not len(sizes):
        return
    short = sizes.min(1)
    histogram = np.histogram(short, bins=[*BINS, np.iinfo(np.int64).max])[0]
    edges = [f"{low}-{high - 1}" for low, high in itertools.pairwise(BINS)] + [f"{BINS[-1]}+"]
    found.facts["short_side"] = {name: int(count) for name, count in zip(edges, histogram, strict=True) if count}
    common, times = Counter(short.tolist()).most_common(1)[0]
    if times > 0.5 * len(short) and common < SMALL_SIDE and len(short) > 1:
        found.add(
            "warning",
            f"the photographs look shrunken: {times} of {len(short)} have a short side of exactly {common} px; "
            f"published scores are from the originals",
        )
    enlarged = int((short < image_size).sum())
    if enlarged > 0.1 * len(short):
        found.add("warning", f"{enlarged} images are smaller than backbone.image_size = {image_size} and get enlarged")


def _check_splits(found: Findings, dataset: Dataset, config: RunConfig) -> None:
    counts = {item["values"]: item["counts"] for item in pc.value_counts(dataset.table["split"]).to_pylist()}
    found.facts["splits"] = dict(sorted(counts.items()))
    for split in dict.fromkeys((config.data.val_split, *config.data.test_splits)):
        count = counts[split]
        if count < 2:
            found.add("error", f"split {split} has {count} image: CIDEr-D is 0 for every caption of a single document")
        elif count < FEW_FOR_CIDER:
            found.add(
                "warning", f"split {split} has {count} images: CIDEr-D on fewer than {FEW_FOR_CIDER} is mostly noise"
            )


def _some(items: list[str]) -> str:
    return ", ".join(items[:EXAMPLES]) + (" ..." if len(items) > EXAMPLES else "")
