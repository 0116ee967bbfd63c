"""The sections of a run's YAML: their keys, types and defaults, and the checks within one section."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from raycap.models.config import (
    MODEL_CONFIGS,
    NUMBER,
    TEXT,
    Augmentation,
    Count,
    Decoding,
    Identity,
    ModelConfig,
    Text,
    Values,
    Views,
    read_number,
)
from raycap.pipeline.config.languages import ENGLISH, PARTS_OF_WORDS, code_problem
from raycap.pipeline.config.variables import quoted_value
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.lease import MAX_LEASE_S
from raycap.pipeline.storage.s3 import RETRY_MINUTES, StorageOptions


def _check_file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"name {quoted_value(name)} must be letters, digits, '_', '-' and '.', a letter or digit first"
        )
    if len(name) > 100:  # the name becomes part of file names, which have at most 255 bytes
        raise ValueError(f"name {quoted_value(name)} has {len(name)} characters; the limit is 100")
    return name


def _check_gpus(gpus: float) -> float:
    if gpus > 1 and not gpus.is_integer():
        raise ValueError(f"{gpus:g} GPUs are neither a whole number nor a part of one GPU, which is all that Ray gives")
    if 0 < gpus < 0.001:
        raise ValueError(f"{gpus:g} of a GPU is less than Ray counts; set it to 0.001 or more, or to 0")
    return gpus


def _check_place(uri: str) -> str:
    is_address = re.match(r"s3:|\w+://", uri)
    if is_address and not re.match(r"s3://[^/]", uri):
        raise ValueError(f"{quoted_value(uri)} is neither a folder nor of the form s3://BUCKET/FOLDER")
    return uri


def _check_language(code: str) -> str:
    if problem := code_problem(code):
        raise ValueError(f"{quoted_value(code)} {problem}")
    return code


def _check_ranking(value: object) -> object:
    number = read_number(value)
    if isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= 10:
        return float(number)
    if value not in ("mean", "sum"):
        raise ValueError(
            f"evaluation.ranking is {quoted_value(value)}; it must be mean, sum, or the exponent of the length penalty "
            "from 0 to 10"
        )
    return value


Language = Annotated[Text, AfterValidator(_check_language)]
Place = Annotated[Text, AfterValidator(_check_place)]  # a folder, or a prefix on S3
FileName = Annotated[Text, AfterValidator(_check_file_name)]
Name = Annotated[str, Field(max_length=200), TEXT]  # of a split, stage or experiment
SPLIT_WORDS = {  # {word in a name: split}
    "train": "train", "training": "train", "test": "test", "testing": "test", "val": "val", "validation": "val",
    "validate": "val", "valid": "val", "dev": "val", "eval": "val", "evaluation": "val",
}  # fmt: skip


def split_name(text: str) -> str:
    """The name of a split without blanks around it, in lower case if it is one of SPLIT_WORDS."""
    name = text.strip()
    return name.lower() if name.lower() in SPLIT_WORDS else name


Split = Annotated[Name, AfterValidator(split_name)]
# Upper limits are far above what anyone would train (`models/config.py`). If no other limit is known, the limit keeps
# products of numbers within 64 bits, or within the range of float32.
Seed = Annotated[int, Field(ge=0, lt=2**62), NUMBER]
Positive = Annotated[int, Field(gt=0, le=10**9), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0, le=1e38), NUMBER]
NonNegative = Annotated[int, Field(ge=0, le=10**9), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e38), NUMBER]
Fraction = Annotated[float, Field(ge=0, lt=1), NUMBER]
Share = Annotated[float, Field(gt=0, le=1), NUMBER]
BatchSize = Annotated[int, Field(gt=0, le=10**6), NUMBER]
Tokens = Annotated[int, Field(ge=3, le=1000), NUMBER]  # of a caption, with SOS and EOS
MAX_BEAMS = 100  # above it, one image takes many seconds and gigabytes
Beams = Annotated[int, Field(gt=0, le=1000), NUMBER]
Ranking = Annotated[Literal["mean", "sum"] | float, BeforeValidator(_check_ranking)]
Processes = Annotated[int, Field(gt=0, le=10_000), NUMBER]
Threads = Annotated[int, Field(ge=0, le=10_000), NUMBER]
Epochs = Annotated[float, Field(gt=0, le=1e6), NUMBER]
Minutes = Annotated[float, Field(gt=0, le=1e6), NUMBER]  # up to two years
Cpus = Annotated[float, Field(ge=0.001, le=10_000), NUMBER]  # at least ten of the steps of 0.0001 in which Ray counts
Gpus = Annotated[float, Field(ge=0, le=1000), NUMBER, AfterValidator(_check_gpus)]
# the metrics in `pipeline.evaluation.scores.metrics.TABLE` that are not computed by default
_OwnMetric = Literal["CHAIR-i", "CHAIR-s", "Div-1", "Div-2", "mBLEU-4"]
_EncoderMetric = Literal["CLIPScore", "RefCLIPScore", "PAC-S", "RefPAC-S", "BERTScore", "BERTScore-P", "BERTScore-R"]
FurtherMetric = Literal[_OwnMetric, _EncoderMetric]
RewardName = Literal["ciderd", "bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "length", "repetition"]
RewardWeight = Annotated[float, Field(ge=-1e6, le=1e6), NUMBER]
TEXT_ENCODER_FILES = ("model.safetensors", "config.json", "tokenizer.json")
SYNTHETIC = "synthetic"  # this value of features.hdf5 selects the regions of the synthetic data set

# The splits of 30 consecutive synthetic images. Every further 30 images have the same splits, so the default of 1,500
# images gives 1,200 train, 100 val, 150 test and 50 novel.
SPLIT_CYCLE = ("train",) * 24 + ("val",) * 2 + ("test",) * 3 + ("novel",)


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, and values cannot be changed after creation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def check_values(self) -> None:
        """Raises ValueError if values contradict each other. Called after pydantic has checked each value alone."""

    def stated(self, key: str) -> str:
        """`KEY = VALUE` for a message, followed by "(the default)" if the configuration does not set the key.

        key: the dotted key from the top of the configuration, such as data.min_count.
        """
        name = key.rpartition(".")[2]
        origin = "" if name in self.model_fields_set else " (the default)"
        return f"{key} = {quoted_value(getattr(self, name))}{origin}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_values()
        return self


class StorageSection(Section):
    """The folder of all results. In a YAML, `storage: results` is short for `storage: {uri: results}`."""

    uri: Place = "results"
    endpoint_url: Text | None = None
    """The address of an S3-compatible server. By default the value of AWS_ENDPOINT_URL, or AWS if that is not set."""
    region: Name | None = None
    retry_minutes: Annotated[float, Field(ge=0, le=60), NUMBER] = RETRY_MINUTES
    """How long a failed request to S3 is repeated. A request that S3 refuses, for example with 403, is not repeated."""

    def check_values(self) -> None:
        if "@" in (self.endpoint_url or ""):
            raise ValueError(
                "storage.endpoint_url holds a user or password, which S3 does not read and every run would store; "
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            )

    @property
    def options(self) -> StorageOptions:
        return StorageOptions(self.endpoint_url, self.region, self.retry_minutes)


def long_storage(value: object) -> object:
    """The section `storage` in long form: `{uri: results}` for `results`. A section in long form is unchanged."""
    return {"uri": value} if isinstance(value, str) else value


class SourceSection(Section):
    """One annotation file, if a data set has several."""

    annotations: Text
    images: Text = "."
    """The folder of the images in this file, relative to data.root, or an s3:// prefix."""
    split: Split | None = None
    """The split of images to which neither the file nor a split list assigns a split."""
    rewarded: bool = True
    """Whether SCST rewards these captions. Set it to false for captions that a model wrote for images of the other
    sources. Cross entropy learns from both."""


