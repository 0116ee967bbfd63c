"""The texts of tokens, and how they are joined to captions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from raycap_onnx.documents import CaptionerError, Values, read_json

MAX_BYTES = 2**26  # of vocabulary.json
JOINING = ("spaces", "scripts", "bytes")


@dataclass(frozen=True)
class Words:
    """The text of each token, how texts are joined, and the ids of special tokens."""

    texts: list[str]
    joining: str
    without_space: frozenset[int]
    sos: int
    eos: int
    pad: int
    unk: int

    @classmethod
    def read(cls, path: Path, special: Values) -> Words:
        read = Values(read_json(path, MAX_BYTES), str(path))
        texts, joining = read["words"], read["joining"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or joining not in JOINING:
            raise CaptionerError(f"{path} is not a vocabulary: expected a list of texts and how they are joined")
        glued = read.ids("without_space", len(texts)) if joining == "scripts" else []
        ids = {key: special.number(key, 0, len(texts) - 1) for key in ("sos", "eos", "pad", "unk")}
        return cls(texts, joining, frozenset(glued), **ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The caption's text, without special tokens except UNK."""
        ids = [index for index in ids if index not in (self.sos, self.eos, self.pad)]
        texts = [self.texts[index] for index in ids]
        if self.joining == "spaces":
            return " ".join(texts)
        if self.joining == "bytes":  # bytes that are no valid text are left out
            decoder = codecs.getincrementaldecoder("utf-8")("ignore")
            parts = [decoder.decode(text.encode("latin-1", "ignore")) for text in texts]
            return "".join([*(part.lstrip() for part in parts[:1]), *parts[1:]])
        pairs = zip(ids, texts, [-1, *ids], strict=False)
        glued = self.without_space
        return "".join(
            text if index in glued or before in glued or before < 0 else f" {text}" for index, text, before in pairs
        )
