"""The rules of the layout, which CONTRIBUTING.md explains. `test_documents.py` tests the documents."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("models", "pipeline", "jobs")  # packages below raycap, to which raycap/ has links
PACKAGES = (*LINKED, "raycap", "raycap_onnx")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# A room imports only rooms of later lines. CONTRIBUTING.md shows the same list.
ORDER = (
    ("serving", "inventory"),
    ("retrain", "search", "cluster", "export"),
    ("tracking",),
    ("training",),
    ("rewards",),
    ("runs",),
    ("distillation",),
    ("captioning",),
    ("features", "reports", "score_inputs", "setup"),
    ("data", "feature_store"),
    ("annotations", "confidence"),
    ("config", "scoring", "comparison"),
    ("language",),
    ("storage",),
    ("runtime",),
    ("untrusted",),
    ("errors", "version"),
)
LEVELS = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

# Every heavy dependency and the files that may name it; jobs/ are the Ray drivers.
HOMES = {
    "timm": {"models/backbone.py"},
    "ray.train": {"pipeline/runtime/context.py", "jobs/train.py"},
    "ray.data": {
        "pipeline/features/extraction.py",
        "pipeline/features/interruptions.py",
        "jobs/image_tasks.py",
        "pipeline/captioning/ray_data.py",
    },
    "ray.serve": {"jobs/serve/deployments.py"},
    "fastapi": {"pipeline/serving/app.py"},
    "starlette": {"pipeline/serving/app.py", "pipeline/serving/bodies.py"},
    "prometheus_client": {"pipeline/serving/metrics.py"},
    "ray.tune": {"jobs/tune/adapter.py", "jobs/tune/schedulers.py", "jobs/tune/workers.py"},
    "regex": {"pipeline/language/words.py"},
    "tokenizers": {"pipeline/language/subwords.py", "pipeline/language/bert_tokenizer.py"},
    "optuna": {"pipeline/search/samplers.py"},
    "sklearn": {"pipeline/confidence/fit.py"},
    "matplotlib": {"pipeline/search/plots.py", "pipeline/reports/curves.py", "pipeline/reports/front_plot.py"},
    "mlflow": {f"pipeline/tracking/{name}.py" for name in ("mlflow_client", "local_database", "run_sync", "registry")},
    "boto3": {"pipeline/storage/s3.py"},
    "onnx_ir": {"pipeline/export/onnx_graphs.py"},
    "onnxscript": {"pipeline/export/onnx_graphs.py"},
    "onnxruntime": {"pipeline/export/onnx_graphs.py", "raycap_onnx/captioner.py"},
    "cryptography": {"pipeline/captioning/bundle_files.py"},
    "h5py": {"pipeline/features/regions.py"},
    "pyarrow.fs": {"pipeline/storage/s3.py"},
    # Java; git's commit; MLflow's server
    "subprocess": {"pipeline/scoring/java.py", "pipeline/version.py", "jobs/bench/tracker.py"},
}
FORBIDDEN = {
    "models": {"raycap.pipeline", "raycap.jobs", "raycap.captioner", "raycap_onnx", "tests", "ray", "pydantic"},
    "pipeline": {"raycap.jobs", "raycap.captioner", "raycap_onnx", "tests"},
    "jobs": {"raycap.captioner", "raycap_onnx", "tests"},
    "raycap": {"raycap_onnx", "tests", "ray"},
    "raycap_onnx": {"raycap", "tests", "torch"},
}
# Packages that take long to import. Only these, and modules of raycap that import one of them at their top, may be
# imported inside a function.
HEAVY = {
    "PIL", "aiohttp", "boto3", "botocore", "cryptography", "fastapi", "h5py", "jinja2", "matplotlib", "mlflow", "numpy",
    "onnx_ir", "onnxruntime", "onnxscript", "optuna", "pandas", "prometheus_client", "psutil", "pyarrow",
    "pycocoevalcap", "ray", "regex", "rich", "s3transfer", "safetensors", "scipy", "sklearn", "starlette", "timm",
    "tokenizers", "torch", "torchvision", "urllib3", "yaml",
}  # fmt: skip
# Calls that may appear in a constant's value: they build a value and do nothing else.
PURE_CALLS = {
    "ContextVar", "Discriminator", "Field", "Format", "Path", "Tag", "TypeVar", "dict.fromkeys", "frozenset", "len",
    "logging.getLogger", "np.array", "np.uint64", "package_folder", "range", "re.compile", "sorted", "tuple",
    "typer.Argument", "typer.Option", "typer.Typer",
}  # fmt: skip


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
    for package in LINKED:
        assert not names_package(names, package), f"{place} imports {package}, whose name is raycap.{package}"
    assert not names_package(names, "raycap.jobs") or place.startswith("jobs/") or place == "raycap/__main__.py"
    for package, homes in HOMES.items():
        if names_package(names, package):
            assert place in homes, f"{place} imports {package}, whose home is {', '.join(sorted(homes))}"


def test_the_rule_sees_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text("def f():\n    from ray import train\n")
    assert names_package(imported(path), "ray.train")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_importing_does_nothing(path: Path) -> None:
    """Ray's workers import modules to unpickle functions: nothing at module level may act."""
    assert not list(actions(ast.parse(path.read_text(encoding="utf-8"))))


