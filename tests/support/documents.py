"""The modules of docs/, which belong to no package."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from tests.conftest import ROOT


@cache
def docs_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
