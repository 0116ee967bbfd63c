"""The order of shards: every sample once per epoch, as a slow program deals them, from a bounded number of shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycap.pipeline.training import sample_order
from raycap.pipeline.training.batches import share
from raycap.pipeline.training.sample_order import ShardOrder, ShardSamples, _permute, mix, samples_at, seed_of

sizes_of_shards = st.lists(st.integers(1, 9), min_size=1, max_size=25)
batch_sizes, worlds, steps = st.integers(1, 12), st.integers(1, 5), st.integers(1, 3)
buffers, seeds = st.floats(0.01, 1), st.integers(0, 2**40)


def seeded(epoch_seed: int, number: int, tag: int) -> int:
    return int(mix(np.array([number], np.uint64) ^ np.uint64(seed_of(epoch_seed, tag)))[0])


def permuted(items: list[int], seed: int) -> list[int]:
    return [items[int(_permute(np.array([place], np.uint64), len(items), seed)[0])] for place in range(len(items))]


def dealt(
    sizes: list[int], batch_size: int, accumulation: int, world: int, buffer: float, seed: int, epoch: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """The samples of an epoch one after another, the worker of each, and the workers' unshuffled parts.

    It lays out the whole epoch, shuffles lists, and deals from them.
    """
    total, num_shares = sum(sizes), world * accumulation
    owners = [0] * batch_size
    for number in range(num_shares):
        for place in range(batch_size)[share(batch_size, number, num_shares)]:
            owners[place] = number % world
    owner = [owners[position % batch_size] for position in range(epoch * total, (epoch + 1) * total)]
    epoch_seed, begins = seed_of(seed, epoch), np.cumsum([0, *sizes])
    line: list[int] = []
    for shard in permuted(list(range(len(sizes))), epoch_seed):
        line += permuted(list(range(begins[shard], begins[shard + 1])), seeded(epoch_seed, shard, 3))
    parts, shuffled, start = [], [], 0
    for worker in range(world):
        part = line[start : start + owner.count(worker)]
        window = max(1, int(buffer * len(part) / 2))
        once, twice = list[int](), list[int]()
        for first in range(0, len(part), window):
            once += permuted(part[first : first + window], seeded(epoch_seed, start + first, 1))
        for first in range(-(window // 2), len(part), window):
            begin = max(0, first)
            if begin < min(first + window, len(part)):
                twice += permuted(once[begin : first + window], seeded(epoch_seed, start + begin, 2))
        parts.append(part)
        shuffled.append(iter(twice))
        start += len(part)
    return [next(shuffled[worker]) for worker in owner], owner, parts


@given(sizes_of_shards, batch_sizes, steps, worlds, buffers, seeds, st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_an_epoch_is_dealt_as_by_a_slow_program(
    sizes: list[int], batch_size: int, accumulation: int, world: int, buffer: float, seed: int, epoch: int
) -> None:
    total = sum(sizes)
    order = ShardOrder(np.array(sizes), batch_size, accumulation, buffer, seed)
    found = order.samples_at(np.arange(epoch * total, (epoch + 1) * total), lambda _: world).tolist()
    assert sorted(found) == list(range(total)), "every sample once"
    assert found == dealt(sizes, batch_size, accumulation, world, buffer, seed, epoch)[0]


@given(sizes_of_shards, batch_sizes, steps, worlds, buffers, seeds, st.integers(0, 100))
@settings(max_examples=80, deadline=None)
def test_a_worker_needs_few_shards_at_a_time(
    sizes: list[int], batch_size: int, accumulation: int, world: int, buffer: float, seed: int, epoch: int
) -> None:
    """At a step it reads from the shards of 2 w consecutive samples of its part, and later ones without a gap.

    w is the window's size. Between a shard's first and last use, `shards_at` names it in each step.
    """
    total = sum(sizes)
    order = ShardOrder(np.array(sizes), batch_size, accumulation, buffer, seed)
    samples, owner, parts = dealt(sizes, batch_size, accumulation, world, buffer, seed, epoch)
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    for worker in range(world):
        window = max(1, int(buffer * len(parts[worker]) / 2))
        own = [place for place in range(total) if owner[place] == worker]
        used = [int(shard_of[samples[place]]) for place in own]
        in_line = shard_of[parts[worker]]
        most = max((len(set(in_line[at : at + 2 * window])) for at in range(len(own))), default=0)
        for number, place in enumerate(own):
            is_open = {shard for shard in used[: number + 1] if shard in used[number:]}
            needed = order.shards_at(np.array([epoch * total + place]), lambda _: world).tolist()
            assert used[number] in is_open <= set(needed) and len(set(needed)) == len(needed) <= most


def test_workers_read_disjoint_shards_except_at_the_cuts() -> None:
    sizes, world = np.full(40, 7), 4
    order = ShardOrder(sizes, 8, 1, 0.3, seed=1)
    samples = order.samples_at(np.arange(280), lambda _: world)
    owner = np.arange(280) % 8 // 2
    readers = [set((samples[owner == worker] // 7).tolist()) for worker in range(world)]
    assert sum(map(len, readers)) <= 40 + world - 1
    assert max(map(len, readers)) <= 11, "equal parts"


def test_worlds_of_epochs_decide_their_orders_alone() -> None:
    """A step across two epochs has the order of each, and a world size the samples of no other epoch."""
    order = ShardOrder(np.full(30, 5), 20, 1, 0.2, seed=4)
    begun = {0: 3, 1: 2, 2: 3}
    mixed = order.samples_at(np.arange(450), lambda epoch: begun[epoch])
    for epoch, world in begun.items():
        alone = order.samples_at(np.arange(epoch * 150, (epoch + 1) * 150), lambda _: world)  # noqa: B023
        assert mixed[epoch * 150 : (epoch + 1) * 150].tolist() == alone.tolist()
    assert (mixed[:150] != order.samples_at(np.arange(150), lambda _: 2)).mean() > 0.8
    assert (mixed[:150] != mixed[300:]).mean() > 0.8


def test_a_buffer_mixes_what_is_near() -> None:
    """A larger buffer moves samples farther from their shards; with a small one, shards still come in random order."""
    sizes = np.full(100, 10)
    for buffer, low, high in ((0.02, 0, 12), (0.5, 100, 400)):
        order = ShardOrder(sizes, 10, 1, buffer, seed=2)
        samples = order.samples_at(np.arange(1000), lambda _: 1)
        by_shard = [np.flatnonzero(samples // 10 == shard) for shard in range(100)]
        assert low <= np.mean([np.ptp(places) for places in by_shard]) - 9 <= high
        first = np.argsort([places.mean() for places in by_shard])
        assert abs(np.corrcoef(first, np.arange(100))[0, 1]) < 0.4


def test_the_order_is_as_recorded() -> None:
    """Another order would change every run of it."""
    order = ShardOrder(np.array([3, 4, 2, 3]), 4, 1, 0.8, seed=7)
    recorded = [3, 5, 0, 9, 4, 6, 10, 8, 1, 2, 11, 7, 11, 10, 2, 1, 8, 9, 4, 6, 0, 7, 3, 5]
    assert order.samples_at(np.arange(24), lambda _: 2).tolist() == recorded


def test_a_far_position_costs_what_the_first_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have one entry per shard, and a position of a large store takes no more of the permutations."""
    order, evaluations = ShardOrder(np.full(1000, 10**9), 64, 1, 0.1, seed=3), list[int]()
    order.samples_at(np.array([0]), lambda _: 8)  # the epoch's tables
    original = sample_order._permute

    def counted(values: np.ndarray, size: int | np.ndarray, seed: int | np.ndarray) -> np.ndarray:
        evaluations.append(len(values))
        return original(values, size, seed)

    monkeypatch.setattr(sample_order, "_permute", counted)
    found = order.samples_at(np.arange(5 * 10**11, 5 * 10**11 + 64), lambda _: 8)
    assert len(set(found.tolist())) == 64 and sum(evaluations) == 3 * 64
    assert order.table_bytes() < 10**5


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_samples_are_numbered_shard_by_shard(image_shards: list[int], data: st.DataObject) -> None:
    """Images or captions of equal shards have consecutive numbers; shards come in the order of the data set."""
    counts = data.draw(st.lists(st.integers(0, 4), min_size=len(image_shards), max_size=len(image_shards)))
    first = np.cumsum([0, *counts])
    by_appearance = list(dict.fromkeys(image_shards))
    for captions in (None, first):
        numbered = ShardSamples(np.array(image_shards), captions)
        expected = [
            (shard, sample)
            for shard in by_appearance
            for image, of_image in enumerate(image_shards)
            if of_image == shard
            for sample in ([image] if captions is None else range(first[image], first[image + 1]))
        ]
        assert numbered.shards.tolist() == by_appearance
        assert numbered.sizes.tolist() == [sum(of == shard for of, _ in expected) for shard in by_appearance]
        samples = numbered.samples(np.arange(len(expected)))
        assert samples.tolist() == [sample for _, sample in expected]


def test_samples_of_contiguous_shards_need_no_table() -> None:
    numbered = ShardSamples(np.repeat([5, 2, 9], 4), np.arange(13) * 5)
    assert numbered._images is None and numbered.samples(np.arange(60)).tolist() == list(range(60))


def test_one_buffer_of_all_is_still_another_order_than_that_of_samples() -> None:
    order = ShardOrder(np.full(10, 10), 5, 1, 1.0, seed=1)
    assert order.samples_at(np.arange(100), lambda _: 1).tolist() != samples_at(np.arange(100), 100, 1).tolist()
