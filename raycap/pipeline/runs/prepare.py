"""Creates a run's folder from a configuration: data, vocabulary, model sizes and initial weights.

Preparation is quick (no Ray, no training). It checks the data and the configuration before it writes any file.
"""

from __future__ import annotations

import datetime
import logging
import platform
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import find_data, longest_caption
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.captioning.constraints import load_automata
from raycap.pipeline.runs.folder import (
    DECISIONS,
    TOKENS,
    RunFolder,
    RunMetadata,
    open_folder,
    stored_config,
    with_decisions_of,
)
from raycap.pipeline.runs.identity import RESULTS_VERSION, run_identity
from raycap.pipeline.storage.atomic import write_json, write_text
from raycap.pipeline.storage.digests import file_digest, write_digests
from raycap.pipeline.storage.weights import save_weights
from raycap.pipeline.version import commit

logger = logging.getLogger(__name__)

RECORDED_PACKAGES = ("torch", "torchvision", "timm", "ray", "mlflow", "numpy", "pyarrow", "pycocoevalcap")


def prepare(config: RunConfig, data: tuple[Dataset, dict[str, str]] | None = None) -> RunFolder:
    """The folder of the run that this configuration and its data identify, which is created if it does not exist.

    data: the result of `find_data`, given by a process that prepares many runs on the same data.

    Raises UserError for data that cannot be trained on. Unreadable images are left out and counted, as long as they
    are at most `data.max_bad_fraction` of the images.
    """
    dataset, unreadable = data or find_data(config)
    dataset = readable(dataset, unreadable, config)
    folder = open_run(config, dataset.fingerprint())
    if not (folder.path / "run.json").is_file():
        _create(folder, config, dataset, unreadable)
        return folder
    if not _has_data(folder, dataset):
        dataset.save(folder.path / "data.arrow")
        folder.push("data.arrow")
    folder = replace(folder)  # a new object, which has not cached the old data set
    if not (folder.path / "COMPLETE.json").is_file():
        _restore_tokens(folder)
    return folder


def _restore_tokens(folder: RunFolder) -> None:
    """Writes the token files of a run if they are missing or damaged."""
    try:
        folder.tokens()
    except DamagedError as error:
        if (folder.path / TOKENS).exists():
            logger.warning(f"damaged   {str(error).partition(';')[0]}; it is written again")
        folder.write_tokens(folder.vocabulary)


def _has_data(folder: RunFolder, dataset: Dataset) -> bool:
    """Whether data.arrow of an existing run holds the data set that the run was found by.

    It does not if the file is damaged, or if the same images have moved to another location before the run is complete.
    """
    is_complete = (folder.path / "COMPLETE.json").is_file()
    columns = [name for name in dataset.table.column_names if not (is_complete and name == "uri")]
    try:
        return bool(folder.dataset.table.select(columns).equals(dataset.table.select(columns)))
    except DamagedError as error:
        logger.warning(f"damaged   {str(error).partition(';')[0]}; it is written again")
        return False


def open_run(config: RunConfig, fingerprint: str) -> RunFolder:
    """The folder of the run that a configuration and its data identify. The folder may not exist yet.

    The configuration gets the decisions of an earlier attempt at the run, if there was one.
    """
    name = f"runs/{run_identity(config, fingerprint)}"
    folder = replace(open_folder(config.working_path / name, config.home(name), config), written=config)
    if not (folder.path / "config.yaml").is_file():
        return folder
    try:
        earlier = stored_config(folder.path)
    except (DamagedError, UserError) as error:
        logger.warning(f"damaged   {str(error).partition(';')[0]}; its decisions are made again")
        return folder
    return replace(folder, config=with_decisions_of(config, earlier))


def readable(dataset: Dataset, unreadable: dict[str, str], config: RunConfig) -> Dataset:
    """The images that can be read. unreadable: {uri: reason} of the others.

    Raises UserError if more than the share `data.max_bad_fraction` of the images cannot be read.
    """
    if len(unreadable) > config.data.max_bad_fraction * len(dataset):
        uri, reason = next(iter(unreadable.items()))
        raise UserError(
            f"{len(unreadable)} of {len(dataset)} images cannot be read, more than "
            f"{config.data.stated('data.max_bad_fraction')}; the first is {uri}: {reason}"
        )
    return dataset.readable()


def _create(folder: RunFolder, config: RunConfig, dataset: Dataset, unreadable: dict[str, str]) -> None:
    """Writes the files of a new run."""
    from raycap.pipeline.runs.initial_weights import begin

    start = begin(config, dataset)
    vocabulary, parts = start.vocabulary, start.parts
    folder.path.mkdir(parents=True, exist_ok=True)
    dataset.save(folder.path / "data.arrow")
    write_text(folder.path / "vocabulary.json", vocabulary.to_json())
    folder.write_config()
    for part, module in parts.items():
        save_weights(module, folder.path / "init" / f"{part}.safetensors")
    write_digests(folder.path / "init")
    counts = {part: sum(parameter.numel() for parameter in module.parameters()) for part, module in parts.items()}
    metadata = RunMetadata(
        run_id=folder.run_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        data_fingerprint=dataset.fingerprint(),
        results_version=RESULTS_VERSION,
        commit=commit(),
        versions={name: _version_of(name) for name in RECORDED_PACKAGES} | {"python": platform.python_version()},
        splits=dataset.split_sizes(),
        unreadable=unreadable,
        sizes=start.sizes,
        num_tokens=start.num_tokens,
        parameters={"backbone": 0} | counts,
        vocabulary=file_digest(folder.path / "vocabulary.json"),
    )
    folder.push("data.arrow", "vocabulary.json", "config.yaml", DECISIONS, "init")
    folder.write_tokens(vocabulary)
    write_json(folder.path / "run.json", asdict(metadata))  # written last, because it marks the folder as complete
    folder.push("run.json")


def check_constraints(config: RunConfig, dataset: Dataset, vocabulary: Vocabulary) -> None:
    """Raises UserError if the configuration's constraint file has words for test images outside the vocabulary."""
    if config.evaluation.constraints is not None:
        images = dataset.split(*config.data.test_splits).column("image_id")
        load_automata(Path(config.evaluation.constraints), images, vocabulary)


def max_positions(config: RunConfig, dataset: Dataset, vocabulary: Vocabulary) -> int:
    """The number of token positions that is enough for training captions, SCST samples and evaluation.

    Raises UserError if the configured number is too small for the longest training caption.
    """
    longest = longest_caption(dataset.split(*config.data.train_splits), vocabulary)
    configured = config.model.max_positions
    if configured is not None and configured < longest:
        raise UserError(
            f"model.max_positions = {configured} is less than the longest training caption's {longest} tokens with SOS "
            "and EOS; raise it or leave it out"
        )
    sampled_lengths = [stage.sampling.max_length for stage in config.stages if stage.objective == "scst"]
    return max(configured or longest, config.evaluation.max_length, *sampled_lengths)


def _version_of(package: str) -> str:
    """The version of an installed package, else "missing"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
