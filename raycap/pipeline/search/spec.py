"""The YAML file of a search: a base configuration, a space over its keys, the trial, objectives and a budget.

A point has one choice per dimension. The choice is the label of a listed value, or a number in a range.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from raycap.models.config import NUMBER, ExpansionNetConfig, Text, Values
from raycap.pipeline.config.load import merge, parse_config, parse_section, read_values, set_value
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import (
    Cpus,
    Epochs,
    FileName,
    Gpus,
    Minutes,
    Name,
    Processes,
    Section,
    Seed,
    StorageSection,
)
from raycap.pipeline.config.shipped import referenced_file
from raycap.pipeline.config.variables import remember_secrets
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.scores.metrics import METRICS
from raycap.pipeline.runs.identity import config_identity
from raycap.pipeline.runs.preflight import require_possible_model
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.search.space import ROW, Dimension, Space, flatten

MAX_SEEDS = 1000
MAX_CHECKED_POINTS = 1000  # in a space of at most this size, the configuration of every point is checked
SCORE = "CIDEr-D"  # the score that every validation reports


class CostFormat(NamedTuple):
    """The heading of a cost in tables and plots, and the number by which they divide it."""

    heading: str
    unit: float = 1


COSTS = {
    "macs": CostFormat("MMACs", 1e6),  # multiply-accumulates per image as ExpansionNet v2's paper counts them
    "macs_executed": CostFormat("MMACs executed", 1e6),  # executed multiply-accumulates per image and caption
    "macs_beam_search": CostFormat("MMACs beam search", 1e6),  # executed multiply-accumulates per beam search
    "parameters": CostFormat("k parameters", 1e3),  # of the captioner without its backbone
}
# the sections that all trials share, so that a point must not change them
FIXED_SECTIONS = ("name", "seed", "storage", "tracking", "workers", "backbone", "features", "data")


class TrialSection(Section):
    """The stages that a trial trains; by default the first cross-entropy stage on frozen features."""

    stages: tuple[Name, ...] | None = None
    epochs: Epochs | None = None
    """The length of each stage; None: as in the base configuration."""
    set: Values = Field(default={})
    """Configuration values for all trials; best.yaml does not contain them."""


class BudgetSection(Section):
    """When a search ends. `trials` counts points times seeds. A larger budget resumes a finished search."""

    trials: Annotated[int, Field(gt=0, le=10**6), NUMBER] | None = None
    hours: Minutes | None = None
    concurrent: Processes | None = None
    """The most trials at a time; None: as many as the machine or cluster can place."""


class SchedulerSection(Section):
    """The scheduler of Ray Tune that decides which trials train on.

    asha: after grace_epochs * reduction**k epochs (k = 0, 1, ...) the best 1/reduction of the trials continue. median:
    from grace_epochs on, a trial ends if its best score is below the median of the other trials' means. pbt: after each
    `every_epochs` epochs, a trial among the worst `quantile` continues with weights of one of the best, at a changed
    point.
    """

    name: Literal["asha", "median", "pbt"]
    grace_epochs: Epochs = 1
    reduction: Annotated[float, Field(ge=1.1, le=1000), NUMBER] = 2
    """Near 1 there would be a rung for every step."""
    every_epochs: Epochs = 1
    quantile: Annotated[float, Field(gt=0, le=0.5), NUMBER] = 0.25


class ResourceSection(Section):
    """The resources of one trial. With one worker it trains in its own process, with several on Ray Train."""

    workers: Processes = 1
    cpus: Cpus = 1
    """Per worker."""
    gpus: Gpus = 0

    def check_values(self) -> None:
        if 0 < self.gpus < 1 < self.workers:
            raise ValueError(
                f"resources.gpus = {self.gpus:g} gives two of {self.workers} workers the same GPU, which NCCL refuses; "
                "set it to 1, or resources.workers to 1"
            )


# short forms of values: `scheduler: asha` of {name: asha}, a list in `space` of its section, `seeds: 3` of [0, 1, 2]
_BY_NAME = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
_AS_CHOICES = BeforeValidator(lambda value: {"choices": value} if isinstance(value, list) else value)
# one seed too many shows that the limit is exceeded
_COUNTED = BeforeValidator(lambda value: list(range(min(value, MAX_SEEDS + 1))) if type(value) is int else value)


class SearchConfig(Section):
    """The configuration of `raycap tune`."""

    name: FileName
    base: Text
    """The file of the base configuration, relative to the search's file, or the name of a shipped one."""
    set: Values = Field(default={})
    """Changes of the base configuration."""
    storage: StorageSection | None = None
    """None: the base configuration's."""
    space: dict[Name, Annotated[Dimension, _AS_CHOICES]] = Field(min_length=1, max_length=100)
    trial: TrialSection = TrialSection()
    backbone: Literal["base", "run"] = "base"
    """Whose features trials read: `base` (its initial backbone), or `run` (that of a finished run of it)."""
    objectives: dict[Name, Literal["max", "min"]] = Field(default={SCORE: "max", "macs": "min"}, min_length=1)
    metrics: tuple[Name, ...] = ("BLEU-4", "ROUGE-L")
    """More scores of a finished trial's captions."""
    score_split: Name | None = None
    """The split whose scores are reported; None: data.val_split, on which weights and points are chosen in any case."""
    budget: BudgetSection = BudgetSection()
    algorithm: Literal["grid", "random", "tpe", "nsga2"] = "random"
    scheduler: Annotated[SchedulerSection | None, _BY_NAME] = None
    resources: ResourceSection = ResourceSection()
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=MAX_SEEDS), _COUNTED] = (0,)
    seed: Annotated[int, Field(ge=0, lt=2**32), NUMBER] = 0
    """The sampler's seed. NumPy takes no larger one."""
    compare: Literal["expansionnet_v2", "meshed_memory", "clustformer"] | None = None
    """The paper to compare with."""

    def check_values(self) -> None:
        rows = (self.space[ROW].choices or (None,)) if ROW in self.space else ()
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError(
                "space.row lists mappings of keys to values, such as {model.d_model: 256, model.d_ff: 512}"
            )
        if both := [key for row in rows for key in flatten(row) if key in self.space]:
            raise ValueError(f"space.{both[0]}: space.row sets this key too; leave one of them out")
        known = list(dict.fromkeys([SCORE, *COSTS, *self.metrics]))
        if unknown := [name for name in self.objectives if name not in known]:
            raise ValueError(f"objectives: no trial reports {unknown[0]!r}; known: {', '.join(known)}")
        if unknown := [name for name in self.metrics if name not in METRICS]:
            raise ValueError(f"metrics: {unknown[0]!r} is unknown; known: {', '.join(METRICS)}")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must differ, found {', '.join(map(str, self.seeds))}")
        trials = self.budget.trials
        if self.algorithm != "grid" and trials is None and self.budget.hours is None:
            raise ValueError(f"algorithm {self.algorithm} needs an end: set budget.trials or budget.hours")
        if self.algorithm == "grid" and trials is not None:
            raise ValueError("algorithm grid runs every point; remove budget.trials, or set algorithm to random")

    @property
    def main_objective(self) -> str:
        """The objective that orders the leaderboard: CIDEr-D if it is one, else the first."""
        return SCORE if SCORE in self.objectives else next(iter(self.objectives))


