"""The numbers and texts of configurations: types with limits, in the form in which pydantic reads annotations.

The limits are far above what anyone would train. They catch what cannot be meant, such as a width of a billion, before
memory is asked for. This module does not import pydantic, which finds the method of the marks by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Le

_WHOLE = re.compile(r"[-+]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[-+]?([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE][-+]?[0-9]{1,3})?")
# characters that no path, address or name has: control characters, and halves of characters
_NO_TEXT = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_TEXT = 1024  # bytes; the longest key on S3


@dataclass(frozen=True)
class Before:
    """A mark on a type: pydantic calls `function` with a value before it checks its type, strictly.

    Strict means that a boolean is no number, and a fraction no whole number.
    """

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        schema = handler(source)
        for each in schema.get("choices", [schema]):  # the members of a union, or the only type
            each["strict"] = True
        return {"type": "function-before", "function": {"type": "no-info", "function": self.function}, "schema": schema}


def read_number(value: Any) -> Any:
    """The number that a text spells; any other value unchanged.

    `${NAME}` in a configuration gives a text, and YAML 1.1 reads 1e-3 as a text.
    """
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        return float(value)
    return value


def check_text(value: Any) -> Any:
    """The value unchanged. Raises ValueError for a text that cannot be a path, an address or a name."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the text is empty; give a value, or leave the key out")
        if _NO_TEXT.search(value):
            raise ValueError("the text has control characters or is not UTF-8; remove them")
        try:
            Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError("the text begins with ~ and names no user's home folder; give another path") from error
        if len(value.encode()) > MAX_TEXT:
            raise ValueError(f"the text has {len(value.encode())} bytes; the limit is {MAX_TEXT}")
    return value


NUMBER, TEXT = Before(read_number), Before(check_text)

Text = Annotated[str, TEXT]
Whole = Annotated[int, NUMBER]
Decimal = Annotated[float, NUMBER]
Count = Annotated[int, Le(10_000), NUMBER]  # of heads, positions, image tokens, captions, workers and the like
Width = Annotated[int, Le(2**17), NUMBER]  # of vectors; the widest layers of large language models have about 50,000
Layers = Annotated[int, Le(200), NUMBER]  # captioners have 3 to 12
Groups = Annotated[int, Le(10**10), NUMBER]  # expansion vectors; the number of parameters limits them further
Words = Annotated[int, Le(10**7), NUMBER]  # of a vocabulary
Pixels = Annotated[int, Le(4096), NUMBER]  # the side of a square image; published backbones take 224 to 384
