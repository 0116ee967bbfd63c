"""The documents are true: links, commands, YAML, the reference of keys, and the pages that `make docs` builds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.search.spec import SearchConfig
from tests.conftest import ROOT
from tests.support.checkout import own
from tests.support.command_line import parse
from tests.support.documents import docs_module

DOCUMENTS = own([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")])
# Commands of earlier versions are history, not instructions.
INSTRUCTIONS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
CONFIGS = own((ROOT / "raycap" / "configs").rglob("*.yaml"))
FENCE = re.compile(r"^ *```(\w*|\{[\w-]+\})\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------- links


def anchors(markdown: str) -> set[str]:
    """The anchors that forges, and the pages, give to headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", markdown), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(slug if slug not in found else next(s for n in range(1, 99) if (s := f"{slug}-{n}") not in found))
    return found


def broken_links(document: Path) -> Iterator[str]:
    """The relative links of a document, pictures too, that lead to no file or no heading, or over a symbolic link."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(document)))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        is_there = file.is_file() and (not anchor or anchor in anchors(text_of(file)))
        is_there &= Path(os.path.normpath(file)) == file.resolve()  # a download has no links
        if not is_there:
            yield target


@pytest.mark.parametrize("document", DOCUMENTS, ids=place)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    assert list(broken_links(document)) == []


# ------------------------------------------------------------------------------------------------------------- commands


def blocks(markdown: str, *languages: str) -> Iterator[str]:
    return (text for language, text in FENCE.findall(markdown) if language in languages)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command `raycap ...` at the start of a line, after variables and `#` of a YAML's header.

    They end before a pipe, a redirection or `&`.
    """
    joined = re.sub(r"\\\n[# ]*", "", text)
    for line in re.findall(
        r"^[# ]*(?:[A-Z_]+=\S+ )*raycap +(?!--help)((?:(?! (?:\d?>|[|&]))[^\n#])+)", joined, re.MULTILINE
    ):
        yield shlex.split(line)


def all_commands() -> list[Any]:
    found = [
        pytest.param(words, id=f"{place(path)}-{number}")
        for path in INSTRUCTIONS
        for number, words in enumerate(commands("\n".join(blocks(text_of(path), "", "sh", "bash", "console"))))
    ]
    headers = [
        (path, "\n".join(line for line in text_of(path).splitlines() if line.startswith("#  "))) for path in CONFIGS
    ]
    return found + [
        pytest.param(words, id=f"{place(path)}-{number}")
        for path, header in headers
        for number, words in enumerate(commands(header))
    ]


@pytest.mark.parametrize("words", all_commands())
def test_commands_parse(words: list[str]) -> None:
    """The commands, their options, the shipped configurations and the keys that they set exist. Nothing is run."""
    parse(words)
    for word in words:
        assert "configs/" not in word, f"{word} is not everywhere; give the name of the shipped configuration"
    for option, value in pairwise(words):
        if option == "--set":
            assert value.split("=")[0] in SettableKeys(), f"{value} sets no key"


@pytest.mark.parametrize("document", INSTRUCTIONS, ids=place)
def test_configurations_scripts_and_make_targets_that_are_named_exist(document: Path) -> None:
    text = text_of(document)
    for name in re.findall(r"\b(?:raycap/)?configs/[\w/]+\.yaml", text):
        assert ROOT / name in CONFIGS, f"{name} does not exist"
    for name in re.findall(r"\bpython (benchmarks/\w+\.py)", text):
        assert (ROOT / name).is_file(), f"{name} does not exist"
    targets = set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert set(re.findall(r"`?\bmake ([a-z]+)`", text)) <= targets


def test_the_recipes_are_all_configurations() -> None:
    text = text_of(ROOT / "docs" / "recipes.md")
    named = set(re.findall(r"`((?:data/)?\w+\.yaml)`", text))
    shipped = [path.relative_to(ROOT / "raycap" / "configs") for path in CONFIGS]
    assert named == {path.as_posix() for path in shipped if path.parts[0] != "recipes"}


# ----------------------------------------------------------------------------------------------------------------- YAML


def yaml_blocks() -> list[Any]:
    return [
        pytest.param(text, id=f"{place(path)}-{number}")
        for path in INSTRUCTIONS
        for number, text in enumerate(blocks(text_of(path), "yaml"))
    ]


