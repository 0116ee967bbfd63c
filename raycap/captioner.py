"""`load` and `Captioner` of the Python API, which load a model and caption images in the caller's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from raycap.pipeline.data.image_sources import ImageSource
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.results import Explanation, ImageCaption
from raycap.pipeline.serving.host import LoadedModel, load_address


class Captioner:
    """Captions and explains images with one model. `load` creates a captioner.

    Several threads may use one captioner: they decode images in parallel and use the model one at a time. Processes
    cannot share a captioner, so each process calls `load` itself.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._service, self.model = loaded.service, loaded.info

    def caption(
        self,
        images: Sequence[ImageSource],
        *,
        batch_size: int | None = None,
        num_results: int = 1,
        beam_size: int | None = None,
        max_length: int | None = None,
        search: Mapping[str, object] | None = None,
    ) -> list[ImageCaption]:
        """Returns one result per image, in order. If an image cannot be read, its result has `error` and no caption.

        images: paths, s3:// URIs, bytes of image files, images of Pillow, or arrays (H, W), (H, W, 3) or (H, W, 4) of
        uint8. batch_size: images per forward pass, by default 16. num_results: captions per image. beam_size: by
        default the model's. max_length: in tokens, by default the model's. search: values of further keys of the
        section `evaluation`, such as {"ranking": "sum"}.

        Raises UserError if an argument is not valid, and StorageError if a storage does not answer.
        """
        if isinstance(images, str | bytes | bytearray | memoryview | Path) or not isinstance(images, Sequence):
            raise UserError(f"images has the type {type(images).__name__}; give a list of images, also for one image")
        for name, number in {"batch_size": batch_size, "num_results": num_results}.items():
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise UserError(f"{name} is {number!r}; expected a whole number of 1 or more")
        given = {"beam_size": beam_size, "max_length": max_length}  # win over the same keys in `search`
        changes = dict(search or {}) | {key: value for key, value in given.items() if value is not None}
        settings = self._service.changed_search(changes, num_results)
        found = self._service.caption_images(images, settings, batch_size=batch_size)
        return list(found)

    def explain(
        self, image: ImageSource, *, caption: str | None = None, head: int | None = None, attribution: bool = True
    ) -> Explanation:
        """Returns maps of where the model looks in an image for each word of a caption (`raycap caption --explain`).

        caption: by default the model's best caption. head: the number, from 0, of a head of the last decoder layer. By
        default the mean over all heads is used. attribution: whether integrated gradients are computed as well, which
        takes minutes on one CPU core.

        Raises UserError if the image cannot be read, if the model has no such head, or if the caption has too many
        tokens.
        """
        try:
            pixels = self._service.pixels(image)
        except BadImage as error:
            raise UserError(f"the image cannot be explained: {error}") from error
        if caption is None:
            (found,) = self._service.caption(pixels[None])
            caption = found.caption or ""
        return self._service.explain(pixels, caption, head, attribution)


def load(
    model: str | Path,
    *,
    device: Literal["cpu", "cuda"] | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    storage: str | Path = "results",
) -> Captioner:
    """Loads a model and returns a captioner for it.

    model: the folder of a bundle, which may be an s3:// prefix. champion:NAME is the best model so far of the
    configuration NAME, as `raycap retrain` keeps it. device: by default a GPU if torch sees one. precision: bfloat16
    changes a few captions, and speeds up large models on hardware that supports it. storage: the folder or s3:// prefix
    with the champions. Credentials, and AWS_ENDPOINT_URL for a compatible server, come from the environment.

    Raises UserError if `model` is not a model that captions images, or if this machine does not have the device.
    """
    return Captioner(load_address(str(model), str(storage), device=device, precision=precision))
