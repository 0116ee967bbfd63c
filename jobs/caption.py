"""`raycap caption`: captions of the user's images with a model bundle; few in this process, many through Ray Data."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.captioning.bundle import Bundle, fetched, load_bundle
from pipeline.captioning.model_sources import ModelSource, SentBundle, StoredBundle
from pipeline.config.sections import SEARCH_DEFAULTS
from pipeline.data.image_paths import find_images
from pipeline.errors import UserError
from pipeline.storage.atomic import write_bytes
from pipeline.storage.path import StoragePath, storage_path

MANY = 2_000  # from so many images on a local Ray is worth its start
BATCH = 16
PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True)
class CaptionOptions:
    """What `raycap caption` is asked for.

    json_lines: JSON in place of text on the terminal.
    out: a file of JSON lines in place of the terminal; images that it has from the same model and settings are skipped.
    num_results: captions per image, best first.
    explain: a folder for pictures of what each word of a caption rests on.
    address: of a Ray cluster.
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
        """The settings of a `CaptionService`."""
        return {"beam_size": self.beam_size, "max_length": self.max_length, "precision": self.precision}


class _Model(NamedTuple):
    location: StoragePath
    folder: Path  # a local copy
    bundle: Bundle


def caption(images: Sequence[str], model: str, options: CaptionOptions = CaptionOptions()) -> int:
    """Writes one line per image. Returns the exit code: 1 when an image could not be read.

    Raises UserError for mistakes of the user before the first caption.
    """
    _check_options(options)
    names = find_images(images)
    opened = _open_model(model)
    signature = _signature(opened, options)
    if options.explain is not None:
        _make_explain_folder(options.explain)
    done = _read_done(options.out, signature) if options.out is not None else {}
    pending = [name for name in names if name not in done]
    if done:
        _note(f"{len(names) - len(pending)} of {len(names)} images are in {options.out} already")
    if options.address is not None or len(pending) >= MANY:
        if options.explain is not None:
            raise UserError(f"--explain draws pictures for fewer than {MANY} images and without --address")
        rows = _caption_on_ray(pending, opened, options)
    else:
        rows = _caption_here(pending, opened.bundle, options)
    num_failed = sum("error" in row for row in done.values()) + _write(rows, len(pending), options, signature)
    if options.out is not None:
        _note(f"captions: {options.out}")
    if num_failed:
        _note(f"{num_failed} of {len(names)} images could not be captioned; their lines give the reasons")
    return 1 if num_failed else 0


def _check_options(options: CaptionOptions) -> None:
    from pipeline.captioning.service import PRECISIONS

    if not 1 <= options.num_results <= options.beam_size:
        raise UserError(f"--n-best {options.num_results}: expected 1 to the beam's size, {options.beam_size}")
    if options.precision not in PRECISIONS:
        raise UserError(f"--precision {options.precision!r}: expected {' or '.join(PRECISIONS)}")


def _open_model(model: str) -> _Model:
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
    return _Model(location, folder, bundle)


