"""The vocabulary, which turns tokens into ids and back."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raycap.models.config import Values
from raycap.pipeline.config.languages import PARTS_OF_WORDS
from raycap.pipeline.data.language.subwords import SubwordModel
from raycap.pipeline.data.language.tokenizers import SUBWORD, TOKENIZERS
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.storage.untrusted.documents import parse_json, read_regular_file

MAX_BYTES = 2**24  # limit of a file; the published vocabulary of 10,000 words has 0.14 MB
PAD, SOS, EOS, UNK = "PAD", "SOS", "EOS", "UNK"
SPECIALS = (PAD, SOS, EOS, UNK)


@dataclass(frozen=True)
class Vocabulary:
    """The words of a model, with their ids and tokenizer.

    words: all words, with PAD, SOS, EOS and UNK. The position of a word is its id. subwords: the model whose pieces are
    the words. None unless the tokenizer is `subword`. Raises ValueError if the values do not fit each other.
    """

    words: tuple[str, ...]
    tokenizer: str = "expansionnet"
    subwords: SubwordModel | None = None
    ids: dict[str, int] = field(init=False, repr=False, compare=False)
    pad: int = field(init=False, repr=False, compare=False)
    sos: int = field(init=False, repr=False, compare=False)
    eos: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: index for index, word in enumerate(self.words)}
        if len(ids) != len(self.words):
            repeated = [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"the vocabulary holds {quoted(repeated[0])} more than once; every word must occur once")
        if self.tokenizer not in TOKENIZERS:
            raise ValueError(f"the vocabulary's tokenizer is {quoted(self.tokenizer)}; known: {', '.join(TOKENIZERS)}")
        if missing := [special for special in SPECIALS if special not in ids]:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}; it must hold {', '.join(SPECIALS)}")
        if (self.subwords is not None) != (self.tokenizer == SUBWORD):
            raise ValueError(f"the tokenizer {SUBWORD} needs a list of merges, and no other tokenizer has one")
        if self.subwords is not None and not ids.keys() >= set(self.subwords.pieces):
            raise ValueError("the vocabulary lacks pieces of its subword model; it must hold all of them")
        for name, value in {"ids": ids, "pad": ids[PAD], "sos": ids[SOS], "eos": ids[EOS]}.items():
            object.__setattr__(self, name, value)  # because the class is frozen

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def build(cls, captions: Iterable[Sequence[str]], min_count: int, tokenizer: str = "expansionnet") -> Vocabulary:
        """The vocabulary of the words that occur `min_count` times or more, and the special tokens.

        captions: the words of each caption. The vocabulary is sorted by code point, as in the published code. Raises
        ValueError if no word is frequent enough.
        """
        counts = Counter(itertools.chain.from_iterable(captions))
        words = {word for word, count in counts.items() if count >= min_count}
        if not words:
            problem = f"none of the {len(counts)} distinct words of the training captions is used data.min_count"
            raise ValueError(f"the vocabulary is empty: {problem} = {min_count} times or more; lower data.min_count")
        return cls(tuple(sorted(words | set(SPECIALS))), tokenizer)

    @classmethod
    def train_subwords(cls, captions: Iterable[str], size: int, min_count: int) -> Vocabulary:
        """Trains a subword model on raw captions. Its vocabulary has at most `size` words, with the special tokens.

        Raises ValueError for a size below 260, the number of bytes and special tokens.
        """
        subwords = SubwordModel.train(captions, size - len(SPECIALS), min_count)
        return cls(tuple(sorted({*subwords.pieces, *SPECIALS})), SUBWORD, subwords)

    def tokenize(self, caption: str) -> list[str]:
        """The tokens of a raw caption."""
        return TOKENIZERS[self.tokenizer].split(caption) if self.subwords is None else self.subwords.split(caption)

    def encode(self, tokens: Sequence[str]) -> list[int]:
        """The ids of SOS, the tokens and EOS. A token that is not in the vocabulary gets the id of UNK."""
        return [self.sos, *(self.ids.get(token, self.ids[UNK]) for token in tokens), self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a caption from its ids up to the first EOS, without PAD and SOS."""
        caption = itertools.takewhile(lambda index: index != self.eos, ids)
        return "".join(self._parts([self.words[index] for index in caption if index not in (self.sos, self.pad)]))

    def tokens_of(self, caption: str) -> list[str]:
        """The tokens of a caption that `decode` made.

        If tokens are parts of words, these may differ from the tokens that were decoded.
        """
        return self.tokenize(caption) if self.tokenizer in PARTS_OF_WORDS else caption.split()

    def parts(self, caption: str) -> list[str]:
        """The text of each token in a caption that `decode` made, with the space before it."""
        return self._parts(self.tokens_of(caption))

    def _parts(self, tokens: list[str]) -> list[str]:
        """The text of each token in a caption, with the space before it."""
        return TOKENIZERS[self.tokenizer].parts(tokens) if self.subwords is None else self.subwords.parts(tokens)

    def to_json(self) -> str:
        """The content of vocabulary.json, which `load` reads."""
        content: Values = {"tokenizer": self.tokenizer, "words": self.words}
        if self.subwords is not None:  # a space can divide the two pieces, because pieces contain none
            content["merges"] = [" ".join(pair) for pair in self.subwords.merges]
        return json.dumps(content, ensure_ascii=False, indent=0)

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """The vocabulary in a file that `save` wrote. Raises ValueError for other content, OSError if it is missing."""
        data = parse_json(read_regular_file(path, MAX_BYTES), str(path))
        words = data.get("words") if isinstance(data, dict) else None
        tokenizer = data.get("tokenizer", "expansionnet") if isinstance(data, dict) else None
        if not isinstance(words, list) or not all(isinstance(text, str) for text in (tokenizer, *words)):
            raise ValueError(f"{path} is not a vocabulary: expected a JSON object with a list of text under 'words'")
        if "merges" not in data:
            return cls(tuple(words), str(tokenizer))
        merges = data["merges"]
        if not isinstance(merges, list) or not all(isinstance(text, str) and text.count(" ") == 1 for text in merges):
            raise ValueError("the merges of a vocabulary must be a list of two pieces with a space between them")
        pairs = [text.split(" ") for text in merges]
        return cls(tuple(words), str(tokenizer), SubwordModel(tuple((left, right) for left, right in pairs)))
