"""Order, batches, schedules, losses and reward: exact against the recorded values and against slow second versions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.bench.reference_cider import PlainCiderD
from models.transform import ImageTransform
from pipeline.config.sections import DataSection, ScheduleSection, ScstSection, StageSection
from pipeline.data.dataset import read_annotations
from pipeline.data.vocabulary import SPECIALS, Vocabulary, tokenize
from pipeline.features.model_inputs import Images
from pipeline.features.store import FeatureStore, write_shard
from pipeline.scoring import ngram_keys
from pipeline.scoring.cider import CiderD
from pipeline.training import reward as rewards
from pipeline.training.batches import Batches, Captions
from pipeline.training.objectives import caption_log_probs, scst_signature, smoothed_cross_entropy
from pipeline.training.optimizer import learning_rate
from pipeline.training.reward import CaptionReward
from pipeline.training.sample_order import samples_at, seed_of
from tests.conftest import write_karpathy

GOLDEN = Path(__file__).resolve().parents[2] / "parity" / "golden"


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(samples_at(np.arange(size) + epoch * size, size, seed)) == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_cost_nothing_far_out() -> None:
    first = samples_at(np.arange(1000), 1000, 1)
    assert (first != samples_at(np.arange(1000), 1000, 2)).mean() > 0.9
    assert (first != samples_at(np.arange(1000, 2000), 1000, 1)).mean() > 0.9
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15
    far = samples_at(np.array([10**14]), 10**8, 1)
    assert 0 <= far[0] < 10**8
    assert len({seed_of(1, 2, 3), seed_of(1, 3, 2), seed_of(2, 1, 3)}) == 3


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Images, Captions]:
    root = write_karpathy(tmp_path / "set", {"train": 13})
    dataset, _ = read_annotations(DataSection(root=str(root)), root)
    keys = [f"key{number}" for number in range(13)]
    write_shard(tmp_path / "store", keys, np.arange(13, dtype=np.float32)[:, None, None].repeat(2, 1))
    table = dataset.table.set_column(4, "key", [keys])
    dataset = type(dataset)(table)
    vocabulary = Vocabulary.build(dataset.tokens(), 1)
    images = Images(dataset, FeatureStore(tmp_path / "store"), ImageTransform(8), 10**6, 1)
    return images, Captions(dataset, vocabulary)


def stage(**values: object) -> StageSection:
    base = {"name": "s", "objective": "cross_entropy", "epochs": 1, "batch_size": 4, "lr": 1e-3}
    return StageSection.model_validate(base | values)


@pytest.mark.parametrize("captions_per_image", [1, 5])
@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2])
def test_workers_share_what_one_worker_would_see(
    parts: tuple[Images, Captions], captions_per_image: int, gradient_accumulation_steps: int
) -> None:
    """The union over ranks and micro-steps is the global batch, whatever the number of workers."""
    section = stage(captions_per_image=captions_per_image)
    whole = Batches(*parts, section, seed=3, rank=0, world_size=1)
    split = section.model_copy(update={"gradient_accumulation_steps": gradient_accumulation_steps})
    for step in (0, 1, 7):
        (single,) = whole.at(step)
        pieces = [part for rank in (0, 1) for part in Batches(*parts, split, seed=3, rank=rank, world_size=2).at(step)]
        assert sorted(row for piece in pieces for row in piece.images) == sorted(single.images)
        assert {piece.global_targets for piece in pieces} == {single.global_targets}
        targets = sum(int((piece.tokens[:, 1:] != parts[1].pad).sum()) for piece in pieces)
        assert targets == single.global_targets
        for piece in pieces:
            assert torch.equal(piece.features.tokens[:, 0, 0].long(), torch.from_numpy(piece.images))
            assert piece.tokens.shape[0] == len(piece.images) * captions_per_image


def test_an_epoch_of_pairs_holds_every_caption_once(parts: tuple[Images, Captions]) -> None:
    batches = Batches(*parts, stage(batch_size=5), seed=1, rank=0, world_size=1)
    seen = Counter(tuple(row) for group in batches.stream(0, 13) for batch in group for row in batch.tokens.tolist())
    captions = Counter(tuple(row) for row in parts[1].rows(np.arange(65)).tolist())
    assert sum(seen.values()) == 65 and seen == captions


def test_a_stream_can_begin_anywhere(parts: tuple[Images, Captions]) -> None:
    batches = Batches(*parts, stage(captions_per_image=2), seed=1, rank=0, world_size=1)
    later = [group[0].tokens.tolist() for group in batches.stream(3, 6)]
    assert later == [group[0].tokens.tolist() for group in list(batches.stream(0, 6))[3:]]


def test_learning_rates_of_the_four_stages() -> None:
    for record in json.loads((GOLDEN / "lr_schedules.json").read_text()).values():
        schedule = ScheduleSection(
            name="hyperbolic",
            warmup_iterations=record["warmup_iterations"],
            decay=record["anneal_coefficient"],
            decay_every_epochs=record["anneal_every_epochs"],
            min_lr=record["min_lr"],
        )
        for iteration, expected in zip(record["iterations"], record["lr"], strict=True):
            rate = learning_rate(schedule, record["base_lr"], iteration, steps_per_epoch=record["iterations_per_epoch"])
            assert rate == pytest.approx(expected, rel=1e-12)


def test_inverse_square_root_peaks_at_the_warm_ups_end() -> None:
    schedule = ScheduleSection(name="inverse_sqrt", warmup_iterations=100)
    rates = [learning_rate(schedule, 2.0, step, steps_per_epoch=10) for step in range(400)]
    assert max(rates) == rates[99] == pytest.approx(2.0)
    assert rates[399] == pytest.approx(1.0) and rates[0] == pytest.approx(0.02)


@given(st.integers(2, 30), st.sampled_from([0.0, 0.01, 0.1, 0.5]), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_label_smoothing_is_a_divergence_from_the_smoothed_target(size: int, smoothing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, size, dtype=torch.float64, generator=generator)
    targets = torch.randint(1, size, (2, 5), generator=generator)
    targets[1, 3:] = 0
    slow = 0.0
    for row, target in zip(logits.reshape(-1, size), targets.reshape(-1), strict=True):
        if target != 0:
            goal = torch.full((size,), smoothing / (size - 1), dtype=torch.float64)
            goal[target] = 1 - smoothing
            slow += float(torch.nn.functional.kl_div(row.log_softmax(-1), goal, reduction="sum"))
    assert float(smoothed_cross_entropy(logits, targets, 0, smoothing)) == pytest.approx(slow, rel=1e-10, abs=1e-10)


def test_caption_log_probs_leave_padding_out() -> None:
    logits = torch.randn(1, 3, 7)
    tokens = torch.tensor([[1, 4, 2, 0]])
    expected = sum(float(logits[0, t].log_softmax(-1)[tokens[0, t + 1]]) for t in (0, 1))
    assert float(caption_log_probs(logits, tokens, 0)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("pairs", [1 << 22, 100], ids=["at once", "in parts"])
@pytest.mark.parametrize("max_words", [2**15 - 1, 4], ids=["15 bits", "wide"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_cider_d_equals_its_definition(max_words: int, pairs: int, data: st.DataObject) -> None:
    words = st.integers(0, 9)
    sentence = st.lists(words, min_size=0, max_size=9)
    references = data.draw(st.lists(st.lists(sentence, min_size=1, max_size=3), min_size=2, max_size=5))
    images = data.draw(st.lists(st.integers(0, len(references) - 1), min_size=1, max_size=6))
    candidates = [data.draw(st.lists(st.integers(0, 12), max_size=9)) for _ in images]
    width = max([len(candidate) for candidate in candidates] + [1])
    rows = torch.tensor([candidate + [0] * (width - len(candidate)) for candidate in candidates])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_keys, "_MAX_WORDS", max_words)
        patch.setattr(ngram_keys, "_PAIRS", pairs)
        scorer = CiderD.build(references, num_words=13)
        scores = scorer.score(rows, torch.tensor([len(c) for c in candidates]), torch.tensor(images)).tolist()
    text = [[[str(word) for word in caption] for caption in image] for image in references]
    plain = PlainCiderD(text)
    slow = [plain.score([str(w) for w in c], text[image]) for c, image in zip(candidates, images, strict=True)]
    assert scores == pytest.approx(slow, rel=1e-9, abs=1e-12)


def test_reward_baseline_and_loss_are_the_references(shared: Path) -> None:
    record = json.loads((GOLDEN / "ciderd_reward.json").read_text())
    entries = json.loads((shared / "data" / "coco_subset" / "dataset.json").read_text())["images"]
    captions = {entry["cocoid"]: [sentence["raw"] for sentence in entry["sentences"]] for entry in entries}
    references = {image: captions[image] for image in record["reference_image_ids"]}
    samples = [caption for image in record["predictions"] for caption in image]
    words = {word for caption in samples for word in caption} | set(SPECIALS)
    words |= {word for texts in references.values() for text in texts for word in tokenize(text)}
    vocabulary = Vocabulary(tuple(sorted(words)))
    width = max(map(len, samples))
    tokens = torch.tensor([[vocabulary.ids[w] for w in c] + [vocabulary.pad] * (width - len(c)) for c in samples])
    images = [image for image in record["picked_image_ids"] for _ in range(5)]
    found = CaptionReward(references, vocabulary, eos=True)(tokens, images).view(-1, 5)
    assert np.allclose(found, record["reward"], rtol=0, atol=1e-6)
    baseline = (found.sum(1, keepdim=True) - found) / 4
    assert np.allclose(baseline, record["leave_one_out_baseline"], rtol=0, atol=1e-6)
    log_probs = torch.tensor([[sum(p) for p in image] for image in record["log_probs"]], dtype=torch.float64)
    assert float(-((found - baseline) * log_probs).mean()) == pytest.approx(record["loss"], abs=1e-6)


def test_without_eos_the_end_does_not_count() -> None:
    vocabulary = Vocabulary(tuple(sorted({"a", "b", "c", *SPECIALS})))
    references = {1: ["a b", "a b c"], 2: ["c c"]}
    ended = torch.tensor([[vocabulary.sos, vocabulary.ids["a"], vocabulary.ids["b"], vocabulary.eos]])
    cut = torch.tensor([[vocabulary.sos, vocabulary.ids["a"], vocabulary.ids["b"], vocabulary.pad]])
    with_eos, without = (CaptionReward(references, vocabulary, eos=eos) for eos in (True, False))
    assert with_eos(ended, [1]) > with_eos(cut, [1])
    assert without(ended, [1]) == without(cut, [1])


def test_documents_may_be_captions() -> None:
    """The meshed-memory recipe: a word that every image has but few captions is worth something."""
    references = [[[1, 2], [3]], [[1, 4], [5]]]
    by_image, by_caption = (CiderD.build(references, caption_documents=flag) for flag in (False, True))
    rows, lengths, image = torch.tensor([[1]]), torch.tensor([1]), torch.tensor([0])
    assert by_image.score(rows, lengths, image)[0] == 0.0
    assert by_caption.score(rows, lengths, image)[0] > 0.0


def test_ground_truth_scores_high_and_its_end_counts() -> None:
    vocabulary = Vocabulary(tuple(sorted({*"abcdefgh", *SPECIALS})))
    references = {n: [f"a {x} b", f"a {x} b c"] for n, x in enumerate("cdefgh")}
    whole, cut = CaptionReward(references, vocabulary, eos=True).ground_truth or (0.0, 0.0)
    assert whole > 0.5 and cut > 0.5 and whole != cut
    plain = CaptionReward(references, vocabulary, eos=False).ground_truth
    assert plain is not None and plain[0] == plain[1]
    assert CaptionReward({1: ["a"], 2: ["b"]}, vocabulary, eos=True).ground_truth is None


def test_the_index_is_built_once_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(tuple(sorted({*"abcdefgh", *SPECIALS})))
    references = {n: [f"a {x} b", f"a {x} b c"] for n, x in enumerate("cdefgh")}
    tokens = torch.tensor([vocabulary.encode(list("acb"))])

    def score(texts: dict[int, list[str]] = references, eos: bool = True, cache: Path | None = tmp_path / "c") -> float:
        reward = CaptionReward(texts, vocabulary, eos=eos, cache=cache)
        assert reward.ground_truth is not None and reward.ground_truth[0] > 0.5
        return float(reward(tokens, [0]))

    first = score()
    assert first == score(cache=None) and first > 0
    (file,) = (tmp_path / "c").glob("*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(rewards, "_build", None)  # whoever builds now fails
        assert score() == first
    file.write_bytes(file.read_bytes()[:100])  # cut off: made again
    assert score() == first
    assert score(eos=False) != first and score({**references, 9: ["c h", "c h a"]}) != first
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 3
    monkeypatch.setattr(rewards, "_KEPT", 2)
    score({**references, 9: ["g h", "g h a"]})
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2
    (tmp_path / "file").write_text("")
    assert score(cache=tmp_path / "file") == first  # no folder can be there


def test_the_signature_says_the_setting() -> None:
    assert scst_signature(ScstSection()) == "STANDARD_wInit+Cider-D[n4,s6.0]+average[nspi5]+1.0.0"
    meshed = ScstSection(sampler="beam", baseline="mean", eos_in_reward=False, document_frequency="captions")
    assert scst_signature(meshed) != scst_signature(ScstSection())


def scst_loss(**settings: Any) -> tuple[float, torch.Tensor]:
    """The loss of a tiny Transformer on two images, and the log-probabilities (2, 3, T) of what it drew."""
    from models.base import Features
    from models.captioner import Captioner
    from models.config import ExpansionNetConfig, ModelSizes
    from models.registry import build_model
    from pipeline.training.batches import Batch
    from pipeline.training.objectives import scst_objective

    torch.manual_seed(0)
    config = ExpansionNetConfig(name="transformer", d_model=8, d_ff=8, num_heads=2, dropout=0.0)
    captioner = Captioner(build_model(config, ModelSizes(5, 6, 8, 1, 2, 0)))
    section = {"num_samples": 3, "max_length": 6} | settings
    stage = StageSection(name="s", objective="scst", epochs=1, batch_size=2, lr=1, scst=section)
    seen = []

    def reward(tokens: torch.Tensor, images: Sequence[int]) -> torch.Tensor:
        seen.append(tokens)
        return torch.arange(len(tokens)).double().square()

    batch = Batch(Features(torch.randn(2, 4, 5)), torch.zeros(2, 2, dtype=torch.int64), np.array([0, 1]), 4, 2)
    run = scst_objective(stage, reward, torch.tensor([7, 8]), 0, ("PAD", "SOS", "EOS", "a", "b", "c"))  # type: ignore[arg-type]
    loss = run(captioner, captioner, batch, torch.Generator().manual_seed(3)).loss
    tokens = seen[0]
    with torch.no_grad():
        logs = captioner(batch.features, tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    kept = tokens[:, 1:] != 0
    if settings.get("eos_in_loss") is False:
        kept &= tokens[:, 1:] != 2
    assert bool((tokens == 2).any()), "something ends"
    return float(loss.detach()), (logs * kept).sum(1).view(2, 3)


def test_the_named_settings_of_the_scst_loss() -> None:
    """Baseline, EOS in the loss and division by a fixed length, each against its definition."""
    rewards = torch.arange(6).double().square().view(2, 3)
    plain, logs = scst_loss(baseline="mean")
    expected = -((rewards - rewards.mean(1, keepdim=True)) * logs).sum() / 6
    assert plain == pytest.approx(float(expected), rel=1e-5)
    others = (rewards.sum(1, keepdim=True) - rewards) / 2
    assert scst_loss()[0] == pytest.approx(float(-((rewards - others) * logs).sum() / 6), rel=1e-5)
    assert scst_loss(baseline="mean", fixed_length=20)[0] == pytest.approx(plain / 20, rel=1e-5)
    without, words = scst_loss(baseline="mean", eos_in_loss=False)
    assert without == pytest.approx(float(-((rewards - rewards.mean(1, keepdim=True)) * words).sum() / 6), rel=1e-5)
    assert without != pytest.approx(plain, rel=1e-3)
    assert scst_loss(baseline="mean", eos_in_reward=False)[0] == pytest.approx(plain), "it is the reward's alone"
