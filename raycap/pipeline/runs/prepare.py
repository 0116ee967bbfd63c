"""Creates a run's folder from a configuration: data, vocabulary, model sizes and initial weights.

The weights are drawn from the seed, read from files, or copied from a model bundle with its vocabulary (`init_from`).
Preparation checks the data and the configuration before it writes any file.
"""

from __future__ import annotations

import datetime
import logging
import platform
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raycap.models.config import ModelSizes
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import build_vocabulary, find_data
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.data.word_vectors import describe_missing, read_word_vectors
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, fetched, load_bundle
from raycap.pipeline.evaluation.captioning.constraints import load_automata
from raycap.pipeline.features.regions import feature_width
from raycap.pipeline.runs.folder import (
    DECISIONS,
    RunFolder,
    RunMetadata,
    open_folder,
    stored_config,
    with_decisions_of,
)
from raycap.pipeline.runs.identity import RESULTS_VERSION, run_identity
from raycap.pipeline.runs.preflight import initial_backbone, max_positions, require_possible_stages
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.atomic import write_json, write_text
from raycap.pipeline.storage.digests import write_digests
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.weights import save_weights
from raycap.pipeline.version import commit, version_of

if TYPE_CHECKING:
    from torch import nn

    from raycap.models.base import CaptionModel
    from raycap.models.encoders.backbone import Backbone

logger = logging.getLogger(__name__)

RECORDED_PACKAGES = ("torch", "torchvision", "timm", "ray", "mlflow", "numpy", "pyarrow", "pycocoevalcap")
# Model keys that may differ from the bundle of `init_from`, because the bundle's weights fit for any of their values.
MAY_DIFFER = {"dropout", "expansion_dropout", "max_positions"}


def prepare(config: RunConfig, data: tuple[Dataset, dict[str, str]] | None = None) -> RunFolder:
    """Returns the folder of the run that a configuration and its data identify. Creates a missing folder.

    data: the result of `find_data`. By default, reads the data.

    Unreadable images are left out. Raises UserError if the data cannot be used for training, or if more than
    `data.max_bad_fraction` of the images cannot be read.
    """
    all_images, unreadable = find_data(config) if data is None else data
    dataset = readable(all_images, unreadable, config)
    folder = open_run(config, dataset.fingerprint())
    if not (folder.path / "run.json").is_file():
        _create(folder, config, dataset, unreadable)
        return folder
    is_complete = (folder.path / "COMPLETE.json").is_file()
    if not _has_data(folder, dataset, is_complete):
        dataset.save(folder.path / "data.arrow")
        folder.push("data.arrow")
    return replace(folder)  # a new object, because this one may have cached the old data set


def _has_data(folder: RunFolder, dataset: Dataset, is_complete: bool) -> bool:
    """True if data.arrow of an existing run contains this data set, and False if the file is damaged.

    If the run is complete, the URIs of the images are not compared, because its images may have moved.
    """
    columns = [name for name in dataset.table.column_names if not (is_complete and name == "uri")]
    try:
        return bool(folder.dataset.table.select(columns).equals(dataset.table.select(columns)))
    except DamagedError as error:
        logger.warning(f"damaged   {str(error).partition(';')[0]}; it is written again")
        return False


def open_run(config: RunConfig, fingerprint: str) -> RunFolder:
    """The folder of the run that a configuration and its data identify, even if the folder does not exist yet.

    If an earlier attempt at the run has decided on precisions, they replace `auto` in the folder's configuration.
    fingerprint: of the data set.
    """
    name = f"runs/{run_identity(config, fingerprint)}"
    folder = replace(open_folder(config.working_path / name, config.home(name), config), written=config)
    if not (folder.path / "config.yaml").is_file():
        return folder
    try:
        return replace(folder, config=with_decisions_of(config, stored_config(folder.path, config.variables)))
    except (DamagedError, UserError) as error:
        logger.warning(f"damaged   {str(error).partition(';')[0]}; its decisions are made again")
        return folder


