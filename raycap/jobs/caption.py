"""`raycap caption`: captions image files with a model bundle, a few in this process and many through Ray Data."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raycap.jobs.caption_output import CaptionFile, Row
from raycap.jobs.named_files import OpenedBundle, check_output_folder, open_bundle
from raycap.jobs.options import Address
from raycap.models.config import PLAIN, Values
from raycap.pipeline.cluster.stalls import StallWatch, wait_for
from raycap.pipeline.cluster.start import cluster_address, connect
from raycap.pipeline.config.load import apply_override
from raycap.pipeline.config.sections import MAX_BEAMS, EvaluationSection, WorkersSection
from raycap.pipeline.data.image_sources import find_images, load_image
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import ModelSource, SentBundle, StoredBundle, bundle_digests
from raycap.pipeline.evaluation.confidence import Confidence
from raycap.pipeline.runtime.log import Decorations, log_to_stderr, progress
from raycap.pipeline.runtime.names import print_line, printable, quoted, shown
from raycap.pipeline.runtime.processor import prepare_processor
from raycap.pipeline.storage.digests import file_digest
from raycap.pipeline.storage.path import storage_path

if TYPE_CHECKING:
    from raycap.pipeline.evaluation.captioning.ray_data import CaptionPool
    from raycap.pipeline.evaluation.captioning.service import CaptionService

MIN_IMAGES_FOR_RAY = 2_000  # for fewer images, starting a local Ray takes longer than it saves
TILE, SPACE = 2.4, 0.05  # the side of a heat map and the space below it, in inches
COLUMNS = 6  # of heat maps
# Matplotlib takes each character from the first of these fonts that has it. DejaVu Sans is part of matplotlib.
FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Unifont", "FreeSans")


# Options of the command
Images = Annotated[
    list[str],
    typer.Argument(help="Files, folders, globs; also s3:// URIs, prefixes and globs.", metavar="IMAGES..."),
]
Out = Annotated[
    str | None,
    typer.Option(
        help="Write JSON lines to this file, or to parts in this s3:// folder; images there are skipped.",
        metavar="FILE|S3_FOLDER",
    ),
]
BeamSize = Annotated[
    int | None, typer.Option("--beam", min=1, max=MAX_BEAMS, help="Beams per image. The default is the bundle's.")
]
SearchSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="evaluation.KEY=VALUE", help="A key of the bundle's search: evaluation.decoding.top_p=0.9."
    ),
]
Precision = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="float32, or bfloat16, in which a few captions differ.")
]
Explain = Annotated[
    Path | None, typer.Option(file_okay=False, help="Write pictures here: attention and attribution of each word.")
]
GpusPerWorker = Annotated[
    float | None, typer.Option(min=0, help="GPUs of each process on Ray. The default is 1 if it has GPUs, else 0.")
]
MaxWorkers = Annotated[
    int | None, typer.Option(min=1, help="Most processes on Ray. The default is as many as the cluster can hold.")
]


def caption(
    images: Images,
    model: Annotated[str, typer.Option(help="A model bundle's folder, also on S3.")],
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON lines with log-probabilities.")] = False,
    out: Out = None,
    beam_size: BeamSize = None,
    num_results: Annotated[int, typer.Option("--n-best", min=1, help="Captions per image, best first.")] = 1,
    set_: SearchSet = None,
    precision: Precision = "float32",
    explain: Explain = None,
    gpus_per_worker: GpusPerWorker = None,
    max_workers: MaxWorkers = None,
    address: Address = None,
) -> int:
    """Caption image files.

    A few images are captioned in this process, with its GPU if there is one, and many through Ray. The exit code is 1
    when an image cannot be read.

    Example: raycap caption photos/ 'more/*.jpg' --model results/models/demo/RUN --json
    """
    log_to_stderr()
    names = find_images(images)
    changes = _changes(set_ or (), beam_size)
    opened = open_bundle("--model", model)
    request = Request(opened, changes, num_results, precision, explain, address, gpus_per_worker, max_workers)
    request.check(len(names))
    output = None if out is None else CaptionFile(storage_path(out))
    return _caption(names, request, output, json_lines=json_lines)


@dataclass(frozen=True)
class Request:
    """What the options of the command ask for.

    changes: keys of the section `evaluation` whose values replace those of the bundle. num_results: captions per
    image. explain: the folder for heat maps. If it is None, no heat maps are drawn. The other options have the
    meanings that `raycap caption --help` describes.
    """

    opened: OpenedBundle
    changes: Values
    num_results: int
    precision: str
    explain: Path | None
    address: str | None
    gpus_per_worker: float | None
    max_workers: int | None

    @cached_property
    def settings(self) -> EvaluationSection:
        """The bundle's settings of the search, with the changes of the options."""
        search = self.opened.bundle.changed_search(self.changes)
        return search.model_copy(update={"num_results": self.num_results})

    @property
    def confidence(self) -> Confidence | None:
        """The bundle's confidence that was fitted with this search. None if there is none."""
        return self.opened.bundle.confidence(self.settings)

    @property
    def joins_cluster(self) -> bool:
        return bool(cluster_address(self.address))  # from Ray's variable in a submitted job

    def check(self, num_images: int) -> None:
        """Raises UserError if the bundle cannot caption images with these options. Notes a missing confidence."""
        bundle, settings = self.opened.bundle, self.settings
        if bundle.transform is None:
            raise UserError(
                f"--model {self.opened.location}: this bundle has no backbone, it captions a detector's region "
                "features or stored grid features and not images; caption a split with `raycap evaluate` and "
                "features.hdf5, or, for grid features, import it again with --backbone"
            )
        if self.num_results > settings.beam_size and not settings.decoding.sampling:
            raise UserError(f"--n-best {self.num_results}: expected 1 to the beam's size, {settings.beam_size}")
        if self.confidence is None and bundle.confidences:
            searches = " and ".join(quoted(fit.search) for fit in bundle.confidences)
            _print_note(
                f"the model has no confidence in captions of this search, only of {searches}; `raycap evaluate "
                "--model` fits one on the validation split"
            )
        if self.explain is not None:
            if self.joins_cluster or num_images >= MIN_IMAGES_FOR_RAY:
                raise UserError(f"--explain needs fewer than {MIN_IMAGES_FOR_RAY} images, and no cluster")
            check_output_folder("--explain", self.explain)

    def signature(self) -> Values:
        """The values that determine the captions. Each line of `--out` contains the values that are not None."""
        settings, bundle = self.settings, self.opened.bundle
        is_usual = settings.ranking == "mean" and not settings.collapse_repeats
        return {
            "beam_size": settings.beam_size,
            "max_length": settings.max_length,
            "ranking": None if is_usual else settings.ranking,
            "collapse_repeats": None if is_usual else settings.collapse_repeats,
            "decoding": None if settings.decoding == PLAIN else asdict(settings.decoding),
            "precision": self.precision,
            "num_results": self.num_results,
            "model": bundle.config["name"],
            "weights": file_digest(self.opened.folder / "model.safetensors")[:16],  # as two bundles can have one name
            "fit": self.confidence and self.confidence.digest,
        }


