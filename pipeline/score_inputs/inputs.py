"""The inputs of metrics for a data set, from the section `evaluation.inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.sections import DataSection, ScoreInputsSection
from pipeline.data.scene_captions import shape_names
from pipeline.score_inputs.objects import read_instances, read_names
from pipeline.scoring.grounding import Objects
from pipeline.scoring.metrics import ScoreInputs


def score_inputs(
    section: ScoreInputsSection,
    language: str,
    several: Mapping[Any, Sequence[str]] | None = None,
    data: DataSection | None = None,
) -> ScoreInputs:
    """The inputs of metrics. several: two or more raw captions of each image, by id.

    data: that of the captions. The objects of the synthetic data set are its shapes, unless the section names others.
    Raises UserError for a file that cannot be read.
    """
    return ScoreInputs(_objects(section, language, data), several or None)


def _objects(section: ScoreInputsSection, language: str, data: DataSection | None) -> Objects | None:
    """The words for objects and the annotated objects; None without words."""
    if section.objects is None:
        synthetic = None if data is None else data.synthetic
        return None if synthetic is None else Objects(shape_names(synthetic.language), synthetic.language)
    names = read_names(Path(section.objects).expanduser())
    instances = section.instances
    return Objects(names, language, None if instances is None else read_instances(Path(instances).expanduser(), names))