def _signature(model: _Model, options: CaptionOptions) -> dict[str, Any]:
    """What decides the captions; each line of `options.out` has it."""
    signature = options.search | {"num_results": options.num_results, "model": model.bundle.config["name"]}
    if options.out is not None:  # bundles of the same name differ in their weights
        with (model.folder / "model.safetensors").open("rb") as file:
            signature["weights"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return signature


def _caption_here(names: Sequence[str], bundle: Bundle, options: CaptionOptions) -> Iterator[dict[str, Any]]:
    """Captions in this process, batch by batch, in order; threads read and decode the files."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from pipeline.captioning.service import CaptionService
    from pipeline.data.images import BadImage
    from pipeline.runtime.cpu import prepare_processor

    prepare_processor()
    service = CaptionService(bundle, **options.search)

    def load(name: str) -> Any:
        try:
            return service.pixels(storage_path(name).read_bytes())
        except BadImage as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"

    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            loaded = list(pool.map(load, batch))
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


def _caption_on_ray(names: Sequence[str], model: _Model, options: CaptionOptions) -> Iterator[dict[str, Any]]:
    from jobs.cluster import connect
    from pipeline.captioning.ray_data import caption_stream

    joined = connect(options.address)
    source: ModelSource = StoredBundle(model.location)
    if joined and not model.location.is_remote:
        source = SentBundle.of(model.folder)
    assert model.bundle.transform is not None
    image_size = model.bundle.transform.image_size
    for name, ranked, error in caption_stream(names, source, image_size, options.search, options.num_results):
        yield {"image": name, "error": error} if error else _row(name, ranked)


def _row(name: str, ranked: Sequence[tuple[str, float]]) -> dict[str, Any]:
    entries = [{"caption": text, "log_prob": round(log_prob, 6)} for text, log_prob in ranked]
    row: dict[str, Any] = {"image": name, **entries[0]}
    if len(entries) > 1:
        row["n_best"] = entries
    return row


def _write(rows: Iterator[dict[str, Any]], total: int, options: CaptionOptions, signature: dict[str, Any]) -> int:
    """Writes the rows to `options.out` or the terminal, with progress on stderr. Returns the number of errors."""
    num_failed, largest_gap = 0, 0.0
    begin = last = time.monotonic()
    # a file name that is not UTF-8 has lone surrogates, which backslashreplace writes as JSON escapes them
    sink = options.out.open("a", encoding="utf-8", errors="backslashreplace") if options.out is not None else None
    try:
        for number, row in enumerate(rows, 1):
            num_failed += "error" in row
            largest_gap = max(largest_gap, row.get("attribution", {}).get("gap", 0.0))
            if sink is not None:
                sink.write(json.dumps({**row, **signature}, ensure_ascii=False) + "\n")
                sink.flush()  # a killed job loses only the image in work
            else:
                print(json.dumps(row, ensure_ascii=False) if options.json_lines else _text(row))
            now = time.monotonic()
            if now - last > PROGRESS_EVERY_S:
                rate = number / (now - begin)
                _note(f"{number}/{total} images, {rate:.1f} images/s, {(total - number) / rate:.0f} s left")
                last = now
    finally:
        if sink is not None:
            sink.close()
    if options.explain is not None:
        _note(
            f"heat maps: {options.explain}; attributions add up to the words' log-probabilities within "
            f"{largest_gap:.3f} nats"
        )
    return num_failed


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['image']}: error: {row['error']}"
    lines = [f"{row['image']}: {row['caption']}"]
    lines += [f"    {each['log_prob']:8.3f}  {each['caption']}" for each in row.get("n_best", ())]
    return "\n".join(lines)


def _draw(path: Path, name: str, service: Any, pixels: Any, caption: str) -> dict[str, Any]:
    """Draws the heat maps of a caption's words and, for a model with clusters, NAME-clusters.png beside them.

    Returns the accuracy of the attribution, for the caption's row.
    """
    from pipeline.captioning.service import MAX_PIXELS
    from pipeline.data.images import decode_image
    from pipeline.reports.cluster_pictures import write_cluster_picture
    from pipeline.reports.heat_maps import write_caption_picture

    image, words = decode_image(storage_path(name).read_bytes(), MAX_PIXELS), caption.split()
    maps = service.attention(pixels, caption).float().numpy()
    attribution = service.attribution(pixels, caption)
    write_caption_picture(path, image, words, maps, attribution.shares().numpy())
    clusters = service.clusters(pixels, caption)
    if clusters is not None:
        write_cluster_picture(path.with_name(f"{path.stem}-clusters.png"), image, words, clusters)
    gap = float(attribution.gap.max()) if words else 0.0
    return {"attribution": {"steps": attribution.steps, "gap": round(gap, 6)}}


def _make_explain_folder(explain: Path) -> None:
    if explain.exists() and not explain.is_dir():
        raise UserError(f"--explain {explain}: this is a file; give a folder")
    explain.mkdir(parents=True, exist_ok=True)


def _read_done(out: Path, signature: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of an earlier call by image. Raises UserError for rows of another model or other settings."""
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
            break  # the incomplete last line of a killed job
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


def _note(text: str) -> None:
    """Prints to stderr: stdout has the captions, which another program may read."""
    print(text, file=sys.stderr, flush=True)