def _changes(overrides: Sequence[str], beam_size: int | None) -> Values:
    """The keys of the section `evaluation` that the options set. Raises UserError for a key of another section."""
    values: Values = {"evaluation": {}}
    for override in overrides:
        apply_override(values, override)
    if unknown := sorted(values.keys() - {"evaluation"}):
        raise UserError(f"--set {shown(unknown[0])}: only keys of the section evaluation, such as evaluation.ranking")
    if not isinstance(values["evaluation"], dict):
        raise UserError("--set evaluation: give its keys one by one, such as evaluation.ranking=sum")
    return values["evaluation"] | ({} if beam_size is None else {"beam_size": beam_size})  # wins over --set


def _caption(names: Sequence[str], request: Request, output: CaptionFile | None, *, json_lines: bool) -> int:
    """Captions the images that `output` lacks, and prints or writes a row for each. Returns the exit code."""
    begin, signature = time.monotonic(), request.signature()
    has_caption = {} if output is None else output.read_done(signature)
    pending = [name for name in names if name not in has_caption]
    if output is not None and has_caption:
        _print_note(f"{len(names) - len(pending)} of {len(names)} images are in {output.place} already")
    uses_ray = bool(pending) and (request.joins_cluster or len(pending) >= MIN_IMAGES_FOR_RAY)
    decorations = Decorations()
    with ExitStack() as stack:
        if uses_ray:
            rows = stack.enter_context(_on_ray(pending, request))
        else:
            rows = _in_process(pending, request, decorations)
        write = partial(_print_row, json_lines) if output is None else stack.enter_context(output.open(signature))
        with progress("captions", len(pending)) as advance:
            for row in rows:
                has_caption[row["image"]] = "error" not in row
                write(row)
                advance(1)
    if request.explain is not None and any(has_caption[name] for name in pending):
        _print_note(f"heat maps: {request.explain}")
    decorations.log_failed(f"caption the image again{' without --out' if output else ''}")
    num_failed = sum(not has_caption[name] for name in names)
    if num_failed:
        _print_note(f"{num_failed} of {len(names)} images could not be captioned; their lines give the reasons")
    if output is not None:
        seconds = time.monotonic() - begin
        speed = f"{len(pending)} images in {seconds:.0f} s, {len(pending) / seconds:.1f} images/s"
        _print_note(f"captions: {output.place} ({speed})")
    return 1 if num_failed else 0


