"""Runs that learn a teacher's captions: what each stage draws, exact resume, and what run.json records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig, total_steps
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.runs.distilled import has_distilled_captions, with_distilled_captions
from raycap.pipeline.runs.folder import DISTILLED, RunFolder
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runs.run_bundle import bundle_run
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.search.trial import epochs_of
from raycap.pipeline.training.batches import Batches, CaptionTokens, num_samples
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from raycap.pipeline.training.sample_order import samples_at, seed_of
from tests.conftest import small_config
from tests.support.bundles import make_bundle
from tests.support.caption_tokens import PlainCaptionTokens
from tests.support.distillation import store_captions, stored_captions
from tests.support.runs import Killed, assert_same_weights, best_weights, with_features

CAPTIONS = ["a big red circle", "a small blue star to the left", "a zeppelin", None, "a green triangle"]
LEARNED = {"a big red circle", "a small blue star to the left", "a green triangle"}


def student(tmp_path: Path, name: str = "storage", captions_per_image: int = 2, **changes: Any) -> RunConfig:
    """A run whose teacher has a beam of 5. Its words are not those of the bundle, whose captions tests replace."""
    bundle = tmp_path / "teacher"
    if not bundle.exists():
        make_bundle(bundle)
    distill = {"model": str(bundle), "captions_per_image": captions_per_image}
    return parse_config(small_config(tmp_path / name, **changes) | {"distill": distill})


def taught(config: RunConfig) -> RunFolder:
    """The folder of a run with stored captions in place of its teacher's."""
    store_captions(config, CAPTIONS)
    return with_distilled_captions(prepare(config))


def plain_captions(folder: RunFolder, texts: dict[str, list[str | None]], captions_per_image: int) -> list[list[str]]:
    """By training image, the captions of people and those of the teacher that can be learned."""
    train = folder.dataset.split("train")
    return [
        captions + [text for text in texts.get(key, [])[:captions_per_image] if text in LEARNED]
        for captions, key in zip(train.column("captions"), train.column("key"), strict=True)
    ]


def test_the_words_of_the_captions_are_as_expected(tmp_path: Path) -> None:
    words = prepare(student(tmp_path)).vocabulary
    known = [text is not None and all(word in words.ids for word in words.tokenize(text)) for text in CAPTIONS]
    assert known == [True, True, False, False, True]


def assert_learned(folder: RunFolder, stage: StageSection, train: Dataset, texts: list[list[str]]) -> None:
    """A stage learns exactly these captions of the training images."""
    words = folder.vocabulary
    plain = PlainCaptionTokens([[words.encode(words.tokenize(text)) for text in each] for each in texts], words.pad)
    learned, every = CaptionTokens.of_stage(folder, stage, train), np.arange(len(plain.image_of))
    assert len(learned) == len(every) and np.array_equal(learned.first, plain.first), stage.name
    assert np.array_equal(learned.images_of(every), plain.image_of)
    assert torch.equal(learned.padded(every), plain.padded(every))


@pytest.mark.parametrize("captions_per_image", [1, 3])
def test_stages_of_cross_entropy_learn_both_and_scst_rewards_those_of_people(
    tmp_path: Path, captions_per_image: int
) -> None:
    config = student(tmp_path, captions_per_image=captions_per_image)
    texts = dict(store_captions(config, CAPTIONS))
    before = prepare(config)
    assert not has_distilled_captions(before)
    people = before.dataset.split("train")
    assert_learned(before, config.stages[0], people, people.column("captions"))  # as in the dry run
    folder = with_distilled_captions(before)
    assert has_distilled_captions(folder) and with_distilled_captions(folder) is folder
    expected = plain_captions(folder, texts, captions_per_image)
    for stage in config.stages:
        is_distilled = stage.objective == "cross_entropy"
        assert_learned(folder, stage, people, expected if is_distilled else people.column("captions"))
    record = folder.metadata.distilled
    assert record is not None and record.captions_per_image == captions_per_image
    assert record.captions == sum(map(len, expected)) - people.num_captions > 0
    offered = [text for each in texts.values() for text in each[:captions_per_image]]
    assert record.dropped == {
        "not finished or with UNK": offered.count(None),
        "with words that the model lacks": offered.count("a zeppelin"),
    }
    assert record.captions + sum(record.dropped.values()) == len(offered) and record.missing == 0
    assert record.name == "small" and record.model == str(tmp_path / "teacher") and "beam 5" in record.search
    assert replace(folder).metadata == folder.metadata, "run.json has its digest"
    assert folder.vocabulary == prepare(parse_config(small_config(tmp_path / "plain"))).vocabulary


