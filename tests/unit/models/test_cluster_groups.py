"""Clusters that can be shown: runs of words, groups of cells, their colors, and the pictures."""

from __future__ import annotations

import torch

from raycap.models.base import Features
from raycap.models.captioner import build_model
from raycap.models.clustformer import ClustFormer
from raycap.models.config import ClustFormerConfig, ModelSizes
from raycap.models.explain.cluster_groups import find_clusters, grid_groups, sequence_groups

SIZES = ModelSizes(feature_width=6, vocabulary_size=11, max_positions=9, sos=0, eos=1, pad=2)
SMALL = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_encoder_layers": 3, "num_decoder_layers": 2}


def matrix(size: int, *pairs: tuple[int, int, float]) -> torch.Tensor:
    found = torch.eye(size)
    for one, other, value in pairs:
        found[one, other] = found[other, one] = value
    return found


def test_words_run_on_while_their_first_word_holds_them() -> None:
    joined = matrix(5, (0, 1, 0.9), (0, 2, 0.5), (0, 3, 0.4), (2, 3, 0.9), (3, 4, 0.7))
    assert sequence_groups(joined).tolist() == [0, 0, 0, 1, 1]
    assert sequence_groups(torch.eye(3)).tolist() == [0, 1, 2]
    assert sequence_groups(torch.zeros(0, 0)).tolist() == []


def test_cells_stand_with_the_first_that_holds_them_on_a_path_of_neighbors() -> None:
    """A 2 x 3 grid. Cell 0 holds 1 and, on a path through it, 4. It holds 5 without a path. Whether 1 holds 2 does not
    matter."""
    joined = matrix(6, (0, 1, 0.6), (0, 4, 0.5), (0, 5, 1.0), (0, 2, 0.49), (1, 2, 1.0), (2, 3, 1.0))
    assert grid_groups(joined, 2, 3).tolist() == [0, 0, 1, 2, 0, 0]
    assert grid_groups(matrix(6, (0, 5, 1.0), (0, 1, 0.6)), 2, 3).tolist() == [0, 0, 1, 2, 3, 4]
    real = torch.tensor([True, True, True, True, False, True])
    assert grid_groups(joined, 2, 3, real).tolist() == [0, 0, 1, 2, -1, 3]
    assert grid_groups(torch.ones(6, 6), 2, 3).tolist() == [0] * 6
    # the end of a row and the begin of the next one are no neighbors
    assert grid_groups(matrix(4, (1, 2, 1.0)), 2, 2).tolist() == [0, 1, 2, 3]


def model(**changes: object) -> ClustFormer:
    torch.manual_seed(0)
    built = build_model(ClustFormerConfig(**(SMALL | changes)), SIZES).eval()  # type: ignore[arg-type]
    assert isinstance(built, ClustFormer)
    with torch.no_grad():  # conditionals that differ, mostly small: several clusters
        for layer in (*built.encoder, *built.decoder):
            for linear in () if layer.clusters is None else layer.clusters.maps:
                linear.bias.fill_(-1.0)
                linear.weight.mul_(20)
    return built


def test_clusters_of_a_model_keep_the_order_of_the_features() -> None:
    built, features, tokens = model(sampling=2), Features(torch.randn(1, 16, 6)), torch.tensor([0, 4, 5, 6, 7])
    found = find_clusters(built, features, tokens)
    assert found is not None and found.grid == (4, 4)
    assert found.image.shape == (3, 16) and found.words.shape == (2, 4)
    assert found.encoder_layers == (1, 2, 3) and found.decoder_layers == (1, 2)
    grids = found.image.view(3, 4, 4)
    assert bool((grids[:, ::2] == grids[:, 1::2]).all() and (grids[:, :, ::2] == grids[:, :, 1::2]).all()), "sampling 2"
    # equal to the groups of the matrix that the model shows
    matrices, _ = built.encoder_clusters(features)
    assert grid_groups(matrices[1, 0], 4, 4).tolist() == found.image[1].tolist()

    boxes = torch.rand(1, 10, 2)
    regions = model(sampling=1, inputs="regions", region_rows=3)
    boxes = torch.cat((boxes, boxes + 0.1), 2)
    order, cells = torch.randperm(10), features.tokens
    one = find_clusters(regions, Features(cells[:, :10], boxes=boxes), tokens)
    two = find_clusters(regions, Features(cells[:, :10][:, order], boxes=boxes[:, order]), tokens)
    assert one is not None and two is not None and one.grid is None
    assert torch.equal(one.image[:, order], two.image) and len(one.image[0].unique()) > 1 and one.image.min() == 0
