"""`raycap compare`: compares models on one split, by scores with intervals, costs, and captions that differ most."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.evaluate import EvaluatedModel, Evaluator, exit_code, find_bundles, find_images, find_options
from raycap.jobs.named_files import check_output_place
from raycap.jobs.options import Address, Set
from raycap.jobs.seeds import group_id
from raycap.models.config import Values
from raycap.pipeline.cluster.start import check_resources
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.config.shipped import named_config
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import fetched, load_bundle
from raycap.pipeline.evaluation.comparison.bootstrap import Difference, compare, differences_json, paired_difference
from raycap.pipeline.evaluation.evaluate import common_settings
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, report_html
from raycap.pipeline.evaluation.reports.report import ResultsFolder, report_images, score_table
from raycap.pipeline.evaluation.reports.tables import Rows, Table, format_table
from raycap.pipeline.evaluation.results import Scores, SplitScores
from raycap.pipeline.evaluation.scores.metrics import COMPARED_BY_IMAGE
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.path import StoragePath, storage_path

logger = logging.getLogger(__name__)

Intervals = dict[str, dict[str, Difference]]  # by model and metric
MAX_PICTURES = 60  # on the page
INTERVAL_NOTE = "95 % bootstrap intervals over the images"
COST_NOTE = "Seconds per image are those of one worker on this hardware, without the loading of models."
METEOR_NOTE = "METEOR of a split is no mean over its images, so that the score above differs."


@dataclass(frozen=True)
class Comparison:
    """The results of several models on one split, by the model's name. All others are compared with the first model."""

    models: Mapping[str, EvaluatedModel]
    results: Mapping[str, SplitScores]  # here, `split` is the model's name, so that tables show it
    intervals: Intervals
    differences: Intervals  # of each other model from the first one
    costs: Mapping[str, Mapping[str, float]]

    @property
    def first(self) -> str:
        """The name of the first model."""
        return next(iter(self.models))

    @property
    def bundles(self) -> dict[str, str]:
        """The bundles of each model, by the model's name."""
        return {name: model.name for name, model in self.models.items()}


def compare_models(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Model bundles.")],
    config: Annotated[Path, typer.Option(help="The YAML file that names the images.", callback=named_config)],
    set_: Set = None,
    split: Annotated[str | None, typer.Option(help="The default is the first of data.test_splits.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The output folder, also on S3.")] = None,
    address: Address = None,
) -> int:
    """Score several models on a split, side by side.

    Each model captions and is scored as by `raycap evaluate`. The page compare.html has all scores with intervals, the
    differences from the first model, the costs, and the pictures whose captions differ most in CIDEr-D. The exit code
    is 1 when an image cannot be read.

    Example: raycap compare models/one models/two --config demo
    """
    if len(models) < 2:
        raise UserError(f"{len(models)} model is given; a comparison needs two or more")
    run_config = load_config(config, set_ or ())
    if out is not None:
        check_output_place("-o", storage_path(out, run_config.storage.options))
    check_resources(run_config, address)
    options = find_options(run_config)
    bundles = find_bundles("MODEL", models, run_config)
    split = split or run_config.data.test_splits[0]
    images, training = find_images(run_config, [split])
    if not any(images[split].references().values()):
        raise UserError(f"--split {split} has no reference captions; name a split with references")
    settings = common_settings(run_config, bundles)
    name = group_id(run_config.name, [*map(str, bundles), split])
    folder = ResultsFolder.of(run_config, "", out or str(run_config.storage_place / f"comparisons/{name}"))
    evaluator = Evaluator(settings, images, replace(options, training=training), address)
    evaluator.check([[bundle] for bundle in bundles])
    with folder.writing():
        labels = {f"model {number}": [bundle] for number, bundle in enumerate(bundles, 1)}
        found = evaluator.evaluate_each(labels, folder)
        write_comparison(folder.place, found, split, images[split], settings)
    return exit_code([model.scores for model in found])


def _names(models: Sequence[EvaluatedModel]) -> list[str]:
    """A name for each model: that of its bundle, followed by the model's number if several bundles have one name."""
    names = [model.scores.bundles[0].name for model in models]
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def _pictures(results: Mapping[str, SplitScores], images: Sequence[ReportImage]) -> list[ReportImage]:
    """The images on which the models' captions differ most in CIDEr-D, with the captions of all models.

    At most MAX_PICTURES images are returned, the largest difference first. Images on which all scores are equal are
    left out. results: by the model's name. images: with the captions of the first model.
    """
    scores = {name: result.cider_by_image for name, result in results.items()}
    found = []
    for image in images:
        number = int(image.image_id)
        values = [by_image[number] for by_image in scores.values() if number in by_image]
        if len(values) == len(scores) and max(values) > min(values):
            captions = {
                f"{name}, CIDEr-D {scores[name][number]:.2f}": result.captions[number]
                for name, result in [*results.items()][1:]
            }
            found.append(replace(image, alternatives=captions, contrast=max(values) - min(values)))
    return sorted(found, key=lambda image: -(image.contrast or 0.0))[:MAX_PICTURES]


def _intervals(result: SplitScores) -> dict[str, Difference]:
    """{metric: mean with its interval}, computed as a difference from 0, for metrics that are means over images."""
    return {
        metric: paired_difference([score.per_image], [[0.0] * len(score.per_image)])
        for metric, score in (result.scores.by_name if result.scores else {}).items()
        if metric in COMPARED_BY_IMAGE and score.per_image
    }


