"""From a configuration to a run's folder: data found and named, vocabulary built, sizes and initial weights written.

Everything here is quick (no Ray, no training) and refuses what could not work later, before anything is written.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import asdict

import torch

from models.backbone import Backbone
from models.base import CaptionModel
from models.config import ModelSizes
from models.registry import build_model
from pipeline.commit import commit
from pipeline.config import RunConfig, dump_config
from pipeline.dataset import Dataset, build_vocabulary, longest_caption
from pipeline.errors import UserError
from pipeline.inputs import find_data
from pipeline.run_folder import RunFolder, code_digest, is_alone, run_identity, write_json, write_text
from pipeline.text import Vocabulary
from pipeline.weights import save_weights

PACKAGES = ("torch", "torchvision", "timm", "ray", "mlflow", "numpy", "pyarrow", "pycocoevalcap")


def prepare(
    config: RunConfig, say: Callable[[str], None], found: tuple[Dataset, dict[str, str]] | None = None
) -> RunFolder:
    """The folder of the run that this configuration and its data are; made when it is not there yet.

    `found` is what `find_data` gave, for a process that prepares many runs on the same data.

    Raises UserError for data that cannot be trained on. Single missing images are left out and counted, up to
    `data.max_bad_fraction`.
    """
    if config.features.hdf5 is not None:
        raise UserError(
            f"features.hdf5 = {config.features.hdf5}: training takes a backbone's grid features only so far; "
            "leave it out (`raycap extract` imports region features into the store)"
        )
    dataset, troubles = found or find_data(config, say)
    dataset = readable(dataset, troubles, config)
    fingerprint = dataset.fingerprint()
    folder = open_run(config, fingerprint)
    if (folder.path / "run.json").is_file():
        if not (folder.path / "COMPLETE.json").is_file() and folder.dataset.column("uri") != dataset.column("uri"):
            dataset.save(folder.path / "data.arrow")  # the same content, moved to another place
            folder.push("data.arrow")
        return RunFolder(folder.path, folder.home)
    train = dataset.split(*config.data.train_splits)
    vocabulary = build_vocabulary(dataset, config.data)
    longest = longest_caption(train, config.data.tokenizer)
    if config.model.max_positions is not None and config.model.max_positions < longest:
        raise UserError(
            f"model.max_positions = {config.model.max_positions} is less than the longest training caption's {longest} "
            "tokens with SOS and EOS; raise it or leave it out"
        )
    longest = config.model.max_positions or longest
    sampled = [stage.sampling.max_length for stage in config.stages if stage.objective == "scst"]
    positions = max(longest, config.evaluation.max_length, *sampled)
    backbone = initial_backbone(config)
    model = _initial_model(config, backbone, vocabulary, positions)
    folder.path.mkdir(parents=True, exist_ok=True)
    dataset.save(folder.path / "data.arrow")
    write_text(folder.path / "vocabulary.json", vocabulary.to_json())
    write_text(folder.path / "config.yaml", dump_config(config))
    save_weights(model, folder.path / "init" / "model.safetensors")
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
            "num_tokens": backbone.num_tokens,
            "parameters": {"model": _count(model), "backbone": _count(backbone)},
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


def _initial_model(config: RunConfig, backbone: Backbone, vocabulary: Vocabulary, positions: int) -> CaptionModel:
    """The model, drawn after the backbone from the same seed."""
    sizes = ModelSizes(backbone.width, len(vocabulary), positions, vocabulary.sos, vocabulary.eos, vocabulary.pad)
    return build_model(config.model, sizes)


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
