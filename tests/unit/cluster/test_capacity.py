"""What a cluster can hold, and what a waiting stage reports."""

from __future__ import annotations

import itertools
import random

import pytest

from raycap.pipeline.cluster.capacity import ClusterStatus


def status(*nodes: dict[str, float], **changes: object) -> ClusterStatus:
    values = {"pending": [], "num_starting": 0}
    return ClusterStatus(nodes=nodes, **values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "requests", "fits"),
    [
        ([{"CPU": 1}, {"CPU": 1}], [{"CPU": 1}] * 2, True),
        ([{"CPU": 1}, {"CPU": 1}], [{"CPU": 2}], False),  # a process needs one node
        ([{"CPU": 2}], [{"CPU": 1}] * 3, False),
        ([{"CPU": 8, "GPU": 1}], [{"CPU": 1, "GPU": 1}] * 2, False),
        ([{"CPU": 1}], [{"CPU": 0.5}, {"CPU": 0.4}], True),
        ([{"CPU": 1}], [{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.4}], False),  # two actors leave nothing for decoding
        ([], [{"CPU": 1}], False),
    ],
)
def test_requests_fit(nodes: list[dict[str, float]], requests: list[dict[str, float]], fits: bool) -> None:
    assert status(*nodes).fits(requests) is fits


def test_equal_requests_fit_exactly_when_an_assignment_exists() -> None:
    """Compared with a search through all assignments. A stage's requests have one size, as raycap asks for them."""
    generator = random.Random(0)
    for _ in range(200):
        nodes = [{"CPU": generator.randint(0, 3), "GPU": generator.randint(0, 2)} for _ in range(3)]
        request = {"CPU": generator.randint(1, 2), "GPU": generator.randint(0, 1)}
        count = generator.randint(1, 4)
        possible = any(
            all(request[key] * chosen.count(index) <= node[key] for index, node in enumerate(nodes) for key in request)
            for chosen in itertools.product(range(3), repeat=count)
        )
        assert status(*nodes).fits([request] * count) is possible


def test_the_text_counts_nodes_and_requests() -> None:
    nodes = [{"CPU": 1, "memory": 1e9}, {"CPU": 1, "memory": 2e9}, {"memory": 1e9}]
    text = status(*nodes, pending=[{"CPU": 8, "GPU": 1}] * 2, num_starting=3).text
    assert text == "nodes: 2 x (1 CPU); 3 more starting; pending: 2 x (8 CPU + 1 GPU)"
    assert status({"memory": 1e9}).text == "no node has CPUs"
