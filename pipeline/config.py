"""The configuration of a run: one YAML file, typed, frozen; unknown keys are refused with the known ones listed."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from models.config import (
    MODEL_CONFIGS,
    BackboneConfig,
    ClustFormerConfig,
    ExpansionNetConfig,
    MeshedMemoryConfig,
    ModelConfig,
)
from pipeline.bundle_files import WEIGHING, bundle_digests, fetched
from pipeline.errors import UserError
from pipeline.staging import cache_folder
from pipeline.storage import Place, StorageOptions, ends_digest, is_remote, place
from pipeline.synthetic import SceneConfig

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
SectionType = TypeVar("SectionType", bound="Section")
EMBEDDED = "embedded"  # as features.hdf5: the regions that come with the embedded data set


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
    more_words: str | None = None  # a file of words, one or several a line, for the vocabulary besides the captions'
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
    few_images: Annotated[int, Field(ge=0)] = 2048  # up to here an actor's start costs more than it saves
    hdf5: str | None = None  # region features in place of a backbone's (pipeline/regions.py), or EMBEDDED
    max_regions: Positive = 100
    cut_regions: bool = False  # keep the first max_regions of an image with more, instead of refusing it
    cache_gib: Annotated[float, Field(gt=0)] = 50  # local copies of shards, and as many of images, on S3


class ScheduleSection(Section):
    """Learning rate over iterations; `pipeline.schedules` has the formulae."""

    name: Literal["hyperbolic", "linear", "inverse_sqrt"] = "hyperbolic"
    warmup_iterations: Positive = 1
    anneal: Annotated[float, Field(gt=0, le=1)] = 1.0
    anneal_every_epochs: Positive = 1
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
    sampling_dropout: true, fixed_length: 20.
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
    max_fall: Fraction = 0.3  # the stage ends when validation CIDEr-D falls below (1 - max_fall) of the run's best


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
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    scst: ScstSection | None = None
    validate_every_epochs: Annotated[float, Field(gt=0)] = 1.0
    patience: Positive | None = None  # validations in a row below the best that end the stage
    plateau: PlateauSection | None = None
    checkpoint_every_steps: Positive = 500
    checkpoint_every_minutes: Annotated[float, Field(gt=0)] = 10
    accumulate: Positive = 1
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
    decode_workers: Annotated[int, Field(ge=0)] = 0
    max_failures: Annotated[int, Field(ge=0)] = 3
    log_every_steps: Positive = 20
    trial_steps: bool = True
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
    constraints: str | None = None  # a file of words that captions must hold; `pipeline.constraint_files` has its form

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
ModelSection = Annotated[
    Annotated[ExpansionNetConfig, Tag("expansionnet_v2")]
    | Annotated[ExpansionNetConfig, Tag("transformer")]
    | Annotated[MeshedMemoryConfig, Tag("meshed_memory")]
    | Annotated[ClustFormerConfig, Tag("clustformer")],
    Discriminator(_system),
]


def needs_boxes(model: ModelConfig) -> bool:
    """Whether a model arranges its input by the boxes of regions."""
    return isinstance(model, ClustFormerConfig) and model.inputs == "regions" and model.encoder_clusters != "none"


class RunConfig(Section):
    """Everything that `raycap run` needs, in one file."""

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    storage: StorageSection = StorageSection()
    data: DataSection
    backbone: BackboneConfig = BackboneConfig()  # may be left out only where features.hdf5 brings a detector's features
    features: FeatureSection = FeatureSection()
    model: ModelSection
    stages: Annotated[tuple[StageSection, ...], Field(min_length=1)]
    init_from: str | None = None  # a model bundle whose weights training starts from, with a fresh optimizer
    workers: WorkersSection = WorkersSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: TrackingSection = TrackingSection()
    retrain: RetrainSection = RetrainSection()

    @field_validator("storage", mode="before")
    @classmethod
    def _short_storage(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"name {self.name!r} must be letters, digits, '_', '-' and '.', a letter or digit first")
        if "backbone" not in self.model_fields_set and self.features.hdf5 is None:
            raise ValueError(
                "key backbone is missing; add it to the configuration, or features.hdf5 for region features"
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stage names must differ, found {', '.join(names)}")
        self._check_regions()
        for stage in self.stages:
            share = math.lcm(*self.workers.counts) * stage.accumulate
            if stage.batch_size % share:
                counts = " and ".join(map(str, self.workers.counts))
                raise ValueError(
                    f"stages.{stage.name}.batch_size = {stage.batch_size} does not divide by "
                    f"{counts} workers x {stage.accumulate} accumulated = {share}; "
                    f"take {max(share, round(stage.batch_size / share) * share)} or another workers.num_workers"
                )
        return self

    def _check_regions(self) -> None:
        """Where features come from goes with the data, the model and the stages."""
        if self.features.hdf5 is None:
            if isinstance(self.model, ClustFormerConfig) and self.model.inputs == "regions":
                raise ValueError(
                    "model.inputs = regions needs a detector's features: name their file as features.hdf5, or set "
                    "model.inputs to grid"
                )
            return
        if self.features.hdf5 == EMBEDDED and self.data.synthetic is None:
            raise ValueError(
                f"features.hdf5 = {EMBEDDED} means the embedded data set's regions, and data.synthetic is not set; "
                "give the path of an HDF5 file"
            )
        if isinstance(self.model, ClustFormerConfig) and self.model.inputs == "grid":
            raise ValueError("model.inputs = grid, and features.hdf5 brings regions; set model.inputs to regions")
        for stage in self.stages:
            if stage.train_backbone:
                raise ValueError(
                    f"stages.{stage.name}.train_backbone is true, and features.hdf5 stands in place of a backbone: "
                    "set it to false, or leave features.hdf5 out"
                )

    @property
    def working_path(self) -> Path:
        """The local folder to work in: the storage itself, or where the copies of what lies on S3 are."""
        if is_remote(self.storage.uri):
            return cache_folder() / "storage" / hashlib.sha256(self.storage_place.uri.encode()).hexdigest()[:16]
        return Path(self.storage.uri).expanduser().resolve()

    @property
    def storage_path(self) -> Path:
        """The storage as a local folder, for what works on one only."""
        if is_remote(self.storage.uri):
            raise UserError(f"storage {self.storage.uri}: this command needs a local folder; set another storage")
        return self.working_path

    def home(self, name: str) -> Place | None:
        """The place of a folder on S3 that is worked on below `working_path`; None for a local storage."""
        return self.storage_place / name if is_remote(self.storage.uri) else None

    @property
    def storage_place(self) -> Place:
        return place(self.storage.uri, self.storage.options)

    def stage(self, name: str) -> StageSection:
        return next(stage for stage in self.stages if stage.name == name)

    def identity(self) -> str:
        """Hash of what decides the result, not of where and with what it is computed.

        Left out: storage, tracking, workers, the size of pieces, how often a checkpoint is written. The data's
        content is hashed apart, wherever it lies; files that are named (weights, word vectors, more words,
        constraints) and `init_from` count by their content.
        """
        body = self.model_dump(mode="json", exclude={"storage", "tracking", "workers", "retrain"})
        body["data"]["root"] = None
        regions = self.features.hdf5
        kept = ("stored_dtype", "max_regions", "cut_regions") if regions else ("compute_dtype", "stored_dtype")
        body["features"] = {key: body["features"][key] for key in kept}
        if regions:
            body["features"]["hdf5"] = regions if regions == EMBEDDED else ends_digest(Path(regions).expanduser())
            body.pop("backbone")
        body["evaluation"].pop("batch_size")
        for stage in body["stages"]:
            stage.pop("checkpoint_every_steps")
            stage.pop("checkpoint_every_minutes")
        for section, key in (
            ("backbone", "weights"), ("model", "word_vectors"), ("data", "more_words"), ("evaluation", "constraints"),
        ):  # fmt: skip
            file = Path(body.get(section, {}).get(key) or "none").expanduser()
            if str(file) not in ("none", "pretrained") and file.is_file():
                body[section][key] = _digest(file, file.stat().st_size, file.stat().st_mtime_ns)
        if self.init_from is not None:
            body["init_from"] = bundle_digests(fetched(place(self.init_from, self.storage.options)), WEIGHING)
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@lru_cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Of a file as it is now: word vectors are gigabytes, and a run's identity is asked for often."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, overrides (`a.b=value`, stages by name or number), expands `${VARIABLE}` and checks a configuration.

    Raises UserError in one sentence that names the key, what was found and what is known.
    """
    return parse_config(read_values(path, overrides))


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values of a YAML file after overrides and `${VARIABLE}`; UserError as `load_config`."""
    if not path.is_file():
        raise UserError(
            f"configuration {path} does not exist; give the path of a YAML file, for example configs/demo.yaml"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a mapping of keys, found {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    expanded: dict[str, Any] = _expand(data, "")
    return expanded


def parse_config(data: dict[str, Any]) -> RunConfig:
    """A checked configuration from plain values; UserError as `load_config`."""
    return parse_section(RunConfig, data)


def parse_section(kind: type[SectionType], data: dict[str, Any]) -> SectionType:
    """Plain values as a section of any kind; UserError as `load_config`."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UserError(_sentence(error, data, kind)) from error


