"""The protocol of scores: how the captions were trained for, searched and scored. It decides which scores compare.

Runs, bundles and ensembles have protocols, from which the settings of a search follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from raycap.models.config import PLAIN, Decoding, ModelConfig, Values
from raycap.pipeline.config.languages import ENGLISH, MetricTokenizer, metric_tokenizer
from raycap.pipeline.config.load import merge, parse_section
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import EvaluationSection, StageSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import shown

NOT_RECORDED = "not recorded"
# Values that signatures leave out
USUAL = {
    "attend_padding": False,
    "num_models": 1,
    "collapse_repeats": False,
    "decoding": PLAIN,
    "precision": "float32",
    "constrained": False,
    "language": ENGLISH,
}
SEARCH_KEYS = ("beam_size", "max_length", "ranking", "collapse_repeats", "decoding")  # of the section `evaluation`


@dataclass(frozen=True)
class Protocol:
    """What decides whether two rows of scores can be compared, besides the images.

    A model bundle, every result and every published row has one. None: not recorded, or not stated in paper or code.

    system: `model.name`. attend_padding: whether images with few regions are padded and the padding is attended.
    objective: of the stage whose weights the model has. eos_in_reward: whether SCST rewarded EOS; None for cross
    entropy. num_models: 0 for an ensemble of a size that is not stated. beam_size to decoding: keys of the section
    `evaluation`. constrained: whether captions must contain words. language: of the captions. tokenizer: of the
    metrics. document_frequencies: the references in which CIDEr-D counts n-grams.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    system: str | None = None
    features: Literal["grid", "regions"] | None = None
    attend_padding: bool | None = None
    objective: Literal["cross_entropy", "scst"] | None = None
    eos_in_reward: bool | None = None
    num_models: int = 1
    beam_size: int | None = None
    max_length: int | None = None
    ranking: Literal["mean", "sum"] | float | None = None
    collapse_repeats: bool | None = None
    precision: Literal["auto", "float32", "bfloat16"] | None = None
    decoding: Decoding = PLAIN
    constrained: bool = False
    language: str = ENGLISH
    tokenizer: MetricTokenizer = "PTB"
    document_frequencies: Literal["scored split"] = "scored split"

    @property
    def signature(self) -> str:
        """The protocol in words, without what is not recorded and without the values of `USUAL`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(WORDS[key](value) for key, value in values.items() if value not in (None, USUAL.get(key)))


def _models(count: int) -> str:
    """The number of models in words; 0 stands for an ensemble of unknown size."""
    return {0: "an ensemble", 1: "one model"}.get(count, f"an ensemble of {count}")


def _ranking(value: str | float) -> str:
    by_penalty = isinstance(value, float)
    return f"ranked with length penalty {value:g}" if by_penalty else f"ranked by the {value} of log-probabilities"


# By field: the words for a value
WORDS: dict[str, Callable[[Any], str]] = {
    "system": str,
    "features": {"grid": "grid features", "regions": "region features"}.__getitem__,
    "attend_padding": {False: "padding masked", True: "padding attended"}.__getitem__,
    "objective": {"cross_entropy": "cross entropy", "scst": "SCST"}.__getitem__,
    "eos_in_reward": {False: "no EOS in the reward", True: "EOS in the reward"}.__getitem__,
    "num_models": _models,
    "beam_size": "beam {}".format,
    "max_length": "at most {} tokens".format,
    "ranking": _ranking,
    "collapse_repeats": {False: "repeated words kept", True: "repeated words collapsed"}.__getitem__,
    "decoding": lambda decoding: decoding.signature,
    "precision": str,
    "constrained": {False: "no constraints", True: "constraints"}.__getitem__,
    "language": "captions in {}".format,
    "tokenizer": "{} tokens".format,
    "document_frequencies": "document frequencies of the {}".format,
}


def differences(published: Protocol, ours: Protocol) -> list[tuple[str, str]]:
    """The words (published, ours) for each field in which two protocols differ.

    A field that the published protocol does not state agrees with everything, and one that ours does not record with
    nothing. An ensemble of a size that is not stated agrees with every ensemble. The reward is compared only for equal
    objectives.
    """
    found = []
    for field in fields(Protocol):
        theirs, our = getattr(published, field.name), getattr(ours, field.name)
        if field.name == "num_models" and theirs == 0 and our > 1:
            continue
        if field.name == "eos_in_reward" and published.objective != ours.objective:
            continue
        if theirs not in (None, our):
            words = WORDS[field.name]
            found.append((words(theirs), NOT_RECORDED if our is None else words(our)))
    return found


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
    shared: Values = {}
    for field in fields(Protocol):
        values = {getattr(each, field.name): None for each in protocols}
        if len(values) == 1:
            shared[field.name] = next(iter(values))
        elif field.default is not None:
            words = " and ".join(WORDS[field.name](value) for value in values)
            raise UserError(f"these models cannot be taken together: {words}; give models of one protocol")
    return Protocol(**shared)


def search_settings(given: EvaluationSection, members: Sequence[Protocol]) -> EvaluationSection:
    """The settings of a search with bundles of these protocols: first the given ones, then those of the protocols.

    Keys that were given are those that a configuration sets. Raises UserError for a key that is not given and in which
    the protocols differ, and for values that no search takes.
    """
    recorded: Values = {}
    for key in SEARCH_KEYS:
        values = {getattr(each, key) for each in members} - {None}
        if key in given.model_fields_set or not values:
            continue
        if len(values) > 1:
            words = " and ".join(sorted(WORDS[key](value) for value in values))
            raise UserError(f"the bundles were evaluated in different ways: {words}; set evaluation.{key}")
        recorded |= {key: values.pop()}
    return parse_section(EvaluationSection, given.model_dump(exclude_unset=True) | recorded, "evaluation")


def changed_search(recorded: EvaluationSection, given: Mapping[str, object]) -> EvaluationSection:
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
