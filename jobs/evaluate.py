"""`raycap evaluate`: captions a split on the cluster with one model or an ensemble, keeps them, scores them once."""

from __future__ import annotations

import json
import logging
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.cluster import start_ray
from models.constraints import ConstraintAutomaton
from pipeline.captioning.captioning import Hypothesis
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.errors import UserError
from pipeline.runs.evaluation import summarize_search
from pipeline.scoring.metrics import Scores
from pipeline.storage.path import StoragePath, place

logger = logging.getLogger(__name__)


ALL = "all"


def evaluate(
    config: RunConfig,
    *,
    splits: Sequence[str] = (),
    models: Sequence[str] = (),
    stage: str | None = None,
    compare: str | None = None,
    features: str | None = None,
    constraints: Path | None = None,
    server: str | None = None,
    out: Path | None = None,
    address: str | None = None,
) -> int:
    """Scores of the configuration's run, or of `models` (bundles; several are an ensemble), on splits of its data.

    splits: those of data.test_splits by default; "all" is the whole data set. stage: the run as it was after it.
    compare: another bundle's captions beside these. features: a feature store, for bundles without a backbone.
    constraints: a file of words that captions must hold, in place of the configuration's evaluation.constraints.
    server: the name in the COCO server's file. Returns 1 when an image could not be read; UserError before anything is
    computed for what the user can mend.
    """
    begin = time.monotonic()
    if stage is not None and models:
        raise UserError("--stage names a stage of the configuration's run; leave --model out, or give its bundle there")
    if server is not None and not server.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--server {server}: letters, digits, - and _ only; it becomes part of a file's name")
    dataset = _data(config, features is not None)
    if features is None and config.features.hdf5 is not None:
        dataset, features = _regions(dataset, config)
    parts = {name: _part(dataset, name) for name in splits or config.data.test_splits}
    members = [_bundle(model, "--model", features) for model in models] or [_run_bundle(config, stage)]
    other = None if compare is None else _bundle(compare, "--compare", features)
    file = constraints or (None if config.evaluation.constraints is None else Path(config.evaluation.constraints))
    machines = {} if file is None else _machines(file, members[0], parts)
    their_machines = {} if file is None or other is None else _machines(file, other, parts)
    label = "+".join(member.name for member in members)[:120]
    folder = out or config.working_path / "evaluations" / label
    folder.mkdir(parents=True, exist_ok=True)
    logger.info(f"models    {', '.join(map(str, members))}" + (", as an ensemble" if len(members) > 1 else ""))
    logger.info(f"data      {', '.join(f'{name} {len(part)}' for name, part in parts.items())} images")
    start_ray(config, address)
    result: dict[str, Any] = {"models": [str(member) for member in members], "splits": {}}
    failed = 0
    for name, part in parts.items():
        found, bad = caption_dataset(members, part, config, features, folder, machines)
        failed += len(bad)
        entry: dict[str, Any] = {"images": len(found), "unreadable": bad}
        result["splits"][name] = entry
        best = _write_captions(folder, name, found, server, part)
        entry |= summarize_search({image: own[0] for image, own in found.items()}, machines, f"search    {name}: ")
        others: dict[int, str] = {}
        if other is not None:
            compared, _ = caption_dataset([other], part, config, features, folder, their_machines)
            others = {image: hypotheses[0].caption for image, hypotheses in compared.items()}
        _score(entry, name, part, best, others, dataset, config)
        _report(folder, name, entry, part, best, others, config, members, features)
    from pipeline.runs.folder import write_json

    write_json(folder / "scores.json", result)
    logger.info(f"scores       {folder / 'scores.json'}")
    logger.info(f"finished in {time.monotonic() - begin:.0f} s")
    if failed:
        logger.info(f"{failed} images could not be read; scores.json says which and why")
    return 1 if failed else 0


def _data(config: RunConfig, with_keys: bool) -> Dataset:
    """The annotations as they are: an image without a caption can be captioned, if not scored."""
    from pipeline.data.dataset import read_annotations
    from pipeline.data.loading import data_root, snapshot_of

    dataset, _ = read_annotations(config.data, data_root(config), config.storage.options)
    return snapshot_of(dataset, config)[0].known() if with_keys else dataset


