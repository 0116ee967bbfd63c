"""`raycap retrain`: what a schedule calls: new data in, a better model out, or nothing changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import pyarrow as pa
import typer

from jobs.cluster import start_ray
from jobs.options import Address, Config, Set
from pipeline.config.run import RunConfig, load_config
from pipeline.data.dataset import Dataset
from pipeline.retrain.retrain import Trained
from pipeline.runtime.log import indented
from pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)


def retrain(config: RunConfig, *, roll_back: bool = False, address: str | None = None) -> int:
    """One retraining, or a rollback; the exit code. Raises UserError for what the user can mend."""
    from pipeline.retrain.retrain import retrain as retrain_once
    from pipeline.retrain.retrain import rollback

    return rollback(config) if roll_back else retrain_once(config, RayWork(address))


@dataclass(frozen=True)
class RayWork:
    """Training and captions on a Ray cluster."""

    address: str | None

    def train(self, config: RunConfig) -> Trained:
        """The whole of `raycap run`: extraction of what is new, every stage, evaluation, report, registration."""
        from jobs.run import run
        from pipeline.runs.run_bundle import local_bundle

        with indented():
            folder = run(config, self.address)
        return Trained(folder.run_id, local_bundle(folder), folder.facts["data_fingerprint"])

    def caption(
        self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig
    ) -> dict[int, str]:
        """One task a worker, on whatever machine; each fetches the bundle itself. What cannot be read is left out."""
        import ray

        start_ray(config, self.address)
        workers = config.workers
        task = ray.remote(_caption).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
        count = workers.num_workers
        tasks = [task.remote(bundle, dict(files), part.table, config, rank, count) for rank in range(count)]
        return {image: caption for share in ray.get(tasks) for image, caption in share.items()}


def _caption(
    bundle: StoragePath, files: dict[str, str], rows: pa.Table, config: RunConfig, rank: int, count: int
) -> dict[int, str]:
    from pipeline.captioning.bundle import bundle_digests, fetched, load_bundle
    from pipeline.captioning.captioning import caption_share
    from pipeline.features.model_inputs import Images
    from pipeline.runtime.context import device_for
    from pipeline.runtime.cpu import prepare_processor

    workers, part = config.workers, Dataset(rows)
    prepare_processor(workers.threads_per_worker)
    device = device_for(workers.gpus_per_worker)
    folder = fetched(bundle)
    if bundle_digests(folder, tuple(files)) != files:
        raise OSError(f"{bundle} is not what it was when it was written; restore it from a copy")
    loaded = load_bundle(folder)
    assert loaded.transform is not None  # a run's bundle has its backbone
    loaded.captioner.to(device)
    options, threads = config.storage.options, workers.threads_per_worker
    images = Images(part, None, loaded.transform, config.data.max_pixels, threads, options)
    bad: dict[int, str] = {}
    settings = config.evaluation
    found = caption_share([loaded.captioner], [images], loaded.vocabulary, settings, rank, count, device, bad)
    return {image: hypotheses[0].caption for image, hypotheses in found.items()}


def command(
    config: Config,
    set_: Set = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Go back to the previous champion.")] = False,
    address: Address = None,
) -> int:
    """Train on new data and keep the better model.

    A schedule can run this at any time, also twice at once. The exit code is 0 when there is nothing to do, and 1 for
    unusable data, which change nothing.

    Example: raycap retrain configs/retrain_demo.yaml
    """
    return retrain(load_config(config, set_ or ()), roll_back=rollback, address=address)
