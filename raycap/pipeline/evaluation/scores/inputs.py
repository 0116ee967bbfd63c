"""The inputs of metrics for a data set, from the section `evaluation.inputs`, and its files of objects.

A file of words has one line per object: its name, and after commas further words and phrases for it, as in
"dog, puppy, baby dog". COCO's annotations of objects (instances_*.json) have the objects of each image.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.config.sections import DataSection, ScoreInputsSection
from raycap.pipeline.data.caption_files import ImageId, read_json
from raycap.pipeline.data.synthetic.scene_captions import shape_names
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.grounding import Objects
from raycap.pipeline.evaluation.scores.metrics import ScoreInputs
from raycap.pipeline.runtime.names import quoted, shorten
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.storage.untrusted.documents import read_document

MAX_NAME = 200  # characters


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

    objects = _objects(section, language, data)
    if section.clip is None and section.pac is None and section.bert is None:
        return ScoreInputs(objects, several or None)
    # imports torch, which the check of a configuration does not need
    from raycap.pipeline.evaluation.scores.encoders import BertEncoder, ClipEncoder

    max_pixels = DataSection.model_fields["max_pixels"].default if data is None else data.max_pixels
    clip, pac = (
        None if files is None else ClipEncoder(files, uris or {}, max_pixels, options)
        for files in (section.clip, section.pac)
    )
    bert = None if section.bert is None else BertEncoder(section.bert)
    return ScoreInputs(objects, several or None, clip, pac, bert)


def _objects(section: ScoreInputsSection, language: str, data: DataSection | None) -> Objects | None:
    """The words for objects and the annotated objects; None without words."""
    if section.objects is None:
        synthetic = None if data is None else data.synthetic
        return None if synthetic is None else Objects(shape_names(synthetic.language), synthetic.language)
    names = read_names(Path(section.objects).expanduser())
    instances = section.instances
    return Objects(names, language, None if instances is None else read_instances(Path(instances).expanduser(), names))


def read_names(path: Path) -> dict[str, tuple[str, ...]]:
    """The names of each object, by the first of them. Raises UserError."""
    try:
        lines = read_document(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"evaluation.inputs.objects: {path} cannot be read as text: {error}") from error
    rows = [[name.strip() for name in line.split(",")] for line in lines if line.strip()]
    objects: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}  # the object of each name
    for first, *others in rows:
        for name in dict.fromkeys((first, *others)):
            if not name or len(name) > MAX_NAME:
                raise UserError(
                    f"evaluation.inputs.objects: {path} has the name {quoted(name)} in the line of {quoted(first)}; "
                    f"expected 1 to {MAX_NAME} characters between commas"
                )
            if name in owner:
                raise UserError(
                    f"evaluation.inputs.objects: {path} gives {quoted(name)} to {quoted(owner[name])} and to "
                    f"{quoted(first)}; every name must belong to one object"
                )
            owner[name] = first
        objects[first] = (first, *others)
    if not objects:
        raise UserError(f"evaluation.inputs.objects: {path} is empty; give one line per object")
    return objects


def read_instances(path: Path, names: Mapping[str, tuple[str, ...]]) -> dict[ImageId, set[str]]:
    """The objects in each image, by id, from COCO's annotations of objects.

    names: those of each object, of which every category must be one. Raises UserError.
    """
    data = read_json(path)
    object_of = {name: object_name for object_name, others in names.items() for name in others}
    try:
        categories = {category["id"]: category["name"] for category in data["categories"]}
        if unknown := [name for name in categories.values() if name not in object_of]:
            raise UserError(
                f"evaluation.inputs.instances: {path} has the categories {shorten(unknown)}, which are not in "
                "evaluation.inputs.objects; add them there"
            )
        found: defaultdict[Any, set[str]] = defaultdict(set)
        for annotation in data["annotations"]:
            found[annotation["image_id"]].add(object_of[categories[annotation["category_id"]]])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"evaluation.inputs.instances: {path} has no COCO annotations of objects ({type(error).__name__}: "
            f"{error}); expected categories and annotations with image_id and category_id"
        ) from error
    return dict(found)