def readable(dataset: Dataset, unreadable: dict[str, str], config: RunConfig) -> Dataset:
    """The data set without the images that cannot be read. unreadable: {URI: reason} of those images.

    Raises UserError if more than the fraction `data.max_bad_fraction` of the images cannot be read.
    """
    if len(unreadable) > config.data.max_bad_fraction * len(dataset):
        uri, reason = next(iter(unreadable.items()))
        raise UserError(
            f"{len(unreadable)} of {len(dataset)} images cannot be read, more than "
            f"{config.data.stated('data.max_bad_fraction')}; the first is {shown(uri)}: {reason}"
        )
    return dataset.readable()


def _create(folder: RunFolder, config: RunConfig, dataset: Dataset, unreadable: dict[str, str]) -> None:
    """Writes the files of a new run."""
    vocabulary, model, backbone = _initial_parts(config, dataset)
    require_possible_stages(config, model, backbone)
    parts: dict[str, nn.Module] = {"model": model}
    if backbone is not None:
        parts["backbone"] = backbone
    folder.path.mkdir(parents=True, exist_ok=True)
    dataset.save(folder.path / "data.arrow")
    write_text(folder.path / "vocabulary.json", vocabulary.to_json())
    folder.write_config()
    for part, module in parts.items():
        save_weights(module, folder.path / "init" / f"{part}.safetensors")
    write_digests(folder.path / "init")
    counts = {part: sum(each.numel() for each in module.parameters()) for part, module in parts.items()}
    metadata = RunMetadata(
        run_id=folder.run_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        data_fingerprint=dataset.fingerprint(),
        results_version=RESULTS_VERSION,
        commit=commit(),
        versions={name: version_of(name) for name in RECORDED_PACKAGES} | {"python": platform.python_version()},
        splits=dataset.split_sizes(),
        unreadable=unreadable,
        sizes=model.sizes,
        num_tokens=config.features.max_regions if backbone is None else backbone.num_tokens,
        parameters={"backbone": 0} | counts,
    )
    folder.push("data.arrow", "vocabulary.json", "config.yaml", DECISIONS, "init")
    write_json(folder.path / "run.json", asdict(metadata))  # written last, because it marks the folder as complete
    folder.push("run.json")


def _initial_parts(config: RunConfig, dataset: Dataset) -> tuple[Vocabulary, CaptionModel, Backbone | None]:
    """The vocabulary, model and backbone of a new run. A run with region features has no backbone.

    Weights are drawn from one seeded sequence, those of the backbone first. Raises UserError if the configuration does
    not fit the data or the bundle of `init_from`.
    """
    import torch

    label, bundle = f"init_from = {config.init_from}", None
    vocabulary, bundle_positions = build_vocabulary(dataset, config.data), 0
    if config.init_from is not None:
        try:
            bundle = load_bundle(fetched(storage_path(config.init_from, config.storage.options)))
        except ValueError as error:
            raise UserError(f"init_from: {error}") from error
        vocabulary = _extended(bundle.vocabulary, vocabulary, label)
        bundle_positions = bundle.captioner.model.sizes.max_positions
    num_positions = max(max_positions(config, dataset, vocabulary), bundle_positions)
    backbone = None
    if config.has_backbone:
        backbone = initial_backbone(config, with_weights=bundle is None)  # else the bundle has the weights
        width = backbone.width
    else:
        width = feature_width(dataset, config)
        torch.manual_seed(config.seed)
    if config.evaluation.constraints is not None:  # raises UserError for a word that the vocabulary lacks
        images = dataset.split(*config.data.test_splits).source_ids()
        load_automata(Path(config.evaluation.constraints), images, vocabulary)
    sizes = ModelSizes(width, len(vocabulary), num_positions, vocabulary.sos, vocabulary.eos, vocabulary.pad)
    model = _initial_model(config, sizes, vocabulary)
    if bundle is not None:
        _copy_bundle(bundle, model, backbone, label)
    return vocabulary, model, backbone