def _in_process(names: Sequence[str], request: Request, decorations: Decorations) -> Iterator[Values]:
    """Yields the output row of each image, in order. If a heat map cannot be drawn, `decorations` records the error."""
    from raycap.pipeline.evaluation.captioning.service import CaptionService

    prepare_processor()
    if request.explain is not None:
        request.explain.mkdir(parents=True, exist_ok=True)
        _print_note(
            "the attributions of a caption's words need hundreds of gradients: seconds to minutes per image on a CPU"
        )
    service = CaptionService(request.opened.bundle, search=request.changes, precision=request.precision)
    settings = service.changed_search({}, request.num_results)
    for number, (name, found) in enumerate(zip(names, service.caption_images(names, settings), strict=True)):
        row = {"image": name} | found.to_json()
        if request.explain is not None and found.caption is not None:
            path = request.explain / f"{number:04d}-{Path(name).stem}.png"
            with decorations.making(f"the picture of {name}"):
                _draw_words(path, name, service, found.caption)
        yield row


@contextmanager
def _on_ray(names: Sequence[str], request: Request) -> Iterator[Iterator[Values]]:
    """Captions the images with processes on Ray. Yields an iterator over the output rows, in the order of the images.

    Joins or starts Ray, and waits until Ray can place a captioning process. Raises UserError if this machine has too
    few GPUs for a process. The context raises JobFailedError if no caption arrives for an hour.
    """
    from raycap.pipeline.evaluation.captioning.ray_data import caption_stream

    opened = request.opened
    has_joined_cluster = connect(request.address)
    pool = _start_pool(request, has_joined_cluster)
    if has_joined_cluster and not opened.location.is_remote:  # other nodes cannot read it, so it is sent
        source: ModelSource = SentBundle.of(opened.folder)
    else:
        source = StoredBundle(opened.location, bundle_digests(opened.folder))
    watch = StallWatch("captioning", WorkersSection())
    transform, search = opened.bundle.transform, {"search": request.changes, "precision": request.precision}
    assert transform is not None
    captions = caption_stream(names, source, transform, search, request.num_results, pool)
    with watch as progressed:

        def rows() -> Iterator[Values]:
            for name, found in captions:
                progressed()
                yield {"image": name} | found

        yield rows()


