"""Configuration keys and values that were renamed. The old ones are refused with a message that gives the new name."""

from __future__ import annotations

from collections.abc import Sequence

# Keys: the old keys with their sections, without the numbers and names of stages. Values: the new keys' last parts.
RENAMED_KEYS = {
    "data.more_words": "extra_vocabulary",
    "features.cut_regions": "truncate_regions",
    "features.few_images": "max_images_for_tasks",
    "model.decoder_layers": "num_decoder_layers",
    "model.encoder_layers": "num_encoder_layers",
    "model.heads": "num_heads",
    "model.memory_slots": "num_memory_slots",
    "stages.accumulate": "gradient_accumulation_steps",
    "stages.clip_norm": "max_grad_norm",
    "stages.schedule.anneal": "decay",
    "stages.schedule.anneal_every_epochs": "decay_every_epochs",
    "stages.scst.max_fall": "max_cider_drop",
    "workers.decode_workers": "num_decode_threads",
    "workers.max_failures": "max_failures_per_hour",
    "workers.trial_steps": "dry_run",
}

# {(key, old value): new value}. A new value is a constant of `pipeline.config.sections`.
RENAMED_VALUES = {("features.hdf5", "embedded"): "synthetic"}


def new_key(location: Sequence[int | str]) -> str | None:
    """The new name of the last key of a location such as ("stages", 0, "accumulate"); None if it was not renamed."""
    return RENAMED_KEYS.get(".".join(part for part in location if isinstance(part, str)))


def refuse_renamed_value(key: str, value: object) -> None:
    """Raises ValueError with the new value when `value` is an old one of `key`."""
    new = RENAMED_VALUES.get((key, str(value)))
    if new is not None:
        raise ValueError(f"{key}: `{value}` is now `{new}`")