def cost_of(bundle: StoragePath, search: EvaluationSection) -> dict[str, float]:
    """The number of parameters of a bundle, and its multiply-accumulates per image ("macs") with the given search.

    Both include the backbone. "macs" is missing for a bundle without a backbone, because it does not record the number
    of image tokens.
    """
    from raycap.models.captioner import cost

    captioner = load_bundle(fetched(bundle)).captioner
    model, backbone = captioner.model, captioner.backbone
    costs: dict[str, float] = {"parameters": sum(each.numel() for each in captioner.parameters())}
    if backbone is None:
        return costs
    limits = {"caption_tokens": search.max_length, "beams": search.beam_size, "steps": search.max_length - 1}
    counted = cost(model.config, model.sizes, image_tokens=backbone.num_tokens, **limits)
    return costs | {"macs": counted.beam_search + backbone.macs()}


def write_comparison(
    place: StoragePath, models: Sequence[EvaluatedModel], split: str, images: Dataset, settings: RunConfig
) -> None:
    """Logs the comparison, and writes compare.json and the page compare.html to a folder.

    An error of the page is only logged. models: with their results on the split. The first model is the baseline.
    """
    compared = _compared(models, split)
    table, cost_table = score_table([*compared.results.values()], with_alignment=True), _cost_table(compared.costs)
    logger.info(f"\n{format_table(*table)}\n\n{format_table(*cost_table)}\n")
    content = _content(compared, split)
    (place / "compare.json").write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())
    decorations = Decorations()
    with decorations.making("the page of the comparison"):
        pictures = _pictures(
            compared.results, report_images(compared.results[compared.first], images, settings.storage.options)
        )
        (place / "compare.html").write_bytes(report_html(_page(compared, split, pictures)).encode())
    decorations.log_failed()
    logger.info(f"comparison   {place / 'compare.html'}")


def _compared(models: Sequence[EvaluatedModel], split: str) -> Comparison:
    """Compares the models with the first one, and logs the differences."""
    by_name = dict(zip(_names(models), models, strict=True))
    results = {name: replace(model.scores[split], split=name) for name, model in by_name.items()}
    first, *others = results
    differences = Intervals()
    for name in others:
        logger.info(f"\n{name} (this) and {first} (other)")
        differences[name] = compare([results[name]], [results[first]])
    intervals = {name: _intervals(result) for name, result in results.items()}
    costs = {name: _costs(model.scores) for name, model in by_name.items()}
    return Comparison(by_name, results, intervals, differences, costs)


def _costs(scores: Scores) -> dict[str, float]:
    """The costs of a model (`cost_of`), with the seconds per image if this command has captioned the images."""
    costs = cost_of(scores.bundles[0], scores.search)
    seconds = scores.seconds_per_image
    return costs if seconds is None else costs | {"seconds_per_image": seconds}


def _content(compared: Comparison, split: str) -> Values:
    """The content of compare.json."""
    return {
        "models": compared.bundles,
        "split": split,
        "signature": compared.models[compared.first].scores.protocol.signature,
        "scores": {name: result.values for name, result in compared.results.items()},
        "intervals": {
            name: {metric: [each.low, each.high] for metric, each in by_metric.items()}
            for name, by_metric in compared.intervals.items()
        },
        "differences": {name: differences_json(by_metric) for name, by_metric in compared.differences.items()},
        "costs": compared.costs,
    }


def _page(compared: Comparison, split: str, pictures: list[ReportImage]) -> Report:
    """The page compare.html. pictures: from `_pictures`."""
    first, scores = compared.first, compared.models[compared.first].scores
    columns, rows = score_table([*compared.results.values()], with_alignment=True)
    note = f"Means over the images with {INTERVAL_NOTE}."
    if any("METEOR" in by_metric for by_metric in compared.intervals.values()):
        note += f" {METEOR_NOTE}"
    chosen = f"{len(pictures)} of {len(compared.results[first].captions)} images"
    return Report(
        title=f"{len(compared.models)} models on {split}",
        run_id=" / ".join(compared.models),
        protocol=f"{scores.protocol.signature}, {compared.results[first].signature}",
        score_columns=columns,
        score_rows=rows,
        stages=[],
        images=pictures,
        metadata=compared.bundles,
        language=scores.language,
        tables=[
            _table("Intervals", note, compared.intervals, "{0.mean:.4f} [{0.low:.4f}, {0.high:.4f}]"),
            _table("Differences", f"Each model minus {first}, with {INTERVAL_NOTE}.", compared.differences, "{0}"),
            Table("Cost", COST_NOTE, *_cost_table(compared.costs)),
        ],
        gallery_note=f"The {chosen} on which CIDEr-D differs most between the models. The large caption and its "
        f"score are those of {first}.",
    )


def _cost_table(costs: Mapping[str, Mapping[str, float]]) -> tuple[list[str], Rows]:
    """The columns and rows of the table of costs. costs: by model."""
    texts = {"parameters": "{:,.0f}", "macs": "{:.3g}", "seconds_per_image": "{:.3g}"}
    rows = [
        (name, [text.format(values[key]) if key in values else "" for key, text in texts.items()])
        for name, values in costs.items()
    ]
    return ["parameters", "multiply-accumulates per image", "s per image"], rows


def _table(title: str, note: str, values: Intervals, form: str) -> Table:
    """A table with a row per model and a column per metric. form: the format string of a cell."""
    columns = list(dict.fromkeys(metric for by_metric in values.values() for metric in by_metric))
    rows = [
        (name, [form.format(by_metric[column]) if column in by_metric else "" for column in columns])
        for name, by_metric in values.items()
    ]
    return Table(title, note, columns, rows)
