"""The tokenizers of BERT and RoBERTa, from the tokenizer.json that is published beside their weights.

Only the vocabulary, the merges and the few options that these models differ in are read. The parts of the tokenizer
are put together here, because a tokenizer.json can describe any program of normalizers and patterns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from raycap.pipeline.runtime.names import quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_PIECES = 10**6
MAX_PIECE = 1000  # characters
_BERT_OPTIONS = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}


class BertTokenizer:
    """Gives the ids of a text's pieces.

    content: that of a tokenizer.json, parsed. A BERT's has WordPiece pieces of words that BERT's rules normalize and
    split, a RoBERTa's byte-pair encoding of bytes. num_pieces: the rows of the model's table. Raises ValueError for
    any other content.
    """

    def __init__(self, content: Any, architecture: Literal["bert", "roberta"], num_pieces: int) -> None:
        model = _mapping(content, "model")
        ids = _vocabulary(model, num_pieces)
        begin, end = ("[CLS]", "[SEP]") if architecture == "bert" else ("<s>", "</s>")
        for piece in (begin, end):
            if piece not in ids:
                raise ValueError(f"its vocabulary lacks {piece}")
        self._begin, self._end, self._has_bytes = ids[begin], ids[end], architecture == "roberta"
        build = _byte_pairs if self._has_bytes else _word_pieces
        self._tokenizer = build(content, model, ids)

    def ids(self, text: str, length: int) -> tuple[int, ...]:
        """The ids of a text between two marks, `length` at most; later pieces are cut off.

        As in the package bert-score, white space around the text is removed, and RoBERTa reads a space before it. A
        mark such as [SEP] in the text is text.
        """
        text = text.strip()
        if text and self._has_bytes:
            text = f" {text}"
        pieces = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._begin, *pieces[: length - 2], self._end


def _mapping(content: Any, key: str) -> dict[str, Any]:
    """The mapping under a key. Raises ValueError."""
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, dict):
        raise ValueError(f"it has no mapping {key}")
    return value


def _vocabulary(model: dict[str, Any], num_pieces: int) -> dict[str, int]:
    """The id of each piece. Raises ValueError."""
    ids = _mapping(model, "vocab")
    if not 1 <= len(ids) <= min(num_pieces, MAX_PIECES):
        raise ValueError(f"its vocabulary has {len(ids)} pieces, and the model {num_pieces}")
    if wrong := [piece for piece, number in ids.items() if type(number) is not int or not 0 <= number < num_pieces]:
        raise ValueError(f"the id of {quoted(wrong[0])} is no number below {num_pieces}")
    if len(set(ids.values())) < len(ids) or max(map(len, ids)) > MAX_PIECE:
        raise ValueError(f"two pieces have one id, or a piece has more than {MAX_PIECE} characters")
    return ids


def _require_types(content: dict[str, Any], **types: str | None) -> None:
    """Raises ValueError unless each part of a tokenizer.json has its type. None: the part must be missing."""
    for part, expected in types.items():
        value = content.get(part)
        # older files do not name the model's type
        found = value.get("type", expected if part == "model" else None) if isinstance(value, dict) else None
        if found != expected or (expected is None and value is not None):
            raise ValueError(f"its {part} is not {expected or 'null'}")


def _word_pieces(content: dict[str, Any], model: dict[str, Any], ids: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    _require_types(content, model="WordPiece", normalizer="BertNormalizer", pre_tokenizer="BertPreTokenizer")
    options = {key: content["normalizer"].get(key, default) for key, default in _BERT_OPTIONS.items()}
    if any(type(value) is not bool and (key, value) != ("strip_accents", None) for key, value in options.items()):
        raise ValueError("an option of its normalizer is neither true nor false")
    unknown, prefix = model.get("unk_token", "[UNK]"), model.get("continuing_subword_prefix", "##")
    longest = model.get("max_input_chars_per_word", 100)
    if not isinstance(unknown, str) or unknown not in ids:
        raise ValueError(f"its vocabulary lacks the unk_token {quoted(unknown)}")
    if not isinstance(prefix, str) or len(prefix) > MAX_PIECE:
        raise ValueError("its continuing_subword_prefix is no short text")
    if type(longest) is not int or not 1 <= longest <= MAX_PIECE:
        raise ValueError(f"its max_input_chars_per_word is no number from 1 to {MAX_PIECE}")
    pieces = models.WordPiece(
        ids, unk_token=unknown, continuing_subword_prefix=prefix, max_input_chars_per_word=longest
    )
    tokenizer = Tokenizer(pieces)
    tokenizer.normalizer = normalizers.BertNormalizer(**options)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _byte_pairs(content: dict[str, Any], model: dict[str, Any], ids: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    _require_types(content, model="BPE", normalizer=None, pre_tokenizer="ByteLevel")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    if any(model.get(key) for key in options) or content["pre_tokenizer"].get("use_regex", True) is not True:
        raise ValueError("it has options that RoBERTa's tokenizer does not have")
    merges = model.get("merges")
    if not isinstance(merges, list) or len(merges) > MAX_PIECES:
        raise ValueError(f"it has no list of at most {MAX_PIECES} merges")
    pairs = [tuple(line.split(" ")) if isinstance(line, str) else line for line in merges]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(piece, str) for piece in pair):
            raise ValueError("a merge is no pair of pieces")
        if missing := [piece for piece in (*pair, "".join(pair)) if piece not in ids]:
            raise ValueError(f"its vocabulary lacks {quoted(missing[0])}, a piece of a merge")
    tokenizer = Tokenizer(models.BPE(ids, [(left, right) for left, right in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer
