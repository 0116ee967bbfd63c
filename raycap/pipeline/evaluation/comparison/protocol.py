"""The protocol of scores: how a model was trained, how its captions were searched, and how they were scored.

Two scores can be compared only if their protocols agree. Runs, bundles and ensembles have protocols. When a bundle is
evaluated again, its protocol gives the settings of the search.
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
# Signatures leave these values out, so that they name only what is unusual
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
    """The conditions, besides the images, that must be equal if two rows of scores are to be compared.

    Every model bundle, result and published row has a protocol. A field is None if it is not recorded, or if neither
    the paper nor its code states it.

    system: `model.name`. attend_padding: True if images with few regions are padded and the padding is attended.
    objective: the objective of the stage whose weights the model has. eos_in_reward: True if SCST rewarded EOS, or None
    for cross entropy. num_models: 0 for an ensemble of unknown size. beam_size, max_length, ranking, collapse_repeats,
    precision, decoding: keys of the section `evaluation`. constrained: True if captions had to contain given words.
    language: the language of the captions. tokenizer: the tokenizer of the metrics. document_frequencies: the
    references in which CIDEr-D counts n-grams.
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
    precision: Literal["float32", "bfloat16"] | None = None
    decoding: Decoding = PLAIN
    constrained: bool = False
    language: str = ENGLISH
    tokenizer: MetricTokenizer = "PTB"
    document_frequencies: Literal["scored split"] = "scored split"

    @property
    def signature(self) -> str:
        """The protocol in words. Fields that are not recorded and values in `USUAL` are left out."""
        values = {name: getattr(self, name) for name in WORDS}
        return ", ".join(WORDS[name](value) for name, value in values.items() if value not in (None, USUAL.get(name)))


def _models(count: int) -> str:
    """The number of models in words. 0 means an ensemble of unknown size."""
    return {0: "an ensemble", 1: "one model"}.get(count, f"an ensemble of {count}")


def _ranking(value: str | float) -> str:
    if isinstance(value, float):
        return f"ranked with length penalty {value:g}"
    return f"ranked by the {value} of log-probabilities"


# For each field of a protocol, the function that describes a value in words
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
    "precision": str,
    "decoding": lambda decoding: decoding.signature,
    "constrained": {False: "no constraints", True: "constraints"}.__getitem__,
    "language": "captions in {}".format,
    "tokenizer": "{} tokens".format,
    "document_frequencies": "document frequencies of the {}".format,
}


def differences(published: Protocol, ours: Protocol) -> list[tuple[str, str]]:
    """The fields in which two protocols differ, each as two descriptions: (published, ours).

    If the published protocol does not state a field, the field agrees with any value. If it states a field that ours
    does not record, they differ. A published ensemble of unknown size agrees with every ensemble. The rewards are
    compared only if the objectives are equal.
    """
    found = []
    for name, words in WORDS.items():
        theirs, our = getattr(published, name), getattr(ours, name)
        if theirs is None or theirs == our:
            continue
        if name == "num_models" and theirs == 0 and our > 1:
            continue
        if name == "eos_in_reward" and published.objective != ours.objective:
            continue
        found.append((words(theirs), NOT_RECORDED if our is None else words(our)))
    return found


def model_protocol(model: ModelConfig, *, regions: bool) -> Protocol:
    """A protocol with the fields that the model and its features determine. regions: True for region features."""
    attends_padding = getattr(model, "attended_regions", None) is not None
    return Protocol(model.name, "regions" if regions else "grid", attends_padding)


def run_protocol(config: RunConfig, stage: StageSection | None) -> Protocol:
    """The protocol of a run's model. stage: the training stage whose weights it has, or None if it was not trained."""
    protocol = model_protocol(config.model, regions=not config.has_backbone)
    if stage is not None:
        eos_in_reward = stage.sampling.eos_in_reward if stage.objective == "scst" else None
        protocol = replace(protocol, objective=stage.objective, eos_in_reward=eos_in_reward)
    return searched(in_language(protocol, config.data.language), config.evaluation)


def in_language(protocol: Protocol, language: str) -> Protocol:
    """The protocol changed to captions in a language, with the metric tokenizer of that language."""
    return replace(protocol, language=language, tokenizer=metric_tokenizer(language))


def searched(protocol: Protocol, search: EvaluationSection) -> Protocol:
    """The protocol changed to the settings of a search."""
    settings = {key: getattr(search, key) for key in (*SEARCH_KEYS, "precision")}
    return replace(protocol, constrained=search.constraints is not None, **settings)


def common_protocol(protocols: Sequence[Protocol]) -> Protocol:
    """The common protocol of several models: the values that all share, and None for fields in which they differ.

    Raises UserError if the protocols differ in a field that has a default other than None, such as the language.
    """
    shared: Values = {}
    for field in fields(Protocol):
        values = dict.fromkeys(getattr(each, field.name) for each in protocols)  # the distinct values, in order
        if len(values) == 1:
            shared[field.name] = next(iter(values))
        elif field.default is not None:
            words = " and ".join(WORDS[field.name](value) for value in values)
            raise UserError(f"these models cannot be taken together: {words}; give models of one protocol")
    return Protocol(**shared)


def search_settings(given: EvaluationSection, members: Sequence[Protocol]) -> EvaluationSection:
    """The settings of a search with bundles of these protocols.

    Keys that the configuration sets are taken from `given`, and other keys from the protocols. Raises UserError if the
    protocols differ in a key that is not set, and for invalid values.
    """
    recorded: Values = {}
    for key in SEARCH_KEYS:
        values = {getattr(each, key) for each in members} - {None}
        if key in given.model_fields_set or not values:
            continue
        if len(values) > 1:
            words = " and ".join(sorted(WORDS[key](value) for value in values))
            raise UserError(f"the bundles were evaluated in different ways: {words}; set evaluation.{key}")
        recorded[key] = values.pop()
    return parse_section(EvaluationSection, given.model_dump(exclude_unset=True) | recorded, "evaluation")


def changed_search(recorded: EvaluationSection, given: Mapping[str, object]) -> EvaluationSection:
    """The recorded settings of a search, changed to the given values of SEARCH_KEYS.

    Of `decoding`, only the given keys are replaced. Raises UserError for an unknown key or an invalid value.
    """
    if unknown := sorted(given.keys() - set(SEARCH_KEYS)):
        raise UserError(f"key evaluation.{shown(unknown[0])} cannot be given here; known: {', '.join(SEARCH_KEYS)}")
    values = recorded.model_dump(include=set(SEARCH_KEYS))
    return parse_section(EvaluationSection, merge(values, dict(given)), "evaluation")


def confidence_search(settings: EvaluationSection, max_positions: int) -> str:
    """The settings that determine the best captions of a search, as text. A confidence is valid for one such text.

    max_positions: the model's number of positions, which limits the length of captions.
    """
    # the best of several drawn captions depends on their number, and the best beam does not
    keys = {*SEARCH_KEYS, "num_results"} if settings.decoding.sampling else set(SEARCH_KEYS)
    search = settings.model_dump(mode="json", include=keys)
    return json.dumps(search | {"max_length": min(settings.max_length, max_positions)}, sort_keys=True)
