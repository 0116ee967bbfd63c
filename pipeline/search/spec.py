"""A search: a base configuration, a space over its keys, what a trial trains, objectives and a budget; one YAML file.

A point names a choice a dimension: the label of one of the dimension's choices, or a number of its range.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from models.config import ExpansionNetConfig
from pipeline.config.load import parse_config, parse_section, read_values, set_value
from pipeline.config.run import RunConfig
from pipeline.config.sections import Positive, Section
from pipeline.errors import UserError
from pipeline.runs.identity import config_identity
from pipeline.scoring.metrics import METRICS
from pipeline.search.space import Dimension, GenerateSection, Space, SpaceSection, space_of

Direction = Literal["max", "min"]
Values = dict[str, Any]  # configuration keys, dotted or nested, and what they get
MOST_CHECKED = 1000  # combinations of a finite space that are all built before anything starts
COSTS = {
    "macs": "multiply-accumulates of an image in the accounting of ExpansionNet v2's paper",
    "macs_executed": "multiply-accumulates of an image and a caption as executed",
    "macs_beam_search": "multiply-accumulates of an image's beam search as executed",
    "parameters": "parameters of the captioner without its backbone",
    "latency_ms": "milliseconds of an image's beam search, measured by the trial",
    "seconds": "seconds that the trial trained",
}
SCORE = "CIDEr-D"
FIXED = {  # what a point may not change, and why
    "name": "a trial's name is made from the search's",
    "seed": "list seeds under `seeds`",
    "storage": "all trials share one storage",
    "tracking": "all trials share one tracker",
    "workers": "`resources` says what a trial gets",
    "backbone": "features are extracted once, before the first trial",
    "features": "features are extracted once, before the first trial",
    "data": "features are extracted once, before the first trial",
}
FREE = {"data.min_count"}
HANDED_OVER = {"model.dropout", "model.expansion_dropout"}  # what weights do not depend on


def _score_and_cost() -> dict[str, Direction]:
    return {SCORE: "max", "macs": "min"}


class TrialSection(Section):
    """What a trial trains: `stages` by name (the first cross-entropy stage on frozen features when left out)."""

    stages: tuple[str, ...] | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None  # of each; None: the base's
    set: Values = Field(default_factory=dict)  # for trials only; best.yaml does not have it


class BackboneSection(Section):
    """Whose features trials read.

    `base`: the base configuration's backbone as it starts. `run`: the one that the finished run of the base
    configuration ended with, else that of `stages` of it, trained here with `set`. Anything else is a weights file.
    """

    weights: str = "base"
    stages: tuple[str, ...] = ()
    set: Values = Field(default_factory=dict)


class BudgetSection(Section):
    """When to end. `trials` counts trainings: points times seeds. Raised later, the same search goes on."""

    trials: Positive | None = None
    hours: Annotated[float, Field(gt=0)] | None = None
    concurrent: Positive | None = None  # None: as many as the cluster can place


class SchedulerSection(Section):
    """ASHA: at grace_epochs * reduction**k epochs a trial goes on when it is among the best 1/reduction there."""

    name: Literal["asha"] = "asha"
    grace_epochs: Annotated[float, Field(gt=0)] = 1
    reduction: Annotated[float, Field(gt=1)] = 2


class PopulationSection(Section):
    """PBT: every so many epochs the worst `quantile` takes over weights and values of the best, and changes them."""

    every_epochs: Annotated[float, Field(gt=0)] = 1
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25


class ResourceSection(Section):
    """What a trial gets. With one worker it trains in its own process, with several on Ray Train."""

    workers: Positive = 1
    cpus: Annotated[float, Field(gt=0)] = 1  # a worker
    gpus: Annotated[float, Field(ge=0)] = 0


class SearchConfig(Section):
    """Everything that `raycap tune` needs."""

    name: str
    base: str  # relative to the search's file
    set: Values = Field(default_factory=dict)
    storage: str | None = None  # None: the base's
    space: dict[str, SpaceSection] = Field(default_factory=dict)
    rows: Annotated[tuple[Values, ...], Field(min_length=1)] | None = None  # points one by one
    trial: TrialSection = TrialSection()
    backbone: BackboneSection = BackboneSection()
    objectives: dict[str, Direction] = Field(default_factory=_score_and_cost)
    metrics: tuple[str, ...] = ("BLEU-4", "ROUGE-L")  # shown beside, of a finished trial's validation captions
    budget: BudgetSection = BudgetSection()
    algorithm: Literal["grid", "random", "tpe", "nsga2", "pbt"] = "random"
    population: Positive | None = None  # NSGA-II's; None: a quarter of the points, 4 to 50
    scheduler: SchedulerSection | None = None
    pbt: PopulationSection = PopulationSection()
    resources: ResourceSection = ResourceSection()
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    seed: int = 0  # of what draws the points
    compare: Literal["expansionnet_v2", "meshed_memory", "clustformer"] | None = None  # beside this paper's ablation

    @field_validator("scheduler", mode="before")
    @classmethod
    def _short_scheduler(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("space", mode="before")
    @classmethod
    def _short_space(cls, value: Any) -> Any:
        """A list is short for `choices`."""
        if not isinstance(value, dict):
            return value
        return {key: {"choices": entry} if isinstance(entry, list) else entry for key, entry in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> SearchConfig:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"name {self.name!r} must be letters, digits, '_', '-' and '.', a letter or digit first")
        if bool(self.space) == bool(self.rows):
            raise ValueError("exactly one of space and rows is needed; rows names points one by one")
        if self.rows and self.algorithm != "grid":
            raise ValueError(f"algorithm {self.algorithm} does not go with rows, which are run one by one; set grid")
        known = [SCORE, *COSTS, *self.metrics]
        for name in self.objectives:
            if name not in known:
                raise ValueError(f"objectives: no trial reports {name!r}; known: {', '.join(dict.fromkeys(known))}")
        if not self.objectives:
            raise ValueError(f"objectives is empty; name one or more of {', '.join(dict.fromkeys(known))}")
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"metrics: {name!r} is unknown; known: {', '.join(METRICS)}")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must differ, found {', '.join(map(str, self.seeds))}")
        trials, seeds = self.budget.trials, len(self.seeds)
        if trials is not None and trials % seeds:
            raise ValueError(
                f"budget.trials = {trials} does not divide by {seeds} seeds; take {max(1, trials // seeds) * seeds}"
            )
        if self.algorithm not in ("grid",) and trials is None and self.budget.hours is None:
            raise ValueError(f"algorithm {self.algorithm} needs an end: set budget.trials or budget.hours")
        if self.algorithm == "pbt":
            self._check_population()
        return self

    def _check_population(self) -> None:
        if self.scheduler is not None:
            raise ValueError("scheduler asha and algorithm pbt exclude each other; leave scheduler out")
        if self.budget.trials is None or self.resources.workers > 1:
            raise ValueError("algorithm pbt needs budget.trials, its members, and one worker a trial")
        for key in self.space:
            if key.startswith("model.") and key not in HANDED_OVER:
                raise ValueError(
                    f"space.{key}: algorithm pbt hands weights from trial to trial, which fit no other {key}; search "
                    "it with tpe or nsga2"
                )

    @property
    def main_objective(self) -> str:
        """The one that orders the leaderboard: CIDEr-D where it is there."""
        return SCORE if SCORE in self.objectives else next(iter(self.objectives))


class Search:
    """A search that was read and checked: the base's values, dimensions, and points as configurations."""

    def __init__(self, config: SearchConfig, base: dict[str, Any]) -> None:
        self.config = config
        self.values = base
        self.base = parse_config(base)
        self.space: Space = _row_space(config.rows) if config.rows else space_of(config.space)
        self.stages = self._stages()
        self._check_accounting()

    @property
    def cost(self) -> str:
        """The cost that tables and plots show: multiply-accumulates as the paper counts them, where it does."""
        return "macs" if isinstance(self.base.model, ExpansionNetConfig) else "macs_executed"

    def _check_accounting(self) -> None:
        if "macs" in self.config.objectives and self.cost != "macs":
            raise UserError(
                f"objectives: macs is an accounting of ExpansionNet v2's paper, and the base's model is "
                f"{self.base.model.name}; name macs_executed, macs_beam_search or another"
            )

    def _stages(self) -> tuple[str, ...]:
        known = [stage.name for stage in self.base.stages]
        if self.config.trial.stages is not None:
            for name in self.config.trial.stages:
                if name not in known:
                    raise UserError(f"trial.stages: the base configuration has no {name!r}; it has {', '.join(known)}")
            return tuple(name for name in known if name in self.config.trial.stages)
        for stage in self.base.stages:
            if stage.objective == "cross_entropy" and not stage.train_backbone:
                return (stage.name,)
        raise UserError("the base configuration has no cross-entropy stage on frozen features; name trial.stages")

    def changes(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """{configuration key: value} of a point."""
        return self.space.changes(point)

    def run_values(self, point: Mapping[str, Any], name: str = "best") -> dict[str, Any]:
        """Plain values of the base configuration at a point, for `raycap run`."""
        values = copy.deepcopy(self.values)
        for key, value in self.changes(point).items():
            set_value(values, key, value, "space")
        values["name"] = f"{self.base.name}-{self.config.name}-{name}"
        return values

    def trial_config(
        self, point: Mapping[str, Any], seed: int, weights: str | None = None, member: int | None = None
    ) -> RunConfig:
        """What a trial at a point trains; `weights` is the file that the backbone starts from, if not the base's.

        Members of a population have runs of their own, also where their points are the same.
        """
        values = self.run_values(point)
        trial, resources = self.config.trial, self.config.resources
        values["name"] = f"{self.base.name}-{self.config.name}" + ("" if member is None else f"-member-{member}")
        values["stages"] = [stage for stage in values["stages"] if stage.get("name") in self.stages]
        for stage in values["stages"]:
            if trial.epochs is not None:
                stage["epochs"] = trial.epochs
        for key, value in flatten(trial.set).items():
            set_value(values, key, value, "trial.set")
        values["seed"], values["tracking"] = seed, {"enabled": False}
        if weights is not None:
            values.setdefault("backbone", {})["weights"] = weights
        values["workers"] = dict(values.get("workers") or {}) | {
            "num_workers": resources.workers,
            "min_workers": None,
            "cpus_per_worker": resources.cpus,
            "gpus_per_worker": resources.gpus,
            "threads_per_worker": max(1, int(resources.cpus)),
            "dry_run": False,
        }
        return parse_config(values)

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point of a finite space, the last dimension changing fastest."""
        return self.space.points()

    def num_trials(self) -> int | None:
        """How many trainings are asked for; None: as many as the hours allow."""
        seeds, asked = len(self.config.seeds), self.config.budget.trials
        size = self.space.size
        if math.isinf(size) or self.config.algorithm == "pbt":
            return asked
        return min(int(size) * seeds, asked) if asked is not None else int(size) * seeds

    def total_epochs(self) -> float:
        """Epochs that a trial trains over all its stages, at the space's first point."""
        return sum(stage.epochs for stage in self.trial_config(self.space.first(), self.config.seeds[0]).stages)

    def identity(self, *others: str) -> str:
        """name-hash of the search, its base and `others` (data, code, backbone). The budget and the machine do not
        enter: a search goes on with more of either."""
        body = self.config.model_dump(mode="json", exclude={"budget", "resources", "base", "set", "storage"})
        told = json.dumps([body, config_identity(self.base), *others], sort_keys=True, default=str)
        return f"{self.config.name}-{hashlib.sha256(told.encode()).hexdigest()[:10]}"

    def check(self) -> None:
        """Builds the configuration and, on the meta device, the model of each choice; UserError names what is refused.

        In a finite space of up to 1,000 points every combination is tried, in others every choice beside the first
        ones of the other dimensions, and both ends of a range.
        """
        for key in self.space.keys:
            self._check_key(key)
        if self.config.algorithm == "grid" and math.isinf(self.space.size):
            raise UserError("algorithm grid: the space has no end; give its ranges a step, or take random or tpe")
        if self.config.algorithm == "pbt" and len(self.stages) > 1:
            raise UserError(f"algorithm pbt needs one stage a trial, found {', '.join(self.stages)}; set trial.stages")
        frozen = [self.base.stage(name).train_backbone for name in self.stages]
        if any(before and not after for before, after in itertools.pairwise(frozen)):
            raise UserError(
                f"trial.stages: {', '.join(self.stages)} need features anew after the backbone was trained, and a "
                "search extracts them once; end with the stage that trains it"
            )
        first = self.space.first()
        try:
            build_on_meta(self.trial_config(first, self.config.seeds[0]))
        except ValueError as error:
            if not self.space.dimensions or len(self.space.keys) > 1:
                self._check_choices(first)  # names the choice when it is one's fault
            raise UserError(f"{self.space.describe(first)} is refused: {error}") from error
        self._check_choices(first)
        settings = self.config.scheduler
        if settings is not None and settings.grace_epochs > self.total_epochs():
            raise UserError(
                f"scheduler.grace_epochs = {settings.grace_epochs:g} is more than the {self.total_epochs():g} epochs "
                "of a trial; lower it or raise trial.epochs"
            )
        if self.space.size <= MOST_CHECKED:
            for point in self.points():
                self._try(point, self.space.describe(point), model=False)

    def _check_key(self, key: str) -> None:
        section = key.split(".")[0]
        if section in FIXED and key not in FREE:
            raise UserError(f"space.{key} cannot be searched: {FIXED[section]}")
        parts = key.split(".")
        names = [stage.name for stage in self.base.stages]
        if parts[0] == "stages" and len(parts) > 1 and parts[1] in names and parts[1] not in self.stages:
            raise UserError(f"space.{key}: no trial runs the stage {parts[1]}; add it to trial.stages")
        for fixed in flatten(self.config.trial.set):
            if f"{key}.".startswith(f"{fixed}.") or f"{fixed}.".startswith(f"{key}."):
                raise UserError(f"space.{key}: trial.set gives {fixed} one value for all trials; leave one of them out")
        if parts[0] == "stages" and parts[-1] == "epochs":
            if self.config.trial.epochs is not None:
                raise UserError(f"space.{key}: trial.epochs gives all trials the same; leave one of them out")
            if self.config.scheduler is not None:
                raise UserError(f"space.{key} does not go with scheduler asha, which compares trials of one length")

    def _check_choices(self, first: Mapping[str, Any]) -> None:
        for dimension in self.space.dimensions:
            for choice in dimension.ends():
                name = f"space.{dimension.key}: the choice {dimension.show(choice)}"
                self._try({**first, dimension.key: choice}, name, model=True)

    def _try(self, point: Mapping[str, Any], name: str, *, model: bool) -> None:
        try:
            config = self.trial_config(point, self.config.seeds[0])
            parse_config(self.run_values(point))  # what `raycap run` gets in the end
            if model:
                build_on_meta(config)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"{name} is refused: {error}") from error


def build_on_meta(config: RunConfig) -> None:
    """The configuration's captioner without memory, on sizes that any data have; ValueError for what does not fit."""
    from models.config import ModelSizes
    from models.macs import count_parameters

    count_parameters(config.model, ModelSizes(64, 100, config.model.max_positions or 74, 0, 1, 2))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: {a: {b: 1}} and {a.b: 1} are the same."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def load_search(path: Path, overrides: Sequence[str] = ()) -> Search:
    """Reads a search and its base and checks every choice; UserError in one sentence."""
    values = read_values(path, overrides)
    config = parse_section(SearchConfig, values)
    base = read_values(path.parent / config.base)
    for key, value in flatten(config.set).items():
        set_value(base, key, value, "set")
    if config.storage is not None:
        base["storage"] = config.storage
    search = Search(config, base)
    search.check()
    return search


def _row_space(rows: Sequence[Mapping[str, Any]]) -> Space:
    """Points one by one, as one dimension of named rows."""
    rows = [flatten(row) for row in rows]
    keys = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    return Space.of_rows(keys, rows)


__all__ = [
    "COSTS",
    "SCORE",
    "Dimension",
    "GenerateSection",
    "Search",
    "SearchConfig",
    "flatten",
    "load_search",
]
