"""The folder with the results of an evaluation: captions, scores.json and pages."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.caption_files import N_BEST, write_n_best, write_predictions
from raycap.pipeline.evaluation.captions import ImageCaption, RankedCaption
from raycap.pipeline.evaluation.comparison.bootstrap import compare
from raycap.pipeline.evaluation.confidence import SIGNALS
from raycap.pipeline.evaluation.evaluate import SplitCaptions, keep_results
from raycap.pipeline.evaluation.reports.page import write_report
from raycap.pipeline.evaluation.reports.report import report
from raycap.pipeline.evaluation.reports.tables import format_scores
from raycap.pipeline.evaluation.results import Scores, SplitScores
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, cache_folder, storage_path
from raycap.pipeline.storage.untrusted.documents import parse_json, read_document, require_mapping

logger = logging.getLogger(__name__)


def write_captions(folder: Path, split: str, images: Mapping[int, ImageCaption], predictions: str) -> None:
    """Writes the captions of a split: `predictions`, a COCO result file, and all captions with their values."""
    write_predictions(folder / predictions, SplitScores(split, images).captions)
    ranked = {image: [one.to_json() for one in each.n_best] for image, each in images.items() if each.n_best}
    write_n_best(folder / N_BEST.format(split), ranked)


def read_captions(path: Path) -> dict[int, ImageCaption]:
    """The captions in a file of `write_captions`, by image id. Raises UserError, or ValueError for other content."""
    found, ranked = {}, TypeAdapter(tuple[RankedCaption, ...])
    for number, line in enumerate(read_document(path).decode().splitlines(), 1):
        name = f"{path}: line {number}"
        row = require_mapping(parse_json(line.encode(), name), name)
        captions = ranked.validate_python(row["n_best"])
        if any(len(each.signals) not in (0, len(SIGNALS)) for each in captions):
            raise ValueError(f"{name} has other signals than {', '.join(SIGNALS)}")
        found[int(row["image_id"])] = ImageCaption(captions)
    return found


@dataclass(frozen=True)
class ResultsFolder:
    """The place of the results, and the local folder in which they are written.

    They differ if the results go to S3; the local folder is then a new one.
    """

    place: StoragePath
    path: Path

    @classmethod
    def of(cls, config: RunConfig, label: str, out: str | None) -> ResultsFolder:
        """The folder that the option --out names; None for evaluations/`label` in the storage."""
        default = config.storage_place / f"evaluations/{label}"
        place = storage_path(default if out is None else out, config.storage.options)
        if not place.is_remote:
            return cls(place, place.path)
        return cls(place, cache_folder() / "evaluations" / uuid.uuid4().hex[:16] / "results")

    def part(self, name: str) -> ResultsFolder:
        """The folder of this name in this one."""
        path = self.path / name
        path.mkdir(parents=True, exist_ok=True)
        return ResultsFolder(self.place / name, path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the local folder, and removes it when its results are on S3.

        After an error, results that are not on S3 remain, and the log names the folder: the captions can take hours.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        is_done = not self.place.is_remote
        try:
            yield
            is_done = True
        finally:
            if not is_done and any(self.path.iterdir()):
                logger.warning(
                    f"results      {self.path}: they are not all in {self.place}; copy them, or remove this folder"
                )
            elif self.place.is_remote:
                shutil.rmtree(self.path.parent, ignore_errors=True)  # with the mirror's record

    def write_captions(self, captions: SplitCaptions) -> None:
        """Writes the captions of all splits."""
        for split, images in captions.items():
            predictions = f"predictions-{split}.json"
            write_captions(self.path, split, images, predictions)
            logger.info(f"predictions  {self.place / predictions}")

    def write_scores(self, content: Mapping[str, object], missing: Mapping[str, str]) -> None:
        """Writes scores.json and uploads all results. missing: {report: reason}, of those that failed."""
        write_json(self.path / "scores.json", {**content, **({"missing": missing} if missing else {})})
        if self.place.is_remote:
            Mirror(self.place, self.path).push()


def write_results(
    folder: ResultsFolder,
    scores: Scores,
    settings: RunConfig,
    *,
    label: str,
    compared: Scores | None = None,
) -> None:
    """Logs the scores of a model, and writes its scores and pages. Stores its confidence in its bundle.

    label: names the model. compared: the scores of another model on the same splits.
    Raises JobFailedError if the two models have captioned other images.
    """
    content, decorations = scores.to_json(), Decorations()
    others: dict[str, SplitScores] = {}
    for each in scores.splits:
        _log_scores(each)
        if compared is None or each.scores is None:
            continue
        others[each.split] = other = compared[each.split]
        differences = {name: asdict(gap) for name, gap in compare([each], [other]).items()}
        entry = {"differences": differences, "images": len(each.captions)}
        content["splits"][each.split]["compared"] = other.scores_to_json() | entry
    if len(scores.bundles) == 1:
        keep_results(scores, {}, decorations)
    folder.write_scores(content, {})
    for each in scores.splits:
        if each.scores is not None:
            with decorations.making(f"the report of {each.split}"):
                _write_page(folder, scores.of(each.split), settings, decorations, label, others.get(each.split))
    folder.write_scores(content, decorations.failed)
    logger.info(f"scores       {folder.place / 'scores.json'}")
    decorations.log_failed()


def _log_scores(result: SplitScores) -> None:
    """Logs the scores of a split, and printed scores, each with why ours cannot be compared."""
    if result.scores is None:
        logger.info(f"{result.split} has no reference captions: captioned, not scored")
    else:
        logger.info(f"\n{result.split}, {len(result.scores.image_ids)} images{format_scores(result.scores)}")
    if result.main_object is not None:
        logger.info(f"  main object named in {result.main_object:.1%} of the captions")
    for row, difference in result.published:
        values = "  ".join(f"{name} {value:.3f}" for name, value in row.scores.items())
        logger.info(f"  {row.name}: {values}" + (f"  ({difference})" if difference else ""))


def _write_page(
    folder: ResultsFolder,
    scores: Scores,
    settings: RunConfig,
    decorations: Decorations,
    label: str,
    other: SplitScores | None,
) -> None:
    """Writes report-SPLIT.html of the only split of `scores`. other: of another model."""
    (result,) = scores.splits
    other = None if other is None else replace(other, split=f"{result.split}, the other")
    page = report(
        scores,
        settings,
        decorations,
        title=f"{label} on {result.split}",
        run_id=label,
        pictured=[result.split],
        compared=other,
    )
    models = ", ".join(bundle.name for bundle in scores.bundles)
    metadata = {"models": models, "images": f"{result.split} {len(result.images)}"}
    name = f"report-{result.split}.html"
    write_report(folder.path / name, replace(page, metadata=metadata))
    logger.info(f"report       {folder.place / name}")
