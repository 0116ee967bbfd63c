"""`raycap caption`: captions for anyone's images with a model bundle; here for a few, through Ray Data for many."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.options import Address
from pipeline.captioning.bundle import Bundle, load_bundle
from pipeline.data.image_paths import find_images
from pipeline.errors import UserError
from pipeline.runtime.progress import progress
from pipeline.storage.path import place

MANY = 2_000  # images from which a local Ray is worth its start
BATCH = 16


def caption(
    images: Sequence[str],
    model: str,
    *,
    json_lines: bool = False,
    out: Path | None = None,
    beam_size: int = 5,
    num_results: int = 1,
    max_length: int = 20,
    precision: str = "float32",
    explain: Path | None = None,
    address: str | None = None,
) -> int:
    """Captions every image, one line each. Returns the exit code: 1 when an image could not be read.

    out: a file of JSON lines in place of the terminal; images that it holds already, by the same model and settings,
    are not captioned again. Raises UserError before the first caption for what the user can mend.
    """
    if not 1 <= num_results <= beam_size:
        raise UserError(f"--n-best {num_results}: expected 1 to the beam's size, {beam_size}")
    from pipeline.captioning.service import PRECISIONS

    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision!r}: expected {' or '.join(PRECISIONS)}")
    names = find_images(images)
    folder = Path(model)
    bundle = _bundle(folder)
    search = {"beam_size": beam_size, "max_length": max_length, "precision": precision}
    signature = search | {"num_results": num_results, "model": bundle.config["name"]}
    if out is not None:
        signature["weights"] = _digest(folder)
    if explain is not None:
        _check_explain(explain, names, bundle)
    done = _already(out, signature) if out is not None else {}
    pending = [name for name in names if name not in done]
    if out is not None and done:
        _note(f"{len(names) - len(pending)} of {len(names)} images are in {out} already")
    settings = search | {"num_results": num_results}
    if address is not None or len(pending) >= MANY:
        if explain is not None:
            raise UserError(f"--explain draws pictures for fewer than {MANY} images and without --address")
        rows = _through_ray(pending, folder, settings, address)
    else:
        rows = _here(pending, bundle, settings, explain)
    failed = sum("error" in row for row in done.values())
    gap = 0.0
    # a file name that is no UTF-8 has lone surrogates, which backslashreplace writes as JSON escapes them
    sink = out.open("a", encoding="utf-8", errors="backslashreplace") if out is not None else None
    try:
        with progress("captions", len(pending), write=_note) as advance:
            for row in rows:
                failed += "error" in row
                gap = max(gap, row.get("attribution", {}).get("gap", 0.0))
                if sink is not None:
                    sink.write(json.dumps({**row, **signature}, ensure_ascii=False) + "\n")
                    sink.flush()  # a killed job loses the image in flight, not what it has
                else:
                    print(json.dumps(row, ensure_ascii=False) if json_lines else _text(row))
                advance(1)
    finally:
        if sink is not None:
            sink.close()
    if explain is not None:
        _note(f"heat maps: {explain}; attributions add up to the words' log-probabilities within {gap:.3f} nats")
    if out is not None:
        _note(f"captions: {out}")
    if failed:
        _note(f"{failed} of {len(names)} images could not be captioned; their lines say why")
    return 1 if failed else 0


def _bundle(folder: Path) -> Bundle:
    if not folder.is_dir():
        raise UserError(f"--model {folder}: no such folder; give a model bundle, such as results/models/NAME/RUN")
    try:
        bundle = load_bundle(folder)
    except ValueError as error:
        raise UserError(f"--model: {error}") from error
    if bundle.transform is None:
        raise UserError(
            f"--model {folder}: this bundle has no backbone, it captions a detector's region features or stored grid "
            "features and not images; caption a split with `raycap evaluate` and features.hdf5 or --features, or, for "
            "grid features, import it again with --backbone"
        )
    return bundle


def _digest(folder: Path) -> str:
    """Which weights: bundles of equal names are told apart by them."""
    with (folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _here(
    names: Sequence[str], bundle: Bundle, settings: dict[str, Any], explain: Path | None
) -> Iterator[dict[str, Any]]:
    """Captions in this process, a batch at a time, in order; files are read and decoded by threads."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from pipeline.captioning.service import CaptionService
    from pipeline.data.images import BadImage
    from pipeline.runtime.cpu import prepare_processor

    prepare_processor()
    settings = dict(settings)
    num_results = settings.pop("num_results")
    service = CaptionService(bundle, **settings)

    def load(name: str) -> Any:
        try:
            return service.pixels(place(name).read_bytes())
        except BadImage as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"

    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(names), BATCH):
            part = names[start : start + BATCH]
            loaded = list(pool.map(load, part))
            good = [pixels for pixels in loaded if not isinstance(pixels, str)]
            found = iter(service.caption(torch.stack(good), num_results) if good else [])
            for number, (name, pixels) in enumerate(zip(part, loaded, strict=True), start):
                if isinstance(pixels, str):
                    yield {"image": name, "error": pixels}
                    continue
                best = next(found)
                row = _row(name, best)
                if explain is not None:
                    row |= _draw(explain / f"{number:04d}-{Path(name).stem}.png", name, service, pixels, best[0][0])
                yield row


