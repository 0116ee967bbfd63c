"""Rules of the layout that no linter has. The order of rooms is in pyproject.toml, for import-linter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for package in ("raycap", "raycap_onnx") for path in (ROOT / package).rglob("*.py"))

# Calls that may appear in a constant's value: they build a value and do nothing else.
PURE_CALLS = {
    "Metric", "dict.fromkeys", "frozenset", "len", "logging.getLogger", "np.array", "np.iinfo", "np.uint64",
    "package_folder", "partial", "range", "re.compile", "sorted", "threading.Lock", "tuple", "typer.Argument",
    "typer.Option", "typer.Typer",
}  # fmt: skip


def test_importing_does_nothing() -> None:
    """Ray's workers import modules to unpickle functions: nothing at module level may act."""
    found = {path: list(actions(ast.parse(path.read_text(encoding="utf-8")))) for path in SOURCES}
    assert not {path.relative_to(ROOT): acts for path, acts in found.items() if acts}


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
                later = {inner for each in ast.walk(node) if isinstance(each, ast.Lambda) for inner in ast.walk(each)}
                calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and call not in later]
                names = {ast.unparse(call.func) for call in calls}
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
    for room in {path.parent for path in SOURCES if path.parent.parent == ROOT / "raycap" / "pipeline"}:
        assert f"{room.relative_to(ROOT).as_posix()}/" in paths, f"README.md's file map lacks {room.name}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_the_lock_names_versions_only() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.\[\],-]+==[^\s;]+( ;.*)?", line), line
        assert "://" not in line
