"""What a wheel and a source archive of this checkout contain, without a network; a copy without links runs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
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


# An installed wheel beside another package that has the names models, pipeline and jobs -------------------------------

OTHERS = ("models", "pipeline", "jobs")


@pytest.fixture(scope="module")
def scripts(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with the wheel, the other package, and this one's dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(source, folder)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Python does not read .pth files of this folder, so that an editable raycap there is not found
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    for name in OTHERS:
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("WHOSE = 'another'\n")
    return python.parent


def output_of(*words: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
def test_both_packages_keep_their_names(scripts: Path, tmp_path: Path) -> None:
    program = "import models, pipeline, jobs, raycap.jobs, raycap.models as ours; print(ours.__file__)\n"
    program += "print(models.WHOSE, pipeline.WHOSE, jobs.WHOSE)"
    ours, others = output_of(scripts / "python", "-c", program, folder=tmp_path).splitlines()
    assert Path(ours).is_relative_to(scripts.parent) and others == "another another another"


@pytest.mark.proof
def test_commands_run_in_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    assert output_of(scripts / "raycap", "--version", folder=tmp_path).startswith("raycap ")
    assert "name: demo\n" in output_of(scripts / "raycap", "config", "demo", folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.proof
@pytest.mark.ray
def test_workers_find_the_wheel_and_results_are_in_the_working_folder(scripts: Path, tmp_path: Path) -> None:
    small = ("--set", "data.synthetic.num_images=30", "--set", "backbone.image_size=32")
    assert "features" in output_of(scripts / "raycap", "extract", "demo", *small, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert list(tmp_path.glob("results/features/*")) and list(tmp_path.glob("results/data/*/images/*.png"))
