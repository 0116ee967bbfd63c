"""From a configuration to a run's folder: data found and named, vocabulary built, sizes and initial weights written.

Everything here is quick (no Ray, no training) and refuses what could not work later, before anything is written.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import platform
from dataclasses import asdict
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
from pipeline.runs.folder import RunFolder, is_alone
from pipeline.runs.identity import code_digest, run_identity
from pipeline.runs.warm_start import warm_start, without_download
from pipeline.runtime.weights import save_weights
from pipeline.storage.atomic import write_json, write_text
from pipeline.version import commit

logger = logging.getLogger(__name__)


PACKAGES = ("torch", "torchvision", "timm", "ray", "mlflow", "numpy", "pyarrow", "pycocoevalcap")


def prepare(config: RunConfig, found: tuple[Dataset, dict[str, str]] | None = None) -> RunFolder:
    """The folder of the run that this configuration and its data are; made when it is not there yet.

    `found` is what `find_data` gave, for a process that prepares many runs on the same data.

    Raises UserError for data that cannot be trained on. Single missing images are left out and counted, up to
    `data.max_bad_fraction`.
    """
    dataset, troubles = found or find_data(config)
    dataset = readable(dataset, troubles, config)
    fingerprint = dataset.fingerprint()
    folder = open_run(config, fingerprint)
    if (folder.path / "run.json").is_file():
        if not (folder.path / "COMPLETE.json").is_file() and folder.dataset.column("uri") != dataset.column("uri"):
            dataset.save(folder.path / "data.arrow")  # the same content, moved to another place
            folder.push("data.arrow")
        return RunFolder(folder.path, folder.home)
    start = warm_start(config)
    train = dataset.split(*config.data.train_splits)
    vocabulary = build_vocabulary(dataset, config.data)
    vocabulary = start.vocabulary(vocabulary) if start else vocabulary
    longest = longest_caption(train, config.data.tokenizer)
    if config.model.max_positions is not None and config.model.max_positions < longest:
        raise UserError(
            f"model.max_positions = {config.model.max_positions} is less than the longest training caption's {longest} "
            "tokens with SOS and EOS; raise it or leave it out"
        )
    longest = config.model.max_positions or longest
    sampled = [stage.sampling.max_length for stage in config.stages if stage.objective == "scst"]
    positions = max(longest, config.evaluation.max_length, start.positions if start else 0, *sampled)
    backbone = None
    if config.has_backbone:
        backbone = initial_backbone(without_download(config) if start else config)
        width, num_tokens = backbone.width, backbone.num_tokens
    else:
        width, num_tokens = feature_width(dataset, config), config.features.max_regions
        torch.manual_seed(config.seed)
    model = _initial_model(config, width, vocabulary, positions)
    if start:
        start.fill(model, backbone)
    folder.path.mkdir(parents=True, exist_ok=True)
    dataset.save(folder.path / "data.arrow")
    write_text(folder.path / "vocabulary.json", vocabulary.to_json())
    write_text(folder.path / "config.yaml", dump_config(config))
    save_weights(model, folder.path / "init" / "model.safetensors")
    if backbone is not None:
        save_weights(backbone, folder.path / "init" / "backbone.safetensors")
    write_json(  # last: its presence says that the folder is whole
        folder.path / "run.json",
        {
            "run_id": folder.run_id,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "data_fingerprint": fingerprint,
            "code": code_digest(),
            "commit": commit(),
            "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "splits": {name: len(dataset.split(name)) for name in dict.fromkeys(dataset.column("split"))},
            "unreadable": troubles,
            "sizes": asdict(model.sizes),
            "num_tokens": num_tokens,
            "parameters": {"model": _count(model), "backbone": 0 if backbone is None else _count(backbone)},
        },
    )
    folder.push("data.arrow", "vocabulary.json", "config.yaml", "init", "run.json")
    return folder


def open_run(config: RunConfig, fingerprint: str) -> RunFolder:
    """The folder of the run that a configuration and its data are, whether it is there or not."""
    name = f"runs/{run_identity(config, fingerprint)}"
    folder = RunFolder(config.working_path / name, config.home(name))
    if folder.home is None:
        return folder
    with is_alone(folder.path) as first:
        if first:  # else the copy is newer than what lies on S3
            folder.pull()
    return folder


def readable(dataset: Dataset, troubles: dict[str, str], config: RunConfig) -> Dataset:
    """The images that can be read; UserError when more than `data.max_bad_fraction` cannot."""
    if len(troubles) > config.data.max_bad_fraction * len(dataset):
        uri, reason = next(iter(troubles.items()))
        raise UserError(
            f"{len(troubles)} of {len(dataset)} images cannot be read, more than data.max_bad_fraction = "
            f"{config.data.max_bad_fraction}; the first is {uri}: {reason}"
        )
    return dataset.known()


def initial_backbone(config: RunConfig) -> Backbone:
    """The backbone as the configuration and the seed make it; UserError for sizes that do not fit."""
    torch.manual_seed(config.seed)
    try:
        return Backbone(config.backbone)
    except (RuntimeError, ValueError, AssertionError, OSError) as error:  # timm has no error class of its own
        raise UserError(f"backbone {config.backbone.name} cannot be made: {' '.join(str(error).split())}") from error


def _initial_model(config: RunConfig, width: int, vocabulary: Vocabulary, positions: int) -> CaptionModel:
    """The model over features of a width, drawn after the backbone from the same seed; with given word vectors."""
    sizes = ModelSizes(width, len(vocabulary), positions, vocabulary.sos, vocabulary.eos, vocabulary.pad)
    file, columns = config.model.word_vectors, config.model.word_vector_width
    if file is None or columns is None:
        return build_model(config.model, sizes)
    vectors, found = read_word_vectors(Path(file).expanduser(), vocabulary.words, columns)
    logger.info(f"words     {file}: {describe_missing(vocabulary.words, found)}")
    model = build_model(config.model, sizes)
    fill_word_vectors(model, torch.from_numpy(vectors), torch.from_numpy(found))
    return model


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
