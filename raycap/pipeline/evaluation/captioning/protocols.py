"""The protocols of runs, bundles and ensembles, and the settings of a search that they imply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from raycap.models.config import ModelConfig
from raycap.pipeline.config.languages import metric_tokenizer
from raycap.pipeline.config.load import merge, parse_section
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import EvaluationSection, StageSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.comparison.protocol import WORDS, Protocol
from raycap.pipeline.runtime.names import shown

SEARCH_KEYS = ("beam_size", "max_length", "ranking", "collapse_repeats", "decoding")  # of the section `evaluation`


def model_protocol(model: ModelConfig, *, regions: bool) -> Protocol:
    """The part of the protocol that a model and the kind of its features decide."""
    attends_padding = getattr(model, "attended_regions", None) is not None
    return Protocol(model.name, "regions" if regions else "grid", attends_padding)


def run_protocol(config: RunConfig, stage: StageSection | None) -> Protocol:
    """The protocol of a run's model. stage: the one whose weights the model has; None if there is none."""
    protocol = model_protocol(config.model, regions=not config.has_backbone)
    if stage is not None:
        eos_in_reward = stage.sampling.eos_in_reward if stage.objective == "scst" else None
        protocol = replace(protocol, objective=stage.objective, eos_in_reward=eos_in_reward)
    return searched(in_language(protocol, config.data.language), config.evaluation)


def in_language(protocol: Protocol, language: str) -> Protocol:
    """The protocol with captions in a language, scored on its words."""
    return replace(protocol, language=language, tokenizer=metric_tokenizer(language))


def searched(protocol: Protocol, search: EvaluationSection) -> Protocol:
    """The protocol with the settings of a search."""
    settings = {key: getattr(search, key) for key in (*SEARCH_KEYS, "precision")}
    return replace(protocol, constrained=search.constraints is not None, **settings)


def common_protocol(protocols: Sequence[Protocol]) -> Protocol:
    """What several protocols share, and None for a field in which they differ.

    Raises UserError for protocols that differ in a field that is never None, such as the language.
    """
    shared: dict[str, Any] = {}
    for field in fields(Protocol):
        values = {getattr(each, field.name): None for each in protocols}
        if len(values) == 1:
            shared[field.name] = next(iter(values))
        elif field.default is not None:
            words = " and ".join(WORDS[field.name](value) for value in values)
            raise UserError(f"these models cannot be taken together: {words}; give models of one protocol")
    return Protocol(**shared)


def ensemble_protocol(members: Sequence[Protocol]) -> Protocol:
    """The protocol of an ensemble of these models."""
    return replace(common_protocol(members), num_models=len(members))


def search_settings(given: EvaluationSection, members: Sequence[Protocol]) -> EvaluationSection:
    """The settings of a search with bundles of these protocols: first the given ones, then those of the protocols.

    Keys that were given are those that a configuration sets. Raises UserError for a key that is not given and in which
    the protocols differ, and for values that no search takes.
    """
    recorded: dict[str, Any] = {}
    for key in SEARCH_KEYS:
        values = {getattr(each, key) for each in members} - {None}
        if key in given.model_fields_set or not values:
            continue
        if len(values) > 1:
            words = " and ".join(sorted(WORDS[key](value) for value in values))
            raise UserError(f"the bundles were evaluated in different ways: {words}; set evaluation.{key}")
        recorded |= {key: values.pop()}
    return parse_section(EvaluationSection, given.model_dump(exclude_unset=True) | recorded, "evaluation")


def changed_search(recorded: EvaluationSection, given: Mapping[str, Any]) -> EvaluationSection:
    """The recorded settings of a search with the given values of SEARCH_KEYS.

    Keys of `decoding` replace the recorded ones one by one. Raises UserError.
    """
    if unknown := sorted(given.keys() - set(SEARCH_KEYS)):
        raise UserError(f"key evaluation.{shown(unknown[0])} cannot be given here; known: {', '.join(SEARCH_KEYS)}")
    values = recorded.model_dump(include=set(SEARCH_KEYS))
    return parse_section(EvaluationSection, merge(values, dict(given)), "evaluation")


def confidence_search(settings: EvaluationSection, max_positions: int) -> str:
    """The settings of a search that decide its best captions, as text. A confidence belongs to one search.

    max_positions: of the model, which no caption exceeds.
    """
    keys = {*SEARCH_KEYS, "num_results"} if settings.decoding.sampling else set(SEARCH_KEYS)  # the best of the draws
    search = settings.model_dump(mode="json", include=keys)
    return json.dumps(search | {"max_length": min(settings.max_length, max_positions)}, sort_keys=True)


def collapsed(caption: str) -> str:
    """The caption with one word in place of equal neighboring words."""
    return " ".join(word for word, _ in groupby(caption.split()))
