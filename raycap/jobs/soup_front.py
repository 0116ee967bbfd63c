"""The scores of many weighted sums of the same models on one split, with the Pareto front of two metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raycap.jobs.seeds import group_id
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import DamagedError, JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.bundle_files import bundle_digests, fetched
from raycap.pipeline.evaluation.captioning.measured_precision import with_precision
from raycap.pipeline.evaluation.captioning.soup import have_one_backbone, require_alike
from raycap.pipeline.evaluation.comparison.front import Point, chord, draw_front, ends, pareto_front
from raycap.pipeline.evaluation.comparison.systems import OTHER_IMAGES
from raycap.pipeline.evaluation.evaluate import Options, evaluate, protocol_of
from raycap.pipeline.evaluation.inputs import Inputs, find_inputs
from raycap.pipeline.evaluation.reports.tables import format_table
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.atomic import decode_json
from raycap.pipeline.storage.path import StoragePath, storage_path

logger = logging.getLogger(__name__)

Weights = tuple[float, ...]


class Front:
    """The points of one call. front.json in `place` has those that are scored, so that they are scored once.

    Where all members have the same backbone, stored features serve all points; those of the members' runs are used
    again. Otherwise each point captions the image files with the sum of the backbones.
    """

    def __init__(
        self,
        bundles: Sequence[StoragePath],
        images: Dataset,
        settings: RunConfig,
        options: Options,
        split: str,
        out: str | None,
    ) -> None:
        """bundles: to join. images: of `split`. settings: of `common_settings`. options: with the two metrics.

        out: the option. Raises UserError for bundles that cannot be joined.
        """
        self.bundles, self.images, self.settings, self.options = bundles, images, settings, options
        self.split, self.metrics = split, options.metrics
        self.names = [str(bundle) for bundle in bundles]
        self.members = [load_bundle(fetched(bundle)) for bundle in bundles]
        require_alike(self.members, self.names)
        if not any(images.references().values()):
            raise UserError(f"--split {split} has no reference captions; name a split with references")
        self.protocol = replace(protocol_of(bundles, settings), num_models=1)
        digests = [bundle_digests(fetched(bundle), ("model.safetensors",)) for bundle in bundles]
        self.inputs: dict[str, Any] = {
            "sha256": [digest["model.safetensors"] for digest in digests],
            "split": split,
            "images": images.fingerprint(),
            "metrics": list(self.metrics),
            "protocol": self.protocol.signature,
        }
        name = group_id(settings.name, [json.dumps(self.inputs)])
        place = settings.storage_place / f"fronts/{name}" if out is None else out
        self.place = storage_path(place, settings.storage.options)

    def score(self, grid: Sequence[Weights], address: str | None) -> int:
        """Scores the weights that have no scores yet, and writes table, JSON and picture. Returns the exit code."""
        entries = self._kept()
        missing = [weights for weights in grid if weights not in entries]
        logger.info(f"models    {', '.join(self.names)}")
        logger.info(f"data      {self.split} {len(self.images)} images")
        logger.info(f"points    {len(grid)}, of which {len(grid) - len(missing)} have scores")
        if missing:
            self.settings = with_precision(self.settings, address)
            inputs = self._find_inputs(address)
        for weights in missing:
            options = replace(self.options, weights=weights, inputs=inputs)
            scores = evaluate(self.bundles, {self.split: self.images}, self.settings, address, options)
            entries[weights] = _entry(scores[self.split], weights)
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

    def _find_inputs(self, address: str | None) -> Inputs:
        """The inputs of all points: stored features if all members have the same backbone or none, or else pixels."""
        settings, images = self.settings, {self.split: self.images}
        if self.members[0].transform is not None and not have_one_backbone(self.members):
            features = settings.features.model_copy(update={"store": "never"})
            settings = settings.model_copy(update={"features": features})
        return find_inputs(self.bundles[:1], images, settings, address, self.options.features)

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
            labels = [bundle.name for bundle in self.bundles]
            for kind, content in draw_front(points, labels, (self.metrics[0], self.metrics[1])).items():
                (self.place / f"front.{kind}").write_bytes(content)
        decorations.log_failed()
        logger.info(f"front        {self.place}")


def _entry(result: SplitScores, weights: Weights) -> dict[str, Any]:
    """The scores of one weighted sum, as front.json has them. Raises JobFailedError for one that is unavailable."""
    if result.scores is None:
        raise JobFailedError(f"no image of {result.split} can be read")
    for name, score in result.scores.by_name.items():
        if score.value is None:
            raise JobFailedError(f"{name} is unavailable: {score.unavailable}")
    return {"weights": list(weights), "scores": result.values, "unreadable": sorted(result.unreadable)}


def _label(weights: Weights) -> str:
    return ",".join(f"{weight:.4g}" for weight in weights)
