"""`raycap caption`: captions of the user's images with a model bundle; few in this process, many through Ray Data."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from raycap.jobs.caption_output import CaptionFile, Row
from raycap.jobs.named_files import OpenedBundle, check_output_folder, open_bundle
from raycap.jobs.options import Address
from raycap.models.config import PLAIN, Values
from raycap.pipeline.cluster.capacity import wait_for
from raycap.pipeline.cluster.stalls import StallWatch, one_sentence
from raycap.pipeline.cluster.start import cluster_address, connect
from raycap.pipeline.config.load import apply_override
from raycap.pipeline.config.sections import EvaluationSection, WorkersSection
from raycap.pipeline.data.image_sources import find_images, load_image
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, ModelSource, SentBundle, StoredBundle, bundle_digests
from raycap.pipeline.evaluation.confidence import Confidence
from raycap.pipeline.evaluation.reports.pictures import draw_clusters, draw_word_maps
from raycap.pipeline.runtime.log import Decorations, log_to_stderr, progress
from raycap.pipeline.runtime.names import printable, quoted, shown
from raycap.pipeline.runtime.processor import prepare_processor
from raycap.pipeline.storage.digests import file_digest
from raycap.pipeline.storage.path import storage_path

if TYPE_CHECKING:
    from raycap.pipeline.evaluation.captioning.ray_data import CaptionPool
    from raycap.pipeline.evaluation.captioning.service import CaptionService

MIN_IMAGES_FOR_RAY = 2_000  # for fewer images, starting a local Ray takes longer than it saves


@dataclass(frozen=True)
class CaptionOptions:
    """The beam search of a `CaptionService`, and the number of captions per image."""

    search: Values
    num_results: int


class Pictures(NamedTuple):
    """The folder for pictures of each caption's words, and the head of the decoder whose attention they show.

    The head is a number from 1 on, as the option --head; None for the mean over all heads.
    """

    folder: Path
    head: int | None


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster's address (None: a Ray on this machine), the processes there, and how long to wait for them."""

    address: str | None
    gpus_per_worker: float | None  # None: 1 if the cluster has GPUs now, else 0
    max_workers: int | None
    max_wait_minutes: float
    max_stall_minutes: float


