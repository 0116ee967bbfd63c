"""The space of a search: one dimension per configuration key, with labelled choices or a range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raycap.models.config import NUMBER, Groups, Values
from raycap.pipeline.config.sections import Name, Section
from raycap.pipeline.runtime.names import printable, shown

MAX_CHOICES = 1000  # that a dimension lists; each is built before a search starts
MAX_NUMBERS = 100_000  # of a range with a step
Coefficient = Annotated[Groups, Field(gt=0)]
Bound = Annotated[int | float, NUMBER, Field(ge=-1e38, le=1e38)]  # of a range


class GenerateSection(Section):
    """Generates expansion groups G from the coefficients `smallest`, 2 * `smallest`, ... up to `largest`.

    For each number n in `groups`, `doubling` generates every n successive coefficients, and `equal` repeats each
    coefficient n times: 3 groups from 16 to 64 are [16, 32, 64], or [16, 16, 16], [32, 32, 32] and [64, 64, 64].
    """

    groups: Annotated[tuple[Annotated[int, Field(gt=0, le=100), NUMBER], ...], Field(max_length=50)]
    smallest: Coefficient
    largest: Coefficient
    spacing: Literal["doubling", "equal"] | tuple[Literal["doubling", "equal"], ...] = "doubling"

    @model_validator(mode="after")
    def _check_not_empty(self) -> GenerateSection:
        if not self.generated():
            raise ValueError(
                f"no {' or '.join(map(str, self.groups))} groups fit between smallest = {self.smallest} and "
                f"largest = {self.largest} by {self.spacing}; lower smallest or raise largest"
            )
        return self

    def generated(self) -> list[list[int]]:
        """The lists of coefficients, without duplicates."""
        num_coefficients = (self.largest // self.smallest).bit_length()  # 1 + how often `smallest` can be doubled
        coefficients = [self.smallest * 2**power for power in range(num_coefficients)]
        groups: list[list[int]] = []
        for count in self.groups:
            for spacing in [self.spacing] if isinstance(self.spacing, str) else self.spacing:
                if spacing == "doubling":
                    groups += [coefficients[start : start + count] for start in range(num_coefficients - count + 1)]
                else:
                    groups += [[coefficient] * count for coefficient in coefficients]
        return [group for number, group in enumerate(groups) if group not in groups[:number]]


class SpaceSection(Section):
    """One dimension: `choices` (or a plain list in YAML), named `groups`, `generate`, or a range from low to high.

    A range between integers has integer values. With `log` the logarithm of a number is drawn uniformly. With `step`
    the choices are low, low + step, low + 2 * step, ... up to high.
    """

    choices: tuple[Any, ...] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    groups: dict[Name, tuple[Coefficient, ...] | None] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    generate: GenerateSection | None = None
    low: Bound | None = None
    high: Bound | None = None
    log: bool = False
    step: Bound | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> SpaceSection:
        lists = [kind for kind in (self.choices, self.groups, self.generate) if kind is not None]
        if self.low is not None and self.high is not None and not lists:
            self._check_range(self.low, self.high)
        elif len(lists) != 1 or (self.low, self.high, self.step, self.log) != (None, None, None, False):
            raise ValueError("needs exactly one of a list of choices, groups, generate, or low and high")
        labels = [show_value(choice) for choice in self.choices or ()]
        if duplicates := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"the choice {shown(duplicates[0])} occurs twice")
        return self

    def _check_range(self, low: Bound, high: Bound) -> None:
        if not low < high:
            raise ValueError(f"low = {low} must be below high = {high}")
        if self.log and (low <= 0 or self.step is not None):
            raise ValueError("a log range needs low above 0 and no step")
        if self.step is not None and not 0 < self.step <= high - low:
            raise ValueError(f"step = {self.step} must be above 0 and at most high - low = {high - low}")
        if self.distance is not None and (high - low) / self.distance >= MAX_NUMBERS:
            raise ValueError(
                f"has more than {MAX_NUMBERS:,} numbers from low = {low} to high = {high}; give a larger step or a "
                "smaller range"
            )

    @property
    def distance(self) -> float | None:
        """The distance between the numbers of a range; None if the range is continuous."""
        return 1 if self.step is None and isinstance(self.low, int) and isinstance(self.high, int) else self.step


@dataclass(frozen=True)
class Dimension:
    """One configuration key with its choices, or with a range from `low` to `high`."""

    key: str
    choices: dict[str, Any] = field(default_factory=dict)  # {label: value}; empty for a range
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None  # None for a continuous range
    integer: bool = False

    def listed(self) -> list[Any] | None:
        """All choices; None for a continuous range. A choice is a label, or a number in a range."""
        if self.choices:
            return list(self.choices)
        if self.step is None:
            return None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1  # 1e-9: rounding must not lose the last one
        return [self.number(self.low + number * self.step) for number in range(count)]

    def ends(self) -> list[Any]:
        """Every label, or both ends of a range. These choices are checked before a search starts."""
        return list(self.choices) or [self.number(self.low), self.number(self.high)]

    def show(self, choice: object) -> str:
        """The choice for tables and messages; floats have four significant digits."""
        return f"{choice:.4g}" if isinstance(choice, float) else str(choice)

    def number(self, value: Any) -> Any:
        """The value as an integer in an integer range, else rounded to six digits, which keeps YAML files short."""
        return round(value) if self.integer else float(f"{value:.6g}")


@dataclass(frozen=True)
class Space:
    """Independent dimensions, or explicit rows as one dimension `row`, whose values are {configuration key: value}."""

    dimensions: tuple[Dimension, ...]
    row_keys: tuple[str, ...] = ()  # the configuration keys that rows set; empty without rows

    def rounded(self, point: Mapping[str, object]) -> Values:
        """The point with numbers as `Dimension.listed` has them, because a sampler may return 0.30000000000000004."""
        return {
            dimension.key: point[dimension.key] if dimension.choices else dimension.number(point[dimension.key])
            for dimension in self.dimensions
        }

    @property
    def keys(self) -> list[str]:
        """Configuration keys that points change."""
        return list(self.row_keys) or [dimension.key for dimension in self.dimensions]

    @property
    def size(self) -> float:
        """The number of points; infinite with a continuous range, and where a float cannot hold it."""
        lists = [dimension.listed() for dimension in self.dimensions]
        return math.prod(math.inf if choices is None else float(len(choices)) for choices in lists)

    def first(self) -> Values:
        """The point with the first choice of each dimension."""
        return {dimension.key: dimension.ends()[0] for dimension in self.dimensions}

    def points(self) -> Iterator[Values]:
        """Every point of a finite space; the last dimension changes fastest."""
        keys = [dimension.key for dimension in self.dimensions]
        for choices in itertools.product(*(dimension.listed() or [] for dimension in self.dimensions)):
            yield dict(zip(keys, choices, strict=True))

    def changes(self, point: Mapping[str, Any]) -> Values:
        """The values that a point sets, as {configuration key: value}."""
        values = {d.key: d.choices[point[d.key]] if d.choices else point[d.key] for d in self.dimensions}
        return dict(values["row"]) if self.row_keys else values

    def describe(self, point: Mapping[str, object]) -> str:
        """The point as one line for tables and messages."""
        if self.row_keys:
            return str(point["row"])
        return ", ".join(f"{short(each.key)} {each.show(point[each.key])}" for each in self.dimensions)


SYMBOLS = {
    "model.static_expansion": "G",
    "model.dynamic_expansion": "N_E",
    "model.encoder_dynamic_expansion": "encoder N_E",
}


def point_key(point: Mapping[str, object]) -> str:
    """A string that is the same for equal points."""
    return repr(sorted(point.items()))


def short(key: str) -> str:
    """A short name of a key: the paper's symbol, or the last part. A stage's key includes the stage's name."""
    section, *parts = key.split(".")
    return SYMBOLS.get(key) or (" ".join(parts) if section == "stages" else (parts or [section])[-1])