class ColumnSection(Section):
    """The names of a table's columns, or of the keys in a sample's JSON. docs/data.md lists the default names."""

    image: Text | None = None
    captions: Text | None = None
    id: Text | None = None
    split: Text | None = None


@dataclass(frozen=True)
class SceneConfig:
    """The synthetic data set: drawn scenes with captions."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}
    num_images: Annotated[int, Field(ge=len(SPLIT_CYCLE), le=10**5), NUMBER] = 1500  # the minimum fills all splits
    image_size: Annotated[int, Field(ge=32, le=2048), NUMBER] = 64
    """The width in pixels. Below 32, shapes would look alike. Scenes are drawn four times as large (at most 200 MB)."""
    seed: Seed = 0
    language: Literal["en", "zh"] = "en"
    """The language of the captions. The images are the same in both languages."""


class DataSection(Section):
    """The images and captions. With `synthetic`, they are generated instead of read from `root`."""

    synthetic: SceneConfig | None = None
    root: Annotated[Place | None, Identity.IGNORED] = None
    """A folder or an s3:// prefix. A run's identity depends on the content of the data and not on this path."""
    format: Literal["auto", "karpathy", "coco", "nocaps", "table", "webdataset", "text"] = "auto"
    annotations: Text = "dataset.json"
    """A file, several files such as shard-{000..009}.tar or part-*.parquet, or a folder."""
    columns: Annotated[ColumnSection, Identity.IGNORED] = ColumnSection()
    """The columns to read. A run's identity depends on the content that was read and not on the columns' names."""
    split_by_folder: Annotated[bool, Identity.IGNORED] = False
    """Images without a split are in that of their folder, if its name is a word for validation or test."""
    split_fractions: Annotated[dict[Split, Share], Identity.IGNORED] = {}
    """{split: fraction} for images without a split. A hash of the image's name and split_seed selects the split."""
    split_seed: Annotated[Seed, Identity.IGNORED] = 0
    images: Text = "."
    """The folder or s3:// prefix below which the annotations name image files."""
    split: Split | None = None
    """The split of images to which the annotations assign no split."""
    sources: tuple[SourceSection, ...] = ()
    """Several annotation files, in place of annotations, images and split."""
    split_lists: dict[Split, Text] = {}
    """{split: file with one image name per line}, relative to data.root."""
    language: Language = ENGLISH
    """The language of the captions, which decides how the metrics split captions into words."""
    tokenizer: Literal["expansionnet", "spacy", "tokens", "unicode", "characters", "subword"] = "expansionnet"
    """How captions become tokens. `tokens` takes those in Karpathy's dataset.json. docs/languages.md has the others."""
    subword_vocabulary: Annotated[int, Field(ge=300, le=10**5), NUMBER] = 8000
    """The size of a vocabulary of subwords, including the 256 bytes and the special tokens."""
    vocabulary_splits: tuple[Split, ...] | None = None
    """The splits whose captions give the vocabulary. By default those of train_splits whose captions people wrote."""
    train_splits: tuple[Split, ...] = ("train", "restval")
    val_split: Split = "val"
    test_splits: tuple[Split, ...] = ("test",)
    min_count: Positive = 5
    """Words that occur less often in the captions are not in the vocabulary."""
    extra_vocabulary: Annotated[Text | None, Identity.FILE] = None
    """A file of words that the vocabulary contains in addition to the words of the captions."""
    max_bad_fraction: Fraction = 0.01
    """A command fails if a larger fraction of the images cannot be used."""
    max_pixels: Positive = 100_000_000

    def check_values(self) -> None:
        if self.sources and ({"annotations", "images", "split"} & self.model_fields_set):
            raise ValueError("data.sources replaces data.annotations, data.images and data.split; give one of them")
        has_unknown_split = not self.taught_splits.issubset(self.train_splits)
        if has_unknown_split or not self.rewarded_splits:
            raise ValueError(
                "data.sources: a source with rewarded: false needs a split of its own, which data.train_splits lists "
                "besides the split of people's captions"
            )
        total = sum(self.split_fractions.values())
        if self.split_fractions and abs(total - 1) > 1e-6:
            raise ValueError(f"data.split_fractions add up to {total:g}; change them so that their sum is 1")
        if (self.synthetic is None) == (self.root is None):
            raise ValueError(
                "exactly one of data.synthetic and data.root is needed; give the data set's folder as data.root"
            )
        if self.synthetic is not None:
            self._check_synthetic(self.synthetic)

    def _check_synthetic(self, synthetic: SceneConfig) -> None:
        """Raises ValueError if a key contradicts the synthetic data set."""
        for key in ("annotations", "columns", "images", "sources", "split_fractions", "split_lists"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"data.{key} belongs to a data set in data.root, and data.synthetic is set; remove it")
        if unknown := [split for split in (self.val_split, *self.test_splits) if split not in SPLIT_CYCLE]:
            known = ", ".join(dict.fromkeys(SPLIT_CYCLE))
            raise ValueError(f"data names the split {quoted_value(unknown[0])}; the synthetic data set has {known}")
        if synthetic.language != self.language:
            raise ValueError(
                f"data.synthetic.language = {synthetic.language} and data.language = {self.language} differ; set "
                "the same"
            )

    @property
    def taught_splits(self) -> set[str | None]:
        """The splits of the sources whose captions a model wrote (`rewarded: false`)."""
        return {source.split for source in self.sources if not source.rewarded}

    @property
    def rewarded_splits(self) -> tuple[str, ...]:
        """The training splits whose captions people wrote, which SCST rewards."""
        return tuple(name for name in self.train_splits if name not in self.taught_splits)


