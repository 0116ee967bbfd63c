"""The inputs of metrics for a data set, from the section `evaluation.inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.config.sections import DataSection, EncoderSection, ScoreInputsSection, TextEncoderSection
from raycap.pipeline.data.synthetic.scene_captions import shape_names
from raycap.pipeline.evaluation.scores.grounding import Encoder, Objects, TokenEncoder
from raycap.pipeline.evaluation.scores.metrics import ScoreInputs
from raycap.pipeline.evaluation.scores.objects import read_instances, read_names
from raycap.pipeline.storage.path import StorageOptions


def score_inputs(
    section: ScoreInputsSection,
    language: str,
    data: DataSection | None = None,
    *,
    several: Mapping[Any, Sequence[str]] | None = None,
    uris: Mapping[Any, str] | None = None,
    options: StorageOptions = StorageOptions(),
) -> ScoreInputs:
    """The inputs of metrics.

    data: that of the captions. The objects of the synthetic data set are its shapes, unless the section names others.
    several: two or more raw captions of each image, by id. uris: of the images, by id. options: of images on S3. Raises
    UserError for a file of objects that cannot be read; the files of encoders are read when a metric needs them.
    """

    def encoder(files: EncoderSection | None) -> Encoder | None:
        if files is None:
            return None
        from raycap.pipeline.evaluation.scores.encoders import FileEncoder

        max_pixels = DataSection.model_fields["max_pixels"].default if data is None else data.max_pixels
        return FileEncoder(files, uris or {}, max_pixels, options)

    objects = _objects(section, language, data)
    encoders = encoder(section.clip), encoder(section.pac), _token_encoder(section.bert)
    return ScoreInputs(objects, several or None, *encoders)


def _token_encoder(section: TextEncoderSection | None) -> TokenEncoder | None:
    if section is None:
        return None
    from raycap.pipeline.evaluation.scores.text_encoders import FileTextEncoder

    return FileTextEncoder(section)


def _objects(section: ScoreInputsSection, language: str, data: DataSection | None) -> Objects | None:
    """The words for objects and the annotated objects; None without words."""
    if section.objects is None:
        synthetic = None if data is None else data.synthetic
        return None if synthetic is None else Objects(shape_names(synthetic.language), synthetic.language)
    names = read_names(Path(section.objects).expanduser())
    instances = section.instances
    return Objects(names, language, None if instances is None else read_instances(Path(instances).expanduser(), names))