def _start_pool(request: Request, has_joined_cluster: bool) -> CaptionPool:
    """Waits until a cluster can place a captioning process, and returns the pool of these processes.

    Raises UserError if Ray runs only on this machine and has too few GPUs for one process.
    """
    import ray

    from raycap.pipeline.evaluation.captioning.ray_data import CaptionPool

    num_gpus = ray.cluster_resources().get("GPU", 0)
    default_gpus = 1.0 if num_gpus > 0 else 0.0
    gpus = default_gpus if request.gpus_per_worker is None else request.gpus_per_worker
    pool = CaptionPool(gpus, request.max_workers)
    if has_joined_cluster:
        wait_for(
            pool.bundles,
            "captioning",
            limit_s=60 * WorkersSection().max_wait_minutes,
            remedy="lower --gpus-per-worker, or join a cluster with larger nodes or more of them",
        )
    elif pool.gpus > num_gpus:
        raise UserError(
            f"--gpus-per-worker {pool.gpus:g}: this machine's Ray has {num_gpus:g} GPUs; give 0, or join a cluster "
            "with --address"
        )
    return pool


def _draw_words(path: Path, name: str, service: CaptionService, caption: str) -> None:
    """Writes a PNG file with an image and heat maps of the attention and attribution of each word of a caption.

    They are those of ExpansionNet v2's Figure 4. The colors of each map range from its smallest value (dark) to its
    largest value (yellow).
    """
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    image = load_image(name)
    explanation = service.explain(service.transform(image), caption)
    assert explanation.attribution is not None
    words, maps = explanation.words, {"attention": explanation.attention, "attribution": explanation.attribution}
    columns = min(COLUMNS, 1 + len(words))
    rows = math.ceil((1 + len(words)) / columns) * len(maps)
    figure = Figure(figsize=(columns * TILE, rows * (TILE * 1.2 + SPACE)))
    figure.set_layout_engine("constrained", h_pad=SPACE)
    axes = figure.subplots(rows, columns, squeeze=False)
    installed = {font.name for font in fontManager.ttflist}
    fonts = [font for font in FONTS if font in installed]
    for axis in axes.flat:
        axis.axis("off")
    axes[0, 0].imshow(image.convert("RGB"), extent=(0, 1, 0, 1))
    gray = image.convert("L")  # gray, so that colors of the image are not mistaken for those of the map
    for row, (kind, weights) in enumerate(maps.items()):
        for number, word in enumerate(words, 1):
            line, column = divmod(number, columns)
            axis = axes[line * len(maps) + row, column]
            axis.imshow(gray, "gray", vmin=0, vmax=255, extent=(0, 1, 0, 1))
            level = weights[number - 1].reshape(explanation.grid)
            axis.imshow(level, "plasma", extent=(0, 1, 0, 1), alpha=0.55, interpolation="bicubic")
            axis.set_title(f"{word}\n{kind}", parse_math=False, fontsize=9, fontfamily=fonts)
    figure.savefig(path, dpi=96)


def _print_row(json_lines: bool, row: Row) -> None:
    """Prints an output row as JSON, or as text in which control characters are escaped."""
    if json_lines:
        print(json.dumps(row))
        return
    result = row["caption"] if "caption" in row else f"error: {row['error']}"
    confidence = f"  (confidence {row['confidence']:.2f})" if "confidence" in row else ""
    print_line(f"{row['image']}: {result}{confidence}")
    for entry in row.get("n_best", ()):
        print_line(f"    {entry['log_prob']:8.3f}  {entry['caption']}")


def _print_note(text: str) -> None:
    """Prints to stderr, because another program may read the captions from stdout."""
    print(printable(text), file=sys.stderr, flush=True)
