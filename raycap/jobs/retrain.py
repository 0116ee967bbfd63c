"""`raycap retrain`: trains on new data and promotes the model if it is better. A schedule can run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from raycap.jobs.cluster import check_address, start_ray, with_precision
from raycap.jobs.cluster_captions import SplitTask, caption_on_cluster
from raycap.jobs.image_tasks import image_reader
from raycap.jobs.options import Address, Config, Set
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle
from raycap.pipeline.features.extraction import features_for_bundles
from raycap.pipeline.retrain.decision import FoundData, Trained, rollback
from raycap.pipeline.retrain.decision import retrain as retrain_once
from raycap.pipeline.runs.check import Reader
from raycap.pipeline.runs.preflight import check_before_writing, check_storage
from raycap.pipeline.runtime.log import indented
from raycap.pipeline.storage.path import StoragePath


@dataclass(frozen=True)
class RayWork:
    """Trains and captions on a Ray cluster, for `pipeline.retrain.decision`."""

    address: str | None

    def reader(self, config: RunConfig) -> Reader:
        """Tasks on the cluster; threads without one."""
        return image_reader(config, self.address)

    def train(self, config: RunConfig, data: FoundData) -> Trained:
        """Runs the same steps as `raycap run`, from the extraction of new images to the registration."""
        from raycap.jobs.run import run
        from raycap.pipeline.runs.run_bundle import local_bundle

        with indented():
            folder = run(config, self.address, data)
        return Trained(folder.run_id, local_bundle(folder))

    def caption(
        self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig
    ) -> dict[int, str]:
        """The best caption of each image by its id, without images that cannot be read or have no usable features.

        Each worker fetches the bundle.
        """
        config = with_precision(config, self.address)
        start_ray(config, self.address, "captions")
        images, store = features_for_bundles(config, part)
        models, splits = [StoredBundle(bundle, files)], {"held out": SplitTask(images)}
        captioned = caption_on_cluster(models, splits, config, store=store, with_alignment=False)["held out"]
        return {image: best.caption for image, best in captioned.best.items()}


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
    check_address(address)  # `start_ray` looks at the resources, if there is something to train
    check_before_writing(run_config)
    return retrain_once(run_config, RayWork(address))