def _regions(dataset: Dataset, config: RunConfig) -> tuple[Dataset, str]:
    """The images of which features.hdf5 has regions, and the store with them."""
    from pipeline.features.regions import import_regions

    dataset = dataset.keyed_by_id()
    store, bad = import_regions(dataset, config)
    if bad:
        logger.info(f"features  {len(bad)} images are left out: {store / 'quarantine.parquet'} says why")
    return dataset.without(sorted(bad)), store.uri


def _machines(file: Path, bundle: Path, parts: dict[str, Dataset]) -> dict[int, ConstraintAutomaton]:
    """The constraints of the images in `parts`; UserError where none of them has any."""
    from pipeline.captioning.constraints import build_machines, read_constraints
    from pipeline.data.vocabulary import Vocabulary

    images = {image for part in parts.values() for image in part.column("image_id")}
    own = {image: words for image, words in read_constraints(file).items() if image in images}
    if not own:
        raise UserError(f"constraints {file}: none of its images is in {', '.join(parts)}; look at the image ids")
    return build_machines(own, Vocabulary.load(bundle / "vocabulary.json"), str(file))


def _part(dataset: Dataset, name: str) -> Dataset:
    part = dataset.split(name)
    if not len(part) and name == ALL:
        part = dataset
    if not len(part):
        there = ", ".join(sorted(set(dataset.column("split"))))
        raise UserError(f"--split {name}: no image is in it; the splits are {there}, and {ALL} for every image")
    return part


def _bundle(model: str, option: str, features: str | None) -> Path:
    from pipeline.captioning.bundle import load_bundle

    folder = Path(model).absolute()
    if not folder.is_dir():
        raise UserError(f"{option} {model}: no such folder; give a model bundle, such as results/models/NAME/RUN")
    try:
        bundle = load_bundle(folder)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error
    if bundle.transform is None and features is None:
        raise UserError(
            f"{option} {model}: this bundle has no backbone; give its feature store with --features, or its "
            "regions as features.hdf5"
        )
    return folder


def _run_bundle(config: RunConfig, stage: str | None) -> Path:
    """The bundle of the configuration's own run, written when it is not there yet."""
    from pipeline.data.loading import find_data
    from pipeline.runs.prepare import open_run
    from pipeline.runs.run_bundle import bundle_path, bundle_run

    dataset, _ = find_data(config)
    folder = open_run(config, dataset.known().fingerprint())
    chosen = None
    if stage is not None:
        names = [each.name for each in config.stages]
        if stage not in names:
            raise UserError(f"--stage {stage}: the configuration has the stages {', '.join(names)}")
        chosen = config.stage(stage)
    finished = folder.result(stage) if stage is not None else (folder.path / "COMPLETE.json").is_file()
    if not (folder.path / "run.json").is_file() or not finished:
        what = f"stage {stage} of" if stage is not None else ""
        raise UserError(
            f"{what} run {folder.run_id} is not finished in {config.storage.uri}; `raycap run` it, or give --model"
        )
    path = bundle_path(folder, chosen)
    return path if path.is_dir() else bundle_run(folder, chosen)


def caption_dataset(
    members: Sequence[Path],
    part: Dataset,
    config: RunConfig,
    features: str | None,
    folder: Path,
    machines: Mapping[int, ConstraintAutomaton] | None = None,
) -> tuple[dict[int, list[Hypothesis]], dict[int, str]]:
    """Captions by image id from one Ray task a worker, and {image id: reason} of images that cannot be read.

    Bundles, images and `folder` must be readable from every node. `machines` are the images' constraints.
    """
    import ray

    workers = config.workers
    rows = folder / "images.arrow"
    part.save(rows)
    task = ray.remote(_share).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
    store = None if features is None else place(features, config.storage.options)
    tasks = [
        task.remote(list(members), rows, store, config, rank, workers.num_workers, dict(machines or {}))
        for rank in range(workers.num_workers)
    ]
    begin = time.monotonic()
    found: dict[int, list[Hypothesis]] = {}
    bad: dict[int, str] = {}
    for done in tasks:
        mine, troubled = ray.get(done)
        found |= mine
        bad |= troubled
    seconds = time.monotonic() - begin
    logger.info(f"captions  {len(found)} images in {seconds:.0f} s, {len(found) / seconds:.1f} images/s")
    rows.unlink()
    return {image: found[image] for image in part.column("image_id") if image in found}, bad