# CPUs of an actor that extracts features, and of a task that decodes images for an actor. The numbers differ, because
# Ray Data would decode inside the actors if actors and tasks had equal resources.
ACTOR_CPUS, DECODING_CPUS = 0.5, 0.4


class FeatureSection(Section):
    """How features are extracted and stored."""

    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16"], Identity.WITH_BACKBONE] = "auto"
    stored_dtype: Literal["float16", "float32"] = "float16"
    batch_size: Annotated[BatchSize, Identity.IGNORED] = 16
    rows_per_shard: Annotated[BatchSize, Identity.IGNORED] = 256
    num_actors: Annotated[Processes | None, Identity.IGNORED] = None
    """Extracting processes. By default one process on CPUs, or on GPUs as many as the cluster has room for."""
    gpus_per_actor: Annotated[Gpus, Identity.IGNORED] = 0
    threads_per_actor: Annotated[Threads | None, Field(gt=0), Identity.IGNORED] = None
    max_images_for_tasks: Annotated[NonNegative, Identity.IGNORED] = 2048
    """Up to this number of images, tasks extract the features, because starting actors takes longer than they save."""
    hdf5: Annotated[Text | None, Identity.LARGE_FILE] = None
    """The file of a detector's region features (`pipeline.features.regions`), which replace a backbone's features.
    `synthetic` selects the regions of the synthetic data set."""
    max_regions: Annotated[Count, Field(gt=0), Identity.WITH_REGIONS] = 100
    truncate_regions: Annotated[bool, Identity.WITH_REGIONS] = False
    """If an image has more than max_regions regions: true keeps the first max_regions, false refuses the image."""
    views: Annotated[int, Field(ge=0, le=1000), NUMBER, Identity.WITH_BACKBONE] = 0
    """Random versions of each training image. Every epoch reads one version. With 0, images are not changed."""
    augmentation: Annotated[Augmentation, Identity.WITH_BACKBONE] = Augmentation()
    """The random changes that make a view from an image."""
    cache_gib: Annotated[PositiveFloat | None, Identity.IGNORED] = None
    """The maximum size in GiB of the cache of shards from S3, and also of the cache of images. A cache stays smaller if
    the disk has no room. By default the maximum is half of the disk's free space when the cache is opened."""
    store: Literal["never", "always"] = "always"
    """always: the features of training images are stored. never: stages with a frozen backbone compute these features
    at each step. The features of other images are stored in both cases."""

    def check_values(self) -> None:
        if self.store != "always" and self.hdf5 is not None:
            raise ValueError(
                f"features.store is {self.store}, and without a backbone nothing computes the features that "
                "features.hdf5 contains; leave features.store out"
            )

    @property
    def training_views(self) -> Views | None:
        """The random versions of training images. None if training images are not changed."""
        return Views(self.views, self.augmentation) if self.views else None

    @property
    def threads(self) -> int:
        """The CPU threads of each extracting process."""
        return self.threads_per_actor or 1

    @property
    def least_actors(self) -> int:
        """The number of processes with which the extraction starts."""
        return self.num_actors or 1

    @property
    def most_actors(self) -> int | None:
        """The maximum number of processes. None if the pool may grow until the cluster has no more room."""
        grows = self.num_actors is None and self.gpus_per_actor > 0
        return None if grows else self.least_actors

    @property
    def cache_bytes(self) -> int | None:
        """`cache_gib` in bytes."""
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)


