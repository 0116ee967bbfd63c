"""The space of a search: one dimension per configuration key, with labelled choices or a range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from raycap.models.config import NUMBER, Values
from raycap.pipeline.config.sections import Section
from raycap.pipeline.runtime.names import printable, shown

MAX_CHOICES = 1000  # that a dimension lists; each is built before a search starts
MAX_NUMBERS = 100_000  # of a range with a step
Bound = Annotated[int | float, NUMBER, Field(ge=-1e38, le=1e38)]  # of a range
ROW = "row"  # the dimension whose choices set several keys


class Dimension(Section):
    """A list of choices, or a range from low to high.

    A range between integers has integer values. With `log` the logarithm of a number is drawn uniformly. With `step`
    the numbers are low, low + step, low + 2 * step, ... up to high.
    """

    choices: tuple[Any, ...] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    """A plain list in the place of the section is short for it."""
    low: Bound = 0
    high: Bound = 0
    log: bool = False
    step: Annotated[Bound, Field(gt=0)] | None = None

    def check_values(self) -> None:
        if self.choices is not None:
            if (self.low, self.high, self.log, self.step) != (0, 0, False, None):
                raise ValueError("low, high, log and step do not go with choices; leave them out")
            labels = [show_value(choice) for choice in self.choices]
            if duplicates := [label for label in labels if labels.count(label) > 1]:
                raise ValueError(f"the choice {shown(duplicates[0])} occurs twice")
        elif not self.low < self.high:
            raise ValueError(f"needs a list of choices, or low below high, found low = {self.low}, high = {self.high}")
        elif self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("a log range needs low above 0 and no step")
        elif self.distance is not None and (self.high - self.low) / self.distance >= MAX_NUMBERS:
            raise ValueError(f"has more than {MAX_NUMBERS:,} numbers; give a larger step or a smaller range")

    @cached_property
    def values(self) -> Values:
        """{label: value} of the choices; empty for a range."""
        return {show_value(choice): choice for choice in self.choices or ()}

    @property
    def is_integer(self) -> bool:
        """Whether the numbers of a range are integers."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    @property
    def distance(self) -> float | None:
        """The distance between the numbers of a range; None if the range is continuous."""
        return 1 if self.step is None and self.is_integer else self.step

    def listed(self) -> list[Any] | None:
        """All choices; None for a continuous range. A choice is a label, or a number in a range."""
        if self.values:
            return list(self.values)
        if self.distance is None:
            return None
        count = math.floor((self.high - self.low) / self.distance + 1e-9) + 1  # 1e-9: rounding must not lose the last
        return [self.rounded(self.low + number * self.distance) for number in range(count)]

    def ends(self) -> list[Any]:
        """Every label, or both ends of a range. These choices are checked before a search starts."""
        listed = self.listed() or [self.rounded(self.low), self.rounded(self.high)]
        return listed if self.values else [listed[0], listed[-1]]

    def rounded(self, choice: Any) -> Any:
        """A number as `listed` has it, because a sampler may return 0.30000000000000004: an integer, or six digits."""
        if self.values:
            return choice
        return round(choice) if self.is_integer else float(f"{choice:.6g}")


@dataclass(frozen=True)
class Space:
    """Independent dimensions by configuration key, and `row`, whose values are {configuration key: value}.

    A point has one choice per dimension.
    """

    dimensions: Mapping[str, Dimension]

    @property
    def keys(self) -> list[str]:
        """Configuration keys that points change."""
        rows = self.dimensions[ROW].values.values() if ROW in self.dimensions else ()
        return list(dict.fromkeys(itertools.chain(*map(flatten, rows), (key for key in self.dimensions if key != ROW))))

    @property
    def size(self) -> float:
        """The number of points; infinite with a continuous range, and where a float cannot hold it."""
        lists = [dimension.listed() for dimension in self.dimensions.values()]
        return math.prod(math.inf if choices is None else float(len(choices)) for choices in lists)

    def first(self) -> Values:
        """The point with the first choice of each dimension."""
        return {key: dimension.ends()[0] for key, dimension in self.dimensions.items()}

    def points(self) -> Iterator[Values]:
        """Every point of a finite space; the last dimension changes fastest."""
        for choices in itertools.product(*(dimension.listed() or [] for dimension in self.dimensions.values())):
            yield dict(zip(self.dimensions, choices, strict=True))

    def changes(self, point: Mapping[str, Any]) -> Values:
        """The values that a point sets, as {configuration key: value}. A point without choices sets none."""
        values = {key: self.dimensions[key].values.get(choice, choice) for key, choice in point.items()}
        row = values.pop(ROW, {})
        return flatten(row) | values

    def describe(self, point: Mapping[str, object]) -> str:
        """The point as one line for tables and messages."""
        return ", ".join(str(point[key]) if key == ROW else show_value({key: point[key]}) for key in point)


SYMBOLS = {
    "model.static_expansion": "G",
    "model.dynamic_expansion": "N_E",
    "model.encoder_dynamic_expansion": "encoder N_E",
}


def point_key(point: Mapping[str, object]) -> str:
    """A string that is the same for equal points."""
    return repr(sorted(point.items()))


def flatten(values: Mapping[str, Any]) -> Values:
    """The values under dotted keys: {a: {b: 1}} becomes {a.b: 1}."""
    flat: Values = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{inner}": item for inner, item in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def short(key: str) -> str:
    """A short name of a key: the paper's symbol, or the last part. A stage's key includes the stage's name."""
    section, *parts = key.split(".")
    return SYMBOLS.get(key) or (" ".join(parts) if section == "stages" else (parts or [section])[-1])


def show_value(value: object) -> str:
    """A value as a label: [32, 64] becomes `32 64`, five equal groups `128 x 5`, and {model.d_model: 8} `d_model 8`.

    Control characters are escaped, because plots cannot show them.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{short(str(key))} {show_value(item)}" for key, item in flatten(value).items())
    if isinstance(value, list | tuple):
        is_repeated = len(value) > 1 and len(set(map(str, value))) == 1
        text = f"{value[0]} x {len(value)}" if is_repeated else " ".join(map(str, value))
        return printable(text)
    if value is None:
        return "null"
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))
