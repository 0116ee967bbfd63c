"""Notebooks of the tutorials, made from their pages: text becomes cells of text, and each block that is run a cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4

DOCS = Path(__file__).resolve().parent
PAGES = (DOCS / "getting_started.md", *sorted((DOCS / "tutorials").glob("*.md")))
CODE = re.compile(r"^```(sh|python)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)[^)\s]+\)")


def notebook(page: str) -> Any:
    """The notebook of a page. Links to other pages, which a notebook does not have beside it, become plain text."""
    cells, end = list[Any](), 0
    for found in CODE.finditer(page):
        cells += [text_cell(page[end : found.start()]), code_cell(*found.groups())]
        end = found.end()
    cells.append(text_cell(page[end:]))
    cells = [cell for cell in cells if cell.source]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # a random one would differ in each build
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def text_cell(text: str) -> Any:
    return v4.new_markdown_cell(LINK.sub(r"\1", text.strip()))


def code_cell(language: str, text: str) -> Any:
    # a cell ends at the first command that fails
    return v4.new_code_cell(f"%%bash -euo pipefail\n{text}" if language == "sh" else text)


def write_notebooks(folder: Path) -> None:
    """Writes `NAME.ipynb` for each tutorial into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        nbformat.write(notebook(page.read_text(encoding="utf-8")), folder / f"{page.stem}.ipynb")


def with_download(page: Path, text: str) -> str:
    """The text of a page, with a link to its notebook in `tutorials/` of the pages below the title."""
    title, _, rest = text.partition("\n")
    up = "../" * len(page.relative_to(DOCS.parent).parent.parts)
    return f'{title}\n\n<a href="{up}tutorials/{page.stem}.ipynb" download>Download as a notebook</a>\n{rest}'