def test_the_epochs_of_a_trial_count_the_captions_of_the_teacher(tmp_path: Path) -> None:
    first, *others = small_config(tmp_path)["stages"]
    config = student(tmp_path, stages=[first | {"captions_per_image": 1, "epochs": 2}, *others])
    folder = taught(config)
    stage = config.stages[0]
    steps = [(each.name, total_steps(each, num_samples(each, folder))) for each in config.stages]
    assert steps[0][1] > total_steps(stage, folder.dataset.split("train").num_captions)
    ends = [sum(each.epochs for each in config.stages[: number + 1]) for number in range(len(steps))]
    found = epochs_of(folder, [(stage.name, 0), (stage.name, steps[0][1] - 1), *steps])
    assert found[0] == (0.0, False) and found[1] == (round(2 - 2 / steps[0][1], 6), False)
    assert found[2:] == [(pytest.approx(end), end is ends[-1]) for end in ends]


@pytest.mark.parametrize("captions_per_image", [1, 2, 5])
def test_drawn_captions_are_those_of_a_plain_implementation(tmp_path: Path, captions_per_image: int) -> None:
    """Every step's captions of every worker, from the lists of people's and the teacher's captions alone."""
    config = student(tmp_path, backbone__image_size=32)
    texts = dict(store_captions(config, CAPTIONS))
    folder = with_distilled_captions(prepare(config))
    stage = config.stages[0].model_copy(update={"captions_per_image": captions_per_image})
    lists, words, seed = plain_captions(folder, texts, 2), folder.vocabulary, seed_of(config.seed, 0)
    train = folder.dataset.split("train")
    images, captions = _NoImages(train), CaptionTokens.of_stage(folder, stage, train)
    workers = [Batches(images, captions, stage, seed=seed, rank=rank, world_size=2) for rank in (0, 1)]
    pairs = [(image, caption) for image, captions in enumerate(lists) for caption in captions]
    count = len(pairs) if captions_per_image == 1 else len(lists)
    assert workers[0].num_samples == num_samples(stage, folder) == count
    for step in (0, 1, 2, 7, 40):
        positions = np.arange(stage.batch_size) + step * stage.batch_size
        samples = samples_at(positions, count, seed).tolist()
        starts = np.random.default_rng(seed_of(seed, step, 1)).integers(0, 2**31, len(samples)).tolist()
        drawn = []
        for sample, start in zip(samples, starts, strict=True):
            if captions_per_image == 1:
                drawn.append(pairs[sample][1])
            else:
                own = lists[sample]
                drawn += [own[(start + number) % len(own)] for number in range(captions_per_image)]
        batches = [worker.at(step)[0] for worker in workers]
        rows = [row for batch in batches for row in batch.tokens.tolist()]
        assert [[each for each in row if each != words.pad] for row in rows] == [
            words.encode(words.tokenize(caption)) for caption in drawn
        ]
        assert batches[0].global_targets == sum(len(words.tokenize(caption)) + 1 for caption in drawn)