def _share(
    members: list[Path],
    rows: Path,
    store: StoragePath | None,
    config: RunConfig,
    rank: int,
    count: int,
    machines: dict[int, ConstraintAutomaton],
) -> tuple[dict[int, list[Hypothesis]], dict[int, str]]:
    from pipeline.captioning.bundle import load_bundle
    from pipeline.captioning.captioning import caption_share
    from pipeline.features.model_inputs import Images
    from pipeline.features.store import open_store
    from pipeline.runtime.context import device_for
    from pipeline.runtime.cpu import prepare_processor

    prepare_processor(config.workers.threads_per_worker)
    device = device_for(config.workers.gpus_per_worker)
    bundles, part = [load_bundle(member) for member in members], Dataset.load(rows)
    for bundle in bundles:
        bundle.captioner.to(device)
    images = [
        Images(
            part,
            None if bundle.transform is not None or store is None else open_store(store, config.features),
            bundle.transform,
            config.data.max_pixels,
            config.workers.threads_per_worker,
            config.storage.options,
        )
        for bundle in bundles
    ]
    bad: dict[int, str] = {}
    captioners = [bundle.captioner for bundle in bundles]
    vocabulary, settings = bundles[0].vocabulary, config.evaluation
    if any(bundle.vocabulary.words != vocabulary.words for bundle in bundles):
        raise UserError("the models of an ensemble must share one vocabulary, word by word; these do not")
    return caption_share(captioners, images, vocabulary, settings, rank, count, device, bad, machines, True), bad


def _write_captions(
    folder: Path,
    split: str,
    found: dict[int, list[Hypothesis]],
    server: str | None,
    part: Dataset,
) -> dict[int, str]:
    """predictions-SPLIT.json, the n best where there are several, the server's files; the best captions."""
    from pipeline.runs.evaluation import write_predictions
    from pipeline.runs.folder import write_text

    best = {image: hypotheses[0].caption for image, hypotheses in found.items()}
    write_predictions(folder / f"predictions-{split}.json", best)
    logger.info(f"predictions  {folder / f'predictions-{split}.json'}")
    if any(len(hypotheses) > 1 for hypotheses in found.values()):
        lines = [
            json.dumps({"image_id": image, "n_best": [_present(each) for each in hypotheses]}, ensure_ascii=False)
            for image, hypotheses in found.items()
        ]
        write_text(folder / f"n-best-{split}.jsonl", "\n".join(lines) + "\n")
        logger.info(f"n best       {folder / f'n-best-{split}.jsonl'}")
    if server is not None:
        if len(best) != len(part):
            raise UserError(
                f"--server: {len(best)} captions for the {len(part)} images of {split}; the server takes all or none"
            )
        name = f"captions_{split}_{server}_results"
        write_predictions(folder / f"{name}.json", best)
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(folder / f"{name}.json", f"{name}.json")
        logger.info(f"server       {folder / f'{name}.zip'}: {len(best)} rows")
    return best


def _present(hypothesis: Hypothesis) -> dict[str, Any]:
    return {key: value for key, value in hypothesis._asdict().items() if value is not None}