@pytest.mark.parametrize("text", yaml_blocks())
def test_yaml_fits_the_configuration(text: str) -> None:
    """Each section is checked by itself. If it lacks keys that must be given, it is an excerpt, and its other keys are
    checked."""
    values = yaml.safe_load(text)
    for key, value in values.items():
        field = RunConfig.model_fields[key]
        try:
            TypeAdapter(field.annotation).validate_python(value)
        except ValidationError as error:
            others = [each for each in error.errors() if each["type"] != "missing"]
            assert not others, others


# ----------------------------------------------------------------------------------------------------------------- keys


def reference() -> ModuleType:
    return docs_module("configuration_keys")


@cache
def all_groups() -> dict[str, list[Any]]:
    keys = reference()
    return {
        "configuration.md": keys.groups(RunConfig),
        "search.md": keys.groups(SearchConfig),
    }


class SettableKeys:
    """What `--set` may name: keys and sections of runs and searches, and anything below a map."""

    def __contains__(self, name: str) -> bool:
        for group in [each for found in all_groups().values() for each in found]:
            for path, is_map in [(group.path, False), *((key.path, key.kind.startswith("map")) for key in group.keys)]:
                pattern = re.escape(path).replace(r"\[\]", r"(\.[\w-]+)?").replace(r"\.KEY", r"\..+")
                if re.fullmatch(pattern + (r"(\..+)?" if is_map else ""), name):
                    return True
        return False


@pytest.mark.parametrize("document", ["configuration.md", "search.md"])
def test_tables_name_keys_that_exist(document: str) -> None:
    groups = all_groups()[document]
    paths = {group.path.removesuffix(".KEY") for group in groups} | {key.path for group in groups for key in group.keys}
    named = [key for key, _ in reference().table_rows(document)]
    assert len(named) > 8 and set(named) <= paths, set(named) - paths
    assert len(named) == len(set(named)), "a key has two rows"


@pytest.mark.parametrize("document", ["configuration.md", "search.md"])
def test_every_key_has_a_meaning(document: str) -> None:
    """It is in a table of the document, in the docstring of the field, or in the text or the row of the section."""
    meanings = dict(reference().table_rows(document))
    for group in all_groups()[document]:
        for key in group.keys:
            name = key.path.rsplit(".", 1)[-1]
            parent = group.path.removesuffix(".KEY")
            is_in_section = parent in meanings or re.search(rf"\b{name}\b", group.about)
            assert key.path in meanings or key.comment or is_in_section, f"{document} does not explain {key.path}"


def test_the_reference_has_every_key_once_with_type_and_default() -> None:
    keys = reference()
    lines = keys.reference().splitlines()
    groups = [group for found in all_groups().values() for group in found]
    assert len([line for line in lines if line.startswith("| `")]) == sum(len(group.keys) for group in groups)
    (row,) = [line for line in lines if line.startswith("| `layer_decay` |")]
    assert "above 0, at most 1" in row and "for every layer from it to the output" in row
    assert all(len(re.split(r"(?<!\\)\|", line)) == 6 for line in lines if line.startswith("|"))


# ---------------------------------------------------------------------------------------------------------------- pages


@pytest.mark.proof
def test_the_pages_build_without_warnings_load_nothing_and_can_be_searched(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_parser", "nbformat"):
        pytest.importorskip(package, reason=f"{package} of the group docs is not installed")
    (command,) = re.findall(r"\$\(BIN\)/python (-m sphinx .+) build/docs$", text_of(ROOT / "Makefile"), re.MULTILINE)
    words = [sys.executable, *shlex.split(command), "--doctree-dir", str(tmp_path / "trees"), str(tmp_path / "pages")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = tmp_path / "pages"
    index = text_of(pages / "searchindex.js")
    assert '"meshed' in index and '"champion' in index
    for page in pages.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"(?:https?:)?//", text_of(page)
        )
        assert not loaded, f"{page.name} loads {loaded}"
    for sheet in pages.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", text_of(sheet)), sheet.name
    assert "cache_gib" in text_of(pages / "docs" / "keys.html")
    assert "attribution" in text_of(pages / "docs" / "api.html")
