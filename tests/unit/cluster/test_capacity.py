"""What a cluster can hold, and what a waiting stage reports. Waiting itself: tests/faults/test_private_disks.py."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest
import ray  # noqa: F401

from raycap.pipeline.cluster import capacity
from raycap.pipeline.cluster.capacity import ClusterStatus
from raycap.pipeline.errors import UserError


def status(*nodes: dict[str, float], **changes: object) -> ClusterStatus:
    values = {"used": 0.0, "pending": [], "num_starting": 0, "has_autoscaler": False}
    return ClusterStatus(nodes=nodes, **values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "bundles", "fits"),
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
def test_bundles_fit(nodes: list[dict[str, float]], bundles: list[dict[str, float]], fits: bool) -> None:
    assert status(*nodes).fits(bundles) is fits


def test_equal_bundles_fit_exactly_when_an_assignment_exists() -> None:
    """Against all assignments, for bundles of one size per stage, as raycap asks for them."""
    generator = random.Random(0)
    for _ in range(200):
        nodes = [{"CPU": generator.randint(0, 3), "GPU": generator.randint(0, 2)} for _ in range(3)]
        bundle = {"CPU": generator.randint(1, 2), "GPU": generator.randint(0, 1)}
        count = generator.randint(1, 4)
        possible = any(
            all(bundle[key] * chosen.count(index) <= node[key] for index, node in enumerate(nodes) for key in bundle)
            for chosen in itertools.product(range(3), repeat=count)
        )
        assert status(*nodes).fits([bundle] * count) is possible


def test_the_text_counts_nodes_and_requests() -> None:
    nodes = [{"CPU": 1, "memory": 1e9}, {"CPU": 1, "memory": 2e9}, {"memory": 1e9}]
    text = status(*nodes, pending=[{"CPU": 8, "GPU": 1}] * 2, num_starting=3).text
    assert text == "nodes: 2 x (1 CPU); 3 more starting; pending: 2 x (8 CPU + 1 GPU)"
    assert status({"memory": 1e9}).text == "no node has CPUs"


class Group:
    """A placement group that is never placed."""

    def wait(self, seconds: float) -> bool:
        return False


@pytest.mark.parametrize(
    "changes", [{}, {"refused": [[{"CPU": 8}, {"CPU": 8}]]}, {"answered": 6}, {"used": 1.0}, {"num_starting": 1}]
)
def test_a_request_is_refused_by_a_decision_of_the_autoscaler_that_saw_it(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have decided before the request, have refused another one, or wait for other work."""
    clock = itertools.count(step=10.0)
    monkeypatch.setattr(capacity.time, "monotonic", lambda: next(clock))
    groups = sys.modules["ray.util.placement_group"]  # `ray.util` has a function of this name
    monkeypatch.setattr(groups, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(groups, "remove_placement_group", lambda group: None)
    states = [
        {"version": 5},
        {"version": 6},
        {"version": 8, "answered": 7, "refused": [[{"CPU": 1}], [{"CPU": 8}]]} | changes,
    ]
    left = iter(states)
    monkeypatch.setattr(
        capacity, "cluster_status", lambda: status({"CPU": 1}, has_autoscaler=True, **next(left, states[-1]))
    )
    with pytest.raises(capacity.WaitedTooLongError if changes else UserError, match="training asks for 1 x"):
        capacity.wait_for([{"CPU": 8}], "training", limit_s=100)
