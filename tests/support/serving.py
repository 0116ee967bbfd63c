"""A server of `raycap serve` in the process of the test, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

import raycap
from raycap.pipeline.evaluation.captioning.bundle import bundle_digests
from raycap.pipeline.retrain.champion import BundleRecord, ChampionState, ChampionStore
from raycap.pipeline.serving.address import ModelAddress, ServeArguments
from raycap.pipeline.serving.app import make_app
from raycap.pipeline.serving.host import ModelHost
from raycap.pipeline.storage.path import StoragePath, storage_path

LOCAL = "http://127.0.0.1:8000"


class LocalCaptioners:
    """A model in this process, in place of `Captioners`. wait: an event for which captions wait. fails: an error that
    they raise."""

    def __init__(self, host: ModelHost) -> None:
        self.host, self.num_jobs = host, 0
        self.wait: asyncio.Event | None = None
        self.fails: Exception | None = None

    async def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "describe":
            return asdict(self.host.current.info), self.host.current.service.transform
        if method == "caption":
            self.num_jobs += len(arguments[0])
        if self.wait is not None:
            await self.wait.wait()
        if self.fails is not None:
            raise self.fails
        return await asyncio.to_thread(getattr(self.host, method), *arguments)


def host_of(bundle: Path) -> ModelHost:
    address = ModelAddress(str(bundle), storage_path("results"))
    return ModelHost(address, address.resolve(), {"device": "cpu"})


def local_client(models: Mapping[str, LocalCaptioners], token: str | None = None, **arguments: Any) -> TestClient:
    """A client of a server with these models. arguments: of `ServeArguments`."""
    served = ServeArguments(**{"models": tuple(models), "loopback_only": True} | arguments)
    return TestClient(make_app(models, served, token), base_url=LOCAL)


def crown(storage: StoragePath | Path, name: str, bundle: Path, token: int) -> BundleRecord:
    """Makes a copy of a bundle the champion of a configuration, as `raycap retrain` does."""
    storage = storage_path(storage)
    record = BundleRecord(bundle=f"models/{name}/champion-t{token:06d}", files=bundle_digests(bundle), run_id="a")
    copy = storage / record.bundle
    if not copy.list():
        for path in bundle.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
    store = ChampionStore(storage, name)
    store._write(ChampionState(number=store.read().number + 1, decided=token, champion=record))
    return record


def captions_by_digest(bundles: Iterable[Path], names: Sequence[str]) -> dict[str, dict[str, str | None]]:
    """The captions by the Python API, as {digest of the model: {name of the image: caption}}."""
    expected = {}
    for bundle in bundles:
        captioner = raycap.load(bundle, device="cpu")
        captions = captioner.caption(names)
        expected[captioner.model.digest] = {name: each.caption for name, each in zip(names, captions, strict=True)}
    return expected


def is_right(answer: Any, names: Sequence[str], expected: Mapping[str, Mapping[str, str | None]]) -> bool:
    """Whether the captions of an answer are those of the model that it names. expected: of `captions_by_digest`."""
    captions = expected[answer["model"]["digest"]]
    return [row["caption"] for row in answer["captions"]] == [captions[name] for name in names]


def as_files(*paths: str) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("images", (Path(path).name, Path(path).read_bytes(), "image/png")) for path in paths]


MULTIPART = {"content-type": "multipart/form-data; boundary=x"}
FILE_HEAD = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
