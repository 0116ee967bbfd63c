"""`raycap compare`: compares models on one split, by scores, costs, and captions that differ most."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.evaluate import Evaluator, exit_code, find_bundles, find_images, find_options
from raycap.jobs.named_files import check_output_place
from raycap.jobs.options import Address, Set
from raycap.jobs.seeds import group_id
from raycap.pipeline.cluster.start import check_resources, with_processors
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_config
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import fetched, load_bundle
from raycap.pipeline.evaluation.comparison.bootstrap import Difference, compare
from raycap.pipeline.evaluation.evaluate import common_settings
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, report_html
from raycap.pipeline.evaluation.reports.report import report_images, score_table
from raycap.pipeline.evaluation.reports.tables import Rows, Table, format_table
from raycap.pipeline.evaluation.results import Scores, SplitScores
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.path import StoragePath, storage_path

logger = logging.getLogger(__name__)

Differences = dict[str, dict[str, Difference]]  # by system and metric
MAX_PICTURES = 60  # on the page
COST_NOTE = "Seconds per image are those of one worker on this hardware, without the loading of models."


def compare_models(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="A model bundle, or several seeds of one system with commas.")
    ],
    config: Annotated[Path, typer.Option(help="The YAML file that names the images.", callback=named_config)],
    set_: Set = None,
    split: Annotated[str | None, typer.Option(help="The default is the first of data.test_splits.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The output folder, also on S3.")] = None,
    address: Address = None,
) -> int:
    """Score several models on a split, side by side.

    Each model captions and is scored as by `raycap evaluate`. The page compare.html has all scores, the differences
    from the first model with intervals, the costs, and the pictures whose captions differ most in CIDEr-D. With two
    seeds of each system, give A,B C,D. The exit code is 1 when an image cannot be read.

    Example: raycap compare models/one models/two --config demo
    """
    if len(models) < 2:
        raise UserError(f"{len(models)} model is given; a comparison needs two or more")
    run_config = with_processors(load_config(config, set_ or ()), address)
    if out is not None:
        check_output_place("-o", storage_path(out, run_config.storage.options))
    check_resources(run_config, address)
    options = find_options(run_config)
    systems = [find_bundles("MODEL", model.split(","), run_config) for model in models]
    bundles = [bundle for system in systems for bundle in system]
    split = split or run_config.data.test_splits[0]
    images = find_images(run_config, [split])
    if not any(images[split].references().values()):
        raise UserError(f"--split {split} has no reference captions; name a split with references")
    settings = common_settings(run_config, bundles)
    name = group_id(run_config.name, [*models, split])
    place = storage_path(out or run_config.storage_place / f"comparisons/{name}", run_config.storage.options)
    evaluator = Evaluator(settings, images, options, address)
    evaluator.check([[bundle] for bundle in bundles])
    labels = {f"model {number}": [bundle] for number, bundle in enumerate(bundles, 1)}
    found = [*evaluator.evaluate_each(labels, place).values()]
    write_comparison(place, found, [*map(len, systems)], images[split], settings)
    return exit_code(found)


def _pictures(results: Mapping[str, SplitScores], images: Sequence[ReportImage]) -> list[ReportImage]:
    """The images on which the models' captions differ most in CIDEr-D, with the captions of all models.

    At most MAX_PICTURES images are returned, the largest difference first. Images on which all scores are equal are
    left out. results: by the model's name. images: with the captions of the first model.
    """
    _, *others = results
    pictures: list[tuple[float, ReportImage]] = []
    for image in images:
        scores = {name: result.cider_by_image.get(image.image_id) for name, result in results.items()}
        values = [score for score in scores.values() if score is not None]
        if len(values) < len(scores) or max(values) == min(values):
            continue
        captions = {f"{name}, CIDEr-D {scores[name]:.2f}": results[name].captions[image.image_id] for name in others}
        contrast = max(values) - min(values)
        pictures.append((contrast, replace(image, alternatives=captions, contrast=contrast)))
    pictures.sort(key=lambda picture: -picture[0])
    return [image for _, image in pictures[:MAX_PICTURES]]


def write_comparison(
    place: StoragePath, models: Sequence[Scores], counts: Sequence[int], images: Dataset, settings: RunConfig
) -> None:
    """Logs the comparison, and writes compare.json and the page compare.html to a folder.

    An error of the page is only logged. models: with their results on the only split. counts: the number of models of
    each system, which is one model, or several that differ only in their seed. A model has the name of its bundle,
    followed by the model's number if several bundles have one name.
    """
    first, names = models[0], [model.bundles[0].name for model in models]
    split = first.splits[0].split
    labels = [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]
    results = {  # here, `split` is the model's name, so that tables show it
        label: replace(model[split], split=label) for label, model in zip(labels, models, strict=True)
    }
    baseline, differences = _differences(results, counts)
    costs = {label: _costs(model) for label, model in zip(labels, models, strict=True)}
    bundles = {label: str(model.bundles[0]) for label, model in zip(labels, models, strict=True)}
    columns, rows = score_table([*results.values()])
    logger.info(f"\n{format_table(columns, rows)}\n\n{format_table(*_cost_table(costs))}\n")
    content = {
        "models": bundles,
        "split": split,
        "signature": first.protocol.signature,
        "scores": {label: result.values for label, result in results.items()},
        "differences": {
            name: {metric: asdict(each) for metric, each in by_metric.items()}
            for name, by_metric in differences.items()
        },
        "costs": costs,
    }
    (place / "compare.json").write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())
    decorations = Decorations()
    with decorations.making("the page of the comparison"):
        result = results[labels[0]]
        pictures = _pictures(results, report_images(result, images, settings.storage.options))
        page = Report(
            title=f"{len(models)} models on {split}",
            run_id=" / ".join(labels),
            protocol=f"{first.protocol.signature}, {result.signature}",
            score_columns=columns,
            score_rows=rows,
            stages=[],
            images=pictures,
            metadata=bundles,
            language=first.protocol.language,
            tables=[_difference_table(baseline, differences), Table("Cost", COST_NOTE, *_cost_table(costs))],
            gallery_note=f"The {len(pictures)} of {len(result.captions)} images on which CIDEr-D differs most between "
            f"the models. The large caption and its score are those of {labels[0]}.",
        )
        (place / "compare.html").write_bytes(report_html(page).encode())
    decorations.log_failed()
    logger.info(f"comparison   {place / 'compare.html'}")


def _differences(results: Mapping[str, SplitScores], counts: Sequence[int]) -> tuple[str, Differences]:
    """The name of the first system, and the differences of the others from it, which are logged.

    results: by the model's name. counts: as for `write_comparison`. A system's name is the names of its models.
    """
    remaining = iter(results.items())
    (baseline, first), *others = [
        (", ".join(system), [*system.values()]) for system in (dict(islice(remaining, count)) for count in counts)
    ]
    differences = Differences()
    for name, system in others:
        logger.info(f"\n{name} (this) and {baseline} (other)")
        differences[name] = compare(system, first)
    return baseline, differences


def _costs(scores: Scores) -> dict[str, float]:
    """The number of a model's parameters, its multiply-accumulates per image ("macs"), and its seconds per image.

    All include the backbone. "macs" is missing for a bundle without a backbone, because it does not record the number
    of image tokens. The seconds are missing if no image could be captioned.
    """
    from raycap.models.captioner import cost

    captioner, search = load_bundle(fetched(scores.bundles[0])).captioner, scores.search
    model, backbone = captioner.model, captioner.backbone
    costs: dict[str, float] = {"parameters": sum(each.numel() for each in captioner.parameters())}
    if backbone is not None:
        limits = {"caption_tokens": search.max_length, "beams": search.beam_size, "steps": search.max_length - 1}
        of_model = cost(model.config, model.sizes, image_tokens=backbone.num_tokens, **limits)
        costs["macs"] = of_model.beam_search + backbone.macs()
    if scores.seconds_per_image is not None:
        costs["seconds_per_image"] = scores.seconds_per_image
    return costs


def _cost_table(costs: Mapping[str, Mapping[str, float]]) -> tuple[list[str], Rows]:
    """The columns and rows of the table of costs. costs: by model."""
    forms = {"parameters": "{:,.0f}", "macs": "{:.3g}", "seconds_per_image": "{:.3g}"}
    rows = Rows()
    for name, values in costs.items():
        rows.append((name, [form.format(values[key]) if key in values else "" for key, form in forms.items()]))
    return ["parameters", "multiply-accumulates per image", "s per image"], rows


def _difference_table(baseline: str, differences: Differences) -> Table:
    """The table of differences, with a row per system and a column per metric."""
    columns = list(dict.fromkeys(metric for by_metric in differences.values() for metric in by_metric))
    rows = [(name, [str(by_metric.get(column, "")) for column in columns]) for name, by_metric in differences.items()]
    note = f"Each system minus {baseline}, with 95 % bootstrap intervals over the images, and over the seeds"
    return Table("Differences", f"{note} if a system has several.", columns, rows)
