"""The Python API of raycap: `raycap.load` gives a `Captioner`, which captions and explains images.

docs/python.md describes it. Importing this package imports neither torch nor Ray.
"""

from pipeline.confidence.image_caption import Explanation, ImageCaption, RankedCaption
from pipeline.errors import UserError
from raycap.captioner import Captioner, ModelInfo, load

__all__ = ["Captioner", "Explanation", "ImageCaption", "ModelInfo", "RankedCaption", "UserError", "load"]