def caption(
    images: Annotated[
        list[str],
        typer.Argument(help="Files, folders, globs; also s3:// URIs, prefixes and globs.", metavar="IMAGES..."),
    ],
    model: Annotated[str, typer.Option(help="A model bundle's folder, also on S3.")],
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON lines with log-probabilities.")] = False,
    out: Annotated[
        str | None,
        typer.Option(
            help="Write JSON lines to this file, or to parts in this s3:// folder; images there are skipped.",
            metavar="FILE|S3_FOLDER",
        ),
    ] = None,
    beam_size: Annotated[
        int | None, typer.Option("--beam", min=1, max=100, help="Beams per image. The default is the bundle's.")
    ] = None,
    num_results: Annotated[int, typer.Option("--n-best", min=1, help="Captions per image, best first.")] = 1,
    max_length: Annotated[
        int | None,
        typer.Option(min=3, help="Tokens per caption, including begin and end. The default is the bundle's."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="evaluation.KEY=VALUE", help="A key of the bundle's search: evaluation.decoding.top_p=0.9."
        ),
    ] = None,
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="float32; bfloat16, in which a few captions differ; or auto, the faster one, measured."),
    ] = "float32",
    min_confidence: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="With --out: write captions with less confidence to a review file beside it."),
    ] = None,
    explain: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write pictures here: attention and attribution of each word.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(min=1, help="With --explain: the attention of this head only, not of their mean.")
    ] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option(min=0, help="GPUs of each process on Ray. The default is 1 if it has GPUs, else 0.")
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="Most processes on Ray. The default is as many as the cluster can hold.")
    ] = None,
    max_wait_minutes: Annotated[
        float, typer.Option(min=0, help="How long to wait for the cluster's resources.")
    ] = WorkersSection().max_wait_minutes,
    max_stall_minutes: Annotated[
        float, typer.Option(min=0.01, help="How long Ray may caption nothing before the command ends.")
    ] = WorkersSection().max_stall_minutes,
    address: Address = None,
) -> int:
    """Caption image files.

    A few images are captioned in this process, with its GPU if there is one, and many through Ray. The exit code is 1
    when an image cannot be read.

    Example: raycap caption photos/ 'more/*.jpg' --model results/models/demo/RUN --json
    """
    begin = time.monotonic()
    log_to_stderr()
    names, opened = find_images(images), open_bundle("--model", model)
    changes = _changes(set_ or (), beam_size, max_length)
    settings = opened.bundle.changed_search(changes).model_copy(update={"num_results": num_results})
    _check(opened, settings, explain, head)
    confidence = _confidence(opened.bundle, settings, min_confidence)
    output = None if out is None else CaptionFile(storage_path(out), min_confidence)
    if output is None and min_confidence is not None:
        raise UserError(f"--min-confidence {min_confidence:g} needs --out, beside which it writes the review file")
    signature = _signature(opened, settings) | {
        "fit": confidence and confidence.digest,
        "min_confidence": min_confidence,
    }
    written = output.precision() if output is not None and precision == "auto" else None
    search: Values = {"search": changes, "precision": written or precision}
    signature["precision"] = search["precision"]  # all lines of a file have one precision
    done = {} if output is None else output.read_done(signature)
    pending = [name for name in names if name not in done]
    if done:
        _print_note(f"{len(names) - len(pending)} of {len(names)} images are in {out} already")
    cluster = ClusterOptions(address, gpus_per_worker, max_workers, max_wait_minutes, max_stall_minutes)
    joins_cluster = bool(cluster_address(address))  # Ray sets the variable for a submitted job
    uses_ray = bool(pending) and (joins_cluster or len(pending) >= MIN_IMAGES_FOR_RAY)
    if explain is not None and uses_ray:
        raise UserError(f"--explain draws pictures for fewer than {MIN_IMAGES_FOR_RAY} images and without a cluster")
    if pending and search["precision"] == "auto":
        search["precision"] = signature["precision"] = _measured_precision(
            opened, search, cluster if uses_ray else None
        )
        _print_note(f"{search['precision']} is used, as measured where the images are captioned")
    if explain is not None:
        check_output_folder("--explain", explain)
        explain.mkdir(parents=True, exist_ok=True)
        _print_note("the attributions of a caption's words need hundreds of gradients: minutes per image on a CPU")
    decorations, options = Decorations(), CaptionOptions(search, num_results)
    captioning: AbstractContextManager[Iterator[Values]]
    if uses_ray:
        captioning = _captioning_on_ray(pending, opened, options, cluster)
    else:
        pictures = None if explain is None else Pictures(explain, head)
        captioning = nullcontext(_caption_in_process(pending, opened.bundle, options, pictures, decorations))
    with nullcontext(_printer(json_lines)) if output is None else output.open(signature) as write, captioning as rows:
        num_failed, largest_gap = _write_rows(rows, len(pending), write)
    if explain is not None and num_failed < len(pending):
        _print_note(
            f"heat maps: {explain}; attributions add up to the words' log-probabilities within {largest_gap:.3f} nats"
        )
    decorations.log_failed(f"caption the image again{' without --out' if output else ''}")
    num_failed += sum(not has_caption for has_caption in done.values())
    if num_failed:
        _print_note(f"{num_failed} of {len(names)} images could not be captioned; their lines give the reasons")
    if output is not None:
        seconds = time.monotonic() - begin
        speed = f"{len(pending)} images in {seconds:.0f} s, {len(pending) / seconds:.1f} images/s"
        _print_note(f"captions: {output.place} ({speed})")
        if min_confidence is not None:
            _print_note(f"review:   {output.review} (captions with a confidence below {min_confidence:g})")
    return 1 if num_failed else 0


def _check(opened: OpenedBundle, settings: EvaluationSection, explain: Path | None, head: int | None) -> None:
    """Raises UserError for a bundle or options with which no image can be captioned."""
    if opened.bundle.transform is None:
        raise UserError(
            f"--model {opened.location}: this bundle has no backbone, it captions a detector's region features or "
            "stored grid features and not images; caption a split with `raycap evaluate` and features.hdf5 or "
            "--features, or, for grid features, import it again with --backbone"
        )
    if settings.num_results > settings.beam_size and not settings.decoding.sampling:
        raise UserError(f"--n-best {settings.num_results}: expected 1 to the beam's size, {settings.beam_size}")
    num_heads = opened.bundle.captioner.model.config.num_heads
    if head is not None and (explain is None or head > num_heads):
        raise UserError(f"--head {head}: expected --explain and a number from 1 to the model's {num_heads} heads")


