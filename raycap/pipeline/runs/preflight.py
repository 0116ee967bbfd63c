"""Checks of the storage, of named files and of the model's sizes, before a command writes or starts anything.

A mistake that the user can correct raises UserError before any file has been written, so no file is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from raycap.models.config import ModelSizes
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SYNTHETIC
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import longest_caption
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.data.word_vectors import check_word_vectors
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import REQUIRED_FILES
from raycap.pipeline.evaluation.captioning.constraints import read_constraints
from raycap.pipeline.evaluation.scores.metrics import ScoreInputs
from raycap.pipeline.features.regions import open_regions, region_file
from raycap.pipeline.storage.atomic import require_writable
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import StorageError

if TYPE_CHECKING:
    from raycap.models.base import CaptionModel
    from raycap.models.encoders.backbone import Backbone

USUAL_WIDTH, USUAL_POSITIONS, USUAL_WORDS = 64, 74, 100  # for a model that is made before the data are read


def check_before_writing(config: RunConfig) -> None:
    """Raises UserError if the storage, a named file or the model's sizes would make the command fail later.

    Settings that depend on the data are checked later, when the data have been read.
    """
    check_storage(config)
    check_files(config)
    require_possible(config)


def check_storage(config: RunConfig) -> None:
    """Raises UserError if the storage cannot be written, S3 does not answer, or bucket or credentials are wrong.

    S3 is asked first and must answer within seconds, because later requests are repeated for minutes.
    """
    with storage_errors("storage.endpoint_url", "create it, or correct storage or data.root"):
        for uri in (config.storage.uri, config.data.root):
            if uri is not None:
                storage_path(uri, config.storage.options).require_answer()
    name = "storage" if "uri" in config.storage.model_fields_set else "storage (results, the default)"
    require_writable("RAYCAP_CACHE" if config.home("") else name, config.working_path)


@contextmanager
def storage_errors(endpoint: str, remedy: str) -> Iterator[None]:
    """Turns errors of S3 in the context into UserError, for example no answer, no such bucket, wrong credentials.

    endpoint: the setting with the server's address. remedy: what to do if the bucket does not exist.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: {error.strerror}; {remedy}") from error
    except StorageError as error:
        advice = f"check {endpoint}, the network and the credentials (AWS_ACCESS_KEY_ID or a profile)"
        raise UserError(f"{error}; {advice}") from error
    except ValueError as error:  # boto3 refuses the address
        raise UserError(f"{endpoint}: {error}; give a URL such as https://s3.example.org") from error


def check_files(config: RunConfig) -> None:
    """Raises UserError if a file that the configuration names is missing or of another kind."""
    model, features = config.model, config.features
    _require_file("data.extra_vocabulary", config.data.extra_vocabulary)
    _require_file("model.word_vectors", model.word_vectors)
    if model.word_vectors is not None and model.word_vector_width is not None:
        check_word_vectors(Path(model.word_vectors).expanduser(), model.word_vector_width)
    if features.hdf5 not in (None, SYNTHETIC):
        with open_regions(region_file(config)):
            pass
    if config.has_backbone and config.backbone.weights not in ("none", "pretrained"):
        _require_file("backbone.weights", config.backbone.weights)
    if config.evaluation.constraints is not None:
        read_constraints(Path(config.evaluation.constraints))
    check_score_inputs(config)
    if config.init_from is not None:
        folder = storage_path(config.init_from, config.storage.options)
        try:
            folder.require_answer()
            missing = [name for name in REQUIRED_FILES if not (folder / name).exists()]
        except OSError as error:
            raise UserError(f"init_from: {folder} cannot be read: {error}") from error
        if missing:
            raise UserError(f"init_from: {folder} is not a model bundle: it lacks {missing[0]}; give a bundle's folder")


def check_score_inputs(config: RunConfig) -> None:
    """Raises UserError if a file of `evaluation.inputs` is missing or cannot be read."""
    for key, file in config.evaluation.inputs.files().items():
        _require_file(key, file)
    ScoreInputs.read(config.evaluation.inputs, config.data.language)


def _require_file(key: str, name: str | None) -> None:
    """Raises UserError if the file of a configuration key cannot be read. name: the path, or None if it is not set."""
    if name is None:
        return
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{key}: {path} does not exist or is not a file; give the path of a file, or leave the key out")
    if not os.access(path, os.R_OK):
        raise UserError(f"{key}: {path} cannot be read; correct its permissions")


def max_positions(config: RunConfig, dataset: Dataset, vocabulary: Vocabulary) -> int:
    """The number of token positions that the model needs for training captions, SCST samples and evaluation.

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


def initial_backbone(config: RunConfig, *, with_weights: bool = True) -> Backbone:
    """The backbone with the configured weights. with_weights: if false, the weights are drawn from the seed instead.

    Raises UserError if the backbone cannot be made, and JobFailedError if the pretrained weights cannot be downloaded.
    """
    import torch

    from raycap.models.encoders.backbone import Backbone, image_transform

    torch.manual_seed(config.seed)
    try:
        image_transform(config.backbone)  # called only for its error, if the configured transform is unknown
        return Backbone(config.backbone, with_weights=with_weights)
    except ConnectionError as error:
        raise JobFailedError(str(error)) from error
    except Exception as error:  # timm and its libraries may raise any error
        reason = " ".join(str(error).split())
        if isinstance(error, OSError) and error.filename and config.backbone.weights == "pretrained":
            reason += "; set HF_HOME and TORCH_HOME to folders with space that can be written"
        raise UserError(f"backbone {config.backbone.name} cannot be made: {reason}") from error


def require_possible(config: RunConfig) -> None:
    """Raises UserError if a stage's `freeze` or `layer_decay` do not fit the parameters of the model.

    The check needs little memory, because it makes the model on torch's device "meta", without weights.
    """
    import torch

    backbone = None
    if config.has_backbone:
        with torch.device("meta"):
            backbone = initial_backbone(config, with_weights=False)
    require_possible_stages(config, require_possible_model(config), backbone)


def require_possible_stages(config: RunConfig, model: CaptionModel, backbone: Backbone | None) -> None:
    """Raises UserError if a stage's `freeze` or `layer_decay` do not fit the parameters of these modules."""
    from raycap.models.captioner import Captioner

    for stage in config.stages:
        trained = backbone if stage.train_backbone else None
        try:
            Captioner(model, trained).frozen_by(stage.freeze)
            if trained is not None and stage.optimizer.layer_decay < 1:
                trained.num_layers_above()
        except ValueError as error:
            raise UserError(f"stages.{stage.name}: {error}") from error


def require_possible_model(config: RunConfig) -> CaptionModel:
    """Returns the captioning model without memory for its weights. Raises ValueError if its settings do not fit.

    Neither the data nor the backbone are known yet, so the model gets usual sizes for what depends on them.
    """
    from raycap.models.captioner import model_on_meta

    positions = config.model.max_positions or USUAL_POSITIONS
    sizes = ModelSizes(USUAL_WIDTH, USUAL_WORDS, positions, sos=0, eos=1, pad=2)
    return model_on_meta(config.model, sizes)
