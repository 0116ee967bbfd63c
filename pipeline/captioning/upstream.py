"""Reads vocabularies of other projects, which are pickles, as plain values. No code in a pickle is executed."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

from pipeline.data.vocabulary import Vocabulary

MAX_BYTES = 64 * 2**20  # Larger files are refused: the published vocabulary has only 0.24 MB.


class PlainUnpickler(pickle.Unpickler):
    """Reads dict, list, str and int only. A pickle that names a class or function is refused before the look-up."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def read_plain_pickle(path: Path) -> Any:
    """The content of a pickle of dict, list, str and int. Raises ValueError for anything else, without executing it."""
    content = _unpickled(path, PlainUnpickler)
    _check_plain(content, path)
    return content


def _unpickled(path: Path, unpickler: type[PlainUnpickler]) -> Any:
    """Unpickles a file of limited size. ValueError for a file that is missing, refused or damaged."""
    if not path.is_file():
        raise ValueError(f"the vocabulary file {path} does not exist; give the path of a pickle")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; a vocabulary of more than {MAX_BYTES} is refused")
    try:
        data = path.read_bytes()
        for code, argument, _ in pickletools.genops(data):  # only parses the pickle
            # A huge memo index would make the unpickler allocate a table of that size.
            if "PUT" in code.name and isinstance(argument, int) and argument > len(data):
                raise pickle.UnpicklingError(f"it asks for place {argument} in a memo, with {len(data)} bytes in all")
        return unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {error}; a vocabulary holds dict, list, str and int only") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} is no readable pickle: {type(error).__name__}: {error}") from error


def _check_plain(content: Any, path: Path) -> None:
    """Raises ValueError unless all values are dict, list, valid str or int."""
    pending, visited = [content], set()
    while pending:
        value = pending.pop()
        if type(value) in (str, int) or id(value) in visited:
            if type(value) is str and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError(f"{path} is refused: {value!r} is no text (half of a surrogate pair)")
            continue
        visited.add(id(value))
        if type(value) is dict:
            pending += [*value.keys(), *value.values()]
        elif type(value) is list:
            pending += value
        else:
            raise ValueError(
                f"{path} is refused: it holds a {type(value).__name__}; a vocabulary holds dict, list, str and int only"
            )


class _WordTableUnpickler(PlainUnpickler):
    """Also accepts the four names of a torchtext-like vocabulary and replaces them by harmless stand-ins.

    Each file gets new stand-ins, because a file can set attributes of these classes.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)

        class Table:
            """A stand-in for the vocabulary, whose attributes the file sets as plain values."""

        class Lookup(dict):
            """A stand-in for defaultdict, whose factory it ignores, and for Counter, which copies another dict."""

            def __init__(self, content: Any = None) -> None:
                super().__init__(content if type(content) is dict else {})

        self.stand_ins: dict[str, Any] = {"Vocab": Table, "Counter": Lookup, "defaultdict": Lookup}
        self.stand_ins["_default_unk_index"] = None
        self.table = Table

    def find_class(self, module_name: str, global_name: str) -> Any:
        module = "collections" if global_name in ("Counter", "defaultdict") else "vocab"
        if global_name in self.stand_ins and module_name.split(".")[-1] == module:
            return self.stand_ins[global_name]
        return super().find_class(module_name, global_name)

    def load(self) -> dict[str, Any]:
        content = super().load()
        if type(content) is not self.table:
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__} and no vocabulary object")
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(content).items()
            if name in ("itos", "stoi")
        }


_MESHED_SPECIALS = {"<unk>": "UNK", "<pad>": "PAD", "<bos>": "SOS", "<eos>": "EOS"}


def read_meshed_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary pickle of the Meshed-Memory Transformer's reference, or raycap's vocabulary.json.

    The pickle holds an object with `itos` and `stoi`. It names four classes and functions, which are not looked
    up, so no code of the file is executed. <unk>, <pad>, <bos> and <eos> get raycap's names and keep their ids.
    Raises ValueError for other content, and when the two tables contradict each other.
    """
    if path.suffix == ".json":
        return Vocabulary.load(path)
    content = _unpickled(path, _WordTableUnpickler)
    _check_plain(content, path)
    words = _checked_words(content, "itos", "stoi", path, "vocabulary of a Meshed-Memory Transformer")
    missing = [special for special in _MESHED_SPECIALS if special not in words]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it must hold {', '.join(_MESHED_SPECIALS)}")
    return Vocabulary(tuple(_MESHED_SPECIALS.get(word, word) for word in words), "spacy")


def read_expansionnet_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary pickle of ExpansionNet v2's reference: `word2idx_dict`, `idx2word_list`, `sos_str`, `eos_str`.

    Raises ValueError for other content, and when the two tables contradict each other.
    """
    content = read_plain_pickle(path)
    words = _checked_words(content, "idx2word_list", "word2idx_dict", path, "ExpansionNet v2 vocabulary")
    if len(content["word2idx_dict"]) != len(words):
        raise ValueError(
            f"{path}: its two tables contradict each other: {len(words)} words, {len(content['word2idx_dict'])} ids"
        )
    vocabulary = Vocabulary(tuple(words))
    if content.get("sos_str") != "SOS" or content.get("eos_str") != "EOS":
        raise ValueError(
            f"{path}: captions start with {content.get('sos_str')!r} and end with {content.get('eos_str')!r}; "
            f"expected 'SOS' and 'EOS'"
        )
    return vocabulary


def _checked_words(content: Any, words_key: str, ids_key: str, path: Path, label: str) -> list[str]:
    """The words of a vocabulary in the order of their ids. ValueError unless the table of ids agrees with them.

    The table of ids may contain more words: each look-up of an unknown word adds an entry to a defaultdict.
    label: the kind of vocabulary, for the error message.
    """
    words = content.get(words_key) if isinstance(content, dict) else None
    ids = content.get(ids_key) if isinstance(content, dict) else None
    if not isinstance(words, list) or not isinstance(ids, dict) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path} is no {label}: expected {words_key!r} and {ids_key!r}")
    different = [index for index, word in enumerate(words) if ids.get(word) != index]
    if different:
        raise ValueError(
            f"{path}: its two tables contradict each other: word {different[0]} is {words[different[0]]!r} in one only"
        )
    return words