class ScheduleSection(Section):
    """How the learning rate changes during a stage. `pipeline.training.optimizer` has the formulae."""

    name: Literal["hyperbolic", "linear", "inverse_sqrt", "cosine"] = "hyperbolic"
    warmup_iterations: Positive = 1
    decay: Annotated[float, Field(gt=0, le=1), NUMBER] = 1.0
    decay_every_epochs: Positive = 1
    min_lr: NonNegativeFloat = 5e-7


class OptimizerSection(Section):
    """The optimizer and its parameters, except the learning rate."""

    name: Literal["radam", "adam", "adamw"] = "radam"
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: PositiveFloat = 1e-9
    weight_decay: NonNegativeFloat = 0.0
    decayed_weights: Literal["all", "linear"] = "all"
    """linear: only weights of linear and convolutional layers decay. Norms, biases, embeddings and positions do not."""
    backbone_lr_factor: Annotated[float, Field(gt=0, le=1000), NUMBER] = 1.0
    """In stages with train_backbone, the learning rate of the backbone is `lr` times this factor."""
    layer_decay: Share = 1.0
    """In stages with train_backbone, a layer's learning rate has the factor layer_decay ** (layers above it + 1)."""


class PlateauSection(Section):
    """Multiplies the learning rate by `factor` after `patience` validations in a row without a new best score."""

    factor: Annotated[float, Field(gt=0, lt=1), NUMBER] = 0.5
    patience: Positive = 3


