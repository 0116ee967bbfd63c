"""How the nodes of a cluster are asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raycap.jobs.doctor import cluster_facts as module
from raycap.jobs.doctor.node_facts import look


def test_the_clocks_of_many_nodes_are_asked_in_a_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch may take as long as its slowest node, and all nodes have one deadline."""
    keys = [f"{number:06d}" for number in range(250)]
    nodes = [
        {"NodeID": key, "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 1.0}} for key in keys
    ]
    batches: list[int] = []

    def ask(nodes: list[str], function: Callable[..., Any], *_: Any) -> Any:
        """The clock of node 7 is a minute ahead; node 9 is a minute behind and shares its cache with node 200."""
        now = time.time()
        if function is not look:
            return {key: SimpleNamespace(host=key) for key in nodes}, dict.fromkeys(nodes, now), {}
        batches.append(len(nodes))
        off = {keys[7]: 60.0, keys[9]: -60.0}
        looks = {key: (now + off.get(key, 0.0), [keys[200]] if key == keys[9] else []) for key in nodes}
        silent = looks.keys() & {keys[120]}
        return (
            {key: found for key, found in looks.items() if key not in silent},
            dict.fromkeys(nodes, now),
            dict.fromkeys(silent, "no answer within 60 s"),
        )

    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    monkeypatch.setattr(module, "cluster_status", lambda: None)
    monkeypatch.setattr(module, "_ask", ask)
    facts = module.cluster_facts(None)
    assert sum(batches) == 250 and len(batches) < 10
    name = {key: f"10.0.0.1 ({key})" for key in keys}
    assert facts.clocks.keys() == set(name.values()) - {name[keys[120]]}
    assert facts.clocks[name[keys[7]]] > 50 and facts.clocks[name[keys[9]]] < -50
    assert all(abs(ahead) < 3 for node, ahead in facts.clocks.items() if node not in (name[keys[7]], name[keys[9]]))
    assert facts.silent == {name[keys[120]]: "no answer within 60 s"}
    assert facts.shared_caches == {name[keys[9]]: [name[keys[200]]]}
