"""Evaluations of systems with several seeds each: the mean scores with their spread, and the systems' differences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.evaluation.captioning.bundle import fetched, read_bundle_config
from raycap.pipeline.evaluation.comparison.bootstrap import Difference, difference_of_seeds
from raycap.pipeline.evaluation.comparison.protocol import common_protocol, differences
from raycap.pipeline.evaluation.reports.report import write_summary
from raycap.pipeline.evaluation.reports.tables import Rows, SeedScores, Spread, format_table
from raycap.pipeline.evaluation.results import Scores, SplitScores
from raycap.pipeline.evaluation.scores.metrics import COMPARED_BY_IMAGE, LESS_IS_BETTER
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)

OTHER_IMAGES = "some images could be read for one model and not for another; run the command again"


@dataclass(frozen=True)
class EvaluatedModel:
    """A model, or an ensemble, with its scores. label: such as "seed 0"."""

    label: str
    scores: Scores

    @property
    def name(self) -> str:
        """The bundles."""
        return " + ".join(map(str, self.scores.bundles))

    @property
    def run(self) -> str | None:
        """The id of the run that trained the model; None for an ensemble and for a bundle that does not name its run.

        Bundles after different stages of a run have the same.
        """
        if len(self.scores.bundles) != 1:
            return None
        info = read_bundle_config(fetched(self.scores.bundles[0])).get("info")
        run = info.get("run") if isinstance(info, dict) else None
        return run if isinstance(run, str) else None


def summarize_systems(place: StoragePath, ours: Sequence[EvaluatedModel], others: Sequence[EvaluatedModel]) -> None:
    """Prints and writes the mean scores of a system with their spread, and its differences from another system.

    ours, others: one model per seed; others: () without a comparison. Splits without references have no scores.
    """
    paired = _paired(ours, others)
    scores, protocol = _seed_scores(ours), common_protocol([model.scores.protocol for model in ours])
    columns, rows, page_rows = scores.columns, Rows(), Rows()
    content: dict[str, Any] = {
        "models": {model.label: model.name for model in ours},
        "protocol": asdict(protocol),
        "signature": protocol.signature,
        "splits": scores.to_json(),
    }
    metadata = {"models": ", ".join(model.name for model in ours)}
    sides = [("", scores)]
    if others:
        sides.append(("other: ", _seed_scores(others)))
        metadata["compared with"] = ", ".join(model.name for model in others)
        content["compared"] = {"models": {model.label: model.name for model in others}, "same_runs": paired is not None}
        content["compared"]["splits"] = sides[1][1].to_json()
        for theirs, our in differences(common_protocol([model.scores.protocol for model in others]), protocol):
            logger.info(f"protocol  other: {theirs}, this: {our}")
    for split in scores.splits:
        for prefix, side in sides:
            rows += side.rows(split, columns, prefix)
            page_rows += side.rows(split, columns, prefix) + side.rows_of_models(split, columns)
    if rows:
        logger.info(f"\n{format_table(columns, rows)}\n")
    for split in scores.splits if others else ():
        logger.info(split)
        results = [[model.scores[split] for model in side] for side in (ours, paired or others)]
        gaps = compare(*results, same_runs=paired is not None)
        content["compared"]["splits"][split]["differences"] = {key: asdict(each) for key, each in gaps.items()}
        page_rows.append((f"{split}, difference", [str(gaps.get(column, "")) for column in columns]))
    decorations = Decorations()
    write_summary(place, content, columns, page_rows, metadata, decorations)
    decorations.log_failed()
    logger.info(f"seeds        {place}")


def _seed_scores(models: Sequence[EvaluatedModel]) -> SeedScores:
    return SeedScores.of(
        {model.label: {each.split: each.to_json() for each in model.scores.splits} for model in models}
    )


def _paired(ours: Sequence[EvaluatedModel], others: Sequence[EvaluatedModel]) -> list[EvaluatedModel] | None:
    """`others` in the order of `ours`, if both are models of the same runs, such as after other stages; else None."""
    by_run = {model.run: model for model in others}
    runs = [model.run for model in ours]
    if None in runs or len(set(runs)) < len(runs) or len(others) != len(ours) or by_run.keys() != set(runs):
        return None
    return [by_run[run] for run in runs]


def compare(
    results: Sequence[SplitScores], others: Sequence[SplitScores], *, same_runs: bool = False
) -> dict[str, Difference]:
    """Logs the scores of two systems on a split side by side. Returns their differences by metric.

    results, others: one for each seed, with scores of the same images. same_runs: see `difference_of_seeds`. There is
    a difference, with its 95 % interval, for each metric that is a mean over images. Raises JobFailedError for scores
    of different images.
    """
    sides = [[result.scores for result in side if result.scores is not None] for side in (results, others)]
    if len({tuple(scores.image_ids) for side in sides for scores in side}) != 1:
        raise JobFailedError(OTHER_IMAGES)
    over = "image" if len(results) == len(others) == 1 else "image and seed"
    width = max(9, *map(len, sides[0][0].by_name))
    logger.info(f"  {'':<{width}} {'this':>15} {'other':>15}   difference by {over}, 95 % interval")
    found = {}
    for name in sides[0][0].by_name:
        scores = [[each.by_name[name] for each in side if name in each.by_name] for side in sides]
        values = [[score.value for score in side if score.value is not None] for side in scores]
        if [len(side) for side in values] != [len(results), len(others)]:
            continue
        text = ""
        if name in COMPARED_BY_IMAGE:
            ours, theirs = ([score.per_image or [] for score in side] for side in scores)
            is_less_better = name in LESS_IS_BETTER
            found[name] = difference_of_seeds(ours, theirs, same_runs=same_runs, less_is_better=is_less_better)
            text = f"{found[name]}, better in {found[name].better:.1%} of resamples"
        cells = [Spread.of(side).text(digits=4) for side in values]
        logger.info(f"  {name:<{width}} {cells[0]:>15} {cells[1]:>15}   {text}")
    return found
