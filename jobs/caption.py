"""`raycap caption`: captions of the user's images with a model bundle; few in this process, many through Ray Data."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from jobs.cluster import connect
from jobs.options import Address
from pipeline.captioning.bundle import Bundle, fetched, load_bundle
from pipeline.captioning.model_sources import ModelSource, SentBundle, StoredBundle
from pipeline.config.sections import SEARCH_DEFAULTS
from pipeline.data.image_paths import find_images
from pipeline.errors import UserError
from pipeline.runtime.progress import progress
from pipeline.storage.atomic import write_bytes
from pipeline.storage.path import StoragePath, storage_path

MIN_IMAGES_FOR_RAY = 2_000  # for fewer images, starting a local Ray takes longer than it saves
BATCH_SIZE = 16


@dataclass(frozen=True)
class CaptionOptions:
    """The options of `raycap caption`.

    json_lines: print JSON in place of text.
    out: write JSON lines to this file and print nothing; images whose captions it contains already are skipped.
    num_results: how many captions are written for each image, the best first.
    explain: the folder for pictures that show which parts of the image each word depends on.
    address: the address of a Ray cluster.
    """

    json_lines: bool = False
    out: Path | None = None
    beam_size: int = SEARCH_DEFAULTS.beam_size
    num_results: int = SEARCH_DEFAULTS.num_results
    max_length: int = SEARCH_DEFAULTS.max_length
    precision: str = SEARCH_DEFAULTS.precision
    explain: Path | None = None
    address: str | None = None

    @property
    def search(self) -> dict[str, Any]:
        """The options that a `CaptionService` takes."""
        return {"beam_size": self.beam_size, "max_length": self.max_length, "precision": self.precision}


class _OpenedModel(NamedTuple):
    """The model bundle of `--model`; `folder` is a local copy of `location`."""

    location: StoragePath
    folder: Path
    bundle: Bundle


def caption(images: Sequence[str], model: str, options: CaptionOptions = CaptionOptions()) -> int:
    """Writes one line per image. Returns the exit code: 1 when an image could not be read.

    Raises UserError for mistakes of the user before the first caption.
    """
    _check_options(options)
    names = find_images(images)
    opened_model = _open_model(model)
    signature = _signature(opened_model, options)
    if options.explain is not None:
        _make_explain_folder(options.explain)
    done = _read_done(options.out, signature) if options.out is not None else {}
    pending = [name for name in names if name not in done]
    if done:
        _print_note(f"{len(names) - len(pending)} of {len(names)} images are in {options.out} already")
    if options.address is not None or len(pending) >= MIN_IMAGES_FOR_RAY:
        if options.explain is not None:
            raise UserError(
                f"--explain draws pictures for fewer than {MIN_IMAGES_FOR_RAY} images and without --address"
            )
        rows = _caption_on_ray(pending, opened_model, options)
    else:
        rows = _caption_in_process(pending, opened_model.bundle, options)
    num_failed_before = sum("error" in row for row in done.values())
    num_failed = num_failed_before + _write(rows, len(pending), options, signature)
    if options.out is not None:
        _print_note(f"captions: {options.out}")
    if num_failed:
        _print_note(f"{num_failed} of {len(names)} images could not be captioned; their lines give the reasons")
    return 1 if num_failed else 0


def _check_options(options: CaptionOptions) -> None:
    """Raises UserError for options that contradict each other or have an unknown value."""
    from pipeline.captioning.service import PRECISIONS

    if not 1 <= options.num_results <= options.beam_size:
        raise UserError(f"--n-best {options.num_results}: expected 1 to the beam's size, {options.beam_size}")
    if options.precision not in PRECISIONS:
        raise UserError(f"--precision {options.precision!r}: expected {' or '.join(PRECISIONS)}")


def _open_model(model: str) -> _OpenedModel:
    """Loads a bundle that captions images; UserError for anything else."""
    location = storage_path(model)
    if not location.is_remote and not location.path.is_dir():
        raise UserError(f"--model {model}: no such folder; give a model bundle, such as results/models/NAME/RUN")
    folder = fetched(location)
    try:
        bundle = load_bundle(folder)
    except ValueError as error:
        raise UserError(f"--model: {error}") from error
    if bundle.transform is None:
        raise UserError(
            f"--model {model}: this bundle has no backbone, it captions a detector's region features or stored grid "
            "features and not images; caption a split with `raycap evaluate` and features.hdf5 or --features, or, for "
            "grid features, import it again with --backbone"
        )
    return _OpenedModel(location, folder, bundle)


def _signature(model: _OpenedModel, options: CaptionOptions) -> dict[str, Any]:
    """The settings and weights that decide the captions. Every line of `options.out` contains them."""
    signature = options.search | {"num_results": options.num_results, "model": model.bundle.config["name"]}
    if options.out is not None:  # two bundles can have the same name and different weights
        with (model.folder / "model.safetensors").open("rb") as file:
            signature["weights"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return signature


def _caption_in_process(names: Sequence[str], bundle: Bundle, options: CaptionOptions) -> Iterator[dict[str, Any]]:
    """Captions the images in this process, batch by batch and in order, while threads read and decode the files."""
    import torch

    from pipeline.captioning.service import CaptionService
    from pipeline.data.images import BadImage
    from pipeline.runtime.cpu import prepare_processor

    prepare_processor()
    service = CaptionService(bundle, **options.search)

    def load_pixels(name: str) -> Any:
        """The image's pixels, or a text with the reason why it cannot be read."""
        try:
            return service.pixels(storage_path(name).read_bytes())
        except BadImage as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"

    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(names), BATCH_SIZE):
            batch = names[start : start + BATCH_SIZE]
            loaded = list(pool.map(load_pixels, batch))
            readable = [pixels for pixels in loaded if not isinstance(pixels, str)]
            captions = iter(service.caption(torch.stack(readable), options.num_results) if readable else [])
            for number, (name, pixels) in enumerate(zip(batch, loaded, strict=True), start):
                if isinstance(pixels, str):
                    yield {"image": name, "error": pixels}
                    continue
                ranked = next(captions)
                row = _row(name, ranked)
                if options.explain is not None:
                    path = options.explain / f"{number:04d}-{Path(name).stem}.png"
                    row |= _draw(path, name, service, pixels, ranked[0][0])
                yield row


