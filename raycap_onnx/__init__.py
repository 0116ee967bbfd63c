"""Captions images with a folder that `raycap export` wrote. Only numpy, Pillow and onnxruntime are needed.

    from raycap_onnx import Captioner

    captioner = Captioner("captioner")
    for caption in captioner.caption(["a.jpg", "b.jpg"]):
        print(caption.text, caption.log_prob)

The same on the command line: python -m raycap_onnx captioner a.jpg b.jpg

The captions equal those of raycap. This folder can be copied to another machine without the rest of raycap.
"""

from raycap_onnx.captioner import Caption, Captioner
from raycap_onnx.description import CaptionerError

__all__ = ["Caption", "Captioner", "CaptionerError"]
