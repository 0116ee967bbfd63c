"""The teacher of a run: the model bundle that `distill.model` names, and the search by which it captions.

Sequence-level knowledge distillation (Kim and Rush 2016, arXiv 1606.07947, section 3.2) trains a model on what the
beam search of a teacher finds, because this is the mode of the teacher's distribution over whole captions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from raycap.models.config import ModelConfig
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import DistillSection, EvaluationSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    CONTENT_FILES,
    bundle_digests,
    bundle_protocol,
    fetched,
    read_bundle_config,
    read_parts,
    require_intact,
)
from raycap.pipeline.evaluation.comparison.protocol import SEARCH_KEYS, USUAL, WORDS, Protocol, search_settings
from raycap.pipeline.storage.path import StoragePath, storage_path

KEY = "distill.model"
RECORDED_KEYS = (*SEARCH_KEYS, "precision")  # of the protocol


@dataclass(frozen=True)
class Teacher:
    """A bundle that captions the training images of a run.

    folder: the bundle's files on this machine. search: as its protocol records it, with all captions of the beam.
    feature_width: of the features that it captions.
    """

    location: StoragePath
    folder: Path
    name: str
    model: ModelConfig
    feature_width: int
    search: EvaluationSection
    content: dict[str, Any] = field(repr=False)  # what decides its captions besides the content of its files

    @cached_property
    def digest(self) -> str:
        """A hash of what decides the captions: weights, words, sizes, image transform and search."""
        transform = [name for name in ("preprocessing.json",) if (self.folder / name).is_file()]
        content = {"files": bundle_digests(self.folder, (*CONTENT_FILES, *transform)), **self.content}
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def signature(self) -> str:
        """The search in words."""
        values = {key: getattr(self.search, key) for key in RECORDED_KEYS}
        return ", ".join(WORDS[key](value) for key, value in values.items() if value != USUAL.get(key))

    def config_of(self, config: RunConfig) -> RunConfig:
        """The configuration by which the teacher captions images of a run."""
        kept = {key: getattr(config.evaluation, key) for key in ("batch_size", "cuda_graph")}
        return config.model_copy(update={"evaluation": self.search.model_copy(update=kept), "model": self.model})

    def require_width(self, feature_width: int) -> None:
        """Raises UserError unless a teacher of region features has those of a run, which have this width."""
        if feature_width != self.feature_width:
            raise UserError(
                f"{KEY}: {self.location} captions regions of width {self.feature_width}, and those of features.hdf5 "
                f"have {feature_width}; give a bundle that was trained on these features"
            )


def find_teacher(config: RunConfig) -> Teacher | None:
    """The teacher of a run; None without the section `distill`. A bundle on S3 is copied to this machine.

    Raises UserError for a folder that is no bundle, and for a bundle that cannot teach this run.
    """
    section = config.distill
    if section is None:
        return None
    location = storage_path(section.model, config.storage.options)
    folder = fetched(location)
    try:
        bundle = read_bundle_config(folder)
        parts, protocol = read_parts(bundle, str(folder / "config.yaml")), bundle_protocol(bundle)
        search = _search(protocol, parts.sizes.max_positions)
    except (UserError, OSError) as error:
        raise UserError(f"{KEY}: {error}") from error
    _require_kind(config, location, protocol, has_backbone=parts.backbone is not None)
    _require_regions(config, location, parts.model)
    _require_captions(section, location, search)
    recorded = bundle.get("protocol") or {}
    content = {key: bundle.get(key) for key in ("model", "sizes", "backbone")}
    content["search"] = {key: recorded[key] for key in RECORDED_KEYS if key in recorded}
    width = parts.sizes.feature_width
    return Teacher(location, folder, bundle["name"], parts.model, width, search, content)


def check_teacher(config: RunConfig) -> None:
    """Raises UserError unless the bundle that `distill.model` names, if any, is whole and can teach this run."""
    teacher = find_teacher(config)
    if teacher is not None:
        try:
            require_intact(teacher.folder)
        except UserError as error:
            raise UserError(f"{KEY}: {error}") from error


def _search(protocol: Protocol, max_positions: int) -> EvaluationSection:
    """The search that a protocol records, with all captions of its beam. A precision that is not recorded is float32.

    All are stored, so that another `captions_per_image` computes nothing again.
    """
    search = search_settings(EvaluationSection(), [protocol])
    update = {
        "num_results": search.beam_size,
        "max_length": min(search.max_length, max_positions),
        "precision": "bfloat16" if protocol.precision == "bfloat16" else "float32",
    }
    return search.model_copy(update=update)


def _require_kind(config: RunConfig, location: StoragePath, protocol: Protocol, *, has_backbone: bool) -> None:
    """Raises UserError for a teacher of another language, or of other inputs than a run has."""
    if protocol.language != config.data.language:
        raise UserError(
            f"{KEY}: {location} captions in {protocol.language}, and data.language is {config.data.language}; give a "
            "bundle of this language"
        )
    if config.has_backbone and not has_backbone:
        raise UserError(
            f"{KEY}: {location} has no backbone, so that it cannot caption the run's image files; give a bundle with a "
            "backbone"
        )
    if not config.has_backbone and (has_backbone or protocol.features == "grid"):
        raise UserError(
            f"{KEY}: {location} does not caption regions, and the run has those of features.hdf5; give a bundle of a "
            "model that was trained on them"
        )


def _require_regions(config: RunConfig, location: StoragePath, model: ModelConfig) -> None:
    """Raises UserError if the images of a run have more regions than a teacher attends to."""
    attended = getattr(model, "attended_regions", None)
    if not config.has_backbone and attended is not None and config.features.max_regions > attended:
        raise UserError(
            f"{KEY}: {location} attends to {attended} regions, and features.max_regions is "
            f"{config.features.max_regions}; give another bundle, or set features.max_regions to {attended}"
        )


def _require_captions(section: DistillSection, location: StoragePath, search: EvaluationSection) -> None:
    """Raises UserError if the teacher's search finds fewer captions per image than a run asks for."""
    if section.captions_per_image > search.beam_size:
        raise UserError(
            f"distill.captions_per_image = {section.captions_per_image} is above the beam of {location}, which is "
            f"{search.beam_size}; lower it"
        )
