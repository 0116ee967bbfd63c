"""`RunConfig`, the configuration of a run with all its sections, and the checks that involve several sections."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr

from raycap.models.config import BackboneConfig, Identity, Values
from raycap.pipeline.config.sections import (
    SYNTHETIC,
    DataSection,
    EvaluationSection,
    FeatureSection,
    FileName,
    ModelSection,
    Place,
    RetrainSection,
    Section,
    Seed,
    StageSection,
    StorageSection,
    TrackingSection,
    WorkersSection,
)
from raycap.pipeline.config.variables import Expanded, Location, remember_secrets, restore_references
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path
from raycap.pipeline.storage.s3 import is_remote


class RunConfig(Section):
    """All keys of a run. Marks (`models.config.Identity`) decide which keys enter the run's identity, and how."""

    name: FileName
    seed: Seed = 0
    storage: Annotated[StorageSection, Identity.IGNORED] = StorageSection()
    data: DataSection
    backbone: Annotated[BackboneConfig, Identity.WITH_BACKBONE] = BackboneConfig()
    """The file of a run must set either this section or features.hdf5."""
    features: FeatureSection = FeatureSection()
    model: ModelSection
    stages: Annotated[tuple[StageSection, ...], Field(min_length=1)]
    init_from: Annotated[Place | None, Identity.BUNDLE] = None
    """A model bundle. Training starts from its weights, with a new optimizer."""
    deliver: Literal["best", "last"] = "best"
    """The stage whose weights the run delivers: the stage with the best validation CIDEr-D, or the last stage."""
    workers: Annotated[WorkersSection, Identity.IGNORED] = WorkersSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: Annotated[TrackingSection, Identity.IGNORED] = TrackingSection()
    retrain: Annotated[RetrainSection, Identity.IGNORED] = RetrainSection()
    _expanded: dict[Location, Expanded] = PrivateAttr(default_factory=dict)

    def with_references(self, data: Values) -> Self:
        """Records the `${VARIABLE}` references of the values from which this configuration was made. Returns itself."""
        self._expanded = remember_secrets(data)
        return self

    @property
    def variables(self) -> dict[str, str]:
        """The variables that the user's file refers to, by name."""
        return {name: value for text in self._expanded.values() for name, value in text.variables.items()}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Unpickles a configuration of another process, and remembers its secrets, so that no message shows them."""
        super().__setstate__(state)
        remember_secrets([self.model_dump(mode="json"), *self._expanded.values()])

    def without_tracker(self) -> Self:
        """A copy without the tracker, whose address may contain a password, for processes that need no tracker."""
        config = self.model_copy(update={"tracking": TrackingSection(enabled=False)})
        config._expanded = {place: text for place, text in self._expanded.items() if place[0] != "tracking"}
        return config

    def stored_values(self, *, only_changes: bool = False) -> Values:
        """The plain values that are stored in the run's folder and sent to the tracker.

        Each text contains `${VARIABLE}` as it was written in the file, but a number or boolean has its value. The
        tracker's address is left out, because it may contain a password. For a run on region features, a default
        section `backbone` is left out, because the run has no backbone. only_changes: whether only the model's name and
        the keys that differ from their defaults are returned.
        """
        exclude: Values = {"tracking": {"uri"}}
        if not self.has_backbone and self.backbone == BackboneConfig():
            exclude["backbone"] = True
        values = self.model_dump(mode="json", exclude=exclude, exclude_defaults=only_changes)
        values["model"]["name"] = self.model.name
        restore_references(values, self._expanded)
        return values

    def check_values(self) -> None:
        if "backbone" not in self.model_fields_set and self.has_backbone:
            raise ValueError(
                "key backbone is missing; add it to the configuration, or features.hdf5 for region features"
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stage names must differ, found {', '.join(names)}")
        self._check_regions()
        self.evaluation.require_words(self.data.language, self.data.tokenizer)
        for stage in self.stages:
            smallest, _ = self.micro_batch_sizes(stage)
            if smallest == 0:
                workers, steps = self.workers.num_workers, stage.gradient_accumulation_steps
                raise ValueError(
                    f"stages.{stage.name}.batch_size = {stage.batch_size} is below {workers} workers x {steps} "
                    f"accumulated, and every worker needs a sample in each micro-step; set batch_size to "
                    f"{workers * steps} or more, or lower workers.num_workers"
                )

    def _check_regions(self) -> None:
        """Raises ValueError if the source of features, backbone or regions, does not fit data, model or stages."""
        if self.features.hdf5 == SYNTHETIC and self.data.synthetic is None:
            raise ValueError(
                f"features.hdf5 = {SYNTHETIC} means the synthetic data set's regions, and data.synthetic is not set; "
                "give the path of an HDF5 file"
            )
        if not self.has_backbone and any(not source.rewarded for source in self.data.sources):
            raise ValueError(
                "data.sources has a source with rewarded: false, whose images have ids of their own, under which "
                "features.hdf5 has no regions; leave it out"
            )
        self.model.check_inputs(regions=not self.has_backbone)
        if self.features.views and not self.has_backbone:
            raise ValueError("features.views is set, and a detector's features have no views; leave it out")
        attended = getattr(self.model, "attended_regions", None)
        if attended is not None and self.features.max_regions > attended:
            raise ValueError(
                f"{self.features.stated('features.max_regions')} is above model.attended_regions = {attended}; "
                f"set it to {attended}, with features.truncate_regions"
            )
        for stage in self.stages:
            if stage.train_backbone and not self.has_backbone:
                raise ValueError(
                    f"stages.{stage.name}.train_backbone is true, and with features.hdf5 there is no backbone; "
                    "set it to false"
                )

    def with_compute_dtype(self, precision: str) -> Self:
        """A copy with a precision in place of `features.compute_dtype`, for example in place of `auto`."""
        return self.model_copy(update={"features": self.features.model_copy(update={"compute_dtype": precision})})

    def with_processors(self, cores: int) -> Self:
        """A copy that uses this number of CPU cores where the keys for CPUs and threads are not set."""
        workers, features = self.workers, self.features
        share, actors = max(1, cores // workers.num_workers), features.most_actors
        cpus = share if workers.cpus_per_worker is None else workers.cpus_per_worker
        workers = workers.model_copy(
            update={"cpus_per_worker": cpus, "threads_per_worker": workers.threads_per_worker or share}
        )
        if actors is not None:  # otherwise their number depends on Ray
            threads = features.threads_per_actor or max(1, cores // actors)
            features = features.model_copy(update={"threads_per_actor": threads})
        return self.model_copy(update={"workers": workers, "features": features})

    @property
    def has_backbone(self) -> bool:
        """True if a backbone computes the features. Otherwise a detector's file `features.hdf5` contains them."""
        return self.features.hdf5 is None

    @property
    def working_path(self) -> Path:
        """The storage's folder on this machine's disk: the storage itself, or the local copy of a storage on S3."""
        if is_remote(self.storage.uri):
            return cache_folder() / "storage" / hashlib.sha256(self.storage_place.uri.encode()).hexdigest()[:16]
        return Path(os.path.realpath(Path(self.storage.uri).expanduser()))

    def home(self, name: str) -> StoragePath | None:
        """The place on S3 of which `working_path / name` is the local copy. None if the storage is local."""
        return self.storage_place / name if is_remote(self.storage.uri) else None

    @property
    def storage_place(self) -> StoragePath:
        """The folder of all results, local or on S3."""
        return storage_path(self.storage.uri, self.storage.options)

    def micro_batch_sizes(self, stage: StageSection) -> tuple[int, int]:
        """The smallest and the largest number of samples in a micro-batch of a worker, for all `workers.counts`."""
        fewest_workers, most_workers = self.workers.counts[0], self.workers.counts[-1]
        steps = stage.gradient_accumulation_steps
        return stage.batch_size // (most_workers * steps), math.ceil(stage.batch_size / (fewest_workers * steps))

    def stage(self, name: str) -> StageSection:
        return next(stage for stage in self.stages if stage.name == name)


def total_steps(stage: StageSection, num_samples: int) -> int:
    """The number of optimizer steps of a stage. num_samples: the samples per epoch.

    The number is rounded up, so that the last step may use samples of one more epoch.
    """
    return max(1, math.ceil(stage.epochs * num_samples / stage.batch_size))
