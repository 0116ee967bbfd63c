"""The scores of many weighted sums of the same models on one split, with the Pareto front of two metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raycap.jobs.cluster import start_ray, with_precision
from raycap.jobs.cluster_captions import SplitTask, caption_on_cluster
from raycap.jobs.evaluation import Evaluation
from raycap.jobs.seeds import group_id
from raycap.jobs.systems import OTHER_IMAGES
from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import snapshot_of
from raycap.pipeline.errors import DamagedError, JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import bundle_source, load_bundle
from raycap.pipeline.evaluation.captioning.bundle_files import bundle_digests, fetched
from raycap.pipeline.evaluation.captioning.soup import Soup, have_one_backbone, require_alike
from raycap.pipeline.evaluation.comparison.front import Point, chord, draw_front, ends, pareto_front
from raycap.pipeline.evaluation.reports.tables import format_table
from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.features.extraction import extract_features
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.atomic import decode_json
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.weights import save_weights

logger = logging.getLogger(__name__)

Weights = tuple[float, ...]


class Front:
    """The points of one call. front.json in `place` has those that are scored, so that they are scored once.

    Where all members have the same backbone, stored features serve all points; those of the members' runs are used
    again. Otherwise each point captions the image files with the sum of the backbones.
    """

    def __init__(self, evaluation: Evaluation, split: str, metrics: tuple[str, str], out: str | None) -> None:
        """evaluation: with the bundles to join. out: the option. Raises UserError for bundles that cannot be joined."""
        evaluation.find_images([split], evaluation.config, None)
        self.evaluation, self.split, self.metrics = evaluation, split, metrics
        self.is_shared = False  # whether stored features of the members' backbone serve all points
        self.names = [str(bundle) for bundle in evaluation.bundles]
        self.members = [load_bundle(fetched(bundle)) for bundle in evaluation.bundles]
        require_alike(self.members, self.names)
        self.references = {image: texts for image, texts in self._images.references().items() if texts}
        if not self.references:
            raise UserError(f"--split {split} has no reference captions; name a split with references")
        evaluation.fit_length(())
        self.protocol = replace(evaluation.protocol, num_models=1)
        digests = [bundle_digests(fetched(bundle), ("model.safetensors",)) for bundle in evaluation.bundles]
        self.inputs: dict[str, Any] = {
            "sha256": [digest["model.safetensors"] for digest in digests],
            "split": split,
            "images": self._images.fingerprint(),
            "metrics": list(metrics),
            "protocol": self.protocol.signature,
        }
        config = evaluation.config
        name = group_id(config.name, [json.dumps(self.inputs)])
        self.place = storage_path(
            config.storage_place / f"fronts/{name}" if out is None else out, config.storage.options
        )

    @property
    def _images(self) -> Dataset:
        return self.evaluation.images_by_split[self.split]

    def score(self, grid: Sequence[Weights], address: str | None) -> int:
        """Scores the weights that have no scores yet, and writes table, JSON and picture. Returns the exit code."""
        entries = self._kept()
        missing = [weights for weights in grid if weights not in entries]
        logger.info(f"models    {', '.join(self.names)}")
        logger.info(f"data      {self.split} {len(self._images)} images")
        logger.info(f"points    {len(grid)}, of which {len(grid) - len(missing)} have scores")
        if missing:
            self._share_features(address)
            self.evaluation.config = with_precision(self.evaluation.config, address)
            logger.info(f"protocol  {replace(self.evaluation.protocol, num_models=1).signature}")
            start_ray(self.evaluation.config, address, "captions")
            sources = [bundle_source(bundle, self.evaluation.config) for bundle in self.evaluation.bundles]
        for weights in missing:
            entries[weights] = self._entry(Soup(sources, weights, without_backbone=self.is_shared))
            self._write(list(entries.values()))
            values = "  ".join(f"{name} {value:.4f}" for name, value in entries[weights]["scores"].items())
            logger.info(f"point     {_label(weights)}: {values}")
        self._report([entries[weights] for weights in grid], list(entries.values()))
        return 1 if entries[grid[0]]["unreadable"] else 0

    def _kept(self) -> dict[Weights, dict[str, Any]]:
        """The entries of front.json by weights; {} where it has the scores of other inputs."""
        file = self.place / "front.json"
        try:
            content = decode_json(file.read_bytes(), str(file))
            if content["inputs"] == self.inputs:
                return {tuple(entry["weights"]): entry for entry in content["points"]}
            logger.info(f"points    {file} has other models, images or settings; it is replaced")
        except FileNotFoundError:
            pass
        except (DamagedError, KeyError, TypeError):
            logger.warning(f"damaged   {file}; its points are scored again")
        return {}

    def _share_features(self, address: str | None) -> None:
        """Computes the images' features that the storage lacks, if all members have the same backbone."""
        evaluation, backbone = self.evaluation, self.members[0].captioner.backbone
        if evaluation.store is not None or not evaluation.config.has_backbone or not have_one_backbone(self.members):
            return
        assert backbone is not None
        features = evaluation.config.features.model_copy(update={"views": 0})
        config = evaluation.config.model_copy(update={"backbone": backbone.config, "features": features})

        def start() -> StallWatch:
            start_ray(config, address, "features")
            return StallWatch("extraction", config.workers)

        images, unreadable = snapshot_of(self._images, config)
        with TemporaryDirectory(prefix="raycap-") as scratch:
            weights = Path(scratch) / "backbone.safetensors"
            save_weights(backbone, weights)
            extracted = extract_features(config, images, weights, start, unreadable)
        evaluation.store, self.is_shared = extracted.store, True
        usable = images.without(sorted(extracted.missing)).readable()
        evaluation.images_by_split = {self.split: usable}

    def _entry(self, soup: Soup) -> dict[str, Any]:
        """Captions and scores the split with one weighted sum."""
        evaluation = self.evaluation
        task = {self.split: SplitTask(self._images)}
        store = evaluation.store
        captioned = caption_on_cluster([soup], task, evaluation.config, store=store, with_alignment=False)[self.split]
        captions = {image: best.caption for image, best in captioned.best.items() if image in self.references}
        scores = score_captions(self.references, captions, metrics=self.metrics, language=evaluation.language)
        for name, score in scores.by_name.items():
            if score.value is None:
                raise JobFailedError(f"{name} is unavailable: {score.unavailable}")
        unreadable = sorted(self.references.keys() - captions.keys())
        return {"weights": list(soup.weights), "scores": scores.values, "unreadable": unreadable}

    def _write(self, entries: Sequence[dict[str, Any]]) -> None:
        """Writes front.json."""
        content = {
            "models": self.names,
            "inputs": self.inputs,
            "signature": self.protocol.signature,
            "points": sorted(entries, key=lambda entry: entry["weights"], reverse=True),
        }
        (self.place / "front.json").write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())

    def _report(self, entries: Sequence[dict[str, Any]], every: Sequence[dict[str, Any]]) -> None:
        """Logs the table and writes the picture of these entries. every: those of front.json."""
        if len({tuple(entry["unreadable"]) for entry in entries}) != 1:
            raise JobFailedError(f"{OTHER_IMAGES}; remove {self.place / 'front.json'} before")
        points = [
            Point(tuple(entry["weights"]), (entry["scores"][self.metrics[0]], entry["scores"][self.metrics[1]]))
            for entry in entries
        ]
        members, front = ends(points), pareto_front(points)
        rows = []
        for point, entry in zip(points, entries, strict=True):
            means = chord(point.weights, members)
            entry |= {"chord": dict(zip(self.metrics, means, strict=True)), "on_front": point in front}
            pairs = zip(point.scores, means, strict=True)
            cells = [text for score, mean in pairs for text in (f"{score:.4f}", f"{score - mean:+.4f}")]
            rows.append((_label(point.weights), [*cells, "*" if point in front else ""]))
        self._write(every)
        columns = [text for name in self.metrics for text in (name, "over chord")]
        logger.info(f"\n{format_table([*columns, 'front'], rows)}\n")
        decorations = Decorations()
        with decorations.making("the picture of the front"):
            labels = [bundle.name for bundle in self.evaluation.bundles]
            for kind, content in draw_front(points, labels, self.metrics).items():
                (self.place / f"front.{kind}").write_bytes(content)
        decorations.log_failed()
        logger.info(f"front        {self.place}")


def _label(weights: Weights) -> str:
    return ",".join(f"{weight:.4g}" for weight in weights)