class Search:
    """A parsed search with its base configuration and its space."""

    def __init__(self, config: SearchConfig, base: Values) -> None:
        self.config = config
        self.values = base  # the base configuration before validation
        self.base = parse_config(base)
        self.space = Space(config.space)
        self.stages = self._stages()
        self.score_split = config.score_split or self.base.data.val_split  # the split whose scores are reported
        # whether the reported scores are those by which weights and points are chosen
        self.reports_validation = self.score_split == self.base.data.val_split
        # whether trials copy weights from each other
        self.is_population = config.scheduler is not None and config.scheduler.name == "pbt"
        # the resources of each worker of a trial under Ray's names
        self.bundle = {"CPU": config.resources.cpus, "GPU": config.resources.gpus, **self.base.workers.resources}
        # the cost in tables and plots; only ExpansionNet v2's paper counts as `macs` does
        self.cost = "macs" if isinstance(self.base.model, ExpansionNetConfig) else "macs_executed"
        if "macs" in config.objectives and self.cost != "macs":
            raise UserError(
                f"objectives: macs is an accounting of ExpansionNet v2's paper, and the base's model is "
                f"{self.base.model.name}; use macs_executed, macs_beam_search or another"
            )

    def _stages(self) -> tuple[str, ...]:
        """The names of the stages that a trial trains, in the order of the base configuration."""
        known, selected = [stage.name for stage in self.base.stages], self.config.trial.stages
        if selected is None:
            frozen = [stage for stage in self.base.stages if not stage.train_backbone]
            selected = tuple(stage.name for stage in frozen if stage.objective == "cross_entropy")[:1]
        if not selected or not set(selected) <= set(known):
            raise UserError(
                f"trial.stages names {', '.join(map(shown, selected)) or 'no stage'}; give one or more of the base "
                f"configuration's, which are {', '.join(known)}"
            )
        return tuple(name for name in known if name in selected)

    def reported(self, metric: str) -> str:
        """The name of a metric on `score_split` in a trial's record: `test CIDEr-D`, or `CIDEr-D` for validation."""
        return metric if self.reports_validation else f"{self.score_split} {metric}"

    def run_values(self, point: Mapping[str, object], name: str = "best") -> Values:
        """The base configuration with a point's values, before validation. `raycap run` can run it."""
        values = copy.deepcopy(self.values)
        for key, value in self.space.changes(point).items():
            set_value(values, key, value, "key")
        values["name"] = f"{self.base.name}-{self.config.name}-{name}"
        return values

    def trial_config(
        self, point: Mapping[str, object], seed: int, weights: Path | None = None, member: str = ""
    ) -> RunConfig:
        """The configuration of a trial, which captions without constraints.

        weights: the initial backbone's file, None for the base configuration's.
        member: a part of the name of the run, so that a population's members at the same point have separate runs.
        """
        trial, resources, values = self.config.trial, self.config.resources, self.run_values(point)
        values["stages"] = [stage for stage in values["stages"] if stage.get("name") in self.stages]
        if trial.epochs is not None:
            values["stages"] = [stage | {"epochs": trial.epochs} for stage in values["stages"]]
        set_values(values, trial.set, "trial.set")
        values |= {"name": f"{self.base.name}-{self.config.name}{member}", "seed": seed, "tracking": {"enabled": False}}
        workers = {
            "num_workers": resources.workers,
            "min_workers": None,
            "cpus_per_worker": resources.cpus,
            "gpus_per_worker": resources.gpus,
            "threads_per_worker": max(1, int(resources.cpus)),
            "dry_run": False,
        }
        set_values(values, {"workers": workers, "evaluation": {"constraints": None}}, "resources")
        if weights is not None:
            set_value(values, "backbone.weights", str(weights), "backbone")
        return parse_config(values)

    def without_tracker(self) -> Search:
        """The search for the processes of its trials, which need no tracker, whose URI may hold a password."""
        values = {key: value for key, value in self.values.items() if key != "tracking"}
        return Search(self.config.model_copy(update={"set": {}}), values)  # the values contain those of `set`

    def total_epochs(self) -> float:
        """The number of epochs of a trial, over all its stages."""
        return sum(stage.epochs for stage in self.trial_config({}, self.config.seeds[0]).stages)

    def identity(self, *others: str) -> str:
        """The search's name and a hash of the search, its base and `others`.

        others: the digests of data and backbone, and RESULTS_VERSION. The hash ignores the budget, the resources and
        the seeds, so that a search can resume after they change.
        """
        body = self.config.model_dump(mode="json", exclude={"budget", "resources", "seeds", "base", "set", "storage"})
        text = json.dumps([body, config_identity(self.base), *others], sort_keys=True, default=str)
        return f"{self.config.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def check(self) -> None:
        """Raises UserError for settings that do not go together, and for a choice or point that cannot be built."""
        for key in self.space.keys:
            self._check_key(key)
        for key in flatten(self.config.trial.set):
            if key.split(".")[0] in ("backbone", "features", "data"):
                raise UserError(f"trial.set.{key} cannot be set, because features are extracted once; set it under set")
        if self.config.algorithm == "grid" and math.isinf(self.space.size):
            raise UserError("algorithm grid: the space is infinite; give its ranges a step, or use random or tpe")
        if self.is_population:
            self._check_population()
        if self.config.backbone == "run" and not any(stage.train_backbone for stage in self.base.stages):
            raise UserError("backbone is run, and no stage of the base configuration trains it; set it to base")
        trains_backbone = [self.base.stage(name).train_backbone for name in self.stages]
        if trains_backbone != sorted(trains_backbone):
            raise UserError(
                f"trial.stages: {', '.join(self.stages)} need new features after the backbone was trained, and a "
                "search extracts them once; end with the stage that trains it"
            )
        data = self.base.data
        if self.score_split not in (data.val_split, *data.test_splits):
            raise UserError(
                f"score_split is {shown(self.score_split)}, which is neither data.val_split ({data.val_split}) nor one "
                f"of data.test_splits ({', '.join(data.test_splits)})"
            )
        self.trial_config({}, self.config.seeds[0])  # an error in `trial` is not that of a point
        for key, dimension in self.space.dimensions.items():
            for choice in dimension.ends():  # with the first choices of the other dimensions
                self._check_point(self.space.first() | {key: choice}, has_model=True)
        if self.space.size <= MAX_CHECKED_POINTS:
            for point in self.space.points():  # without its model, which takes 20 ms
                self._check_point(point, has_model=False)
        scheduler, key = self.config.scheduler, "every_epochs" if self.is_population else "grace_epochs"
        if scheduler is not None and (first := getattr(scheduler, key)) > self.total_epochs():
            raise UserError(
                f"scheduler.{key} = {first:g} is more than the {self.total_epochs():g} epochs of a trial; lower it or "
                "raise trial.epochs"
            )

    def _check_population(self) -> None:
        """Raises UserError for settings that population based training cannot use."""
        config = self.config
        for is_met, need in (
            (config.algorithm == "random", f"algorithm random, not {config.algorithm}"),
            (config.budget.trials is not None, "budget.trials, the size of the population"),
            (config.budget.concurrent is None, "no budget.concurrent, because all members take turns"),
            (len(config.seeds) == 1, f"one seed, found {len(config.seeds)}"),
            (config.resources.workers == 1, f"resources.workers = 1, not {config.resources.workers}"),
            (len(self.stages) == 1, f"one stage in trial.stages, found {', '.join(self.stages)}"),
        ):
            if not is_met:
                raise UserError(f"scheduler pbt needs {need}; change it, or drop the scheduler")
        for key in self.space.keys:
            if (key.startswith("model.") and not key.endswith("dropout")) or key.endswith(".ema"):
                raise UserError(
                    f"space.{key}: scheduler pbt copies weights and their averages between trials, which needs equal "
                    f"{key}; leave it out, or drop the scheduler"
                )

    def _check_point(self, point: Mapping[str, object], *, has_model: bool) -> None:
        """Builds the configurations of a point and, with `has_model`, its model."""
        try:
            config = self.trial_config(point, self.config.seeds[0])
            parse_config(self.run_values(point))  # best.yaml may get this configuration, which differs from a trial's
            if has_model:
                require_possible_model(config)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"space, at {shown(self.space.describe(point))}: {error}") from error

    def _check_key(self, key: str) -> None:
        """UserError for a key that a search must not change."""
        section, _, rest = key.partition(".")
        if section in FIXED_SECTIONS:
            place = {"seed": "seeds", "workers": "resources"}.get(section, "set")
            raise UserError(f"space.{key} cannot be searched, because all trials share {section}; use the key {place}")
        for fixed in flatten(self.config.trial.set):
            if f"{key}.".startswith(f"{fixed}.") or f"{fixed}.".startswith(f"{key}."):  # one contains the other
                raise UserError(f"space.{key}: trial.set gives {fixed} one value for all trials; leave one of them out")
        if section == "stages" and rest.partition(".")[0] not in self.stages:
            raise UserError(f"space.{key}: the stages of a trial are {', '.join(self.stages)}; change trial.stages")
        has_one_length = self.config.trial.epochs is not None or self.config.scheduler is not None
        if section == "stages" and key.endswith(".epochs") and has_one_length:
            raise UserError(f"space.{key}: trial.epochs and a scheduler need trials of one length; leave them out")


def set_values(values: Values, changes: Mapping[str, object], source: str) -> None:
    """Sets the keys of `changes`, nested or dotted, in `values`; a UserError begins with `source`."""
    for key, value in flatten(changes).items():
        set_value(values, key, value, source)


def load_search(path: Path, overrides: Sequence[str] = ()) -> Search:
    """Reads a search and its base configuration, and checks every choice; UserError for what is wrong in them."""
    values = read_values(path, overrides)
    remember_secrets(values)  # an error may quote any of them
    config = parse_section(SearchConfig, values)
    base = read_values(referenced_file(path.parent, config.base))
    set_values(base, config.set, "set")
    if config.storage is not None:
        base = merge(base, {"storage": values["storage"]})  # with its references to variables
    search = Search(config, base)
    search.check()
    return search
