"""The sections of a run's YAML, typed and frozen; which keys there are, and what fits together within one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from models.config import MODEL_CONFIGS, ModelConfig
from pipeline.errors import UserError
from pipeline.storage.path import StorageOptions

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
EMBEDDED = "embedded"  # as features.hdf5: the regions that come with the embedded data set


# Of every 30 images in order 24 are train, 2 val, 3 test and 1 novel: 1,500 give 1,200, 100, 150 and 50.
SPLIT_CYCLE = ("train",) * 24 + ("val",) * 2 + ("test",) * 3 + ("novel",)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StorageSection(Section):
    """Where everything is written. In a YAML, `storage: results` is short for `storage: {uri: results}`."""

    uri: str = "results"
    endpoint_url: str | None = None  # an S3-compatible server's; None: AWS's, or AWS_ENDPOINT_URL
    region: str | None = None

    @model_validator(mode="after")
    def _no_password(self) -> StorageSection:
        if "@" in (self.endpoint_url or ""):
            raise ValueError(
                "storage.endpoint_url holds a user or password, which S3 does not read and every run would store; "
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            )
        return self

    @property
    def options(self) -> StorageOptions:
        return StorageOptions(self.endpoint_url, self.region)


class SourceSection(Section):
    """One annotation file of a data set that has several."""

    annotations: str
    images: str = "."  # the folder that its file names start from, relative to data.root, or an s3:// prefix
    split: str | None = None  # for images that neither the file nor a split list assigns


@dataclass(frozen=True)
class SceneConfig:
    """`image_size` in pixels. Raises UserError for a set too small to fill its splits or too small to see."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    num_images: int = 1500
    image_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_images < len(SPLIT_CYCLE):
            raise UserError(
                f"num_images is {self.num_images}, but the embedded data set deals its images out in rounds of "
                f"{len(SPLIT_CYCLE)} so that no split is empty; set num_images to {len(SPLIT_CYCLE)} or more"
            )
        if self.image_size < 32:
            raise UserError(
                f"image_size is {self.image_size}, but below 32 pixels the small shapes cannot be told apart; "
                "set image_size to 32 or more"
            )


class DataSection(Section):
    """Where images and captions are. `synthetic` draws the embedded data set instead of reading `root`."""

    synthetic: SceneConfig | None = None
    root: str | None = None  # a folder or an s3:// prefix
    format: Literal["auto", "karpathy", "coco", "nocaps", "table"] = "auto"
    annotations: str = "dataset.json"
    images: str = "."  # the folder that the annotations' filepath/filename start from, or an s3:// prefix
    split: str | None = None
    sources: tuple[SourceSection, ...] = ()  # instead of annotations, images and split
    split_lists: dict[str, str] = {}  # {split: file with an image name a line}, relative to data.root
    tokenizer: Literal["expansionnet", "spacy"] = "expansionnet"
    vocabulary_splits: tuple[str, ...] | None = None  # None: train_splits
    train_splits: tuple[str, ...] = ("train", "restval")
    val_split: str = "val"
    test_splits: tuple[str, ...] = ("test",)
    min_count: Positive = 5
    extra_vocabulary: str | None = (
        None  # a file of words, one or several a line, for the vocabulary besides the captions'
    )
    max_bad_fraction: Fraction = 0.01
    max_pixels: Positive = 100_000_000

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if self.sources and ({"annotations", "images", "split"} & self.model_fields_set):
            raise ValueError("data.sources stands instead of data.annotations, data.images and data.split; give one")
        if (self.synthetic is None) == (self.root is None):
            raise ValueError(
                "exactly one of data.synthetic and data.root is needed; give the data set's folder as data.root"
            )
        return self