class _NoImages(Images):
    """Images without pixels."""

    def __init__(self, dataset: Dataset) -> None:
        self.transform, self.count = None, len(dataset)

    def __len__(self) -> int:
        return self.count

    def load(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Any:
        return None


@pytest.mark.usefixtures("one_thread")
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages of cross entropy are killed and resumed, while the storage loses and gains captions."""
    stages = small_config(tmp_path)["stages"][:2]
    stages[0] |= {"captions_per_image": 1}
    names = tuple(stage["name"] for stage in stages)

    def run(name: str) -> tuple[RunFolder, StageJob]:
        config = student(tmp_path, name, stages=stages)
        _, features = with_features(config)
        folder = taught(config)
        return folder, StageJob(folder, names, features)

    whole, job = run("whole")
    train_stages(LocalContext("cpu"), job)
    folder, job = run("killed")
    original, broken = StageRun.step, set()

    def step(self: StageRun, number: int, batches: Any) -> Any:
        if number == 3 and self.stage.name not in broken:
            broken.add(self.stage.name)
            raise Killed
        return original(self, number, batches)

    monkeypatch.setattr(StageRun, "step", step)
    store = stored_captions(folder.config)
    for _ in range(3):
        try:
            train_stages(LocalContext("cpu"), job)
        except Killed:
            for chunk in store.chunks():
                (store.folder / chunk).delete()
            store.write(["other"], {"other": ["a big red circle"]})
    assert broken == set(names)
    plain, features = with_features(parse_config(small_config(tmp_path / "plain", stages=stages)))
    train_stages(LocalContext("cpu"), StageJob(plain, names, features))
    for name in names:
        assert_same_weights(best_weights(folder.stage(name)), best_weights(whole.stage(name)))
        ours, without = best_weights(whole.stage(name)), best_weights(plain.stage(name))
        assert any(not torch.equal(ours[key], without[key]) for key in ours), "the teacher makes a difference"


def test_a_bundle_and_its_card_name_the_teacher(tmp_path: Path) -> None:
    folder = taught(student(tmp_path, stages=small_config(tmp_path)["stages"][:1]))
    card = (bundle_run(folder) / "card.md").read_text()
    assert f"| teacher | {folder.metadata.distilled} |" in card


def test_a_damaged_file_is_taken_again_from_the_storage(tmp_path: Path) -> None:
    config = student(tmp_path)
    folder = taught(config)
    path = folder.path / DISTILLED
    content, record = path.read_bytes(), folder.metadata
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(DamagedError, match="distilled.arrow is damaged: it does not have the digest in run.json; rest"):
        folder.taught()
    folder = with_distilled_captions(folder)
    assert path.read_bytes() == content and folder.metadata == record
    path.unlink()
    store_captions(config, CAPTIONS[:2])
    with pytest.raises(DamagedError, match="the storage has other captions of small now; restore it"):
        with_distilled_captions(folder)
    assert folder.metadata == replace(folder).metadata == record


def test_too_few_captions_are_refused(tmp_path: Path) -> None:
    config = student(tmp_path)
    store, keys = stored_captions(config), prepare(config).dataset.split("train").column("key")
    store.write(keys[1:], {key: ["a big red circle"] for key in keys[1:]})
    with pytest.raises(UserError, match=r"1 of 48 training images have no captions of distill.model = .*, more than"):
        with_distilled_captions(prepare(config))
    more = student(tmp_path, "more", data__max_bad_fraction=0.05)
    stored_captions(more).write(keys[1:], {key: ["a big red circle"] for key in keys[1:]})
    record = with_distilled_captions(prepare(more)).metadata.distilled
    assert record is not None and (record.missing, record.images, record.captions) == (1, 47, 47)
    assert str(record).endswith("47 captions of 47 images; 1 images without any")
    none = student(tmp_path, "none")
    store_captions(none, ["a zeppelin", None])
    with pytest.raises(UserError, match=r"no caption of .*/teacher can be learned \(48 not .*, 48 with words"):
        with_distilled_captions(prepare(none))
    assert prepare(none).metadata.distilled is None
