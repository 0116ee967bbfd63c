"""`raycap retrain`: the command for a schedule. It trains on new data and promotes the model if it is better."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from jobs.cluster import start_ray
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.retrain.retrain import Trained
from pipeline.runtime.log import indented
from pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)


def retrain(config: RunConfig, *, roll_back: bool = False, address: str | None = None) -> int:
    """One retraining, or a rollback. Returns the exit code; raises UserError for mistakes in the configuration."""
    from pipeline.retrain.retrain import retrain as retrain_once
    from pipeline.retrain.retrain import rollback

    return rollback(config) if roll_back else retrain_once(config, RayWork(address))


@dataclass(frozen=True)
class RayWork:
    """Training and captions on a Ray cluster."""

    address: str | None

    def train(self, config: RunConfig) -> Trained:
        """The same steps as `raycap run`, from the extraction of new images to the registration."""
        from jobs.run import run
        from pipeline.runs.run_bundle import local_bundle

        with indented():
            folder = run(config, self.address)
        return Trained(folder.run_id, local_bundle(folder), folder.metadata.data_fingerprint)

    def caption(
        self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig
    ) -> dict[int, str]:
        """The best caption by image id; images that cannot be read are left out. Each worker fetches the bundle."""
        from jobs.caption_tasks import SplitTask, caption_on_cluster
        from pipeline.captioning.model_sources import StoredBundle

        start_ray(config, self.address)
        models = [StoredBundle(bundle, files)]
        captioned = caption_on_cluster(models, {"held out": SplitTask(part)}, config, with_alignment=False)["held out"]
        return {image: best.caption for image, best in captioned.best.items()}