class ScstSection(Section):
    """Self-critical sequence training: the sampler, the baseline, the reward and the loss.

    The defaults are the recipe of ExpansionNet v2. The recipe of the Meshed-Memory Transformer is sampler: beam,
    baseline: mean, eos_in_reward: false, document_frequency: captions, sampling_dropout: true, fixed_length: 20.
    """

    num_samples: Annotated[int, Field(ge=2, le=1000), NUMBER] = 5
    max_length: Tokens = 20
    sampler: Literal["multinomial", "beam"] = "multinomial"
    temperature: PositiveFloat = 1.0
    baseline: Literal["leave_one_out", "mean", "greedy"] = "leave_one_out"
    eos_in_reward: bool = True
    eos_in_loss: bool = True
    """Whether the log-probability of EOS is part of the loss."""
    fixed_length: Positive | None = None
    """Each caption's summed log-probability is divided by this number, if the key is set."""
    document_frequency: Literal["images", "captions"] = "images"
    sampling_dropout: bool = False
    """Sample with dropout, and compute the loss with the same dropout masks."""
    reward: dict[RewardName, RewardWeight] = {"ciderd": 1.0}
    """{reward: weight} of the weighted sum (`pipeline.training.rewards.reward`). A weight of 0 only logs a reward."""
    divide_by_deviation: bool = False
    """Divide the advantages of an image's samples by the standard deviation of their rewards."""
    kl: NonNegativeFloat = 0.0
    """The weight of the divergence from the model at the start of the stage, which needs a second copy of the model."""
    max_cider_drop: Fraction = 0.3
    """The stage ends when validation CIDEr-D is below (1 - max_cider_drop) times the best."""

    def check_values(self) -> None:
        if not any(self.reward.values()):
            raise ValueError(f"reward is {self.reward}; give one reward or more a weight other than 0")
        if self.divide_by_deviation and self.baseline == "greedy":
            raise ValueError(
                "divide_by_deviation needs a baseline of the samples whose deviation it is, and baseline is greedy; "
                "set baseline to leave_one_out or mean"
            )

    @property
    def signature(self) -> str:
        """The settings in the notation of SacreEOS (Hu et al. 2023), which ends with the version of the notation.

        Settings that the notation lacks follow as `|key:value` if they differ from the defaults. The notation has no
        reward but CIDEr-D. With other rewards, `|reward:...` lists all weights and the part about CIDEr-D is void.
        """
        mode = "STANDARD_wInit" if self.eos_in_reward else "NO<EOS>MODE_wInit"
        baseline = {"leave_one_out": "average", "mean": "average_all", "greedy": "greedy"}[self.baseline]
        sampler = "nspi" if self.sampler == "multinomial" else "beam"
        notation = f"{mode}+Cider-D[n4,s6.0]+{baseline}[{sampler}{self.num_samples}]+1.0.0"
        others = ["max_length", "temperature", "eos_in_loss", "fixed_length", "document_frequency", "sampling_dropout"]
        others += ["divide_by_deviation", "kl"]
        defaults = type(self)()
        values = {key: getattr(self, key) for key in others if getattr(self, key) != getattr(defaults, key)}
        if self.reward != defaults.reward:
            values["reward"] = "+".join(f"{weight:g}*{name}" for name, weight in sorted(self.reward.items()))
        return "|".join([notation, *(f"{key}:{str(value).lower()}" for key, value in values.items())])


