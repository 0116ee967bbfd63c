"""The protocol of scores: how the captions were trained for, searched and scored. It decides which scores compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from raycap.models.config import PLAIN, Decoding
from raycap.pipeline.config.languages import ENGLISH, MetricTokenizer

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Protocol:
    """What decides whether two rows of scores can be compared, besides the images.

    A model bundle, every result and every printed row has one. None: not recorded, or not stated in paper or code.

    system: `model.name`. attend_padding: whether images with few regions are padded and the padding is attended.
    objective: of the last stage whose weights were kept. eos_in_reward: whether SCST rewarded EOS; None for cross
    entropy. num_models: 0 for an ensemble of a size that is not stated. beam_size to decoding: the keys of the section
    `evaluation`; where no `decoding` is recorded, it is plain, because there was no other one. constrained: whether
    captions must contain words. language: of the captions. tokenizer: of the metrics. document_frequencies: the
    references that CIDEr-D counts.
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


def differences(printed: Protocol, ours: Protocol) -> list[tuple[str, str]]:
    """The words (printed, ours) for each field in which two protocols differ.

    A field that the printed protocol does not state agrees with everything, and one that ours does not record with
    nothing. An ensemble of a size that is not stated agrees with every ensemble. The reward is compared only for equal
    objectives.
    """
    found = []
    for field in fields(Protocol):
        theirs, our = getattr(printed, field.name), getattr(ours, field.name)
        if field.name == "num_models" and theirs == 0 and our > 1:
            continue
        if field.name == "eos_in_reward" and printed.objective != ours.objective:
            continue
        if theirs not in (None, our):
            words = WORDS[field.name]
            found.append((words(theirs), NOT_RECORDED if our is None else words(our)))
    return found
