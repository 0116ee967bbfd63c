"""Sphinx's configuration: `make docs` builds the Markdown files of the repository as pages with search.

The source folder is the repository, so that links between files hold on the pages as they do in a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from configuration_keys import MARK, reference  # noqa: E402
from notebooks import PAGES, with_download, write_notebooks  # noqa: E402
from pygments.lexers.special import TextLexer  # noqa: E402

project = "raycap"
author = copyright = "The raycap authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
ROOT_PAGES = ["BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"]
include_patterns = ["docs/*.md", "docs/tutorials/*.md", *ROOT_PAGES, "infra/README.md"]
# Folders with thousands of files are not even listed.
exclude_patterns = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("docs", "infra"))
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
highlight_language = "text"
suppress_warnings = ["myst.header"]
default_role = "code"  # docstrings have `single` backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = "raycap"
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # it would fetch pages, which browsers refuse for files on a disk
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_extra_path = ["static/index.html"]  # leads to the root document
templates_path: list[str] = []


def insert_keys(_: Any, name: str, source: list[str]) -> None:
    """Puts the reference of all keys into its page."""
    if name == "docs/keys":
        source[0] = source[0].replace(MARK, reference())


def insert_downloads(_: Any, name: str, source: list[str]) -> None:
    """Puts a link to its notebook into each tutorial."""
    page = ROOT / f"{name}.md"
    if page in PAGES:
        source[0] = with_download(page, source[0])


def add_notebooks(app: Any, error: Exception | None) -> None:
    """Writes the tutorials' notebooks beside the pages."""
    if error is None:
        write_notebooks(Path(app.outdir) / "tutorials")


def setup(app: Any) -> dict[str, Any]:
    app.add_lexer("mermaid", TextLexer)  # forges draw the diagram; these pages show its text
    app.connect("source-read", insert_keys)
    app.connect("source-read", insert_downloads)
    app.connect("build-finished", add_notebooks)
    return {"parallel_read_safe": True}
