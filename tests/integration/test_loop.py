"""The loop without Ray: a stage that is interrupted anywhere ends with the weights of one that was not."""

from __future__ import annotations

import gc
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raycap.models.captioner import Captioner
from raycap.pipeline.evaluation.captioning.bundle import bundle_protocol, load_bundle
from raycap.pipeline.evaluation.results import RankedCaption
from raycap.pipeline.runs.delivery import bundle_run
from raycap.pipeline.runs.folder import RunFolder, open_folder
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.runtime.processor import PrecisionTimes
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.training import dry_run as dry_run_module
from raycap.pipeline.training.batches import Batch
from raycap.pipeline.training.dry_run import dry_run
from raycap.pipeline.training.loop import NOTICE, STOPPING, StageJob, StageRun, train_stages
from raycap.pipeline.training.stage_output import StageOutput
from raycap.pipeline.training.step_metrics import DivergedError
from tests.conftest import small_config
from tests.support.runs import (
    FROZEN_STAGES,
    STAGES,
    Killed,
    assert_same_weights,
    best_weights,
    break_each_stage_once,
    prepare_run,
    run_ranks,
)

VIEWS = {"views": 2, "compute_dtype": "float32"}


def prepare_stages(storage: Path) -> tuple[RunFolder, StoragePath]:
    """A run of all stages with views of the training images.

    The last two have a penalty to their first weights, and the last one samples with dropout.
    """
    stages = small_config(storage)["stages"]
    reward = {"ciderd": 1.0, "bleu4": 0.2, "rouge_l": 0.1, "length": -0.01}
    stages[-2]["scst"] |= {"kl": 5.0, "reward": reward, "divide_by_deviation": True}
    scst = stages[-1]["scst"] | {"sampling_dropout": True, "kl": 5.0}
    stages[-1] |= {"dropout": 0.3, "drop_path": 0.2, "scst": scst}
    return prepare_run(storage, stages=stages, features=VIEWS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder, store = prepare_stages(tmp_path_factory.mktemp("undisturbed"))
    train_stages(LocalContext("cpu"), StageJob(folder, STAGES, store))
    return folder


@pytest.mark.parametrize("stop", [1, pytest.param(2, marks=pytest.mark.proof), 3])
def test_interrupted_anywhere_the_weights_are_bit_identical(
    tmp_path: Path, undisturbed: RunFolder, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage is broken off after `stop` steps and begun again in a new object, in both objectives."""
    folder, store = prepare_stages(tmp_path)
    job = StageJob(folder, STAGES, store)
    broken = break_each_stage_once(monkeypatch, stop)
    for _ in range(len(STAGES) + 1):
        try:
            train_stages(LocalContext("cpu"), job)
        except Killed:
            continue
    assert broken == set(STAGES)
    for stage in STAGES:
        assert_same_weights(best_weights(folder.stage(stage)), best_weights(undisturbed.stage(stage)))
        steps = [
            entry["step"]
            for entry in read_journal(folder.journal)
            if entry["stage"] == stage and entry["kind"] == "train"
        ]
        assert steps == sorted(set(steps)), "a step that was done twice stands in the journal once"


def test_a_slow_disk_loses_no_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each validation is the best so far. Its checkpoint reaches the disk late, after training has changed the weights.

    Best weights and checkpoints on disk are those of the validation.
    """
    stages = [stage for stage in small_config(tmp_path)["stages"] if stage["name"] in FROZEN_STAGES]
    for stage in stages:
        stage |= {"validate_every_epochs": 0.2}
    validated: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in FROZEN_STAGES}
    changed_meanwhile = []

    def score(self: StageRun, captions: dict[int, str]) -> float:
        weights = self.captioner.model.state_dict()
        copies = {f"model.safetensors:{key}": value.clone() for key, value in weights.items()}
        validated[self.stage.name][self.progress.step] = copies
        return float(sum(map(len, validated.values())))

    write, step = StageOutput._write_checkpoint, StageRun.step
    stepped: dict[tuple[str, int], threading.Event] = {}

    def counted_step(self: StageRun, number: int, batches: list[Batch]) -> dict[str, float]:
        metrics = step(self, number, batches)
        stepped.setdefault((self.stage.name, number), threading.Event()).set()
        return metrics

    def late(self: StageOutput, state: dict[str, Any], record: dict[str, Any]) -> None:
        next_step = stepped.setdefault((self.stage, record["step"]), threading.Event())
        changed_meanwhile.append(next_step.wait(timeout=2))  # a stage's last checkpoint has no next step
        write(self, state, record)
        saved = torch.load(self.path / f"step-{record['step']}" / "state.pt", weights_only=True)["captioner"]
        assert_same_weights(
            {key.replace("model.", "model.safetensors:", 1): value for key, value in saved.items()},
            validated[self.stage][record["step"]],
        )

    monkeypatch.setattr(StageRun, "_score", score)
    monkeypatch.setattr(StageRun, "step", counted_step)
    monkeypatch.setattr(StageOutput, "_write_checkpoint", late)
    folder, store = prepare_run(tmp_path, stages=stages)
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    assert changed_meanwhile.count(False) == len(FROZEN_STAGES), "a checkpoint was written before the next step"
    for name in FROZEN_STAGES:
        result = folder.result(name)
        assert result is not None and result.best_step == result.steps and len(validated[name]) >= 3
        assert_same_weights(best_weights(folder.stage(name)), validated[name][result.steps])


def test_stages_follow_each_other(undisturbed: RunFolder) -> None:
    """The loss falls, end-to-end stages change the backbone, frozen ones do not have one."""
    losses = [
        entry["loss"]
        for entry in read_journal(undisturbed.journal)
        if entry["stage"] == "xe_finetune" and entry["kind"] == "train"
    ]
    assert losses[-1] < losses[0]
    initial = load_file(undisturbed.path / "init" / "backbone.safetensors")
    assert not any(key.startswith("backbone") for key in best_weights(undisturbed.stage("xe_frozen")))
    tuned = best_weights(undisturbed.stage("xe_finetune"))
    assert any(not torch.equal(value, tuned[f"backbone.safetensors:{key}"]) for key, value in initial.items())
    rewarded = [entry for entry in read_journal(undisturbed.journal) if "reward_bleu4" in entry]
    assert rewarded and {entry["stage"] for entry in rewarded} == {"scst_frozen"}
    assert rewarded[-1].keys() >= {"kl", "reward_ciderd", "reward_rouge_l", "reward_length"} and rewarded[-1]["kl"] > 0
    for stage in STAGES:
        result = undisturbed.result(stage)
        assert result and result.steps > 0 and not list(undisturbed.stage(stage).glob("step-*"))
    predictions = json.loads((undisturbed.stage("xe_frozen") / "predictions-val.json").read_text())
    assert len(predictions) == len(undisturbed.dataset.split("val"))


@pytest.mark.parametrize(
    ("deliver", "scores", "model", "backbone"),
    [
        ("last", (0.3, 0.6, 0.5, 0.45), "scst_frozen", "xe_finetune"),  # keep_if_better drops the last stage
        ("best", (0.6, 0.3, 0.5, 0.55), "xe_frozen", "init"),
    ],
)
def test_a_run_delivers_its_best_stage_or_its_last_one(
    deliver: str, scores: tuple[float, ...], model: str, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = prepare_run(tmp_path, deliver=deliver)
    by_stage = dict(zip(STAGES, scores, strict=True))
    monkeypatch.setattr("raycap.pipeline.training.loop.caption_images", lambda *_: {})
    monkeypatch.setattr(StageRun, "_score", lambda self, _: by_stage[self.stage.name])
    train_stages(LocalContext("cpu"), StageJob(folder, STAGES, store))
    assert folder.delivered() == folder.config.stage(model)
    start = folder.weights_before(folder.config.stages[3], "model")
    assert start.is_relative_to(folder.stage("scst_frozen")), "a stage starts from the stage before in either case"
    bundle = load_bundle(bundle_run(folder))
    assert bundle_protocol(bundle.config).objective == folder.config.stage(model).objective
    for part, name in (("model", model), ("backbone", backbone)):
        file = folder.delivered_weights(part)
        assert name in file.relative_to(folder.path).parts, part
        weights = getattr(bundle.captioner, part).state_dict()
        assert all(torch.equal(weights[key], value) for key, value in load_file(file).items()), part


def test_a_collapse_ends_the_stage_and_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCST stops when its validation falls.

    If the stage is broken off before its result is written, the next attempt ends it in the same way."""
    stages = small_config(tmp_path)["stages"]
    stages[2] |= {"epochs": 4, "validate_every_epochs": 1}
    folder, store = prepare_run(tmp_path, stages=stages)
    monkeypatch.setattr(StageRun, "_score", lambda self, _: 0.1 if self.stage.objective == "scst" else 1.0)
    job = StageJob(folder, STAGES[:3], store)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        original = StageRun._finish

        def finish(self: StageRun) -> None:
            if self.stage.objective == "scst":
                raise Killed
            original(self)

        patch.setattr(StageRun, "_finish", finish)
        train_stages(LocalContext("cpu"), job)
    train_stages(LocalContext("cpu"), job)
    result = folder.result("scst_frozen")
    assert result and "fell to 0.1" in result.ended_early and not result.kept and result.steps == 6
    assert folder.delivered_weights("model").parent.parent.name == "xe_finetune"


@pytest.mark.parametrize(
    "changes",
    [{"checkpoint_every_steps": 2}, {"checkpoint_every_steps": 2, "validate_every_epochs": 0.5}],
    ids=["checkpoint", "validation"],
)
def test_a_loss_that_a_gpu_would_report_late_is_never_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The losses are read before the next checkpoint or validation, and the error names the step."""
    stages = [small_config(tmp_path)["stages"][0] | {"epochs": 4} | changes]
    folder, store = prepare_run(tmp_path, stages=stages, workers__log_every_steps=1000)
    run = StageRun(LocalContext("cpu"), folder, folder.config.stages[0], StageJob(folder, STAGES[:1], store))
    run.finite.defers, original = True, run.step

    def step(number: int, batches: list[Batch]) -> dict[str, torch.Tensor]:
        if number == 2:
            with torch.no_grad():
                next(iter(run.captioner.model.parameters())).fill_(float("nan"))
        return original(number, batches)

    run.step = step  # type: ignore[method-assign]
    with pytest.raises(DivergedError, match="the loss is nan in stage xe_frozen, step 2, rank 0"):
        run.run()
    run.output.wait()
    saved = sorted(path.name for path in folder.stage("xe_frozen").glob("step-*"))
    assert saved == ["step-2"]
    weights = torch.load(folder.stage("xe_frozen") / "step-2" / "state.pt")["captioner"]
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert all(entry["step"] <= 2 for entry in read_journal(folder.journal) if entry["kind"] == "validation")


@pytest.mark.parametrize(("bfloat16", "warns"), [(17.0, True), (1.0, False)])
def test_bfloat16_that_is_slow_on_this_processor_is_reported_before_the_first_step(
    tmp_path: Path, bfloat16: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = PrecisionTimes("CPU", 1.0, bfloat16)
    monkeypatch.setattr("raycap.pipeline.runtime.processor.measure_precisions", lambda *_: times)
    stages = [small_config(tmp_path)["stages"][0] | {"precision": "bfloat16"}]
    folder, store = prepare_run(tmp_path, stages=stages)
    train_stages(LocalContext("cpu"), StageJob(folder, ("xe_frozen",), store))
    entries = read_journal(folder.journal)
    before = [entry["text"] for entry in entries[: [entry["kind"] for entry in entries].index("train")]]
    assert (
        "stages.xe_frozen.precision is bfloat16, in which this processor takes 17.0 times as long for a product; set "
        "it to float32" in before
    ) == warns and len(before) == 1 + warns


def test_a_gradient_that_is_not_finite_is_never_applied(tmp_path: Path) -> None:
    folder, store = prepare_run(tmp_path)
    run = StageRun(LocalContext("cpu"), folder, folder.config.stages[0], StageJob(folder, STAGES[:1], store))
    parameter = next(iter(run.captioner.model.parameters()))
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(DivergedError, match="gradient norm"):
        run.run()
    assert all(torch.isfinite(value).all() for value in run.captioner.state_dict().values())


def test_workers_that_were_replaced_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a stage, their driver starts other workers, which continue from the last checkpoint."""
    folder, store = prepare_run(tmp_path)
    job = StageJob(folder, STAGES[:1], store, driver_token=folder.new_token("driver_token"))
    step = StageRun.step

    def cut_off(run: StageRun, number: int, batches: list[Batch]) -> dict[str, float]:
        if number == 2:
            folder.new_token("worker_group_token")
        return step(run, number, batches)

    monkeypatch.setattr(StageRun, "step", cut_off)
    with pytest.raises(RuntimeError, match="other workers train"):
        train_stages(LocalContext("cpu"), job)
    monkeypatch.undo()
    assert folder.result(STAGES[0]) is None and not list(folder.stage(STAGES[0]).glob("best-*"))
    train_stages(LocalContext("cpu"), job)
    assert folder.result(STAGES[0]) is not None


class NoticedContext(LocalContext):
    """A worker that gets a notice before step `notice_at`. If this is None, it gets no notice."""

    def __init__(self, notice_at: int | None = None) -> None:
        super().__init__("cpu")
        self.notice_at, self.num_asked = notice_at, 0  # the loop asks once per step

    def has_notice(self) -> bool:
        self.num_asked += 1
        return self.notice_at is not None and self.num_asked > self.notice_at


def run_until(run: StageRun, last: int) -> None:
    """Runs a stage and breaks it off before the step `last`, when its last checkpoint is on disk."""
    step = run.step

    def cut_off(number: int, batches: list[Batch]) -> dict[str, float]:
        if number == last:
            run.output.wait()
            raise Killed
        return step(number, batches)

    run.step = cut_off  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run.run()


def noticed_steps(folder: RunFolder) -> list[int]:
    """The steps after which the journal has a notice."""
    return [entry["step"] for entry in read_journal(folder.journal) if entry.get("text") == NOTICE]


class StoppedContext(LocalContext):
    """A worker that must stop from the step with the number `stop_at` on."""

    def __init__(self, stop_at: int) -> None:
        super().__init__("cpu")
        self.stop_at, self.num_asked = stop_at, 0  # the loop asks once per step

    def must_stop(self) -> bool:
        self.num_asked += 1
        return self.num_asked > self.stop_at


def test_a_stop_saves_the_step_and_ends(tmp_path: Path, undisturbed: RunFolder) -> None:
    """The first stop is in the middle of a stage. The second one is at its last step: this step is validated, and the
    next stage stops at its first step. Then training runs to the end."""
    stages = [stage | {"checkpoint_every_steps": 500} for stage in small_config(tmp_path)["stages"]]
    folder, store = prepare_run(tmp_path, stages=stages, features=VIEWS)
    job = StageJob(folder, STAGES[:2], store)
    train_stages(StoppedContext(1), job)
    assert [path.name for path in folder.stage(STAGES[0]).glob("step-*")] == ["step-2"]
    assert [entry["step"] for entry in read_journal(folder.journal) if entry.get("text") == STOPPING] == [2]
    train_stages(StoppedContext(undisturbed.result(STAGES[0]).steps - 3), job)
    assert folder.result(STAGES[0]) is not None and folder.result(STAGES[1]) is None
    assert [path.name for path in folder.stage(STAGES[1]).glob("step-*")] == ["step-1"]
    train_stages(LocalContext("cpu"), job)
    for name in STAGES[:2]:
        assert_same_weights(best_weights(folder.stage(name)), best_weights(undisturbed.stage(name)))


def one_rank(rank: int, world_size: int, cases: list[tuple[Path, Path, str, Path]], out: Path) -> None:
    """One of several processes: real optimizer steps under DDP over gloo, in float64.

    Of three, the last one then gets a notice in the first case's stage, which is broken off.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=world_size)
    context = NoticedContext(notice_at=1 if rank == world_size - 1 else None)
    context.world_rank, context.world_size = rank, world_size
    for folder, store, name, place in cases:
        save_steps(context, folder, store, name, place / f"{rank}.pt")
    if world_size == 3:
        path, store, name, _ = cases[0]
        run_folder = open_folder(path)
        job = StageJob(run_folder, STAGES, store)
        run_until(StageRun(context, run_folder, run_folder.config.stage(name), job), last=4)
    gc.collect()  # the stages' reducers, which otherwise keep the group's threads until the interpreter has ended
    dist.destroy_process_group()


def save_steps(context: LocalContext, folder: Path, store: Path, name: str, out: Path) -> None:
    run_folder = open_folder(folder)
    run = StageRun(context, run_folder, run_folder.config.stage(name), StageJob(run_folder, STAGES, store))
    numbers = [run.step(step, run.batches.at(step)) for step in range(20)]
    metrics = ([entry[key].item() for entry in numbers] for key in ("gradient_norm", "loss"))
    torch.save([run.captioner.state_dict(), *metrics], out)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Twenty optimizer steps of two DDP processes and of one, captions of different lengths.

    In float64 the weights are equal up to rounding. In float32, with the paper's RAdam, the losses are equal. This also
    holds if gradients are exchanged in bfloat16.
    """
    cases = []
    for name, gradient_accumulation_steps, precision in (
        ("xe_frozen", 2, "float64"),
        ("xe_finetune", 1, "float64"),
        ("xe_frozen", 1, "float32"),
        ("xe_frozen", 1, "bfloat16 gradients"),
        ("xe_finetune", 1, "options float64"),
    ):
        place = tmp_path / f"{name}-{gradient_accumulation_steps}-{precision}"
        stages = small_config(place)["stages"]
        for stage in stages:
            stage |= {
                "dropout": 0.0,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "precision": "float64" if precision.endswith("float64") else "float32",
                "gradient_dtype": "bfloat16" if "gradients" in precision else "float32",
            }
            if precision.endswith("float64"):  # RAdam would turn the rounding of zeros into steps
                stage["optimizer"] = {"name": "adam", "eps": 1e-3}
            if precision.startswith("options") and stage["name"] == name:
                stage |= OPTIONS | {"optimizer": OPTIONS["optimizer"] | {"name": "adam", "eps": 1e-3}}
        folder, store = prepare_run(place, stages=stages)
        save_steps(LocalContext("cpu"), folder.path, store, name, place / "one.pt")
        cases.append((folder.path, store, name, place))
    run_ranks(one_rank, 2, 2, cases, tmp_path)
    for *_, place in cases:
        one, norms, losses = torch.load(place / "one.pt")
        (two, norms_of_two, first), (_, _, second) = (torch.load(place / f"{rank}.pt") for rank in (0, 1))
        exact, rounds = place.name.endswith("float64"), place.name.endswith("gradients")
        shares = [x + y for x, y in zip(first, second, strict=True)]  # each rank's loss is its share of the global one
        assert len(losses) == 20 and shares == pytest.approx(losses, rel=1e-9 if exact else 1e-4)
        if rounds:
            halves = [norm / 2 for norm in norms]
            assert norms_of_two == pytest.approx(halves, rel=1e-2) and norms_of_two != pytest.approx(halves, rel=1e-5)
        if not exact:
            continue
        assert norms_of_two == pytest.approx([norm / 2 for norm in norms], rel=1e-6), "a rank's half of a sum"
        for key in one:
            assert torch.allclose(one[key], two[key], rtol=1e-9, atol=1e-9), key


def test_three_processes_with_unequal_shares_train_as_one(tmp_path: Path) -> None:
    """Optimizer steps on 7 samples in 2 micro-steps and on 8 images with SCST, which 3 processes share unequally.

    A notice that only the last rank gets makes rank 0 save a checkpoint.
    """
    cases = []
    changes: dict[str, dict[str, Any]] = {
        "xe_frozen": {"batch_size": 7, "gradient_accumulation_steps": 2, "checkpoint_every_steps": 500},
        "scst_frozen": {"scst": {"num_samples": 3, "max_length": 10, "sampler": "beam"}, "ema": 0.5},
    }
    for name in changes:
        place = tmp_path / name
        common = {"dropout": 0.0, "precision": "float64", "optimizer": {"name": "adam", "eps": 1e-3}}
        stages = [stage | common | changes.get(stage["name"], {}) for stage in small_config(place)["stages"]]
        folder, store = prepare_run(place, stages=stages)
        save_steps(LocalContext("cpu"), folder.path, store, name, place / "one.pt")
        cases.append((folder.path, store, name, place))
    run_ranks(one_rank, 3, 3, cases, tmp_path)
    for *_, place in cases:
        weights, norms, losses = torch.load(place / "one.pt")
        ranks = [torch.load(place / f"{rank}.pt") for rank in range(3)]
        assert [sum(shares) for shares in zip(*(rank[2] for rank in ranks), strict=True)] == pytest.approx(losses)
        for rank_weights, rank_norms, _ in ranks:
            assert [3 * norm for norm in rank_norms] == pytest.approx(norms, rel=1e-6)
            for key in weights:
                assert torch.allclose(weights[key], rank_weights[key], rtol=1e-9, atol=1e-9), key
    noticed = open_folder(cases[0][0])
    assert [path.name for path in noticed.stage("xe_frozen").glob("step-*")] == ["step-2"]
    assert noticed_steps(noticed) == [2]


def test_validations_score_captions_as_the_evaluation_does(tmp_path: Path) -> None:
    """With `collapse_repeats`, words are collapsed before the score that chooses weights and ends stages."""
    scores = []
    for collapses in (False, True):
        place = tmp_path / str(collapses)
        folder, store = prepare_run(place, evaluation__collapse_repeats=collapses)
        run = StageRun(LocalContext("cpu"), folder, folder.config.stage(STAGES[0]), StageJob(folder, STAGES, store))
        vocabulary = run.vocabulary
        best = {}
        for image, captions in folder.dataset.split(folder.config.data.val_split).references().items():
            ids = vocabulary.encode(vocabulary.tokenize(captions[0]))
            doubled = [ids[0], *(each for each in ids[1:-1] for _ in range(2)), ids[-1], vocabulary.pad, vocabulary.pad]
            best[image] = RankedCaption(captions[0], 0.0, ids=tuple(doubled))
        plain = {image: replace(each, ids=tuple(dict.fromkeys(each.ids))) for image, each in best.items()}
        scores.append((run._score(best), run._score(plain)))
        run.output.close()
    assert scores[0][0] < 0.5 * scores[0][1] and scores[1][0] > 0.9 * scores[0][1]


def test_an_average_of_the_weights_is_validated_and_kept(tmp_path: Path) -> None:
    """Compared with an average that is computed beside the training."""
    decay, stages = 0.6, [stage | {"ema": 0.6} for stage in small_config(tmp_path)["stages"]]
    folder, store = prepare_run(tmp_path / "a", stages=stages)
    job, stage = StageJob(folder, STAGES, store), folder.config.stage(STAGES[0])
    run = StageRun(LocalContext("cpu"), folder, stage, job)
    expected = {name: each.detach().clone() for name, each in run.captioner.named_parameters()}
    for step in range(4):
        run.step(step, run.batches.at(step))
        d = min(decay, (1 + step) / (10 + step))
        weights = dict(run.captioner.named_parameters())
        expected = {name: d * value + (1 - d) * weights[name].detach() for name, value in expected.items()}
    assert run.average is not None
    raw = {name: each.detach().clone() for name, each in run.captioner.named_parameters()}
    with run.average.in_use():
        for name, each in run.captioner.named_parameters():
            assert torch.allclose(each, expected[name], rtol=1e-5, atol=1e-7), name
            assert raw[name].std() == 0 or not torch.equal(each, raw[name]), name
    assert all(torch.equal(each, raw[name]) for name, each in run.captioner.named_parameters())
    run.output.close()


OPTIONS: dict[str, Any] = {
    "freeze": ["model.token_embedding", "backbone.swin.layers.0.blocks.?.norm1"],
    "schedule": {"name": "cosine", "warmup_iterations": 2, "min_lr": 1e-6},
    "optimizer": {"name": "adamw", "weight_decay": 0.1, "decayed_weights": "linear", "layer_decay": 0.5,
                  "backbone_lr_factor": 0.3},
}  # fmt: skip


def test_with_all_options_a_stage_is_resumed_bit_identically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for name in ("whole", "broken"):
        stages = small_config(tmp_path)["stages"]
        stages[1] |= OPTIONS | {"ema": 0.9, "max_grad_norm": None, "max_grad_value": 0.1, "checkpoint_every_steps": 1}
        folder, store = prepare_run(tmp_path / name, stages=stages[1:2])
        if name == "broken":
            break_each_stage_once(monkeypatch, 2)
            with pytest.raises(Killed):
                train_stages(LocalContext("cpu"), StageJob(folder, STAGES[1:2], store))
        train_stages(LocalContext("cpu"), StageJob(folder, STAGES[1:2], store))
        weights.append(best_weights(folder.stage(STAGES[1])))
    assert_same_weights(*weights)
    rates = [entry["lr"] for entry in read_journal(folder.journal) if entry["kind"] == "train"]
    base, count = stages[1]["lr"], len(rates)
    cosine = [1e-6 + (base - 1e-6) * (1 + math.cos(math.pi * part / (count - 2))) / 2 for part in range(count - 1)]
    assert count > 3 and rates == pytest.approx([base / 2, *cosine])
    for part in ("model", "backbone"):
        initial = load_file(folder.path / "init" / f"{part}.safetensors")
        same = {key for key, value in initial.items() if torch.equal(value, weights[0][f"{part}.safetensors:{key}"])}
        frozen = {
            key for key in initial if key.startswith("token_embedding.") or ("layers.0" in key and "norm1" in key)
        }
        assert frozen and frozen <= same and len(same) < len(initial) / 2


def test_a_dry_run_names_the_remedy_where_the_memory_does_not_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(*_: Any) -> Captioner:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dry_run_module, "stage_captioner", limited)
    folder, _ = prepare_run(tmp_path)
    errors = {result.stage: result.error or "" for result in dry_run(folder)}
    assert all(f"memory; raise stages.{name}.gradient_accumulation_steps" in text for name, text in errors.items())
    trained = {stage.name for stage in folder.config.stages if stage.train_backbone}
    assert {name for name, text in errors.items() if "set backbone.gradient_checkpointing" in text} == trained
