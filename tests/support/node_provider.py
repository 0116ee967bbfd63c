"""A node provider for Ray's autoscaler: its nodes are processes on this machine, each with a disk of its own.

Ray's monitor process imports this module by the name in the autoscaler's configuration and calls the provider.
"""

from __future__ import annotations

import subprocess
import threading
import uuid
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

HEAD_ID, HEAD_TYPE = "head", "head"


def autoscaling_config(folder: Path, address: str, cpus: int, max_workers: int) -> dict[str, Any]:
    """The autoscaler's configuration: a head without CPUs, and up to `max_workers` nodes with `cpus` CPUs each."""
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {f"{kind}_commands": [] for kind in commands} | {
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        "cluster_name": "private",
        "max_workers": max_workers,
        "provider": {
            "type": "external",
            "module": "tests.support.node_provider.ProcessNodeProvider",
            "folder": str(folder),
            "address": address,
            "cpus": cpus,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 0, "max_workers": max_workers},
        },
        "head_node_type": HEAD_TYPE,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 10,
    }


class ProcessNodeProvider(NodeProvider):
    """Starts and ends worker nodes; `tests.support.ray_cluster.node_command` says how."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self.lock = threading.RLock()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        head = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: HEAD_TYPE, TAG_RAY_NODE_NAME: HEAD_ID}
        self.tags = {HEAD_ID: head | {TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}}

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self.lock:
            for name, process in list(self.processes.items()):
                if process.poll() is not None:
                    del self.processes[name], self.tags[name]
            return [name for name, tags in self.tags.items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        return node_id in self.tags

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self.tags

    def node_tags(self, node_id: str) -> dict[str, str]:
        with self.lock:
            return self.tags[node_id]

    def internal_ip(self, node_id: str) -> str:
        return "127.0.0.1"

    external_ip = internal_ip

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        with self.lock:
            self.tags[node_id] |= tags

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        from tests.support.ray_cluster import node_command

        folder, address = Path(self.provider_config["folder"]), self.provider_config["address"]
        kind = tags[TAG_RAY_USER_NODE_TYPE]
        cpus = int(self.provider_config["cpus"])
        for _ in range(count):
            name = uuid.uuid4().hex[:12]
            variables = {"RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": kind}
            with (folder / f"node-{name}.txt").open("wb") as log:
                process = subprocess.Popen(
                    node_command(folder, name, cpus, [f"--address={address}"], variables), stdout=log, stderr=log
                )
            with self.lock:
                self.processes[name] = process
                self.tags[name] = {TAG_RAY_NODE_NAME: name, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE} | tags

    def terminate_node(self, node_id: str) -> None:
        from tests.support.ray_cluster import Cluster

        with self.lock:
            process = self.processes.pop(node_id, None)
            self.tags.pop(node_id, None)
        if process is not None:
            Cluster.kill(process)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config
