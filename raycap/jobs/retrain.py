"""`raycap retrain`: trains on new data and promotes the model if it is better, for example on a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.options import Address, Config, Set
from raycap.jobs.run import run
from raycap.pipeline.cluster.start import check_address, with_processors
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle
from raycap.pipeline.evaluation.comparison.protocol import SEARCH_KEYS
from raycap.pipeline.evaluation.evaluate import Options, evaluate
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.retrain.retraining import HELD_OUT, FoundData, rollback
from raycap.pipeline.retrain.retraining import retrain as retrain_once
from raycap.pipeline.runs.delivery import local_bundle
from raycap.pipeline.runs.preflight import check_before_writing, check_storage
from raycap.pipeline.storage.path import StoragePath


@dataclass(frozen=True)
class RayWork:
    """Trains and captions on a Ray cluster, for `pipeline.retrain.retraining`."""

    address: str | None

    def train(self, config: RunConfig, data: FoundData) -> Path:
        """Runs the same steps as `raycap run`, from the extraction of new images to the registration."""
        return local_bundle(run(config, self.address, data))

    def evaluate(self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig) -> SplitScores:
        """CIDEr-D of a bundle on the held-out images. Raises OSError when a file does not have its digest."""
        StoredBundle(bundle, files).fetch()
        search = {key: getattr(config.evaluation, key) for key in SEARCH_KEYS}  # whatever the bundle records
        config = with_processors(config, self.address)
        settings = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=search)})
        scores = evaluate([bundle], {HELD_OUT: part}, settings, self.address, Options(metrics=("CIDEr-D",)))
        return scores[HELD_OUT]


def retrain(
    config: Config,
    set_: Set = None,
    roll_back: Annotated[bool, typer.Option("--rollback", help="Go back to the previous champion.")] = False,
    address: Address = None,
) -> int:
    """Train on new data and keep the better model.

    A schedule can run this at any time, also twice at once. The exit code is 0 when there is nothing to do, and 1 for
    unusable data, which change nothing.

    Example: raycap retrain retrain_demo
    """
    run_config = load_config(config, set_ or ())
    if roll_back:
        check_storage(run_config)
        return rollback(run_config)
    check_address(address)  # `start_ray` checks the resources later, if there is something to train
    check_before_writing(run_config)
    return retrain_once(run_config, RayWork(address))