def dump_config(config: RunConfig) -> str:
    """YAML of the resolved configuration; the tracker's address, which may hold a password, is left out.

    So is the backbone of a run on region features, which has none.
    """
    values = config.model_dump(mode="json", exclude={"tracking": {"uri"}})
    if config.features.hdf5 is not None and config.backbone == BackboneConfig():
        del values["backbone"]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override!r} is not of the form a.b=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: {text!r} is not a YAML value") from error
    set_value(data, key, value, "--set")


def set_value(data: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Sets a dotted key of plain values, stages by name or number; `where` begins the sentence of a UserError."""
    node: Any = data
    parts = key.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            names = [item.get("name") if isinstance(item, dict) else None for item in node]
            index = names.index(part) if part in names else int(part) if part.isascii() and part.isdigit() else -1
            if not 0 <= index < len(node):
                raise UserError(f"{where} {key}: {part!r} is none of {', '.join(str(name) for name in names)}")
            if last:
                node[index] = value
            else:
                node = node[index]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            else:
                if node.get(part) is None:
                    node[part] = {}
                node = node[part]
        else:
            raise UserError(f"{where} {key}: {'.'.join(parts[:depth])} holds a plain value, nothing lies below it")


def _expand(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _expand(item, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, f"{key}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise UserError(
                f"{key} needs the environment variable {name}, which is not set; export {name}=... or --set {key}=..."
            )
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", replace, value)


def _sentence(error: ValidationError, data: Any, kind: type[BaseModel]) -> str:
    """The first error as one sentence with the dotted key; unknown keys name the nearest known one."""
    first = error.errors()[0]
    where = first["loc"]
    if first["type"] == "union_tag_invalid":
        known = sorted(MODEL_CONFIGS)
        near = difflib.get_close_matches(first["ctx"]["tag"], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"model.name is {first['ctx']['tag']!r}, which is unknown: {hint}known: {', '.join(known)}"
    if where[:1] == ("model",):
        where = (where[0], *where[2:])  # pydantic names the system in between, which is no key
    location = _with_stage_names([str(part) for part in where], data)
    key = ".".join(location)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(first["loc"][:-1], kind)
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown key {key}: {hint}known here: {', '.join(known)}"
    if first["type"] in ("missing", "missing_argument"):
        return f"key {key} is missing; add it to the configuration"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message if not key or key.split(".")[-1] in message else f"{key}: {message}"
    return f"{key} = {first['input']!r}: {message[:1].lower()}{message[1:]}"


def _with_stage_names(location: list[str], data: Any) -> list[str]:
    if len(location) >= 2 and location[0] == "stages" and location[1].isdigit():
        stage = data["stages"][int(location[1])]
        if isinstance(stage, dict) and isinstance(stage.get("name"), str):
            return ["stages", stage["name"], *location[2:]]
    return location


def _known_keys(location: Sequence[int | str], kind: type[BaseModel]) -> list[str]:
    """Keys valid at a location, by walking the types of the sections."""
    if len(location) == 2 and location[0] == "model":
        return sorted(field.name for field in fields(MODEL_CONFIGS[str(location[1])]))
    node: Any = kind
    for part in location:
        if isinstance(part, int):
            continue
        if isinstance(node, type) and issubclass(node, BaseModel):
            node = _section_type(node.model_fields[part].annotation) if part in node.model_fields else node
    if isinstance(node, type) and issubclass(node, BaseModel):
        return sorted(node.model_fields)
    return sorted(field.name for field in fields(node)) if is_dataclass(node) else []


def _section_type(annotation: Any) -> Any:
    if isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel)):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_type(inner)
        if found is not None:
            return found
    return None


def total_steps(stage: StageSection, num_samples: int) -> int:
    """Optimizer steps of a stage over `num_samples` samples an epoch; the last step may run into another epoch."""
    return max(1, math.ceil(stage.epochs * num_samples / stage.batch_size))