def _caption_on_ray(names: Sequence[str], model: _OpenedModel, options: CaptionOptions) -> Iterator[dict[str, Any]]:
    from pipeline.captioning.ray_data import caption_stream

    """Captions the images through Ray Data, on the cluster at `options.address` or on a local Ray."""
    has_joined_cluster = connect(options.address)
    source: ModelSource = StoredBundle(model.location)
    if has_joined_cluster and not model.location.is_remote:  # other nodes cannot read this machine's disk
        source = SentBundle.of(model.folder)
    assert model.bundle.transform is not None
    image_size = model.bundle.transform.image_size
    for name, ranked, error in caption_stream(names, source, image_size, options.search, options.num_results):
        yield {"image": name, "error": error} if error else _row(name, ranked)


def _row(name: str, ranked: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """The output for one image from its captions with log-probabilities, the best first."""
    entries = [{"caption": text, "log_prob": round(log_prob, 6)} for text, log_prob in ranked]
    row: dict[str, Any] = {"image": name, **entries[0]}
    if len(entries) > 1:
        row["n_best"] = entries
    return row


def _write(rows: Iterator[dict[str, Any]], total: int, options: CaptionOptions, signature: dict[str, Any]) -> int:
    """Writes the rows to `options.out` or the terminal, with progress on stderr. Returns the number of errors."""
    num_failed, largest_gap = 0, 0.0
    # A file name that is not UTF-8 contains lone surrogates. backslashreplace writes them as valid JSON escapes.
    sink = options.out.open("a", encoding="utf-8", errors="backslashreplace") if options.out is not None else None
    try:
        with progress("captions", total, write=_print_note) as advance:
            for row in rows:
                num_failed += "error" in row
                largest_gap = max(largest_gap, row.get("attribution", {}).get("gap", 0.0))
                if sink is not None:
                    sink.write(json.dumps({**row, **signature}, ensure_ascii=False) + "\n")
                    sink.flush()  # a killed job loses only the image that it was captioning
                else:
                    print(json.dumps(row, ensure_ascii=False) if options.json_lines else _text(row))
                advance(1)
    finally:
        if sink is not None:
            sink.close()
    if options.explain is not None:
        _print_note(
            f"heat maps: {options.explain}; attributions add up to the words' log-probabilities within "
            f"{largest_gap:.3f} nats"
        )
    return num_failed


def _text(row: dict[str, Any]) -> str:
    """A row as it is shown on the terminal."""
    if "error" in row:
        return f"{row['image']}: error: {row['error']}"
    lines = [f"{row['image']}: {row['caption']}"]
    lines += [f"    {entry['log_prob']:8.3f}  {entry['caption']}" for entry in row.get("n_best", ())]
    return "\n".join(lines)


def _draw(path: Path, name: str, service: Any, pixels: Any, caption: str) -> dict[str, Any]:
    """Writes the heat maps of a caption's words to `path` and, for a model with clusters, a second picture.

    Returns how accurate the attribution is, as an entry for the image's row.
    """
    from pipeline.captioning.service import MAX_PIXELS
    from pipeline.data.images import decode_image
    from pipeline.reports.cluster_pictures import cluster_picture
    from pipeline.reports.heat_maps import caption_picture

    image, words = decode_image(storage_path(name).read_bytes(), MAX_PIXELS), caption.split()
    attention = service.attention(pixels, caption).float().numpy()
    attribution = service.attribution(pixels, caption)
    caption_picture(image, words, attention, attribution.shares().numpy()).save(path)
    clusters = service.clusters(pixels, caption)
    if clusters is not None:
        cluster_picture(image, words, clusters).save(path.with_name(f"{path.stem}-clusters.png"))
    gap = float(attribution.gap.max()) if words else 0.0  # an empty caption has no attributions
    return {"attribution": {"steps": attribution.steps, "gap": round(gap, 6)}}


def _make_explain_folder(explain: Path) -> None:
    if explain.exists() and not explain.is_dir():
        raise UserError(f"--explain {explain}: this is a file; give a folder")
    explain.mkdir(parents=True, exist_ok=True)


def _read_done(out: Path, signature: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows that an earlier call has written to `out`, by image.

    Raises UserError when they come from another model or from other settings.
    """
    if not out.exists():
        if not out.absolute().parent.is_dir():
            raise UserError(f"--out {out}: the folder {out.absolute().parent} does not exist; make it first")
        return {}
    if not out.is_file():
        raise UserError(f"--out {out}: this is a folder or a device; give a file's name")
    rows: dict[str, dict[str, Any]] = {}
    complete = b""
    for number, line in enumerate(out.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # a killed job has left its last line incomplete
        try:
            row = json.loads(line)
            rows[row["image"]] = row
            written_with = {key: row.get(key) for key in signature}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"--out {out}: line {number} is not a caption of this command; give another name"
            ) from error
        if written_with != signature:
            raise UserError(
                f"--out {out}: line {number} was written with {written_with}, not {signature}; give another name"
            )
        complete += line
    if len(complete) < out.stat().st_size:
        write_bytes(out, complete)
    return rows


def _print_note(text: str) -> None:
    """Prints to stderr, because another program may read the captions from stdout."""
    print(text, file=sys.stderr, flush=True)


def command(
    images: Annotated[list[str], typer.Argument(help="Files, folders, globs, s3:// URIs.", metavar="IMAGES...")],
    model: Annotated[str, typer.Option(help="A model bundle's folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines with log-probabilities.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON lines to this file; images that it contains are skipped.")
    ] = None,
    beam: Annotated[int, typer.Option(min=1, max=100, help="Beams per image.")] = SEARCH_DEFAULTS.beam_size,
    n_best: Annotated[int, typer.Option(min=1, help="Captions per image, best first.")] = SEARCH_DEFAULTS.num_results,
    max_length: Annotated[
        int, typer.Option(min=3, help="Tokens per caption, including begin and end.")
    ] = SEARCH_DEFAULTS.max_length,
    precision: Annotated[
        str,
        typer.Option(help="float32, or bfloat16: faster for large models where supported; a few captions differ."),
    ] = SEARCH_DEFAULTS.precision,
    explain: Annotated[
        Path | None, typer.Option(help="Write pictures here: attention and attribution of each word.")
    ] = None,
    address: Address = None,
) -> int:
    """Caption image files.

    A few images are captioned in this process, many through Ray. The exit code is 1 when an image cannot be read.

    Example: raycap caption photos/ 'more/*.jpg' --model results/models/demo/RUN --json
    """
    options = CaptionOptions(json, out, beam, n_best, max_length, precision, explain, address)
    return caption(images, model, options)
