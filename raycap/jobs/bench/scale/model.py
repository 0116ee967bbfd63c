"""A model of a run over more images than fit here: which part takes how long, how much memory, and what it costs.

Seconds and memory of the project's own code continue the measurements at two sizes in a straight line. Reading,
computing and storing follow from a cluster's rates. It is arithmetic: no queue, no failure, and every node at its full
rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raycap.jobs.bench.scale.keys import ROWS_PER_SHARD
from raycap.jobs.bench.scale.measured import Measurement

IMAGE_MB = 0.18  # of a JPEG file of COCO
REQUESTS_AT_A_TIME = 8  # per node
GET_USD, PUT_USD = 0.4e-6, 5e-6  # list prices of S3 per request; listing costs as much as PUT
MEMORY_GB = 2.0  # that a driver or worker should need at most


@dataclass(frozen=True)
class Cluster:
    """A cluster and its storage. images_per_s, cache_gib, gbit_per_s: of each node."""

    nodes: int = 16
    images_per_s: float = 100.0
    feature_mb: float = 144 * 1536 * 2 / 1e6
    cache_gib: float = 200.0
    latency_ms: float = 30.0
    gbit_per_s: float = 10.0

    def read_s(self, requests: float, megabytes: float) -> float:
        """The seconds in which all nodes together read this, from requests of equal size."""
        waiting = requests * self.latency_ms / 1000 / REQUESTS_AT_A_TIME
        return max(waiting, megabytes * 8 / 1000 / self.gbit_per_s) / self.nodes


@dataclass(frozen=True)
class Part:
    """A row of the model.

    place: "driver", "worker" (each one) or "nodes" (all together). memory_gb: None if it does not grow with the images.
    """

    name: str
    place: str
    seconds: float
    memory_gb: float | None = None
    gets: float = 0
    puts: float = 0

    @property
    def usd(self) -> float:
        """The price of the requests."""
        return self.gets * GET_USD + self.puts * PUT_USD

    def __str__(self) -> str:
        memory = "bounded" if self.memory_gb is None else f"{self.memory_gb:,.1f}"
        return (
            f"{self.name:<32}{self.place:<8}{_duration(self.seconds):>10}{memory:>10}"
            f"{self.gets:>16,.0f}{self.puts:>14,.0f}{self.usd:>10,.2f}"
        )


def _duration(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.1f} s"


def line(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at` of the line through the first and the last point, at least that of the last point."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = 0.0 if x1 == x0 else max(0.0, (y1 - y0) / (x1 - x0))
    return y1 + slope * (at - x1)


def parts(measured: Sequence[Measurement], images: int, cluster: Cluster) -> Iterator[Part]:
    """The parts of a run: those that were measured, and those that the cluster's rates decide."""
    for name in dict.fromkeys(each.part for each in measured):
        rows = [each for each in measured if each.part == name]
        seconds = line([(each.rows, each.processor_seconds) for each in rows], images)
        memory = line([(each.rows, each.private_mb) for each in rows], images) / 1000
        requests = rows[-1].requests * images / rows[-1].rows
        place = "worker" if "worker" in name else "driver"
        yield Part(name, place, seconds + requests * cluster.latency_ms / 1000, memory, puts=requests)
    read = cluster.read_s(images, images * IMAGE_MB)
    computed = images / cluster.images_per_s / cluster.nodes
    shards = math.ceil(images / ROWS_PER_SHARD)
    yield Part("extraction: images are read", "nodes", read, gets=images)
    yield Part("extraction: backbone", "nodes", computed)
    stored = cluster.read_s(2 * shards, images * cluster.feature_mb)
    yield Part("extraction: features are stored", "nodes", stored, puts=2 * shards)
    yield Part("frozen stage: an epoch is read", "nodes", stored, gets=shards)


def report(measured: Sequence[Measurement], images: int, cluster: Cluster) -> Iterator[str]:
    """The lines of the model: a table for `images`, and which part limits at which size."""
    yield ""
    yield f"model: {images:,} images, {cluster.nodes} nodes, features of {images * cluster.feature_mb / 1e6:,.1f} TB"
    yield f"{'part':<32}{'place':<8}{'time':>10}{'own GB':>10}{'GET':>16}{'PUT, LIST':>14}{'USD':>10}"
    yield from map(str, parts(measured, images, cluster))
    room = cluster.nodes * cluster.cache_gib * 2**30 / 1e6
    share = min(1.0, room / (images * cluster.feature_mb))
    yield f"the caches of all nodes hold {share:.0%} of the features"
    yield ""
    yield f"{'images':>16}  {'longest on the driver':<32}{'longest on the nodes':<36}above {MEMORY_GB:g} GB"
    size = 100_000
    while size <= images:
        rows = list(parts(measured, size, cluster))
        longest = [
            max((row for row in rows if (row.place == "nodes") is on_nodes), key=lambda row: row.seconds)
            for on_nodes in (False, True)
        ]
        large = [row.name for row in rows if row.memory_gb is not None and row.memory_gb > MEMORY_GB]
        names = [f"{row.name}, {_duration(row.seconds)}" for row in longest]
        yield f"{size:>16,}  {names[0]:<32}{names[1]:<36}{', '.join(large) or 'none'}"
        size *= 10
