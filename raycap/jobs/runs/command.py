"""`raycap runs`: what a storage contains, and the removal of what nothing in it needs any more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from raycap.jobs.options import Set
from raycap.jobs.runs.contents import Content, read_contents
from raycap.jobs.runs.prune import plan_removals, remove
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_place
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.preflight import storage_errors
from raycap.pipeline.runtime.names import expanded_path, printable, shown
from raycap.pipeline.runtime.secrets import remember_address, without_secrets
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions, is_remote

OLD_DAYS = 30
TITLES = {"runs": "run", "searches": "search", "retrain": "champion of", "models": "bundle", "features": "features"}


def runs(
    target: Annotated[
        str,
        typer.Argument(help="A storage's folder, s3://BUCKET/FOLDER, or a configuration.", metavar="STORAGE|CONFIG"),
    ],
    set_: Set = None,
    endpoint_url: Annotated[str | None, typer.Option(help="Of an S3-compatible server, for s3://...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
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
    shows what can be removed: checkpoints of complete runs, feature stores that no run uses, runs that were not trained
    to the end and not touched for some days, and what killed processes have left. Nothing is removed without --yes, and
    never a bundle, a champion or what is in progress.

    Example: raycap runs results --prune --older-than 60
    """
    storage = _storage(target, set_ or (), endpoint_url)
    if yes and not prune:
        raise UserError("--yes removes what --prune shows; give both")
    with storage_errors("--endpoint-url", "give a storage that exists"):
        storage.require_answer()
    found = read_contents(storage)
    size = sum(entry.bytes for entries in found.values() for entry in entries)
    if as_json:
        values = {room: [entry.values() for entry in entries] for room, entries in found.items()}
        print(json.dumps({"storage": str(storage), "bytes": size, **values}, indent=1))
    else:
        for room, entries in found.items():
            _print_table(TITLES[room], entries)
        _print(f"{storage}: {_size(size)}; {', '.join(f'{room} {len(entries)}' for room, entries in found.items())}")
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


def _print_table(title: str, entries: Sequence[Content]) -> None:
    """Prints a table unless it is empty. What is damaged follows the row."""
    if not entries:
        return
    lines = [[title, *entries[0].facts, "state", "changed", "size"]]
    for entry in entries:
        changed = datetime.fromtimestamp(entry.newest, UTC).strftime("%Y-%m-%d")
        lines.append([entry.name, *map(_cell, entry.facts.values()), entry.state, changed, _size(entry.bytes)])
    widths = [max(len(printable(cell)) for cell in cells) for cells in zip(*lines, strict=True)]
    for cells, detail in zip(lines, ["", *(entry.detail for entry in entries)], strict=True):
        text = "  ".join(printable(cell).ljust(width) for cell, width in zip(cells, widths, strict=True))
        _print(f"{text}  {without_secrets(detail)}".rstrip())
    print()


def _cell(value: object) -> str:
    """A value of a table."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _prune(storage: StoragePath, found: Mapping[str, Sequence[Content]], older_than: int, yes: bool) -> None:
    """Prints the plan and, with --yes, removes its parts one by one."""
    removals, kept = plan_removals(storage, found, older_than)
    for sentence in kept:
        _print(without_secrets(sentence))
    removed, total = 0, sum(removal.bytes for removal in removals)
    for removal in removals:
        outcome = "would go"
        if yes:
            is_removed = remove(storage, removal)
            removed += removal.bytes if is_removed else 0
            outcome = "removed" if is_removed else "kept: a process works on it"
        _print(f"{outcome}  {removal.kind:<10}  {_size(removal.bytes):>9}  {removal.name}  ({removal.why})")
    if yes:
        print(f"removed {_size(removed)} of {_size(total)}")
    elif removals:
        print(f"{len(removals)} parts with {_size(total)}; nothing was removed, --yes removes them")
    else:
        print(f"nothing to remove; unfinished runs count after {older_than} days without a change (--older-than)")


def _print(line: str) -> None:
    """Prints a line in which names from the storage cannot control the terminal."""
    print(printable(line))


def _size(count: float) -> str:
    """A number of bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
