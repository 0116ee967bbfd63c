"""What `auto` leaves open in a run's configuration. The driver decides it; its workers get a configuration without it.

evaluation.precision, features.compute_dtype: the faster precision, which the first command of a storage measures on its
workers. A run keeps it, so that a resumed run has the same bits.
backbone.gradient_checkpointing: whether the memory needs it, which a dry run shows. Each attempt decides again, because
it may have other GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from raycap.pipeline.cluster.start import start_extraction
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.evaluation.captioning.measured_precision import with_kept_precision, with_precision
from raycap.pipeline.features.precision import extraction_precision


def with_decisions_of(config: RunConfig, earlier: RunConfig) -> RunConfig:
    """The configuration with the precisions of an earlier attempt at the same run, where they are `auto`."""
    if config.features.compute_dtype == "auto":
        config = _with_features_in(config, earlier.features.compute_dtype)
    return with_kept_precision(config, earlier)


def with_precisions(config: RunConfig, address: str | None) -> RunConfig:
    """The configuration with the precisions of its features and of its searches, where they are `auto`.

    What the storage has not decided yet is measured on the Ray at `address`.
    """
    if config.has_backbone and config.features.compute_dtype == "auto":
        backbone, place = replace(config.backbone, weights="none"), config.storage_place / "precision"
        start = partial(start_extraction, config, address)
        config = _with_features_in(config, extraction_precision(backbone, config.features, place, start))
    return with_precision(config, address)


def with_checkpointing(config: RunConfig, checkpointing: bool) -> RunConfig:
    """The configuration with the decision of a dry run: whether the backward pass computes activations again."""
    backbone = replace(config.backbone, gradient_checkpointing=checkpointing)
    return config.model_copy(update={"backbone": backbone})


def _with_features_in(config: RunConfig, precision: str) -> RunConfig:
    """The configuration with features that are computed in a precision."""
    return config.model_copy(update={"features": config.features.model_copy(update={"compute_dtype": precision})})