def actions(module: ast.Module) -> Iterator[str]:
    """Statements at module level that do more than define a name."""
    defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in module.body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.Expr(value=ast.Constant()):
                continue  # the docstring
            case ast.Expr() if module.body[-1] is node and ast.unparse(node) == "sys.exit(main())":
                continue  # `python -m`
            case ast.If(test=test) if ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
                continue
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                names = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                if all(is_pure(name, defined) for name in names):
                    continue
        yield ast.unparse(node)


def is_pure(name: str, defined: set[str]) -> bool:
    return (
        name in PURE_CALLS | defined
        or name.startswith("pa.")
        or name[:1].isupper()
        or name.endswith((".with_name", ".split"))
    )


@pytest.mark.parametrize(
    "source", ["open('a', 'w')", "print(1)", "for x in []: pass", "x = open('a')", "x: int = start()", "with a: b = 1"]
)
def test_the_rule_sees_actions(source: str) -> None:
    assert list(actions(ast.parse(source)))


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"raycap.{name}" if name.startswith(LINKED) else name


MODULES = {module_of(path): path for path in SOURCES}


def room_of(module: str) -> str:
    return module.split(".")[2]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_rooms_import_only_what_is_below_them(path: Path) -> None:
    parts = path.relative_to(ROOT / "pipeline").with_suffix("").parts if path.is_relative_to(ROOT / "pipeline") else ()
    if not parts or parts[0] == "__init__":
        return
    for module in imported(path) & MODULES.keys():
        if module.startswith("raycap.pipeline.") and room_of(module) != parts[0]:
            assert LEVELS[parts[0]] < LEVELS[room_of(module)], (
                f"{path.relative_to(ROOT)} imports {module}, which is not below it"
            )


def test_every_room_has_its_place_and_a_size_that_a_reader_can_survey() -> None:
    rooms = [path for path in (ROOT / "pipeline").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {room.name for room in rooms} == LEVELS.keys() - {"errors", "version"}
    for room in [*rooms, ROOT / "jobs" / "tune", ROOT / "jobs" / "bench", ROOT / "jobs" / "serve"]:
        count = len([path for path in room.glob("*.py") if path.name != "__init__.py"])
        assert 2 <= count <= 12, f"{room.relative_to(ROOT)} has {count} files"
        body = ast.parse((room / "__init__.py").read_text(encoding="utf-8")).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), f"{room.name}/__init__.py holds more than a docstring"
        docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
        assert docstring and "\n" not in docstring, f"{room.name}/__init__.py needs a docstring of one line"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_private_names_stay_in_their_module(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raycap"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{path.relative_to(ROOT)} imports {', '.join(private)} from {node.module}"


# Heavy packages that nearly every command needs: they may be imported anywhere, and reaching them is no reason.
LIGHT_ENOUGH = {"numpy", "pyarrow", "yaml", "psutil"}


@functools.cache
def imports_at_the_top(module: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@functools.cache
def reaches_heavy(module: str) -> bool:
    """Whether importing a module of raycap imports a heavy package, through the imports at module level."""
    visited, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name.split(".")[0] in HEAVY - LIGHT_ENOUGH:
            return True
        if name in MODULES and name not in visited:
            visited.add(name)
            waiting += imports_at_the_top(name)
    return False


def imports_inside_functions(path: Path) -> Iterator[tuple[str, ...]]:
    """For each import inside a function the modules that it may name: of `from a import b` both a.b and a."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from ((alias.name,) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((f"{node.module}.{alias.name}", node.module or "") for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_import_only_what_is_heavy(path: Path) -> None:
    for names in imports_inside_functions(path):
        module = next((name for name in names if name in MODULES), names[-1])
        heavy = reaches_heavy(module) if module in MODULES else module.split(".")[0] in HEAVY
        assert heavy, f"{path.relative_to(ROOT)} imports {module} inside a function; import it at the top"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_test_files_share_only_what_is_in_support(path: Path) -> None:
    for module in imported(path):
        if module.startswith("tests."):
            assert module.startswith(("tests.support", "tests.conftest")), f"{path.relative_to(ROOT)} imports {module}"


MAX_PARAMETERS, MAX_LINES = 7, 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_are_short_and_take_few_parameters(path: Path) -> None:
    """Commands of the command line aside, whose parameters are their options."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        place = f"{path.relative_to(ROOT)}: {node.name}"
        lines = (node.end_lineno or 0) - node.lineno + 1
        options = "typer." in ast.unparse(node.args) or any(
            "command" in ast.unparse(each) for each in node.decorator_list
        )
        if not options:
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            count -= bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
            assert count <= MAX_PARAMETERS, f"{place} takes {count} parameters"
            assert lines <= MAX_LINES, f"{place} has {lines} lines"


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
    for room in {path.parent for path in SOURCES} - {ROOT / "pipeline"}:
        place = f"{room.relative_to(ROOT).as_posix()}/"
        assert place in paths, f"README.md's file map lacks {place}"
        if place.startswith("pipeline/"):
            docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
            assert docstring[1:-1] in (ROOT / "README.md").read_text(encoding="utf-8"), (
                f"README.md describes {place} otherwise"
            )


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_contributing_shows_the_order_of_rooms() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "\n".join("  ".join(rooms) for rooms in ORDER) in text


def test_the_lock_names_versions_only() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.\[\],-]+==[^\s;]+( ;.*)?", line), line
        assert "://" not in line
