"""The house's own rules: which way imports run, where heavy dependencies live, and that the README tells the truth."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for room in ("models", "pipeline", "jobs") for path in (ROOT / room).rglob("*.py"))

# Every heavy dependency and the files that may name it; jobs/ are the Ray drivers.
HOMES = {
    "timm": {"models/backbone.py"},
    "ray.train": {"pipeline/runtime/context.py", "jobs/train.py"},
    "ray.data": {"pipeline/features/extraction.py", "pipeline/captioning/ray_data.py"},
    "ray.tune": {"jobs/tune/schedulers.py", "jobs/tune/command.py"},
    "optuna": {"pipeline/search/samplers.py"},
    "matplotlib": {"pipeline/search/plots.py", "pipeline/reports/curves.py"},
    "mlflow": {f"pipeline/tracking/{name}.py" for name in ("mlflow_client", "run_sync", "registry")},
    "boto3": {"pipeline/storage/path.py"},
    "h5py": {"pipeline/features/regions.py"},
    "pyarrow.fs": {"pipeline/storage/path.py"},
    # Java; git's commit; MLflow's server
    "subprocess": {"pipeline/scoring/java.py", "pipeline/version.py", "jobs/bench/tracker.py"},
}
FORBIDDEN = {
    "models": {"pipeline", "jobs", "tests", "ray", "pydantic"},
    "pipeline": {"jobs", "tests"},
    "jobs": {"tests"},
}


def imported(path: Path) -> set[str]:
    """Every module named by an import, in function bodies too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def names_package(names: set[str], package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way_and_heavy_ones_have_one_home(path: Path) -> None:
    names, place = imported(path), path.relative_to(ROOT).as_posix()
    for package in FORBIDDEN[place.split("/")[0]]:
        assert not names_package(names, package), f"{place} imports {package}"
    for package, homes in HOMES.items():
        if names_package(names, package):
            assert place in homes, f"{place} imports {package}, whose home is {', '.join(sorted(homes))}"


def test_the_rule_sees_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text("def f():\n    from ray import train\n")
    assert names_package(imported(path), "ray.train")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_importing_does_nothing(path: Path) -> None:
    """Ray's workers import modules to unpickle functions: no statement at module level may act."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant | ast.Call), ast.dump(node)
            if isinstance(node.value, ast.Call):
                assert path.name == "__main__.py" or "app." in ast.unparse(node.value), ast.unparse(node)


def file_map() -> list[str]:
    """Paths named in the README's file map, a block of lines `path  what it is`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- file map -->\n```\n(.*?)```", text, re.DOTALL)
    assert block, "README.md has no file map"
    return [line.split()[0] for line in block.group(1).splitlines() if line.strip()]


def test_the_readme_file_map_is_true() -> None:
    paths = file_map()
    for path in paths:
        assert (ROOT / path).exists(), f"README.md names {path}, which does not exist"
    for room in {path.parent for path in SOURCES}:
        place = f"{room.relative_to(ROOT).as_posix()}/"
        assert place in paths or place == "pipeline/", f"README.md's file map lacks {place}"


def test_every_command_in_the_readme_parses() -> None:
    """Its name, its options and their kinds; nothing is run."""
    from typer.main import get_command

    from jobs.cli import app

    root = get_command(app)
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    commands = re.findall(r"^\s*(?:\$ )?raycap ([^\n#`]+)", text, re.MULTILINE)
    assert commands
    for line in commands:
        name, *words = shlex.split(line)
        context = root.make_context("raycap", [name], resilient_parsing=True)
        command = root.get_command(context, name)
        assert command is not None, f"README.md names the command {name}, which does not exist"
        with command.make_context(name, words, parent=context):  # raises for options that do not fit
            pass


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    assert set(re.findall(r"`?make ([a-z]+)`?", text)) <= targets


def test_the_lock_names_versions_only() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.\[\],-]+==[^\s;]+( ;.*)?", line), line
        assert "://" not in line
