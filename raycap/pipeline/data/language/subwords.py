"""Subword models: byte-pair encoding on the bytes of captions (Sennrich et al. 2016), by the package tokenizers.

Every byte is a piece, so that any caption can be split into known pieces. The list of merges determines a model, so a
file needs nothing else.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from raycap.pipeline.data.language.tokenizers import normalized
from raycap.pipeline.runtime.names import quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_BYTES = 256
MAX_MERGES = 2**17
MAX_PIECE = 256  # bytes
# A piece never crosses the end of a run of letters, of digits or of other marks. A run includes the space before it.
# Zero-width joiners count as letters.
_RUNS = r" ?[\p{L}\p{M}\x{200c}\x{200d}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+"


@cache
def _byte_of() -> dict[str, int]:
    """{character in a piece: the byte that it represents}, GPT-2's table, which the package tokenizers uses.

    A printable byte is represented by its own character, and the other bytes by the characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def piece_bytes(piece: str) -> bytes:
    """The bytes of a piece. Characters that represent no byte are left out."""
    byte_of = _byte_of()
    return bytes(byte_of[char] for char in piece if char in byte_of)


@dataclass(frozen=True)
class SubwordModel:
    """A byte-pair encoding. merges: pairs of pieces in the order in which they are merged.

    Raises ValueError for more than MAX_MERGES merges, for a merged piece of more than MAX_PIECE bytes, and for a pair
    with a piece that is neither a byte nor the result of an earlier merge.
    """

    merges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if len(self.merges) > MAX_MERGES:
            raise ValueError(f"the subword model has {len(self.merges)} merges; {MAX_MERGES} is the limit")
        known = set(_byte_of())
        for left, right in self.merges:
            merged = left + right
            if left not in known or right not in known or len(merged) > MAX_PIECE:
                raise ValueError(
                    f"the subword model merges {quoted(left)} and {quoted(right)}; both must be bytes or the results "
                    f"of earlier merges, with at most {MAX_PIECE} bytes together"
                )
            known.add(merged)

    @classmethod
    def train(cls, captions: Iterable[str], num_pieces: int, min_count: int) -> SubwordModel:
        """Trains a model on raw captions. num_pieces: the largest number of pieces, with the bytes.

        A pair is merged if it occurs `min_count` times or more. The order of the captions does not matter. Raises
        ValueError if `num_pieces` is below the number of bytes.
        """
        from tokenizers import trainers

        if num_pieces < NUM_BYTES:
            raise ValueError(f"a subword model of {num_pieces} pieces is too small; the bytes alone are {NUM_BYTES}")
        tokenizer = _new_tokenizer({}, [])
        trainer = trainers.BpeTrainer(
            vocab_size=num_pieces,
            min_frequency=min_count,
            show_progress=False,
            initial_alphabet=sorted(_byte_of()),
            max_token_length=MAX_PIECE,
        )
        tokenizer.train_from_iterator(map(_prepared, captions), trainer)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]  # the package offers the merges only in JSON
        return cls(tuple((left, right) for left, right in merges))

    @property
    def pieces(self) -> list[str]:
        """All pieces: the bytes, then the results of the merges."""
        return list(dict.fromkeys([*_byte_of(), *map("".join, self.merges)]))

    def split(self, caption: str) -> list[str]:
        """The pieces of a raw caption. A piece that begins a word contains the space before it."""
        tokens: list[str] = self._tokenizer.encode(_prepared(caption)).tokens
        return tokens

    def parts(self, pieces: Iterable[str]) -> list[str]:
        """The text that each piece adds to a caption.

        If a character consists of several pieces, the last piece adds it. Bytes that are no valid UTF-8 are left out.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        texts = [decoder.decode(piece_bytes(piece)) for piece in pieces]
        return [texts[0].lstrip(), *texts[1:]] if texts else []

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return _new_tokenizer({piece: number for number, piece in enumerate(self.pieces)}, list(self.merges))


def _prepared(caption: str) -> str:
    """The normalized caption with one space before every word."""
    return "".join(f" {word}" for word in normalized(caption).split())


def _new_tokenizer(ids: dict[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(ids, list(merges)) if ids else models.BPE())
    runs = pre_tokenizers.Split(Regex(_RUNS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([runs, to_bytes])
    return tokenizer
