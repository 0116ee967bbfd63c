"""A server of `raycap serve` in the process of the test, without Ray."""

from __future__ import annotations

import asyncio
import base64
import shutil
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from models.transform import ImageTransform
from pipeline.captioning.bundle_files import bundle_digests
from pipeline.retrain.champion import BundleRecord, ChampionState, ChampionStore
from pipeline.serving.app import AppSettings, make_app
from pipeline.serving.host import ModelHost
from pipeline.serving.loading import load_address
from pipeline.serving.metrics import Metrics
from pipeline.serving.served_models import Answer, Challenger, ExplainJob, ImageJob, ServedModel, ServedModels
from pipeline.storage.path import storage_path

LOCAL = "http://127.0.0.1:8000"


class LocalCaptioners:
    """A model in this process. `wait`: an event that captions wait for. `fails`: what they raise."""

    def __init__(self, host: ModelHost) -> None:
        self.host, self.num_jobs = host, 0
        self.wait: asyncio.Event | None = None
        self.fails: Exception | None = None

    async def describe(self) -> tuple[dict[str, Any], ImageTransform]:
        return self.host.describe()

    async def caption(self, jobs: list[ImageJob]) -> list[Answer]:
        self.num_jobs += len(jobs)
        if self.wait is not None:
            await self.wait.wait()
        if self.fails is not None:
            raise self.fails
        return await asyncio.to_thread(self.host.caption, jobs)

    async def explain(self, job: ExplainJob) -> Answer:
        if self.fails is not None:
            raise self.fails
        return await asyncio.to_thread(self.host.explain, job)


def host_of(bundle: Path) -> ModelHost:
    return ModelHost(load_address(str(bundle), "results", device="cpu"))


def local_client(
    models: dict[str, LocalCaptioners], settings: AppSettings = AppSettings(), challenger: Any = None
) -> TestClient:
    """A client of a server with these models. challenger: (captioners, share, log)."""
    metrics = Metrics()
    served = {name: ServedModel(name, captioners, metrics) for name, captioners in models.items()}
    compared = None
    if challenger is not None:
        captioners, share, log = challenger
        compared = Challenger(ServedModel("other", captioners, metrics), share, log)
    app = make_app(ServedModels(served, metrics, compared), settings, metrics)
    return TestClient(app, base_url=LOCAL)


def crown(storage: Path, name: str, bundle: Path, token: int) -> BundleRecord:
    """Makes a copy of a bundle the champion of a configuration, as `raycap retrain` does."""
    place = f"models/{name}/champion-t{token:06d}"
    if not (storage / place).exists():
        shutil.copytree(bundle, storage / place)
    record = BundleRecord(bundle=place, files=bundle_digests(storage / place), run_id="a")
    store = ChampionStore(storage_path(storage), name)
    decided = tuple(sorted({*store.read().decided, token}))
    store._write(ChampionState(number=len(decided), decided=decided, champion=record))
    return record


def as_files(*paths: str) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("images", (Path(path).name, Path(path).read_bytes(), "image/png")) for path in paths]


def as_base64(*paths: str) -> list[str]:
    return [base64.b64encode(Path(path).read_bytes()).decode() for path in paths]
