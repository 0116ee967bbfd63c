"""Counters of a server in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """The counters of one server. Paths are those of its routes; others count as "other"."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "raycap_requests", "Requests by path and status.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "raycap_request_seconds", "Time of requests.", ["path"], buckets=SECONDS, registry=self.registry
        )
        self.in_progress = Gauge("raycap_requests_in_progress", "Requests in progress.", registry=self.registry)
        self.images = Counter("raycap_images", "Captioned images by model.", ["model"], registry=self.registry)
        self.batches = Histogram(
            "raycap_batch_size", "Images per forward pass.", ["model"], buckets=SIZES, registry=self.registry
        )

    def text(self) -> tuple[bytes, str]:
        """All counters, and the content type of the text."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
