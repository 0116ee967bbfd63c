"""How captions are decoded beyond the beam's size and length. This module does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from raycap.models.values import NUMBER, Count, Decimal, Words, at_most

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True)
class Decoding:
    """Rules for words, diverse beams and sampling. Raises ValueError for values that make no sense.

    suppress_unk: no caption has UNK. min_length: no caption has fewer tokens, which count SOS and EOS. no_repeat_ngram:
    no caption has the same n tokens twice, for this n. no_open_endings: no caption ends with a word that needs another
    word after it, such as "a" or "with".

    beam_groups: the beams are this many groups, which search one after the other (Vijayakumar et al. 2016,
    arXiv 1610.02424). A group prefers other words than earlier groups: the log-probability of a word is lowered by
    `diversity` for each beam of an earlier group that has chosen it at the same step. The paper recommends a diversity
    from 0.2 to 0.8 (section 5).

    sampling: captions are drawn, without beams, from softmax(logits / temperature), restricted to the `top_k` most
    probable words and then to the fewest words whose probabilities add up to `top_p` (Holtzman et al. 2019,
    arXiv 1904.09751). The draws depend on `seed` and the image only.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for pydantic

    suppress_unk: bool = True
    min_length: Count = 2
    no_repeat_ngram: Count | None = None
    no_open_endings: bool = False
    beam_groups: Count = 1
    diversity: Decimal = 0.5
    sampling: bool = False
    temperature: Decimal = 1.0
    top_k: Words | None = None
    top_p: Decimal | None = None
    seed: Annotated[int, at_most(2**62 - 1), NUMBER] = 0

    def __post_init__(self) -> None:
        least = {"min_length": 2, "no_repeat_ngram": 1, "beam_groups": 1, "top_k": 1, "seed": 0, "diversity": 0}
        for key, value in least.items():
            found = getattr(self, key)
            _require(found is None or value <= found < math.inf, key, found, f"{value} or more")
        _require(0 < self.temperature < math.inf, "temperature", self.temperature, "above 0")
        _require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        if self.sampling and self.beam_groups > 1:
            raise ValueError(
                "evaluation.decoding.sampling draws captions without beams, and evaluation.decoding.beam_groups is "
                f"{self.beam_groups}; set one of them only"
            )
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        for key in changed & set(SAMPLING_KEYS) if not self.sampling else ():
            raise ValueError(
                f"evaluation.decoding.{key} is for drawn captions, and evaluation.decoding.sampling is false; set it "
                f"to true, or leave {key} out"
            )
        if "diversity" in changed and self.beam_groups == 1:
            raise ValueError(
                "evaluation.decoding.diversity is for groups of beams, and evaluation.decoding.beam_groups is 1; set "
                "it to 2 or more, or leave diversity out"
            )

    @property
    def signature(self) -> str:
        """The settings in words; "all words allowed" without any rule."""
        texts = {
            "no UNK": self.suppress_unk,
            f"at least {self.min_length} tokens": self.min_length > 2,
            f"no repeated {self.no_repeat_ngram}-gram": self.no_repeat_ngram is not None,
            "no open endings": self.no_open_endings,
            f"{self.beam_groups} groups of beams with diversity {self.diversity:g}": self.beam_groups > 1,
            f"drawn at temperature {self.temperature:g} with seed {self.seed}": self.sampling,
            f"from the {self.top_k} best words": self.top_k is not None,
            f"from the nucleus of {self.top_p}": self.top_p is not None,
        }
        return ", ".join(text for text, holds in texts.items() if holds) or "all words allowed"


def _require(holds: bool, key: str, found: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"evaluation.decoding.{key} is {found}; it must be {expected}")


# the search of the papers' codes, and of bundles that record no other one
PLAIN = Decoding(suppress_unk=False)
