"""What bundles caption: stored features of their own backbones, regions from a file, or pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.cluster.start import start_extraction
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import snapshot_of
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, read_bundle_config
from raycap.pipeline.evaluation.captioning.bundle_files import fetched
from raycap.pipeline.features.extraction import Extracted, extract_features, hash_and_extract
from raycap.pipeline.features.regions import import_regions
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import save_weights

ALL_IMAGES = "all"  # the name for --split that selects every image


@dataclass(frozen=True)
class Inputs:
    """The inputs of an evaluation.

    images: those of each split that can be captioned. image_ids: of all images of each split, in their order.
    unreadable: {image id: reason} of the others, as far as this is known before the captions. stores: the features that
    each bundle captions; None for one that captions pixels.
    """

    images: Mapping[str, Dataset]
    image_ids: Mapping[str, Sequence[int]]
    unreadable: Mapping[int, str]
    stores: tuple[StoragePath | None, ...]


def images_by_split(dataset: Dataset, splits: Sequence[str]) -> dict[str, Dataset]:
    """The images of each split; `all` means every image if no split is called so.

    Raises UserError for a split without images.
    """
    found = {}
    for split in splits:
        images = dataset.split(split)
        if not len(images) and split == ALL_IMAGES:
            images = dataset
        if not len(images):
            names = ", ".join(sorted(dataset.split_sizes()))
            raise UserError(
                f"--split {split}: no image is in it; the splits are {names}, and {ALL_IMAGES} for every image"
            )
        found[split] = images
    return found


def find_inputs(
    bundles: Sequence[StoragePath],
    images: Mapping[str, Dataset],
    settings: RunConfig,
    address: str | None,
    features: StoragePath | None = None,
) -> Inputs:
    """The inputs of bundles, and the extraction or import of the features that the storage lacks.

    A bundle with a backbone captions its stored features, and pixels if `features.store` is `never`. The features are
    those of a run that has not trained this backbone. A bundle without a backbone captions `features`, or else the
    regions of `features.hdf5`. Images without features of one bundle are captioned by none.
    """
    every = _union([*images.values()])
    ids = {split: part.column("image_id") for split, part in images.items()}
    has_backbone = [read_bundle_config(fetched(bundle)).get("backbone") is not None for bundle in bundles]
    stores: list[StoragePath | None] = [None] * len(bundles)
    unreadable, missing = dict[str, str](), dict[str, str]()  # reasons, by URI and by content key
    if not settings.has_backbone and features is None:
        every = every.keyed_by_id()
        if not all(has_backbone):
            regions, missing = import_regions(every, settings)
            stores = [None if has else regions for has in has_backbone]
    else:
        stores = [None if has else features for has in has_backbone]
        if settings.has_backbone and settings.features.store != "never":
            for number in np.flatnonzero(has_backbone).tolist():
                every, extracted = _extracted(bundles[number], every, settings, address, unreadable)
                stores[number] = extracted.store
                missing |= extracted.missing
        if any(stores) and not _has_keys(every):
            every, unreadable = snapshot_of(every, settings)
    usable = (every.readable() if any(stores) else every).without([*missing])
    left_out = set(every.column("image_id")) - set(usable.column("image_id"))
    named = zip(*(every.column(name) for name in ("image_id", "uri", "key")), strict=True)
    return Inputs(
        {split: _part(usable, part) for split, part in ids.items()},
        ids,
        {
            image: unreadable.get(uri) or missing.get(key) or "it has no features"
            for image, uri, key in named
            if image in left_out
        },
        tuple(stores),
    )


def _extracted(
    place: StoragePath, every: Dataset, settings: RunConfig, address: str | None, unreadable: dict[str, str]
) -> tuple[Dataset, Extracted]:
    """The images with content keys, and the features of a bundle's backbone. Adds {URI: reason} to `unreadable`."""
    bundle = load_bundle(fetched(place))
    backbone = bundle.captioner.backbone
    assert backbone is not None
    features = settings.features.model_copy(update={"views": 0})
    config = settings.model_copy(update={"backbone": backbone.config, "features": features})
    start, transform = partial(start_extraction, config, address), bundle.transform
    # All nodes see the storage, and maybe not this machine's folder for temporary files.
    folder = None if config.storage_place.is_remote else config.working_path
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".weights-", dir=folder) as scratch:
        weights = Path(scratch) / "backbone.safetensors"
        save_weights(backbone, weights)
        if not _has_keys(every):
            hash_files = hash_and_extract(config, lambda: weights, start, transform)
            every, reasons = snapshot_of(every, config, hash_files)
            unreadable |= reasons
        return every, extract_features(config, every, weights, start, unreadable, transform)


def _has_keys(dataset: Dataset) -> bool:
    return dataset.table["key"].null_count < len(dataset)


def _union(parts: Sequence[Dataset]) -> Dataset:
    """The images of all parts, which are disjoint unless one of them is every image."""
    largest = max(parts, key=len)
    ids = set(largest.column("image_id"))
    if all(ids.issuperset(part.column("image_id")) for part in parts):
        return largest
    return Dataset(pa.concat_tables([part.table for part in parts]))


def _part(every: Dataset, ids: Sequence[int]) -> Dataset:
    """The images with these ids, in the order of `every`."""
    is_chosen = pc.is_in(every.table["image_id"], pa.array(ids, every.table["image_id"].type))
    return Dataset(every.table.filter(is_chosen))