class FeatureSection(Section):
    """Extraction and the feature store."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    stored_dtype: Literal["float16", "float32"] = "float16"
    batch_size: Positive = 16
    rows_per_shard: Positive = 256
    num_actors: Positive = 1
    gpus_per_actor: float = 0
    threads_per_actor: Positive = 1
    max_images_for_tasks: Annotated[int, Field(ge=0)] = 2048  # up to here an actor's start costs more than it saves
    hdf5: str | None = None  # region features in place of a backbone's (pipeline/features/regions.py), or EMBEDDED
    max_regions: Positive = 100
    truncate_regions: bool = False  # keep the first max_regions of an image with more, instead of refusing it
    cache_gib: Annotated[float, Field(gt=0)] = 50  # local copies of shards, and as many of images, on S3


class ScheduleSection(Section):
    """Learning rate over iterations; `pipeline.training.optimizer` has the formulae."""

    name: Literal["hyperbolic", "linear", "inverse_sqrt"] = "hyperbolic"
    warmup_iterations: Positive = 1
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    decay_every_epochs: Positive = 1
    min_lr: Annotated[float, Field(ge=0)] = 5e-7


class OptimizerSection(Section):
    name: Literal["radam", "adam", "adamw"] = "radam"
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: Annotated[float, Field(gt=0)] = 1e-9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class PlateauSection(Section):
    """Multiplies the rate by `factor` after `patience` validations in a row that did not beat the best."""

    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    patience: Positive = 3


class ScstSection(Section):
    """Self-critical sequence training: what is sampled, the baseline, and the EOS rule.

    The meshed-memory recipe is sampler: beam, baseline: mean, eos_in_reward: false, document_frequency: captions,
    sampling_dropout: true, fixed_length: 20. (sampling_dropout: with the captioner's dropout, but for that inside a
    dynamic expansion.)
    """

    num_samples: Annotated[int, Field(ge=2)] = 5
    max_length: Annotated[int, Field(ge=3)] = 20
    sampler: Literal["multinomial", "beam"] = "multinomial"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    baseline: Literal["leave_one_out", "mean", "greedy"] = "leave_one_out"
    eos_in_reward: bool = True
    eos_in_loss: bool = True  # its log-probability carries the gradient too
    fixed_length: Positive | None = None  # divide each caption's log-probability by this number, whatever its length
    document_frequency: Literal["images", "captions"] = "images"
    sampling_dropout: bool = False
    max_cider_drop: Fraction = (
        0.3  # the stage ends when validation CIDEr-D falls below (1 - max_cider_drop) of the run's best
    )


class StageSection(Section):
    """One training stage. `batch_size` is global and counts images (pairs with captions_per_image 1)."""

    name: str
    objective: Literal["cross_entropy", "scst"]
    train_backbone: bool = False
    epochs: Annotated[float, Field(gt=0)]
    batch_size: Positive
    captions_per_image: Positive = 1
    lr: Annotated[float, Field(gt=0)]
    schedule: ScheduleSection = ScheduleSection()
    optimizer: OptimizerSection = OptimizerSection()
    label_smoothing: Fraction = 0.1
    dropout: Fraction | None = None
    drop_path: Fraction | None = None  # None: the backbone's
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    scst: ScstSection | None = None
    validate_every_epochs: Annotated[float, Field(gt=0)] = 1.0
    patience: Positive | None = None  # validations in a row below the best that end the stage
    plateau: PlateauSection | None = None
    checkpoint_every_steps: Positive = 500
    checkpoint_every_minutes: Annotated[float, Field(gt=0)] = 10
    gradient_accumulation_steps: Positive = 1
    keep_if_better: bool = False  # keep the stage before unless this one's validation CIDEr-D is higher

    @model_validator(mode="after")
    def _consistent(self) -> StageSection:
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise ValueError(f"stage name {self.name!r} must be made of a-z, 0-9 and _")
        if self.scst is not None and self.objective != "scst":
            raise ValueError(f"stage {self.name} has a section scst but objective {self.objective}")
        return self

    @property
    def sampling(self) -> ScstSection:
        return self.scst or ScstSection()


class WorkersSection(Section):
    """Who trains: data-parallel workers on the Ray cluster. Changing it does not make another run."""

    num_workers: Positive = 1
    min_workers: Positive | None = None  # train on with this many when nodes go away, on num_workers when they are back
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1
    threads_per_worker: Positive = 1
    num_decode_threads: Annotated[int, Field(ge=0)] = 0
    max_failures: Annotated[int, Field(ge=0)] = 3
    log_every_steps: Positive = 20
    dry_run: bool = True
    compile: bool = False  # torch.compile; needs a C++ compiler on CPUs. Rounds in another order, so not bit-identical

    @property
    def counts(self) -> range:
        """How many workers may train at a time."""
        return range(self.min_workers or self.num_workers, self.num_workers + 1)

    @model_validator(mode="after")
    def _range(self) -> WorkersSection:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(f"min_workers = {self.min_workers} is above num_workers = {self.num_workers}")
        return self


class EvaluationSection(Section):
    beam_size: Positive = 5
    max_length: Annotated[int, Field(ge=3)] = 20
    num_results: Positive = 1  # captions kept for each image, at most beam_size
    batch_size: Positive = 32
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast, faster where the processor has it
    constraints: str | None = (
        None  # a file of words that captions must hold; `pipeline.captioning.constraints` has its form
    )

    @property
    def protocol(self) -> str:
        """How captions were found, as reports say it."""
        rough = "" if self.precision == "float32" else f", {self.precision}"
        return f"beam {self.beam_size}, at most {self.max_length} tokens{rough}"

    @model_validator(mode="after")
    def _fits_the_beam(self) -> EvaluationSection:
        if self.num_results > self.beam_size:
            raise ValueError(f"num_results = {self.num_results} is above beam_size = {self.beam_size}; raise the beam")
        return self


class TrackingSection(Section):
    """MLflow. Without `uri`: a SQLite file under the storage."""

    enabled: bool = True
    uri: str | None = None
    experiment: str = "raycap"
    registered_name: str | None = None  # None: the run's name


class RetrainSection(Section):
    """`raycap retrain`: on which images a new model is compared with the champion, and by how much it must be better.

    It is promoted when the lower end of the bootstrap interval of its CIDEr-D's difference lies above `margin`.
    """

    split: str | None = None  # fixed at its first use; None: the first of data.test_splits
    margin: Annotated[float, Field(ge=0)] = 0.0  # CIDEr-D, in the field's scale (1.404)
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95  # of the two-sided interval
    lease_seconds: Annotated[float, Field(gt=0)] = 120  # a retraining that was killed keeps others out for so long


def _system(model: Any) -> str:
    """Which system's keys a section `model` has; without a name the first one's."""
    return str(model.get("name", "expansionnet_v2") if isinstance(model, dict) else getattr(model, "name", ""))


# each system has its own keys; those of another are refused as unknown
if TYPE_CHECKING:
    ModelSection = ModelConfig
else:
    ModelSection = Annotated[
        Union[tuple(Annotated[section, Tag(name)] for name, section in MODEL_CONFIGS.items())],  # noqa: UP007
        Discriminator(_system),
    ]
