"""`raycap caption`: captions of the user's images with a model bundle; few in this process, many through Ray Data."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jobs.cluster import connect
from jobs.named_files import OpenedBundle, check_output_file, open_bundle
from jobs.options import Address
from pipeline.captioning.bundle import Bundle
from pipeline.captioning.model_sources import ModelSource, SentBundle, StoredBundle
from pipeline.config.sections import SEARCH_DEFAULTS
from pipeline.data.image_paths import find_images
from pipeline.errors import UserError
from pipeline.runtime.progress import progress
from pipeline.storage.atomic import write_bytes
from pipeline.storage.path import storage_path

MIN_IMAGES_FOR_RAY = 2_000  # for fewer images, starting a local Ray takes longer than it saves
BATCH_SIZE = 16  # images per forward pass when this process captions them
NUM_DECODE_THREADS = 4


def caption(
    images: Annotated[list[str], typer.Argument(help="Files, folders, globs, s3:// URIs.", metavar="IMAGES...")],
    model: Annotated[str, typer.Option(help="A model bundle's folder.")],
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON lines with log-probabilities.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON lines to this file; images that it contains are skipped.")
    ] = None,
    beam_size: Annotated[
        int, typer.Option("--beam", min=1, max=100, help="Beams per image.")
    ] = SEARCH_DEFAULTS.beam_size,
    num_results: Annotated[
        int, typer.Option("--n-best", min=1, help="Captions per image, best first.")
    ] = SEARCH_DEFAULTS.num_results,
    max_length: Annotated[
        int, typer.Option(min=3, help="Tokens per caption, including begin and end.")
    ] = SEARCH_DEFAULTS.max_length,
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="float32, or bfloat16: faster for large models where supported; a few captions differ."),
    ] = SEARCH_DEFAULTS.precision,
    explain: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write pictures here: attention and attribution of each word.")
    ] = None,
    address: Address = None,
) -> int:
    """Caption image files.

    A few images are captioned in this process, many through Ray. The exit code is 1 when an image cannot be read.

    Example: raycap caption photos/ 'more/*.jpg' --model results/models/demo/RUN --json
    """
    if num_results > beam_size:
        raise UserError(f"--n-best {num_results}: expected 1 to the beam's size, {beam_size}")
    names = find_images(images)
    opened = open_bundle("--model", model)
    if opened.bundle.transform is None:
        raise UserError(
            f"--model {model}: this bundle has no backbone, it captions a detector's region features or stored grid "
            "features and not images; caption a split with `raycap evaluate` and features.hdf5 or --features, or, for "
            "grid features, import it again with --backbone"
        )
    search: dict[str, Any] = {"beam_size": beam_size, "max_length": max_length, "precision": precision}
    signature, done = {}, {}
    if out is not None:
        with (opened.folder / "model.safetensors").open("rb") as file:  # bundles of one name can have other weights
            weights = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        name = opened.bundle.config["name"]
        signature = search | {"num_results": num_results, "model": name, "weights": weights}
        done = _read_done(out, signature)
    pending = [name for name in names if name not in done]
    if done:
        _print_note(f"{len(names) - len(pending)} of {len(names)} images are in {out} already")
    uses_ray = address is not None or len(pending) >= MIN_IMAGES_FOR_RAY
    if explain is not None:
        if uses_ray:
            raise UserError(
                f"--explain draws pictures for fewer than {MIN_IMAGES_FOR_RAY} images and without --address"
            )
        explain.mkdir(parents=True, exist_ok=True)
    if uses_ray:
        rows = _caption_on_ray(pending, opened, search, num_results, address)
    else:
        rows = _caption_in_process(pending, opened.bundle, search, num_results, explain)
    num_failed, largest_gap = _write_rows(rows, len(pending), json_lines, out, signature)
    if explain is not None:
        _print_note(
            f"heat maps: {explain}; attributions add up to the words' log-probabilities within {largest_gap:.3f} nats"
        )
    if out is not None:
        _print_note(f"captions: {out}")
    num_failed += sum("error" in row for row in done.values())
    if num_failed:
        _print_note(f"{num_failed} of {len(names)} images could not be captioned; their lines give the reasons")
    return 1 if num_failed else 0


def _read_done(out: Path, signature: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Reads the rows that an earlier call has written to `out`, by image name. Removes an incomplete last line.

    signature: the settings and weights that determine the captions. Every line contains them. Raises UserError if a
    line has another signature.
    """
    check_output_file("--out", out)
    if not out.exists():
        return {}
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


