"""`raycap runs`: what a storage contains, and the removal of what nothing in it needs any more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.named_files import check_output_file
from raycap.jobs.options import Set
from raycap.jobs.runs.contents import Inventory, read_inventory
from raycap.jobs.runs.prune import plan_removals, remove
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_place
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import expanded_path, printable, shown
from raycap.pipeline.runtime.secrets import remember_address, without_secrets
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions, is_remote

OLD_DAYS = 30


def runs(
    target: Annotated[
        str,
        typer.Argument(help="A storage's folder, s3://BUCKET/FOLDER, or a configuration.", metavar="STORAGE|CONFIG"),
    ],
    set_: Set = None,
    endpoint_url: Annotated[str | None, typer.Option(help="Of an S3-compatible server, for s3://...")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write all of it to this JSON file; - prints it.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Show what can be removed, and how many bytes it has.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove it.")] = False,
    older_than: Annotated[
        int, typer.Option(min=1, max=36500, help="With --prune: days without a change of an unfinished run.")
    ] = OLD_DAYS,
) -> None:
    """List what a storage contains, and remove what is not needed.

    The tables have the runs with their state and CIDEr-D, searches, champions, bundles and feature stores. --prune
    shows what can be removed: checkpoints of complete runs, what killed processes have left, feature stores that no
    run uses, and runs that were not trained to the end and not touched for some days. Nothing is removed without
    --yes, and never a bundle, a champion or what is in progress.

    Example: raycap runs results --prune --older-than 60
    """
    storage = _storage(target, set_ or (), endpoint_url)
    if json_file not in (None, "-"):
        check_output_file("--json", Path(str(json_file)))
    if yes and not prune:
        raise UserError("--yes removes what --prune shows; give both")
    found = _read(storage)
    text = json.dumps(found.values(), indent=1)
    if json_file == "-":
        print(text)
    else:
        _print_tables(found)
    if json_file not in (None, "-"):
        Path(str(json_file)).write_text(text, "utf-8")
    if prune:
        _prune(storage, found, older_than, yes)


def _storage(target: str, overrides: Sequence[str], endpoint_url: str | None) -> StoragePath:
    """The storage that an argument names. Raises UserError if there is none."""
    remember_address(endpoint_url or "")
    path = None if is_remote(target) else named_place(expanded_path(target))
    if path is None and not is_remote(target):
        raise UserError(f"{shown(target)} does not exist; give a storage's folder, s3://..., or a configuration")
    if path is not None and path.is_file():
        if endpoint_url is not None:
            raise UserError("--endpoint-url belongs to s3://...; with a configuration --set storage.endpoint_url")
        return load_config(path, overrides).storage_place
    if overrides:
        raise UserError("--set changes a configuration; give a configuration in place of a storage, or leave it out")
    return storage_path(target, StorageOptions(endpoint_url)) if path is None else storage_path(path)


def _read(storage: StoragePath) -> Inventory:
    """What the storage contains. Raises UserError if S3 does not answer, or for a missing bucket."""
    from raycap.pipeline.runs.preflight import storage_errors

    with storage_errors("--endpoint-url", "give a storage that exists"):
        storage.require_answer()
    return read_inventory(storage)


def _print_tables(found: Inventory) -> None:
    """Prints a table for each kind of content, and the totals."""
    _table(
        ("run", "created", "state", "val", "test", "size"),
        [
            (run.id, run.created[:16], run.state_text, _score(run.val), _score(run.test), _size(run.bytes), run.detail)
            for run in found.runs
        ],
    )
    _table(
        ("search", "trials", "state", "size"),
        [
            (each.name, each.trials, "in progress" if each.is_active else "", _size(each.bytes), each.detail)
            for each in found.searches
        ],
    )
    champions = [
        (each.name, str(each.decisions), each.bundle, each.run, "in progress" if each.is_active else "", each.detail)
        for each in found.champions
    ]
    _table(("champion of", "decisions", "bundle", "run", "state"), champions)
    bundles = [(each.name, _day(each.newest), _size(each.bytes), "") for each in found.bundles]
    _table(("bundle", "changed", "size"), bundles)
    stores = [
        (each.name, _count(each.images), _day(each.newest), _size(each.bytes), each.detail) for each in found.features
    ]
    _table(("features", "images", "changed", "size"), stores)
    others = "".join(f", {name} {_size(size)}" for name, size in found.other.items())
    counts = f"{len(found.runs)} runs, {len(found.searches)} searches, {len(found.bundles)} bundles, "
    counts += f"{len(found.champions)} champions, {len(found.features)} feature stores{others}"
    _print(f"{found.storage}: {_size(found.bytes)}; {counts}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table unless it is empty. The last cell of a row follows it without a column: what is damaged."""
    if not rows:
        return
    lines = [[*columns, ""], *rows]
    widths = [max(len(printable(line[column])) for line in lines) for column in range(len(columns))]
    for *cells, detail in lines:
        text = "  ".join(printable(cell).ljust(width) for cell, width in zip(cells, widths, strict=True))
        _print(f"{text}  {without_secrets(detail)}".rstrip())
    print()


def _prune(storage: StoragePath, found: Inventory, older_than: int, yes: bool) -> None:
    """Prints the plan and, with --yes, removes its parts one by one."""
    plan = plan_removals(storage, found, older_than)
    for sentence in plan.kept:
        _print(without_secrets(sentence))
    removed = 0
    for removal in plan.removals:
        outcome = "would go"
        if yes:
            is_removed = remove(storage, removal, older_than)
            removed += removal.bytes if is_removed else 0
            outcome = "removed" if is_removed else "kept: it has changed"
        _print(f"{outcome}  {removal.kind:<10}  {_size(removal.bytes):>9}  {removal.name}  ({removal.why})")
    if yes:
        print(f"removed {_size(removed)} of {_size(plan.bytes)}")
    elif plan.removals:
        print(f"{len(plan.removals)} parts with {_size(plan.bytes)}; nothing was removed, --yes removes them")
    else:
        print(f"nothing to remove; unfinished runs count after {older_than} days without a change (--older-than)")


def _print(line: str) -> None:
    """Prints a line in which names from the storage cannot control the terminal."""
    print(printable(line))


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _day(seconds: float) -> str:
    """The day of a time in Unix seconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d") if seconds else "-"


def _size(count: float) -> str:
    """A number of bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