def _changes(overrides: Sequence[str], beam_size: int | None, max_length: int | None) -> Values:
    """The keys of the section `evaluation` that the options give in place of the bundle's. Raises UserError."""
    values: Values = {"evaluation": {}}
    for override in overrides:
        apply_override(values, override)
    if unknown := sorted(values.keys() - {"evaluation"}):
        raise UserError(f"--set {shown(unknown[0])}: only keys of the section evaluation, such as evaluation.ranking")
    if not isinstance(values["evaluation"], dict):
        raise UserError("--set evaluation: give its keys one by one, such as evaluation.ranking=sum")
    options = {"beam_size": beam_size, "max_length": max_length}
    return values["evaluation"] | {key: value for key, value in options.items() if value is not None}


def _signature(opened: OpenedBundle, settings: EvaluationSection) -> Values:
    """The part of the signature of `--out` that the model and the settings of its search decide.

    Usual settings are None, which lines omit.
    """
    is_usual = settings.ranking == "mean" and not settings.collapse_repeats
    return {
        "beam_size": settings.beam_size,
        "max_length": settings.max_length,
        "ranking": None if is_usual else settings.ranking,
        "collapse_repeats": None if is_usual else settings.collapse_repeats,
        "decoding": None if settings.decoding == PLAIN else asdict(settings.decoding),
        "precision": None,
        "num_results": settings.num_results,
        "model": opened.bundle.config["name"],
        "weights": file_digest(opened.folder / "model.safetensors")[:16],  # bundles of one name can have others
    }


def _caption_in_process(
    names: Sequence[str], bundle: Bundle, options: CaptionOptions, pictures: Pictures | None, decorations: Decorations
) -> Iterator[Values]:
    """Yields the output row of each image, in order.

    pictures: None for no pictures. A picture that fails is recorded in `decorations`.
    """
    from raycap.pipeline.evaluation.captioning.service import CaptionService

    prepare_processor()
    service = CaptionService(bundle, **options.search)
    search = service.changed_search({}, options.num_results)
    for number, (name, found) in enumerate(zip(names, service.caption_images(names, search), strict=True)):
        row = {"image": name} | found.to_json()
        if pictures is not None and found.caption is not None:
            path = pictures.folder / f"{number:04d}-{Path(name).stem}.png"
            with decorations.making(f"the picture of {name}"):
                row |= _draw_words(path, name, service, found.caption, pictures.head)
        yield row


@contextmanager
def _captioning_on_ray(
    names: Sequence[str], model: OpenedBundle, options: CaptionOptions, cluster: ClusterOptions
) -> Iterator[Iterator[Values]]:
    """Gives the output row of each image. Ray Data captions them on a cluster or on a local Ray.

    The context ends with StalledError when no caption comes for `cluster.max_stall_minutes`.
    """
    from raycap.pipeline.evaluation.captioning.ray_data import caption_stream

    has_joined_cluster = connect(cluster.address)
    pool = start_pool(cluster, has_joined_cluster)
    source = _source(model, has_joined_cluster)
    transform = model.bundle.transform
    assert transform is not None
    with _stall_watch(cluster) as progressed:

        def rows() -> Iterator[Values]:
            captions = caption_stream(names, source, transform, options.search, options.num_results, pool)
            for name, found in captions:
                progressed()
                yield {"image": name} | found

        yield rows()


def _source(model: OpenedBundle, has_joined_cluster: bool) -> ModelSource:
    """The source from which Ray's processes load the model."""
    if has_joined_cluster and not model.location.is_remote:  # other nodes cannot read this machine's disk
        return SentBundle.of(model.folder)
    return StoredBundle(model.location, bundle_digests(model.folder))


def _measured_precision(model: OpenedBundle, search: Values, cluster: ClusterOptions | None) -> str:
    """float32 or bfloat16: the faster one in a captioning process of Ray, or in this process if `cluster` is None."""
    from raycap.pipeline.evaluation.captioning.ray_data import fastest_precision

    if cluster is None:
        return fastest_precision(StoredBundle(model.location), search, gpus=None)
    has_joined_cluster = connect(cluster.address)
    import ray

    pool = start_pool(cluster, has_joined_cluster)
    task = ray.remote(fastest_precision).options(num_cpus=pool.cpus, num_gpus=pool.gpus)
    with _stall_watch(cluster), one_sentence("the measurement of precisions"):
        precision: str = ray.get(task.remote(_source(model, has_joined_cluster), search, pool.gpus))
    return precision


