"""Tutorials: each has a notebook with its blocks, and a test that runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.documents import docs_module
from tests.support.tutorials import blocks_of, run_page

PAGES = [ROOT / "docs/getting_started.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_valid_notebook_with_its_blocks(page: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat of the group docs is not installed")
    docs_module("notebooks").write_notebooks(tmp_path)
    notebook = nbformat.read(tmp_path / f"{page.stem}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    assert len(code) == len(blocks) > 3
    for source, block in zip(code, blocks, strict=True):
        assert source == ("%%bash -euo pipefail\n" if block.language == "sh" else "") + block.text.rstrip("\n")
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "](../" not in text and ".md)" not in text, "links to pages, which a notebook does not have beside it"


def test_every_tutorial_is_run() -> None:
    """By a test that has its name."""
    tests = "".join(path.read_text() for path in (ROOT / "tests/integration").glob("test_*.py"))
    for page in PAGES:
        assert f'{page.name}"' in tests, f"no test runs {page.name}"


def test_a_block_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```sh\necho a > a.txt\n```\n\n```sh\nfalse | true\n```\n")
    with pytest.raises(AssertionError, match=r"block 2 of page\.md, line 8, ended with exit code"):
        run_page(page, tmp_path, {})