def _initial_model(config: RunConfig, sizes: ModelSizes, vocabulary: Vocabulary) -> CaptionModel:
    """The model with weights drawn from torch's current random state and, if configured, with word vectors."""
    import torch

    from raycap.models.captioner import build_model
    from raycap.models.layers import fill_word_vectors

    file, columns = config.model.word_vectors, config.model.word_vector_width
    if file is None or columns is None:
        return build_model(config.model, sizes)
    vectors, has_vector = read_word_vectors(Path(file).expanduser(), vocabulary.words, columns)
    logger.info(f"words     {file}: {describe_missing(vocabulary.words, has_vector)}")
    model = build_model(config.model, sizes)
    fill_word_vectors(model, torch.from_numpy(vectors), torch.from_numpy(has_vector))
    return model


def _extended(bundled: Vocabulary, vocabulary: Vocabulary, label: str) -> Vocabulary:
    """A vocabulary with the bundle's words, which keep their ids, and then the words that only `vocabulary` has.

    Raises UserError if the two vocabularies were made by different tokenizers. label: the bundle's name in messages.
    """
    if bundled.tokenizer != vocabulary.tokenizer:
        raise UserError(
            f"data.tokenizer is {vocabulary.tokenizer} and the words of {label} were made by {bundled.tokenizer}; "
            "set the same"
        )
    if bundled.subwords is not None:  # byte-level pieces can spell any caption, so none is added
        return bundled
    new_words = [word for word in vocabulary.words if word not in bundled.ids]
    return Vocabulary((*bundled.words, *new_words), bundled.tokenizer)


def _copy_bundle(bundle: Bundle, model: CaptionModel, backbone: Backbone | None, label: str) -> None:
    """Copies a bundle's weights into a run's new modules. Rows of new words and positions keep their initial values.

    If the run reads region features, the bundle's backbone is ignored. Raises UserError if the two models differ in
    configuration or in shapes. label: the bundle's name in messages.
    """
    captioner = bundle.captioner
    if backbone is not None and captioner.backbone is None:
        raise UserError(f"{label}: this bundle has no backbone; give one that captions images")
    config, bundled = asdict(model.config), asdict(captioner.model.config)
    for key in ("name", *sorted(config.keys() - MAY_DIFFER)):  # the name first, because it decides the other keys
        if config[key] != bundled.get(key):
            raise UserError(f"model.{key} is {config[key]} and that of {label} is {bundled.get(key)}; set the same")
    if backbone is not None and captioner.backbone is not None:
        _copy_tensors(captioner.backbone, backbone, growing=(), label=f"{label}: backbone")
    sizes = captioner.model.sizes
    growing = (sizes.vocabulary_size, sizes.max_positions)
    _copy_tensors(captioner.model, model, growing=growing, label=f"{label}: model")


def _copy_tensors(source: nn.Module, target: nn.Module, *, growing: Collection[int], label: str) -> None:
    """Copies every tensor of `source` into `target`. Raises UserError if their names or shapes differ.

    growing: sizes of dimensions in `source` that may be larger in `target`. label: the start of messages.
    """
    from_tensors, to_tensors = source.state_dict(), target.state_dict()  # detached, so they can be written to
    unmatched = sorted(from_tensors.keys() ^ to_tensors.keys())
    if unmatched:
        raise UserError(f"{label} has other parts than the configuration asks for, first {unmatched[0]}; set the same")
    for name, tensor in from_tensors.items():
        copy = to_tensors[name]
        fits = len(copy.shape) == len(tensor.shape) and all(
            new == old or (old in growing and new > old) for new, old in zip(copy.shape, tensor.shape, strict=True)
        )
        if not fits:
            raise UserError(
                f"{label}.{name} has shape {tuple(tensor.shape)} and the configuration asks for {tuple(copy.shape)}; "
                "set the same sizes"
            )
        copy[tuple(slice(size) for size in tensor.shape)] = tensor  # rows of new words and positions come last
