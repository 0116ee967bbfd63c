"""Captions of whole splits on the cluster: one task a worker, each with its share of the images."""

from __future__ import annotations

from models.constraints import ConstraintAutomaton
from pipeline.captioning.captioning import Hypothesis
from pipeline.config.sections import WorkersSection
from pipeline.runs.folder import RunFolder
from pipeline.storage.path import StoragePath


def caption_splits(
    folder: RunFolder,
    splits: tuple[str, ...],
    store: StoragePath,
    excluded: tuple[str, ...],
    machines: dict[int, ConstraintAutomaton],
) -> dict[str, dict[int, Hypothesis]]:
    """{split: {image id: its best caption}} by the run's final weights, from stored features.

    `machines` are the constraints of test images; the validation split, which training is compared on, has none.
    """
    import ray

    workers: WorkersSection = folder.config.workers
    task = ray.remote(_caption_share).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
    count = workers.num_workers
    shares = ray.get([task.remote(folder, splits, store, excluded, rank, count, machines) for rank in range(count)])
    merged: dict[str, dict[int, Hypothesis]] = {split: {} for split in splits}
    for share in shares:
        for split, captions in share.items():
            merged[split].update(captions)
    return {split: dict(sorted(captions.items())) for split, captions in merged.items()}


def _caption_share(
    folder: RunFolder,
    splits: tuple[str, ...],
    store: StoragePath,
    excluded: tuple[str, ...],
    rank: int,
    count: int,
    machines: dict[int, ConstraintAutomaton],
) -> dict[str, dict[int, Hypothesis]]:
    from models.captioner import Captioner
    from models.registry import build_model
    from models.transform import ImageTransform
    from pipeline.captioning.captioning import caption_share
    from pipeline.features.model_inputs import Images
    from pipeline.features.store import open_store
    from pipeline.runtime.context import device_for
    from pipeline.runtime.cpu import prepare_processor
    from pipeline.runtime.weights import load_weights

    folder = folder.on_worker()
    config = folder.config
    device = device_for(config.workers.gpus_per_worker)
    prepare_processor(config.workers.threads_per_worker)
    model = build_model(config.model, folder.sizes)
    load_weights(model, folder.weights_before(None, "model"))
    captioner = Captioner(model).to(device)
    features, transform = open_store(store, config.features), ImageTransform(config.backbone.image_size)
    found = {}
    for split in splits:
        part = folder.dataset.without(excluded).split(split)
        images = Images(part, features, transform, config.data.max_pixels, 1)
        settings = config.evaluation
        own = {} if split == config.data.val_split else machines
        words = folder.vocabulary
        shares = caption_share([captioner], [images], words, settings, rank, count, device, None, own, True)
        found[split] = {image: hypotheses[0] for image, hypotheses in shares.items()}
    return found
