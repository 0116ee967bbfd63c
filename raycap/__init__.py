"""The Python API of raycap: `raycap.load` gives a `Captioner`, which captions and explains images.

docs/python.md describes the API. Each name of the API is imported when it is first used, because every process of a
cluster imports this package and few of them use the API.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycap.captioner import Captioner, load
    from raycap.pipeline.errors import UserError
    from raycap.pipeline.evaluation.results import Explanation, ImageCaption, RankedCaption
    from raycap.pipeline.serving.host import ModelInfo

__all__ = ["Captioner", "Explanation", "ImageCaption", "ModelInfo", "RankedCaption", "UserError", "load"]
_MODULES = {
    "raycap.captioner": ("Captioner", "load"),
    "raycap.pipeline.serving.host": ("ModelInfo",),
    "raycap.pipeline.evaluation.results": ("Explanation", "ImageCaption", "RankedCaption"),
    "raycap.pipeline.errors": ("UserError",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(module), name)
            return globals()[name]
    raise AttributeError(f"module 'raycap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