def _through_ray(
    names: Sequence[str], folder: Path, settings: dict[str, Any], address: str | None
) -> Iterator[dict[str, Any]]:
    """Captions through Ray Data: `folder` must be readable from every node."""
    from jobs.cluster import connect
    from pipeline.captioning.ray_data import caption_stream

    connect(address)
    for name, found, error in caption_stream(names, folder.absolute(), settings):
        yield {"image": name, "error": error} if error else _row(name, found)


def _row(name: str, found: Sequence[tuple[str, float]]) -> dict[str, Any]:
    (text, log_prob), *others = found
    row: dict[str, Any] = {"image": name, "caption": text, "log_prob": round(log_prob, 6)}
    if others:
        row["n_best"] = [{"caption": text, "log_prob": round(value, 6)} for text, value in found]
    return row


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['image']}: error: {row['error']}"
    lines = [f"{row['image']}: {row['caption']}"]
    lines += [f"    {each['log_prob']:8.3f}  {each['caption']}" for each in row.get("n_best", ())]
    return "\n".join(lines)


def _draw(path: Path, name: str, service: Any, pixels: Any, caption: str) -> dict[str, Any]:
    """The heat maps of a caption's words and, where the model makes clusters, NAME-clusters.png beside them.

    Returns how exact the attribution is, for the caption's row.
    """
    from pipeline.captioning.service import MAX_PIXELS
    from pipeline.data.images import decode_image
    from pipeline.reports.cluster_pictures import write_cluster_picture
    from pipeline.reports.heat_maps import write_caption_picture

    image, words = decode_image(place(name).read_bytes(), MAX_PIXELS), caption.split()
    maps = service.attention(pixels, caption).float().numpy()
    attribution = service.attribution(pixels, caption)
    write_caption_picture(path, image, words, maps, attribution.shares().numpy())
    clusters = service.clusters(pixels, caption)
    if clusters is not None:
        write_cluster_picture(path.with_name(f"{path.stem}-clusters.png"), image, words, clusters)
    gap = float(attribution.gap.max()) if words else 0.0
    return {"attribution": {"steps": attribution.steps, "gap": round(gap, 6)}}


def _check_explain(explain: Path, names: Sequence[str], bundle: Bundle) -> None:
    if explain.exists() and not explain.is_dir():
        raise UserError(f"--explain {explain}: this is a file; give a folder")
    explain.mkdir(parents=True, exist_ok=True)


def _already(out: Path, signature: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier call wrote; UserError when another model or beam wrote it, or it is something else."""
    if not out.exists():
        if not out.absolute().parent.is_dir():
            raise UserError(f"--out {out}: the folder {out.absolute().parent} does not exist; make it first")
        return {}
    if not out.is_file():
        raise UserError(f"--out {out}: this is a folder or a device; give a file's name")
    rows: dict[str, dict[str, Any]] = {}
    whole = b""
    for number, line in enumerate(out.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # a killed job's last line, cut short
        try:
            row = json.loads(line)
            rows[row["image"]] = row
            found = {key: row.get(key) for key in signature}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"--out {out}: line {number} is not a caption of this command; give another name"
            ) from error
        if found != signature:
            raise UserError(f"--out {out}: line {number} was written with {found}, not {signature}; give another name")
        whole += line
    if len(whole) < out.stat().st_size:
        temporary = out.with_name(f".{out.name}.tmp")
        temporary.write_bytes(whole)
        temporary.replace(out)
    return rows


def _note(text: str) -> None:
    """To stderr: captions on stdout may go on into another program."""
    print(text, file=sys.stderr, flush=True)


def command(
    images: Annotated[list[str], typer.Argument(help="Files, folders, globs, s3:// URIs.", metavar="IMAGES...")],
    model: Annotated[str, typer.Option(help="A model bundle's folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines with log-probabilities.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON lines to this file; images that it contains are skipped.")
    ] = None,
    beam: Annotated[int, typer.Option(min=1, max=100, help="Beams per image.")] = 5,
    n_best: Annotated[int, typer.Option(min=1, help="Captions per image, best first.")] = 1,
    max_length: Annotated[int, typer.Option(min=3, help="Tokens per caption, including begin and end.")] = 20,
    precision: Annotated[
        str,
        typer.Option(help="float32, or bfloat16: faster for large models where supported; a few captions differ."),
    ] = "float32",
    explain: Annotated[
        Path | None, typer.Option(help="Write pictures here: attention and attribution of each word.")
    ] = None,
    address: Address = None,
) -> int:
    """Caption image files.

    A few images are captioned in this process, many through Ray. The exit code is 1 when an image cannot be read.

    Example: raycap caption photos/ 'more/*.jpg' --model results/models/demo/RUN --json
    """
    return caption(
        images,
        model,
        json_lines=json,
        out=out,
        beam_size=beam,
        num_results=n_best,
        max_length=max_length,
        precision=precision,
        explain=explain,
        address=address,
    )
