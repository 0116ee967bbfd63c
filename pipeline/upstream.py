"""Files of upstream projects that are not tensors: their vocabularies, which come as pickles."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from pipeline.text import Vocabulary

MAX_BYTES = 64 * 2**20  # the published vocabulary has 0.24 MB


class PlainUnpickler(pickle.Unpickler):
    """Reads dict, list, str and int and nothing else: a pickle that names any class or function is refused unread."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def read_plain_pickle(path: Path) -> Any:
    """The content of a pickle of dict, list, str and int. Raises ValueError for anything else; nothing in it runs."""
    if not path.is_file():
        raise ValueError(f"the vocabulary file {path} does not exist; give the path of a pickle")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; a vocabulary of more than {MAX_BYTES} is refused")
    try:
        content = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {error}; a vocabulary holds dict, list, str and int only") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} is no readable pickle: {type(error).__name__}: {error}") from error
    _check_plain(content, path)
    return content


def _check_plain(content: Any, path: Path) -> None:
    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        if type(value) in (str, int) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is dict:
            pending += [*value.keys(), *value.values()]
        elif type(value) is list:
            pending += value
        else:
            raise ValueError(
                f"{path} is refused: it holds a {type(value).__name__}; a vocabulary holds dict, list, str and int only"
            )


def read_expansionnet_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary pickle of ExpansionNet v2's reference: `word2idx_dict`, `idx2word_list`, `sos_str`, `eos_str`.

    Raises ValueError for another content, and where the two tables contradict each other.
    """
    content = read_plain_pickle(path)
    words = content.get("idx2word_list") if isinstance(content, dict) else None
    ids = content.get("word2idx_dict") if isinstance(content, dict) else None
    if not isinstance(words, list) or not isinstance(ids, dict) or not all(isinstance(word, str) for word in words):
        raise ValueError(
            f"{path} is no ExpansionNet v2 vocabulary: expected a dict with 'idx2word_list' and 'word2idx_dict'"
        )
    wrong = [index for index, word in enumerate(words) if ids.get(word) != index]
    if wrong or len(ids) != len(words):
        where = f"word {wrong[0]} is {words[wrong[0]]!r} in one and not in the other" if wrong else "sizes differ"
        raise ValueError(f"{path}: its two tables contradict each other ({len(words)} and {len(ids)} words): {where}")
    vocabulary = Vocabulary(tuple(words))
    if content.get("sos_str") != "SOS" or content.get("eos_str") != "EOS":
        raise ValueError(
            f"{path}: captions start with {content.get('sos_str')!r} and end with {content.get('eos_str')!r}; "
            f"expected 'SOS' and 'EOS'"
        )
    return vocabulary