def _score(
    entry: dict[str, Any],
    split: str,
    part: Dataset,
    best: dict[int, str],
    others: dict[int, str],
    dataset: Dataset,
    config: RunConfig,
) -> None:
    """Scores of one split into its entry; without references there are captions only."""
    from jobs.score import format_scores
    from pipeline.data.synthetic import main_object_accuracy
    from pipeline.scoring.bootstrap import paired_difference
    from pipeline.scoring.metrics import score_captions
    from pipeline.scoring.published import published_rows

    references = {image: captions for image, captions in part.references().items() if captions and image in best}
    if not references:
        logger.info(f"{split} has no reference captions: captioned, not scored")
        return
    seen = [caption for captions in dataset.split(*config.data.train_splits).column("captions") for caption in captions]
    scores = score_captions(references, {image: best[image] for image in references}, training_captions=seen or None)
    entry |= _summary(scores)
    logger.info(f"\n{split}, {len(references)} images{format_scores(scores)}")
    if config.data.synthetic is not None:
        entry["main_object"] = main_object_accuracy({image: best[image] for image in references}, references)
        logger.info(f"  main object named in {entry['main_object']:.1%} of the captions")
    for row, difference in published_rows(config.model.name, split, part.column("uri"), config.evaluation.beam_size):
        values = "  ".join(f"{name} {value:.3f}" for name, value in row.scores.items())
        logger.info(f"  {row.name}: {values}" + (f"  ({difference})" if difference else ""))
    if not others:
        return
    theirs = score_captions(references, {image: others[image] for image in references}, metrics=tuple(scores.by_name))
    entry["compared"] = _summary(theirs) | {"differences": {}}
    logger.info(f"  {'':<9} {'this':>8} {'other':>8}   difference by image, 95 % interval")
    for name, score in scores.by_name.items():
        other = theirs.by_name[name]
        if score.value is None or other.value is None:
            continue
        text = ""
        if score.per_image is not None and other.per_image is not None and not name.startswith("BLEU"):
            gap = paired_difference(score.per_image, other.per_image)
            entry["compared"]["differences"][name] = gap._asdict()
            text = f"{gap}, better in {gap.better:.1%} of resamples"
        logger.info(f"  {name:<9} {score.value:>8.4f} {other.value:>8.4f}   {text}")


def _summary(scores: Scores) -> dict[str, Any]:
    ciderd = scores.by_name.get("CIDEr-D")
    return {
        "scores": {name: score.value for name, score in scores.by_name.items()},
        "unavailable": {name: score.unavailable for name, score in scores.by_name.items() if score.unavailable},
        "signature": scores.signature,
        "extras": scores.extras,
        "main_object": None,
        "per_image_CIDEr-D": dict(zip(scores.image_ids, (ciderd and ciderd.per_image) or [], strict=False)),
    }


def _report(
    folder: Path,
    split: str,
    entry: dict[str, Any],
    part: Dataset,
    best: dict[int, str],
    others: dict[int, str],
    config: RunConfig,
    members: Sequence[Path],
    features: str | None,
) -> None:
    """report-SPLIT.html; the heat maps are those of the first model."""
    if "scores" not in entry:
        return
    from jobs.gallery import with_attention
    from pipeline.reports.page import Report, ReportImage, write_report
    from pipeline.runs.summary import published_table, score_table

    table = {"splits": {split: entry, **({f"{split}, the other": entry["compared"]} if others else {})}}
    if others:
        entry["compared"]["images"] = entry["images"]
    columns, rows = score_table(table, align=True)
    scores = entry["per_image_CIDEr-D"]
    images = [
        ReportImage(
            image,
            StoragePath(uri, config.storage.options),
            best[image],
            captions,
            scores.get(image),
            split,
            {"other": others[image]} if others else {},
        )
        for image, uri, captions in zip(*(part.column(name) for name in ("image_id", "uri", "captions")), strict=True)
        if image in best
    ]
    label = "+".join(member.name for member in members)[:120]
    store = None if features is None else place(features, config.storage.options)
    images = with_attention(images, members[0], config, label, store, part)
    report = Report(
        title=f"{label} on {split}",
        run_id=label,
        protocol=f"{config.evaluation.protocol}, {entry['signature']}",
        score_columns=columns,
        score_rows=rows + published_table(columns, config, split, part.column("uri")),
        stages=[],
        images=images,
        facts={"models": ", ".join(label.split("+")), "images": f"{split} {len(part)}"},
    )
    write_report(folder / f"report-{split}.html", report)
    logger.info(f"report       {folder / f'report-{split}.html'}")
