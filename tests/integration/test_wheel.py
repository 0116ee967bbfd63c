"""An installed wheel beside another package that has the names models, pipeline and jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.checkout import build_wheel, copy_sources

OTHERS = ("models", "pipeline", "jobs")


pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with the wheel, the other package, and this one's dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(copy_sources(folder / "source"), folder)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Only the folder: an editable raycap there is found through a .pth file, which this does not read.
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


def test_both_packages_keep_their_names(scripts: Path, tmp_path: Path) -> None:
    program = "import models, pipeline, jobs, raycap.jobs, raycap.models as ours; print(ours.__file__)\n"
    program += "print(models.WHOSE, pipeline.WHOSE, jobs.WHOSE)"
    ours, others = output_of(scripts / "python", "-c", program, folder=tmp_path).splitlines()
    assert Path(ours).is_relative_to(scripts.parent) and others == "another another another"


def test_commands_run_in_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    assert output_of(scripts / "raycap", "--version", folder=tmp_path).startswith("raycap ")
    assert "name: demo\n" in output_of(scripts / "raycap", "config", "demo", folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.ray
def test_workers_find_the_wheel_and_results_are_in_the_working_folder(scripts: Path, tmp_path: Path) -> None:
    small = ("--set", "data.synthetic.num_images=30", "--set", "backbone.image_size=32")
    assert "features" in output_of(scripts / "raycap", "extract", "demo", *small, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert list(tmp_path.glob("results/features/*")) and list(tmp_path.glob("results/data/*/images/*.png"))
