"""The space of a search: dimensions over configuration keys, as choices with labels or as ranges."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from pipeline.config.sections import Positive, Section


class GenerateSection(Section):
    """Expansion groups G made by rule.

    For each number of groups n: every n coefficients from `smallest` to `largest` that follow each other by doubling
    (`doubling`), and every such coefficient n times (`equal`). groups [1, 3], 16 to 64: [16], [32], [64],
    [16, 32, 64], and [16, 16, 16] to [64, 64, 64].
    """

    groups: tuple[Positive, ...]
    smallest: Positive
    largest: Positive
    spacing: Literal["doubling", "equal"] | tuple[Literal["doubling", "equal"], ...] = "doubling"

    @model_validator(mode="after")
    def _possible(self) -> GenerateSection:
        if not self.made():
            raise ValueError(
                f"no {' or '.join(map(str, self.groups))} groups lie between smallest = {self.smallest} and "
                f"largest = {self.largest} by {self.spacing}; give them more room"
            )
        return self

    def made(self) -> list[list[int]]:
        """The groups, without repetition."""
        ladder = [self.smallest]
        while ladder[-1] * 2 <= self.largest:
            ladder.append(ladder[-1] * 2)
        if self.smallest > self.largest:
            ladder = []
        found: list[list[int]] = []
        for count in self.groups:
            for spacing in [self.spacing] if isinstance(self.spacing, str) else self.spacing:
                if spacing == "doubling":
                    found += [ladder[start : start + count] for start in range(len(ladder) - count + 1)]
                else:
                    found += [[coefficient] * count for coefficient in ladder]
        return [groups for number, groups in enumerate(found) if groups not in found[:number]]


class SpaceSection(Section):
    """One dimension: `choices` (in a YAML also a plain list), named `groups`, `generate`, or a range from low to high.

    A range between whole numbers has whole numbers; `log` draws its logarithm evenly, `step` makes it a grid.
    """

    choices: tuple[Any, ...] | None = None
    groups: dict[str, tuple[Positive, ...] | None] | None = None
    generate: GenerateSection | None = None
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> SpaceSection:
        ranged = self.low is not None and self.high is not None
        kinds = [self.choices is not None, self.groups is not None, self.generate is not None, ranged]
        if sum(kinds) != 1 or (not ranged and (self.low, self.high, self.step, self.log) != (None, None, None, False)):
            raise ValueError("needs exactly one of a list of choices, groups, generate, or low and high")
        if self.low is not None and self.high is not None:
            if not self.low < self.high:
                raise ValueError(f"low = {self.low} must be below high = {self.high}")
            if self.log and (self.low <= 0 or self.step is not None):
                raise ValueError("a log range needs low above 0 and no step")
            if self.step is not None and not 0 < self.step <= self.high - self.low:
                raise ValueError(f"step = {self.step} must be above 0 and at most high - low = {self.high - self.low}")
        elif not (self.choices or self.groups or self.generate):
            raise ValueError("is empty; name one choice or more")
        labels = [show_value(choice) for choice in self.choices or ()]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"the choice {twice[0]} stands there twice")
        return self


@dataclass(frozen=True)
class Dimension:
    """One key: labels and values of its choices, or a range."""

    key: str
    labels: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    integer: bool = False

    @property
    def is_range(self) -> bool:
        return not self.labels

    def listed(self) -> list[Any] | None:
        """All choices; None where there is no end of them."""
        if self.labels:
            return list(self.labels)
        step = self.step or (1 if self.integer else None)
        if step is None:
            return None
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return [self._number(self.low + number * step) for number in range(count)]

    def ends(self) -> list[Any]:
        """Every choice, or both ends of a range: what is tried before anything starts."""
        return list(self.labels) if self.labels else [self._number(self.low), self._number(self.high)]

    def draw(self, generator: random.Random) -> Any:
        """A choice at random."""
        listed = self.listed()
        if listed is not None and not self.log:
            return generator.choice(listed)
        if self.log:
            drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
            return self._number(min(max(drawn, self.low), self.high))
        return self._number(generator.uniform(self.low, self.high))

    def neighbor(self, choice: Any, generator: random.Random) -> Any:
        """A change as population based training makes it: a draw in one of four, else the next choice up or down, or
        a number times 0.8 or 1.2 within its range."""
        if generator.random() < 0.25:
            return self.draw(generator)
        listed = self.listed()
        if listed is not None:
            place = listed.index(choice) + generator.choice((-1, 1))
            return listed[min(max(place, 0), len(listed) - 1)]
        return self._number(min(max(choice * generator.choice((0.8, 1.2)), self.low), self.high))

    def value(self, choice: Any) -> Any:
        """What the configuration gets for a choice."""
        return self.values[self.labels.index(choice)] if self.labels else choice

    def show(self, choice: Any) -> str:
        return str(choice) if self.labels else f"{choice:.4g}" if isinstance(choice, float) else str(choice)

    def _number(self, value: float) -> Any:
        return round(value) if self.integer else float(f"{value:.6g}")


@dataclass(frozen=True)
class Space:
    """Dimensions, or rows: points of several keys that go together, as one dimension named `row`."""

    dimensions: tuple[Dimension, ...]
    rows: tuple[str, ...] = ()  # the keys of rows; the dimension's values are then {key: value}

    @classmethod
    def of_rows(cls, keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Space:
        labels = tuple(", ".join(f"{short(key)} {show_value(row[key])}" for key in keys if key in row) for row in rows)
        return cls((Dimension("row", labels, tuple(dict(row) for row in rows)),), tuple(keys))

    @property
    def keys(self) -> list[str]:
        """Configuration keys that points change."""
        return list(self.rows) or [dimension.key for dimension in self.dimensions]

    @property
    def size(self) -> float:
        """How many points there are; infinite where a range has no steps."""
        return math.prod(math.inf if (each := d.listed()) is None else len(each) for d in self.dimensions)

    def first(self) -> dict[str, Any]:
        return {dimension.key: dimension.ends()[0] for dimension in self.dimensions}

    def points(self) -> Iterator[dict[str, Any]]:
        lists = [dimension.listed() for dimension in self.dimensions]
        for choices in itertools.product(*(each or [] for each in lists)):
            yield dict(zip((d.key for d in self.dimensions), choices, strict=True))

    def changes(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """{configuration key: value} of a point."""
        values = {dimension.key: dimension.value(point[dimension.key]) for dimension in self.dimensions}
        return dict(values["row"]) if self.rows else values

    def by_key(self) -> Space:
        """Dimensions over keys also for rows: what plots and importance are drawn over."""
        if not self.rows:
            return self
        (dimension,) = self.dimensions
        columns = {key: [values.get(key, MISSING) for values in dimension.values] for key in self.rows}
        return Space(
            tuple(
                Dimension(key, tuple(dict.fromkeys(map(show_value, column))), tuple(_once(column)))
                for key, column in columns.items()
            )
        )

    def point_by_key(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """A point in the dimensions of `by_key`."""
        if not self.rows:
            return dict(point)
        changes = self.changes(point)
        return {key: show_value(changes.get(key, MISSING)) for key in self.rows}

    def describe(self, point: Mapping[str, Any]) -> str:
        if self.rows:
            return str(point["row"])
        return ", ".join(f"{short(d.key)} {d.show(point[d.key])}" for d in self.dimensions)


MISSING = "base"  # what a row that does not name a key has there


def _once(values: Sequence[Any]) -> list[Any]:
    return list({show_value(value): value for value in values}.values())


SYMBOLS = {
    "model.static_expansion": "G",
    "model.dynamic_expansion": "N_E",
    "model.encoder_dynamic_expansion": "encoder N_E",
}


def short(key: str) -> str:
    """The papers' symbol of a key, or its last word (with the stage's, which alone would not tell)."""
    if key in SYMBOLS:
        return SYMBOLS[key]
    parts = key.split(".")
    return " ".join(parts[1:]) if parts[0] == "stages" else parts[-1]


def show_value(value: Any) -> str:
    """A value as a label: [32, 64] is `32 64`, five equal groups are `128 x 5`, null is `attention`."""
    if value is None:
        return "attention"
    if isinstance(value, list | tuple):
        if len(value) > 1 and len(set(map(str, value))) == 1:
            return f"{value[0]} x {len(value)}"
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def space_of(sections: Mapping[str, SpaceSection]) -> Space:
    return Space(tuple(_dimension(key, section) for key, section in sections.items()))


def _dimension(key: str, section: SpaceSection) -> Dimension:
    if section.low is not None and section.high is not None:
        whole = all(isinstance(value, int) for value in (section.low, section.high, section.step or 0))
        return Dimension(key, low=section.low, high=section.high, log=section.log, step=section.step, integer=whole)
    if section.groups is not None:
        values = tuple(list(value) if value is not None else None for value in section.groups.values())
        return Dimension(key, tuple(section.groups), values)
    if section.generate is not None:
        made = section.generate.made()
        return Dimension(key, tuple(map(show_value, made)), tuple(made))
    choices = section.choices or ()
    return Dimension(key, tuple(map(show_value, choices)), tuple(_plain(choice) for choice in choices))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
