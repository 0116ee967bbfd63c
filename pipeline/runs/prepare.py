"""Creates a run's folder from a configuration: data, vocabulary, model sizes and initial weights.

Preparation is quick (no Ray, no training). It checks the data and the configuration before it writes any file.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from models.backbone import Backbone
from models.base import CaptionModel
from models.config import ModelSizes
from models.registry import build_model
from models.token_embeddings import fill_word_vectors
from pipeline.config.load import dump_config
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset, build_vocabulary, longest_caption
from pipeline.data.loading import find_data
from pipeline.data.vocabulary import Vocabulary
from pipeline.data.word_vectors import describe_missing, read_word_vectors
from pipeline.errors import UserError
from pipeline.features.regions import feature_width
from pipeline.runs.folder import RunFolder, RunMetadata, is_alone
from pipeline.runs.identity import code_digest, run_identity
from pipeline.runs.warm_start import WarmStart, warm_start, without_download
from pipeline.storage.atomic import write_text
from pipeline.storage.weights import save_weights
from pipeline.version import commit

logger = logging.getLogger(__name__)


RECORDED_PACKAGES = ("torch", "torchvision", "timm", "ray", "mlflow", "numpy", "pyarrow", "pycocoevalcap")


@dataclass(frozen=True)
class _InitialState:
    """The modules and the vocabulary that a run starts with."""

    vocabulary: Vocabulary
    model: CaptionModel
    backbone: Backbone | None  # None: the run reads region features
    num_tokens: int  # image tokens per image; for region features the largest number of regions


def prepare(config: RunConfig, data: tuple[Dataset, dict[str, str]] | None = None) -> RunFolder:
    """The folder of the run that this configuration and its data identify, which is created if it does not exist.

    data: the result of `find_data`, given by a process that prepares many runs on the same data.

    Raises UserError for data that cannot be trained on. Unreadable images are left out and counted, as long as they
    are at most `data.max_bad_fraction` of the images.
    """
    dataset, unreadable = data or find_data(config)
    dataset = readable(dataset, unreadable, config)
    fingerprint = dataset.fingerprint()
    folder = open_run(config, fingerprint)
    if (folder.path / "run.json").is_file():
        is_complete = (folder.path / "COMPLETE.json").is_file()
        if not is_complete and folder.dataset.column("uri") != dataset.column("uri"):
            dataset.save(folder.path / "data.arrow")  # the same images have moved to another location
            folder.push("data.arrow")
        return RunFolder(folder.path, folder.home)  # a new object, which has not cached the old data set
    state = _initial_state(config, dataset)
    _write_initial_state(folder, config, dataset, state)
    RunMetadata(
        run_id=folder.run_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        data_fingerprint=fingerprint,
        code=code_digest(),
        commit=commit(),
        versions={name: _version(name) for name in RECORDED_PACKAGES} | {"python": platform.python_version()},
        splits={name: len(dataset.split(name)) for name in dict.fromkeys(dataset.column("split"))},
        unreadable=unreadable,
        sizes=state.model.sizes,
        num_tokens=state.num_tokens,
        parameters={
            "model": _num_parameters(state.model),
            "backbone": 0 if state.backbone is None else _num_parameters(state.backbone),
        },
    ).save(folder.path / "run.json")  # written last, because run.json marks the folder as complete
    folder.push("data.arrow", "vocabulary.json", "config.yaml", "init", "run.json")
    return folder


def open_run(config: RunConfig, fingerprint: str) -> RunFolder:
    """The folder of the run that a configuration and its data identify. The folder may not exist yet."""
    name = f"runs/{run_identity(config, fingerprint)}"
    folder = RunFolder(config.working_path / name, config.home(name))
    if folder.home is None:
        return folder
    with is_alone(folder.path) as alone:
        if alone:  # otherwise another process writes to the local copy, which is then newer than the one on S3
            folder.pull()
    return folder


def readable(dataset: Dataset, unreadable: dict[str, str], config: RunConfig) -> Dataset:
    """The readable images. UserError if more than `data.max_bad_fraction` are not. unreadable: {uri: reason}."""
    if len(unreadable) > config.data.max_bad_fraction * len(dataset):
        uri, reason = next(iter(unreadable.items()))
        raise UserError(
            f"{len(unreadable)} of {len(dataset)} images cannot be read, more than data.max_bad_fraction = "
            f"{config.data.max_bad_fraction}; the first is {uri}: {reason}"
        )
    return dataset.readable()


def initial_backbone(config: RunConfig) -> Backbone:
    """The backbone of a configuration, with weights drawn from the seed or downloaded. UserError when that fails."""
    torch.manual_seed(config.seed)
    try:
        return Backbone(config.backbone)
    except (RuntimeError, ValueError, AssertionError, OSError) as error:  # timm raises all of these
        raise UserError(f"backbone {config.backbone.name} cannot be made: {' '.join(str(error).split())}") from error


def _initial_state(config: RunConfig, dataset: Dataset) -> _InitialState:
    """Draws the weights of the backbone and then of the model from the seed, then copies those of `init_from`."""
    start = warm_start(config)
    vocabulary = build_vocabulary(dataset, config.data)
    vocabulary = start.extend_vocabulary(vocabulary) if start else vocabulary
    max_positions = _max_positions(config, dataset, start)
    backbone = None
    if config.has_backbone:
        backbone = initial_backbone(without_download(config) if start else config)
        width, num_tokens = backbone.width, backbone.num_tokens
    else:
        width, num_tokens = feature_width(dataset, config), config.features.max_regions
        torch.manual_seed(config.seed)
    sizes = ModelSizes(width, len(vocabulary), max_positions, vocabulary.sos, vocabulary.eos, vocabulary.pad)
    model = _initial_model(config, sizes, vocabulary)
    if start:
        start.copy_weights(model, backbone)
    return _InitialState(vocabulary, model, backbone, num_tokens)


def _max_positions(config: RunConfig, dataset: Dataset, start: WarmStart | None) -> int:
    """The number of positions that is enough for training captions, SCST samples, evaluation and the warm start."""
    longest = longest_caption(dataset.split(*config.data.train_splits), config.data.tokenizer)
    if config.model.max_positions is not None and config.model.max_positions < longest:
        raise UserError(
            f"model.max_positions = {config.model.max_positions} is less than the longest training caption's {longest} "
            "tokens with SOS and EOS; raise it or leave it out"
        )
    sampled_lengths = [stage.sampling.max_length for stage in config.stages if stage.objective == "scst"]
    warm_start_positions = start.max_positions if start else 0
    return max(
        config.model.max_positions or longest, config.evaluation.max_length, warm_start_positions, *sampled_lengths
    )


def _initial_model(config: RunConfig, sizes: ModelSizes, vocabulary: Vocabulary) -> CaptionModel:
    """The model with weights drawn from torch's current random state and, if configured, with word vectors."""
    file, columns = config.model.word_vectors, config.model.word_vector_width
    if file is None or columns is None:
        return build_model(config.model, sizes)
    vectors, has_vector = read_word_vectors(Path(file).expanduser(), vocabulary.words, columns)
    logger.info(f"words     {file}: {describe_missing(vocabulary.words, has_vector)}")
    model = build_model(config.model, sizes)
    fill_word_vectors(model, torch.from_numpy(vectors), torch.from_numpy(has_vector))
    return model


def _write_initial_state(folder: RunFolder, config: RunConfig, dataset: Dataset, state: _InitialState) -> None:
    """Writes every file of a new run except run.json."""
    folder.path.mkdir(parents=True, exist_ok=True)
    dataset.save(folder.path / "data.arrow")
    write_text(folder.path / "vocabulary.json", state.vocabulary.to_json())
    write_text(folder.path / "config.yaml", dump_config(config))
    save_weights(state.model, folder.path / "init" / "model.safetensors")
    if state.backbone is not None:
        save_weights(state.backbone, folder.path / "init" / "backbone.safetensors")


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _version(name: str) -> str:
    """The version of an installed package, else "missing"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
