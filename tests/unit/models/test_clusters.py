"""Ada-ClustFormer's clustering matrix against equations 3 to 8 as they read, in float64, and what follows from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycap.models.clustformer import ClusterMaps, Layout, arrange_regions
from tests.support.models import (
    FLOAT64,
    literal_matrices,
)

STACKINGS = ("matrix", "conditional", "none")


def exact(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def layers(count: int, width: int, axes: int, stacking: str = "matrix") -> list[ClusterMaps]:
    """Maps whose conditionals are anywhere between 0 and 1."""
    found = []
    for _ in range(count):
        maps = ClusterMaps(width, axes, stacking).double()
        for linear in maps.maps:
            torch.nn.init.normal_(linear.weight, std=1.0)
            torch.nn.init.normal_(linear.bias, mean=1.0)
        found.append(maps)
    return found


def computed(inputs: list[Tensor], maps: list[ClusterMaps]) -> list[Tensor]:
    """C (B, N, N) of every layer for grids (B, H, W, D)."""
    state: tuple[Tensor, ...] = ()
    found = []
    for x, layer in zip(inputs, maps, strict=True):
        matrix, state = layer(x, state)
        found.append(matrix)
    return found


@torch.no_grad()
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 3), st.sampled_from(STACKINGS))
@settings(max_examples=25, deadline=None)
def test_one_dimension_is_the_literal_form(seed: int, length: int, depth: int, stacking: str) -> None:
    torch.manual_seed(seed)
    maps = layers(depth, 5, 1, stacking)
    inputs = [torch.randn(2, 1, length, 5, dtype=FLOAT64) for _ in range(depth)]
    found = computed(inputs, maps)
    for image in range(2):
        expected = literal_matrices([x[image] for x in inputs], maps, stacking)
        for ours, theirs in zip(found, expected, strict=True):
            exact(ours[image], theirs)


@torch.no_grad()
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from(STACKINGS))
@settings(max_examples=20, deadline=None)
def test_two_dimensions_are_the_literal_form(seed: int, rows: int, columns: int, depth: int, stacking: str) -> None:
    torch.manual_seed(seed)
    maps = layers(depth, 4, 2, stacking)
    inputs = [torch.randn(2, rows, columns, 4, dtype=FLOAT64) for _ in range(depth)]
    found = computed(inputs, maps)
    for image in range(2):
        expected = literal_matrices([x[image] for x in inputs], maps, stacking)
        for ours, theirs in zip(found, expected, strict=True):
            exact(ours[image], theirs)


@torch.no_grad()
@pytest.mark.parametrize("stacking", STACKINGS)
def test_rows_step_by_step_are_the_matrix(stacking: str) -> None:
    torch.manual_seed(0)
    maps = layers(3, 5, 1, stacking)
    inputs = [torch.randn(4, 1, 8, 5, dtype=FLOAT64) for _ in range(3)]
    whole = computed(inputs, maps)
    sums, rows = [torch.zeros(4, 1, dtype=FLOAT64)] * 3, [torch.zeros(4, 0, dtype=FLOAT64)] * 3
    for t in range(8):
        state: tuple[Tensor, ...] = ()
        for m, layer in enumerate(maps):
            row, state, sums[m], rows[m] = layer.step(inputs[m][:, 0, t], sums[m], rows[m], state)
            exact(row, whole[m][:, t, : t + 1])


@torch.no_grad()
@given(st.integers(1, 7), st.integers(1, 7), st.sampled_from([2, 3, 4]))
@settings(max_examples=20, deadline=None)
def test_sampling_down_and_up(rows: int, columns: int, rate: int) -> None:
    """Pooling takes the mean of the members that exist. Spreading copies an entry to all pairs of its members."""
    layout = Layout(rows, columns, rate)
    x = torch.randn(2, rows * columns, 3, dtype=FLOAT64)
    pooled, grid = layout.pool(x), x.view(2, rows, columns, 3)
    down, across = -(-rows // rate), -(-columns // rate)
    assert pooled.shape == (2, down, across, 3)
    for r in range(down):
        for c in range(across):
            members = grid[:, r * rate : (r + 1) * rate, c * rate : (c + 1) * rate]
            exact(pooled[:, r, c], members.mean((1, 2)))
    small = torch.randn(2, down * across, down * across, dtype=FLOAT64)
    large = layout.spread(small)
    for a in range(rows * columns):
        for b in range(rows * columns):
            group = [n // columns // rate * across + n % columns // rate for n in (a, b)]
            exact(large[:, a, b], small[:, group[0], group[1]])


def literal_arrangement(boxes: Tensor, rows: int, columns: int) -> list[int | None]:
    """Which region stands at each cell, row by row; None for dummies."""
    centers = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in boxes.tolist()]
    order = sorted(range(len(centers)), key=lambda n: (centers[n][0], centers[n][1], n))
    grid: list[list[int | None]] = [[None] * columns for _ in range(rows)]
    for column in range(-(-len(order) // rows)):
        members = sorted(order[column * rows : (column + 1) * rows], key=lambda n: centers[n][1])
        for row, region in enumerate(members):
            grid[row][column] = region
    return [region for line in grid for region in line]


@given(st.integers(0, 10**6), st.integers(1, 11), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_regions_are_arranged_by_their_boxes(seed: int, count: int, rows: int) -> None:
    torch.manual_seed(seed)
    boxes = torch.randint(0, 4, (3, count, 4)).float()  # many ties
    lengths = torch.randint(0, count + 1, (3,))
    lengths[seed % 3] = 0  # an image of which the detector saw nothing: dummies only
    found = arrange_regions(boxes, lengths, rows)
    columns = -(-count // rows)
    x = torch.randn(3, count, 2)
    for image in range(3):
        expected = literal_arrangement(boxes[image, : lengths[image]], rows, columns)
        assert found.valid_mask[image].tolist() == [region is not None for region in expected]
        for cell, region in enumerate(expected):
            if region is not None:
                assert int(found.order[image, cell]) == region
        sequence = found.row_by_row()
        assert sequence.order[image, : lengths[image]].tolist() == [r for r in expected if r is not None]
        assert int(sequence.valid_mask[image].sum()) == lengths[image]
    assert torch.equal(found.undo(found.apply(x), count), x)
    assert torch.equal(found.row_by_row().undo(found.row_by_row().apply(x), count), x)
    without = arrange_regions(boxes, None, rows)
    assert int(without.valid_mask.sum()) == 3 * count
