"""What a wheel and a source archive of this checkout contain, without a network; a copy without links runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from raycap.jobs.submit import pack
from tests.support.checkout import build_wheel, copy_sources


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without git and links, with files that no wheel may contain."""
    source = copy_sources(tmp_path_factory.mktemp("checkout") / "source")
    for name in (
        "tests/test_a.py",
        "raycap/models/a.pyc",
        "raycap/configs/notes.txt",
        "heat-maps/a.py",
        "raycap/models/a.pem",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("a = 1\n")
    return source


@pytest.fixture(scope="module")
def names(source: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return names_in(build_wheel(source, tmp_path_factory.mktemp("wheel")))


def test_a_wheel_takes_two_names_and_contains_no_tests(names: set[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"raycap", "raycap_onnx"}
    kept = {f"raycap/{name}" for name in ("configs/demo.yaml", "configs/data/nocaps_val.yaml", "py.typed")}
    kept |= {f"raycap/configs/recipes/{name}" for name in ("four_stages.yaml", "search_demo.yaml")}
    reports = "raycap/pipeline/evaluation/reports"
    kept |= {f"{reports}/report.html.jinja", "raycap/pipeline/serving/caption_page.html"}
    assert kept <= names


def test_a_job_gets_the_package_that_a_wheel_has(
    names: set[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycap.jobs.submit.package_folder", lambda: source / "raycap")
    pack(tmp_path, {})
    packed = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert packed - {"raycap/COMMIT"} == {name for name in names if name.startswith("raycap/")}


def test_a_download_without_links_runs(source: Path, tmp_path: Path) -> None:
    assert not [path for path in source.rglob("*") if path.is_symlink()]
    code = "import raycap.jobs.cli as cli; print(cli.__file__); cli.main(['config', 'demo'])"
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(str(source)) and "\nname: demo\n" in done.stdout


@pytest.mark.proof
def test_a_wheel_can_be_built_from_the_source_archive(source: Path, names: set[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        assert not [member.name for member in opened if member.issym() or member.islnk()]
        opened.extractall(tmp_path, filter="data")
    assert names_in(build_wheel(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "wheel")) == names
