"""The captions of a run's teacher: taken from the storage into the run's folder, and recorded in run.json."""

from __future__ import annotations

import logging
from dataclasses import replace

from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.runs.distillation.caption_store import caption_store, images_to_caption
from raycap.pipeline.runs.distillation.taken_captions import Distilled, Taker, count_taken, read_taken
from raycap.pipeline.runs.distillation.teacher import Teacher, find_teacher
from raycap.pipeline.runs.folder import DISTILLED, DISTILLED_TOKENS, RunFolder
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.digests import has_digest

logger = logging.getLogger(__name__)


def has_distilled_captions(folder: RunFolder) -> bool:
    """Whether a run needs nothing of a teacher: it has none, or its folder has the teacher's captions."""
    record, path = folder.metadata.distilled, folder.path / DISTILLED
    return folder.config.distill is None or (record is not None and path.is_file() and has_digest(path, record.sha256))


def with_distilled_captions(folder: RunFolder) -> RunFolder:
    """The folder of a run with the captions of its teacher, which its storage must contain.

    Raises UserError when the teacher has captioned too few images (`data.max_bad_fraction`), and DamagedError for a
    damaged chunk and for stored captions that are no longer those that the run has begun with.
    """
    if has_distilled_captions(folder):
        return folder
    teacher = find_teacher(folder.config)
    assert teacher is not None  # `has_distilled_captions` is true without one
    record, before = _take(folder, teacher), folder.metadata.distilled
    if before is not None and record.sha256 != before.sha256:
        raise DamagedError(
            f"{folder.path / DISTILLED} is damaged, and the storage has other captions of {teacher.name} now; restore "
            f"it from a copy, or remove {folder.path} to start the run over"
        )
    logger.info(f"teacher   {record}")
    write_json(folder.path / "run.json", replace(folder.metadata, distilled=record).values())
    folder.push(DISTILLED)
    taught = replace(folder)  # the other object has cached the old run.json
    taught.write_tokens(DISTILLED_TOKENS)
    taught.push("run.json")
    return taught


def _take(folder: RunFolder, teacher: Teacher) -> Distilled:
    """Writes the run's file of captions, and returns its record."""
    config = folder.config
    assert config.distill is not None
    images, path = images_to_caption(config, folder.dataset), folder.path / DISTILLED
    taker = Taker(folder.vocabulary, folder.sizes.max_positions, config.distill.captions_per_image)
    dropped, sha256 = taker.take(caption_store(config, teacher), images.table["key"], path)
    table = read_taken(path)
    missing = len(images) - len(table)
    if missing > config.data.max_bad_fraction * len(images):
        raise UserError(
            f"{missing} of {len(images)} training images have no captions of distill.model = {config.distill.model}, "
            f"more than data.max_bad_fraction = {config.data.max_bad_fraction}; the log has the reasons"
        )
    num_images, num_captions = count_taken(table, folder.dataset.split(*config.data.train_splits))
    if not num_captions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise UserError(
            f"distill.model: no caption of {teacher.location} can be learned ({reasons}); give a teacher whose words "
            "are those of this run, or leave the section distill out"
        )
    return Distilled(
        model=without_secrets(str(teacher.location)),
        name=teacher.name,
        digest=teacher.digest,
        search=teacher.signature,
        captions_per_image=config.distill.captions_per_image,
        images=num_images,
        captions=num_captions,
        dropped=dict(dropped),
        missing=missing,
        sha256=sha256,
    )