def _stall_watch(cluster: ClusterOptions) -> StallWatch:
    """Ends the command when Ray captions nothing for `cluster.max_stall_minutes`."""
    return StallWatch(
        "captioning",
        WorkersSection(max_stall_minutes=cluster.max_stall_minutes),
        limit_name="--max-stall-minutes",
        remedy="with --out, the same command continues from what is finished",
    )


def start_pool(cluster: ClusterOptions, has_joined_cluster: bool) -> CaptionPool:
    """The processes that caption, once Ray can place the first of them. Raises UserError if it never can."""
    import ray

    from raycap.pipeline.evaluation.captioning.ray_data import CaptionPool

    num_gpus = ray.cluster_resources().get("GPU", 0)
    gpus = float(num_gpus > 0) if cluster.gpus_per_worker is None else cluster.gpus_per_worker
    pool = CaptionPool(gpus, cluster.max_workers)
    if has_joined_cluster:
        wait_for(
            pool.bundles,
            "captioning",
            limit_s=60 * cluster.max_wait_minutes,
            limit_name="--max-wait-minutes",
            remedy="lower --gpus-per-worker, or join a cluster with larger nodes or more of them",
        )
    elif gpus > num_gpus:
        raise UserError(
            f"--gpus-per-worker {gpus:g}: this machine's Ray has {num_gpus:g} GPUs; give 0, or join a cluster with "
            "--address"
        )
    return pool


def _confidence(bundle: Bundle, search: EvaluationSection, min_confidence: float | None) -> Confidence | None:
    """The confidence of a bundle in the captions of a search, or None, which is said if it has one for another search.

    min_confidence: the option --min-confidence. Raises UserError if it is given and there is no confidence.
    """
    confidence = bundle.confidence(search)
    if confidence is None and (bundle.confidences or min_confidence is not None):
        reason = "the model has no confidence in captions of this search"
        remedy = "`raycap evaluate --model` fits one on the validation split"
        if min_confidence is not None:
            raise UserError(f"--min-confidence {min_confidence:g}: {reason}; {remedy}")
        searches = " and ".join(quoted(fit.search) for fit in bundle.confidences)
        _print_note(f"{reason}, only of {searches}; {remedy}")
    return confidence


def _draw_words(path: Path, name: str, service: CaptionService, caption: str, head: int | None) -> Values:
    """Draws the attention and attribution of each word to `path`, and for a model with clusters a second picture.

    head: as in `Pictures`.

    Returns the entry `attribution` of the image's row: `steps` is the number of integration steps, and `gap` is the
    largest difference, in nats, between a word's log-probability and the sum of its attributions.
    """
    image = load_image(name)
    pixels = service.transform(image)
    explanation = service.explain(pixels, caption, None if head is None else head - 1)
    assert explanation.attribution is not None
    maps = {"attention": explanation.attention, "attribution": explanation.attribution}
    draw_word_maps(path, image, explanation.words, maps, explanation.grid)
    clusters = service.clusters(pixels, caption)
    if clusters is not None:
        draw_clusters(path.with_name(f"{path.stem}-clusters.png"), image, explanation.words, clusters)
    return {"attribution": {"steps": explanation.steps, "gap": round(explanation.gap, 6)}}


def _write_rows(rows: Iterator[Values], total: int, write: Callable[[Row], None]) -> tuple[int, float]:
    """Calls `write` with each row. total: the number of rows.

    Returns the number of images with an error, and the largest `gap` of an attribution (see `_draw_words`) in nats.
    """
    num_failed, largest_gap = 0, 0.0
    with progress("captions", total, write=_print_note) as advance:
        for row in rows:
            num_failed += "error" in row
            largest_gap = max(largest_gap, row.get("attribution", {}).get("gap", 0.0))
            write(row)
            advance(1)
    return num_failed, largest_gap


def _printer(json_lines: bool) -> Callable[[Row], None]:
    """Returns a function that prints a row as JSON or as text, with control characters escaped."""
    return lambda row: print(json.dumps(row) if json_lines else _format_row(row))


def _format_row(row: Row) -> str:
    """An output row as text for the terminal."""
    confidence = f"  (confidence {row['confidence']:.2f})" if "confidence" in row else ""
    lines = [f"{row['image']}: {row['caption'] + confidence if 'caption' in row else 'error: ' + row['error']}"]
    lines += [f"    {entry['log_prob']:8.3f}  {entry['caption']}" for entry in row.get("n_best", ())]
    return "\n".join(map(printable, lines))


def _print_note(text: str) -> None:
    """Prints to stderr, because another program may read the captions from stdout."""
    print(printable(text), file=sys.stderr, flush=True)