class StageSection(Section):
    """One training stage."""

    name: Name
    objective: Literal["cross_entropy", "scst"]
    train_backbone: bool = False
    freeze: Annotated[tuple[Text, ...], Field(max_length=100)] = ()
    """Parameters that are not trained. A name such as `model.encoder.0` includes all parameters in this module. In a
    name, * matches any text and ? any character."""
    epochs: Epochs
    batch_size: BatchSize
    """Samples per step of all workers together. A sample is an image. With cross_entropy and one caption per image, a
    sample is a pair of an image and a caption."""
    captions_per_image: Beams = 1
    lr: PositiveFloat
    schedule: ScheduleSection = ScheduleSection()
    optimizer: OptimizerSection = OptimizerSection()
    label_smoothing: Fraction = 0.1
    dropout: Fraction | None = None
    """The dropout in this stage. By default the dropout in the section `model`."""
    drop_path: Fraction | None = None
    """The backbone's drop_path in this stage. By default drop_path in the section `backbone`."""
    max_grad_norm: PositiveFloat | None = None
    """A gradient with a larger norm is scaled down to this norm."""
    max_grad_value: PositiveFloat | None = None
    """Each element of the gradient is clipped to at most this absolute value."""
    ema: Annotated[float, Field(gt=0, lt=1), NUMBER] | None = None
    """The decay per step of an average of the weights. The average is validated and kept in place of the weights."""
    precision: Literal["float32", "tf32", "bfloat16", "float64"] = "float32"
    """The precision of matrix products. tf32 rounds factors to 10 bits on GPUs since Ampere. On other processors, tf32
    is the same as float32."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type in which workers exchange gradients."""
    scst: ScstSection | None = None
    validate_every_epochs: Epochs = 1.0
    patience: Positive | None = None
    """The stage ends after this many validations in a row without a new best score."""
    plateau: PlateauSection | None = None
    checkpoint_every_steps: Annotated[Positive, Identity.IGNORED] = 500
    checkpoint_every_minutes: Annotated[Minutes, Identity.IGNORED] = 10
    gradient_accumulation_steps: Positive = 1
    keep_if_better: bool = False
    """Keep the weights of this stage only if its validation CIDEr-D is above that of the stage before."""

    def check_values(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise ValueError(f"stage name {quoted_value(self.name)} must be made of a-z, 0-9 and _")
        if self.scst is not None and self.objective != "scst":
            raise ValueError(f"stage {self.name} has a section scst but objective {self.objective}")
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise ValueError(
                f"stage {self.name} has max_grad_norm = {self.max_grad_norm} and max_grad_value = "
                f"{self.max_grad_value}; a gradient is clipped by one of them: set the other to null"
            )
        if self.schedule.name == "cosine" and self.schedule.min_lr > self.lr:
            raise ValueError(
                f"stage {self.name} has schedule.min_lr = {self.schedule.min_lr:g} above lr = {self.lr:g}, and the "
                "cosine falls from lr to min_lr; lower min_lr"
            )
        for key in ("backbone_lr_factor", "layer_decay"):
            value = getattr(self.optimizer, key)
            if value != 1 and not self.train_backbone:
                raise ValueError(
                    f"stage {self.name} has optimizer.{key} = {value:g}, which is for the backbone, and train_backbone "
                    "is false; leave it out"
                )

    @property
    def samples_are_pairs(self) -> bool:
        """True if a sample is an (image, caption) pair. Otherwise it is an image with `captions_per_image` captions."""
        return self.captions_per_image == 1 and self.objective == "cross_entropy"

    @property
    def sampling(self) -> ScstSection:
        return self.scst or ScstSection()


class WorkersSection(Section):
    """The data-parallel training workers on the Ray cluster."""

    num_workers: Processes = 1
    min_workers: Processes | None = None
    """The minimum number of workers, with which training runs while nodes are missing. By default num_workers."""
    gpus_per_worker: Gpus = 0
    cpus_per_worker: Cpus | None = None
    resources: dict[Text, Annotated[float, Field(ge=0.0001, le=1e15), NUMBER]] = {}
    """Further resources of each worker under Ray's names, for example {"accelerator_type:A100": 0.001, "memory":
    2.4e10}."""
    threads_per_worker: Annotated[Threads | None, Field(gt=0)] = None
    dry_run: bool = True
    """Take one step of every stage before training, so that a lack of memory shows at once."""
    num_decode_threads: Threads = 0
    max_failures_per_hour: NonNegative = 6
    """Training ends if more failures than this happen within an hour."""
    max_wait_minutes: Minutes = 30
    """The maximum time that a stage waits for the cluster's resources before it starts."""
    max_stall_minutes: Minutes = 60
    """A stage of a run, or an extraction of features, ends if it makes no progress for this long."""
    log_every_steps: Positive = 20
    compile: bool = False
    """Whether torch.compile compiles each layer, which needs a C++ compiler. Results differ in the last bits."""

    @property
    def counts(self) -> range:
        """All numbers of workers with which the run may train."""
        return range(self.min_workers or self.num_workers, self.num_workers + 1)

    @property
    def cpus(self) -> float:
        """The CPUs of each worker."""
        return 1 if self.cpus_per_worker is None else self.cpus_per_worker

    @property
    def threads(self) -> int:
        """The CPU threads of each worker."""
        return self.threads_per_worker or 1

    @property
    def resources_of_worker(self) -> dict[str, float]:
        """{Ray's name of a resource: amount} that each worker needs: its CPUs, its GPUs and `resources`."""
        return {"CPU": self.cpus, "GPU": self.gpus_per_worker, **self.resources}

    @property
    def task_options(self) -> Values:
        """`resources_of_worker` as options of `ray.remote`, for a task that runs in the place of a worker."""
        others = {name: amount for name, amount in self.resources.items() if name != "memory"}
        options: Values = {"num_cpus": self.cpus, "num_gpus": self.gpus_per_worker, "resources": others}
        if "memory" in self.resources:
            options["memory"] = self.resources["memory"]
        return options

    def check_values(self) -> None:
        remedies = {"CPU": "set workers.cpus_per_worker", "GPU": "set workers.gpus_per_worker"}
        remedies["object_store_memory"] = "Ray reserves it for no task, so remove it"
        for name, remedy in remedies.items():
            if name in self.resources:
                raise ValueError(f"workers.resources names {name}; {remedy}")
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(f"workers.min_workers = {self.min_workers} is above {self.stated('workers.num_workers')}")
        if 0 < self.gpus_per_worker < 1 < self.num_workers:
            raise ValueError(
                f"workers.gpus_per_worker = {self.gpus_per_worker:g} gives two of {self.num_workers} workers the same "
                "GPU, which NCCL refuses; set it to 1, or workers.num_workers to 1"
            )


class EncoderSection(Section):
    """A CLIP model of the package open_clip."""

    model: Text
    """The package's name of the architecture, such as ViT-B-32-quickgelu for OpenAI's ViT-B/32."""
    weights: Annotated[Text, Identity.FILE]


class TextEncoderSection(Section):
    """A BERT or RoBERTa model of the package transformers, and how BERTScore uses the model."""

    folder: Annotated[Text, Identity.TEXT_ENCODER]
    """The folder with model.safetensors, config.json and tokenizer.json."""
    layer: Annotated[int, Field(ge=0, le=200), NUMBER]
    """The layer whose hidden states are compared."""

    def model_files(self) -> dict[str, str]:
        """{key: path} of the weights, the configuration and the tokenizer."""
        folder = Path(self.folder).expanduser()
        return {f"folder/{name}": str(folder / name) for name in TEXT_ENCODER_FILES}


class ScoreInputsSection(Section):
    """Files that some of `evaluation.metrics` need. `pipeline.evaluation.scores` describes the files."""

    objects: Annotated[Text | None, Identity.FILE] = None
    """A file with the words for objects, for CHAIR."""
    instances: Annotated[Text | None, Identity.FILE] = None
    """A file with COCO's annotations of objects, for CHAIR."""
    clip: EncoderSection | None = None
    """The CLIP model for CLIPScore."""
    pac: EncoderSection | None = None
    """The CLIP model for PAC-S, with the weights of the metric's authors."""
    bert: TextEncoderSection | None = None
    """The text encoder for BERTScore."""

    def check_values(self) -> None:
        if self.instances is not None and self.objects is None:
            raise ValueError("evaluation.inputs.instances needs evaluation.inputs.objects, the words for the objects")

    def files(self) -> dict[str, str]:
        """{dotted key: path} of the files that this section names."""
        files: dict[str, str | None] = {"objects": self.objects, "instances": self.instances}
        for key, encoder in (("clip", self.clip), ("pac", self.pac)):
            if encoder is not None:
                files[f"{key}.weights"] = encoder.weights
        if self.bert is not None:
            files |= {f"bert.{key}": file for key, file in self.bert.model_files().items()}
        return {f"evaluation.inputs.{key}": file for key, file in files.items() if file is not None}


class EvaluationSection(Section):
    """How captions are searched and scored.

    A bundle's protocol records beam_size, max_length, ranking, collapse_repeats and decoding.
    """

    beam_size: Annotated[int, Field(gt=0, le=MAX_BEAMS), NUMBER] = 5
    max_length: Tokens = 20
    num_results: Beams = 1
    """Captions per image, at most beam_size unless decoding.sampling is true."""
    ranking: Ranking = "mean"
    """How finished beams are ranked: by the mean or sum of their tokens' log-probabilities. A number ranks by the sum
    divided by the length penalty with this exponent (`models.decoding.search.length_divisor`)."""
    decoding: Decoding = Decoding()
    collapse_repeats: bool = False
    """Merge equal neighboring words into one, as the Meshed-Memory Transformer's code does before scoring."""
    batch_size: Annotated[BatchSize | None, Identity.IGNORED] = None
    """Images per search. By default 32 on a CPU and 256 on a GPU, or fewer if the GPU's memory does not suffice."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """With bfloat16 (autocast), a few captions differ."""
    cuda_graph: Annotated[bool, Identity.IGNORED] = False
    """On a GPU, capture the search as a CUDA graph at the second batch of a shape, and replay it for later batches."""
    good_ciderd: Annotated[float, Field(gt=0, le=10), NUMBER] = 0.85
    """For the confidence, a caption with at least this CIDEr-D counts as good. The default is the score of people's
    captions on COCO's server."""
    constraints: Annotated[Text | None, Identity.FILE] = None
    """A file of words that captions must contain. `pipeline.evaluation.captioning.constraints` describes the format."""
    metrics: Annotated[tuple[FurtherMetric, ...], Field(max_length=100)] = ()
    """Metrics that are computed in addition to the default metrics."""
    inputs: ScoreInputsSection = ScoreInputsSection()

    def images_at_a_time(self, device: str) -> int:
        """The number of images in one search on a device of the type "cpu" or "cuda".

        The default is larger on a GPU, because there a search of few images waits for the CPU at each step.
        """
        return self.batch_size or (256 if device == "cuda" else 32)

    def check_values(self) -> None:
        if repeated := [name for name in self.metrics if self.metrics.count(name) > 1]:
            raise ValueError(f"evaluation.metrics contains {repeated[0]} more than once; name each metric once")
        decoding = self.decoding
        if self.num_results > self.beam_size and not decoding.sampling:
            raise ValueError(
                f"evaluation.num_results = {self.num_results} is above {self.stated('evaluation.beam_size')}; raise it"
            )
        if decoding.sampling and self.beam_size > 1:
            raise ValueError(
                f"evaluation.decoding.sampling draws captions without beams, and evaluation.beam_size is "
                f"{self.beam_size}; set it to 1"
            )
        if self.beam_size % decoding.beam_groups:
            raise ValueError(
                f"evaluation.decoding.beam_groups = {decoding.beam_groups} does not divide "
                f"{self.stated('evaluation.beam_size')}; all groups have equally many beams"
            )
        if decoding.min_length > self.max_length:
            raise ValueError(
                f"evaluation.decoding.min_length = {decoding.min_length} is above "
                f"{self.stated('evaluation.max_length')}; lower it"
            )
        if self.constraints is not None:
            self.check_takes_constraints("evaluation.constraints")

    def check_takes_constraints(self, source: str) -> None:
        """Raises UserError if the search cannot be combined with constraints: draws, or several groups of beams.

        source: the key or option with the constraints.
        """
        key = "sampling" if self.decoding.sampling else "beam_groups"
        if self.decoding.sampling or self.decoding.beam_groups > 1:
            raise UserError(
                f"{source} is given, and captions with constraints are searched with beams in one group; leave out "
                f"evaluation.decoding.{key}"
            )

    def require_words(self, language: str, tokenizer: str) -> None:
        """Raises UserError if a key does not work with the language or the tokenizer of the captions.

        collapse_repeats and no_open_endings need tokens that are whole words, and no_open_endings needs English.
        """
        keys = {"collapse_repeats": self.collapse_repeats, "decoding.no_open_endings": self.decoding.no_open_endings}
        for key, is_set in keys.items():
            if is_set and tokenizer in PARTS_OF_WORDS:
                raise UserError(
                    f"evaluation.{key} is true, and with data.tokenizer = {tokenizer} tokens can be parts of a word; "
                    "set it to false"
                )
        if self.decoding.no_open_endings and language != ENGLISH:
            raise UserError(
                f"evaluation.decoding.no_open_endings is true, and the list of these words is English, not {language}; "
                "set it to false"
            )


class TrackingSection(Section):
    """The MLflow server or file to which metrics and models are sent."""

    enabled: bool = True
    uri: Annotated[Text, AfterValidator(str.strip)] | None = Field(default=None, repr=False)
    """The address of MLflow. By default a SQLite file in the storage."""
    experiment: Name = "raycap"


class RetrainSection(Section):
    """`raycap retrain` compares a new model with the champion on the images of `split`.

    The new model is promoted if the lower end of the bootstrap interval of the difference in CIDEr-D is above `margin`.
    """

    split: Split | None = None
    """The split on which models are compared, fixed when first used. By default the first of data.test_splits."""
    margin: NonNegativeFloat = 0.0
    """In units of CIDEr-D, in which published scores are near 1.4."""
    confidence: Annotated[float, Field(ge=0.5, lt=1), NUMBER] = 0.95
    """The confidence of the two-sided interval."""
    lease_seconds: Annotated[float, Field(ge=0.01, le=MAX_LEASE_S), NUMBER] = 120
    """After a retraining was killed, the next retraining can start only after this time."""


def _system(model: object) -> str:
    """The value of `name` in a section `model`, which selects the class that checks the section."""
    if isinstance(model, dict):
        return str(model.get("name", "expansionnet_v2"))
    return str(getattr(model, "name", ""))


if TYPE_CHECKING:
    ModelSection = ModelConfig
else:
    ModelSection = Annotated[
        Union[tuple(Annotated[section, Tag(name)] for name, section in MODEL_CONFIGS.items())],  # noqa: UP007
        Discriminator(_system),
    ]
