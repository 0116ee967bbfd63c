"""The journal is a folder of parts: lines are only added, and a long run uploads no more than a short one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raycap.pipeline.runs import journal as journals
from raycap.pipeline.runs.journal import Follower, Journal, read_journal
from raycap.pipeline.storage.path import StoragePath


@dataclass(frozen=True)
class Counted(StoragePath):
    """A folder that counts what is written to its files."""

    written: Counter[str] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)

    def __truediv__(self, name: str) -> Counted:
        return Counted(f"{self.uri}/{name}", self.options, self.written, self.times)

    def write_bytes(self, data: bytes | memoryview) -> str:
        self.written["bytes"] += len(data)
        self.times[self.name] += 1
        return super().write_bytes(data)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "PART_BYTES", 400)


def steps(folder: Path, stage: str = "a") -> list[int]:
    return [entry["step"] for entry in read_journal(folder) if entry["stage"] == stage]


def test_what_an_upload_sends_does_not_grow(tmp_path: Path) -> None:
    home, journal = Counted(str(tmp_path / "home")), Journal(tmp_path / "journal", "a", 0)
    sent = []
    for step in range(1, 101):
        journal.write("train", step, {"loss": 1.0 / step})
        home.written.clear()
        journal.upload(home)
        sent.append(home.written["bytes"])
    parts = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert len(parts) > 15 and parts[0] == "00001.jsonl"
    assert max(sent) < 2 * 400, "the part that was completed, and the first line of the next"
    assert max(home.times.values()) <= 7, "no part is sent again once it is complete"
    assert (
        read_journal(tmp_path / "home") == read_journal(tmp_path / "journal")
        and len(read_journal(tmp_path / "home")) == 100
    )


def test_a_resumed_stage_repeats_steps_and_changes_no_line(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    for stage in ("a", "b"):
        first = Journal(folder, stage, 0)
        for step in range(1, 13):  # more than one part
            first.write("train", step, {"attempt": 1})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with (folder / max(before)).open("a") as file:
        file.write('{"stage": "b", "kind": "tr')  # the writer was killed in the middle of a line
    second = Journal(folder, "b", 4)
    assert steps(folder, "b") == [1, 2, 3, 4]
    second.write("train", 5, {"attempt": 2})
    assert steps(folder, "a") == list(range(1, 13)) and steps(folder, "b") == [1, 2, 3, 4, 5]
    assert [entry["attempt"] for entry in read_journal(folder)][-2:] == [1, 2]
    assert all((folder / name).read_bytes().startswith(content) for name, content in before.items())
    Journal(folder, "b", 0)
    assert steps(folder, "b") == [] and len(steps(folder, "a")) == 12


def test_a_follower_reads_across_parts_and_waits_for_whole_lines(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    follower, journal = Follower(folder), Journal(folder, "a", 0)
    seen = []
    for step in range(1, 31):
        journal.write("train", step, {})
        if step % 7 == 0:
            seen += [entry["step"] for entry in follower.new()]
    seen += [entry["step"] for entry in follower.new()]
    assert seen == list(range(1, 31)) and len(list(folder.iterdir())) > 3
    line = json.dumps({"stage": "a", "kind": "train", "step": 31, "time": 1.0}) + "\n"
    newest = max(folder.iterdir())
    for part in (line[:20], line[20:]):
        with newest.open("a") as file:
            file.write(part)
        seen += [entry["step"] for entry in follower.new()]
    assert seen == list(range(1, 32))