def show_value(value: object) -> str:
    """A value as a label: [32, 64] becomes `32 64`, and five equal groups become `128 x 5`.

    Control characters are escaped, because plots cannot show them.
    """
    if value is None:
        return "attention"  # which a model without expansion groups uses
    if isinstance(value, list | tuple):
        is_repeated = len(value) > 1 and len(set(map(str, value))) == 1
        text = f"{value[0]} x {len(value)}" if is_repeated else " ".join(map(str, value))
        return printable(text)
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def space_of(sections: Mapping[str, SpaceSection]) -> Space:
    """The space of the `space` section of a search."""
    return Space(tuple(_dimension(key, section) for key, section in sections.items()))


def row_space(rows: Sequence[Mapping[str, object]]) -> Space:
    """The space whose points are `rows`; each row is {dotted key: value}."""
    keys = dict.fromkeys(itertools.chain.from_iterable(rows))
    labels = [", ".join(f"{short(key)} {show_value(row[key])}" for key in keys if key in row) for row in rows]
    return Space((Dimension("row", dict(zip(labels, rows, strict=True))),), tuple(keys))


def _dimension(key: str, section: SpaceSection) -> Dimension:
    """The dimension that a section describes."""
    if section.low is not None and section.high is not None:
        integer = all(isinstance(number, int) for number in (section.low, section.high, section.distance))
        return Dimension(key, {}, section.low, section.high, section.log, section.distance, integer)
    if section.groups is not None:
        return Dimension(key, {label: groups and list(groups) for label, groups in section.groups.items()})
    choices = section.generate.generated() if section.generate else section.choices or ()
    return Dimension(key, {show_value(choice): choice for choice in choices})