def _caption_in_process(
    names: Sequence[str], bundle: Bundle, search: dict[str, Any], num_results: int, explain: Path | None
) -> Iterator[dict[str, Any]]:
    """Yields the output row of each image, in order. Threads read and decode the images of a batch.

    explain: the folder for pictures of each caption's words; None for no pictures.
    """
    import torch

    from pipeline.captioning.service import CaptionService
    from pipeline.data.images import BadImage
    from pipeline.runtime.cpu import prepare_processor

    prepare_processor()
    service = CaptionService(bundle, **search)

    def load_pixels(name: str) -> Any:
        """The image's pixels, or a text with the reason why it cannot be read."""
        try:
            return service.pixels(storage_path(name).read_bytes())
        except BadImage as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"

    with ThreadPoolExecutor(NUM_DECODE_THREADS) as pool:
        for start in range(0, len(names), BATCH_SIZE):
            batch = names[start : start + BATCH_SIZE]
            loaded = list(pool.map(load_pixels, batch))
            readable = [pixels for pixels in loaded if not isinstance(pixels, str)]
            captions = iter(service.caption(torch.stack(readable), num_results) if readable else [])
            for number, (name, pixels) in enumerate(zip(batch, loaded, strict=True), start):
                if isinstance(pixels, str):
                    yield {"image": name, "error": pixels}
                    continue
                ranked = next(captions)
                row = _output_row(name, ranked)
                if explain is not None:
                    path = explain / f"{number:04d}-{Path(name).stem}.png"
                    row |= _draw_words(path, name, service, pixels, ranked[0][0])
                yield row


def _caption_on_ray(
    names: Sequence[str], model: OpenedBundle, search: dict[str, Any], num_results: int, address: str | None
) -> Iterator[dict[str, Any]]:
    """Yields the output row of each image. Ray Data captions them on the cluster at `address` or on a local Ray."""
    from pipeline.captioning.ray_data import caption_stream

    has_joined_cluster = connect(address)
    source: ModelSource = StoredBundle(model.location)
    if has_joined_cluster and not model.location.is_remote:  # other nodes cannot read this machine's disk
        source = SentBundle.of(model.folder)
    assert model.bundle.transform is not None
    for name, ranked, error in caption_stream(names, source, model.bundle.transform.image_size, search, num_results):
        yield {"image": name, "error": error} if error else _output_row(name, ranked)


def _output_row(name: str, ranked: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """The output row of an image. ranked: its captions with their log-probabilities in nats, the best first."""
    entries = [{"caption": text, "log_prob": round(log_prob, 6)} for text, log_prob in ranked]
    return {"image": name, **entries[0]} | ({"n_best": entries} if len(entries) > 1 else {})


def _draw_words(path: Path, name: str, service: Any, pixels: Any, caption: str) -> dict[str, Any]:
    """Draws the attention and attribution of each word to `path`, and for a model with clusters a second picture.

    Returns the entry `attribution` of the image's row: `steps` is the number of integration steps, and `gap` is the
    largest difference, in nats, between a word's log-probability and the sum of its attributions.
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


def _write_rows(
    rows: Iterator[dict[str, Any]], total: int, json_lines: bool, out: Path | None, signature: Mapping[str, Any]
) -> tuple[int, float]:
    """Writes the rows to `out`, or without it to the terminal.

    total: the number of rows. signature: entries that are added to each line of `out`. Returns the number of images
    with an error, and the largest `gap` of an attribution (see `_draw_words`) in nats.
    """
    num_failed, largest_gap = 0, 0.0
    # A file name that is not UTF-8 contains lone surrogates. backslashreplace writes them as valid JSON escapes.
    opened = out.open("a", encoding="utf-8", errors="backslashreplace") if out is not None else nullcontext()
    with opened as file, progress("captions", total, write=_print_note) as advance:
        for row in rows:
            num_failed += "error" in row
            largest_gap = max(largest_gap, row.get("attribution", {}).get("gap", 0.0))
            if file is not None:
                file.write(json.dumps({**row, **signature}, ensure_ascii=False) + "\n")
                file.flush()  # a killed job loses only the image that it was captioning
            else:
                print(json.dumps(row, ensure_ascii=False) if json_lines else _format_row(row))
            advance(1)
    return num_failed, largest_gap


def _format_row(row: dict[str, Any]) -> str:
    """An output row as text for the terminal."""
    if "error" in row:
        return f"{row['image']}: error: {row['error']}"
    lines = [f"{row['image']}: {row['caption']}"]
    lines += [f"    {entry['log_prob']:8.3f}  {entry['caption']}" for entry in row.get("n_best", ())]
    return "\n".join(lines)


def _print_note(text: str) -> None:
    """Prints to stderr, because another program may read the captions from stdout."""
    print(text, file=sys.stderr, flush=True)
