"""Runs a tutorial as its reader does: the blocks of commands and of Python of a page, in order, in one folder.

Each block is a process of its own, as a cell of the page's notebook is, so that blocks share files and nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "RAYCAP_TUTORIAL"  # names the folder in the environment of all processes of a page
TIMEOUT_S = 900  # of a block


class Block(NamedTuple):
    line: int  # number, from 1 on, of the page's line with its first command
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page that a reader runs."""
    return [Block(page.count("\n", 0, found.start(2)) + 1, *found.groups()) for found in BLOCK.finditer(page)]


def shortened(blocks: list[Block], changes: Mapping[str, str]) -> list[Block]:
    """The blocks with texts replaced wherever they occur. Raises AssertionError for a text that no block has."""
    for old, new in changes.items():
        assert any(old in block.text for block in blocks), f"no block has the text {old!r}, which is to be replaced"
        blocks = [block._replace(text=block.text.replace(old, new)) for block in blocks]
    return blocks


def run_page(page: Path, folder: Path, changes: Mapping[str, str], **variables: str) -> list[str]:
    """Runs the blocks of a page in `folder`, where `raycap` is this checkout's. Returns what each block printed.

    variables: of the environment. Raises AssertionError with the line and the output of the first block that fails.
    """
    outputs = []
    blocks = shortened(blocks_of(page.read_text(encoding="utf-8")), changes)
    with ended(folder):
        for number, block in enumerate(blocks, start=1):
            code, output = run_block(block, folder, variables)
            place = f"block {number} of {page.name}, line {block.line}"
            assert code == 0, f"{place}, ended with exit code {code}:\n{block.text}\n{output[-6000:]}"
            outputs.append(output)
    return outputs


def run_block(block: Block, folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """The exit code and the output of a block. Processes that it starts in the background continue."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), MARK: str(folder)} | variables
    environment["PATH"] = f"{programs(folder)}{os.pathsep}{environment['PATH']}"
    command = ["python", "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    log = folder / ".output.txt"  # a pipe would wait for processes in the background
    with log.open("w") as output:
        done = subprocess.run(
            [*command, block.text], cwd=folder, env=environment, stdout=output, stderr=output, timeout=TIMEOUT_S
        )
    return done.returncode, log.read_text(encoding="utf-8")


def programs(folder: Path) -> Path:
    """A folder for the PATH with `raycap`, `ray` and `python`."""
    place = folder / ".bin"
    place.mkdir(exist_ok=True)
    for name, words in {"raycap": "-m raycap", "ray": "-m ray.scripts.scripts", "python": ""}.items():
        (place / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (place / name).chmod(0o755)
    return place


@contextmanager
def ended(folder: Path) -> Iterator[None]:
    """Kills the processes that the page's blocks have left in the background, and those that these start meanwhile."""
    try:
        yield
    finally:
        while processes := list(marked(folder)):
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)  # a process ends some time after its signal


def marked(folder: Path) -> Iterator[psutil.Process]:
    """The processes of a page that have not ended."""
    mark = f"{MARK}={folder}".encode()
    for process in psutil.process_iter():
        with suppress(OSError):
            # psutil's environment is empty where a process, such as Ray's agents, has changed its title
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                yield process
