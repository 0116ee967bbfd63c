"""A storage with the files of runs, searches, champions, bundles and features, without training anything."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import yaml

from raycap.models.config import ModelSizes
from raycap.pipeline.retrain.champion import BundleRecord, ChampionStore
from raycap.pipeline.runs.folder import RunMetadata
from raycap.pipeline.runs.identity import RESULTS_VERSION
from raycap.pipeline.storage.lease import Lease, take_lease
from raycap.pipeline.storage.path import StoragePath

STAGES = ("xe", "scst")


class FakeStorage:
    """Writes into a storage, local or on S3. The contents of weights are their names."""

    def __init__(self, place: StoragePath) -> None:
        self.place = place

    def write(self, name: str, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (self.place / name).write_bytes(data)

    def run(self, run_id: str, done: int = 2, *, complete: bool = True, regions: bool = False) -> None:
        """A run whose first `done` stages are finished."""
        folder = f"runs/{run_id}"
        config = {"stages": [{"name": name} for name in STAGES], "data": {"val_split": "val", "test_splits": ["test"]}}
        self.write(f"{folder}/config.yaml", yaml.safe_dump(config).encode())
        self._weights(f"{folder}/init", run_id, regions)
        for number, stage in enumerate(STAGES[: done + (not complete)]):
            self._weights(f"{folder}/stages/{stage}/best-4", f"{run_id}-{stage}", regions)
            if number < done:
                self.write(f"{folder}/stages/{stage}/DONE.json", {"best_step": 4, "best_score": 0.5 + number})
            if number == min(done, len(STAGES) - 1):
                self.write(f"{folder}/stages/{stage}/step-6/state.pt", b"s" * 1000)
                self.write(f"{folder}/stages/{stage}/step-6/progress.json", {"step": 6})
        metadata = RunMetadata(
            run_id=run_id,
            created="2026-01-02T03:04:05+00:00",
            data_fingerprint="f",
            results_version=RESULTS_VERSION,
            commit="g",
            versions={},
            splits={},
            unreadable={},
            sizes=ModelSizes(4, 9, 5, 2, 0, 1),
            num_tokens=3,
            parameters={"model": 1, "backbone": 1},
        )
        self.write(f"{folder}/run.json", asdict(metadata))
        if complete:
            self.write(f"{folder}/COMPLETE.json", {"scores": {"val_CIDEr-D": 1.25, "test_CIDEr-D": 1.5}})
            self.bundle(f"demo/{run_id}")

    def _weights(self, folder: str, name: str, regions: bool) -> None:
        files = {"model.safetensors": f"{name} model"} | (
            {} if regions else {"backbone.safetensors": f"{name} backbone"}
        )
        for file, text in files.items():
            self.write(f"{folder}/{file}", text.encode())
        self.write(
            f"{folder}/digests.json", {"format": 1, "files": {file: digest(text) for file, text in files.items()}}
        )

    def search(self, name: str, **runs: str) -> None:
        """A search with a trial for each run, in the given state."""
        values = [
            {"trial_id": run, "point": {}, "seed": 0, "state": state, "run": f"/old/place/runs/{run}"}
            for run, state in runs.items()
        ]
        self.write(f"searches/{name}/trials.json", values)

    def bundle(self, name: str) -> None:
        self.write(f"models/{name}/model.safetensors", b"w" * 100)

    def champion(self, name: str, run_id: str) -> None:
        """A champion that a run has produced, under a lease that was returned."""
        store = ChampionStore(self.place, name)
        lease = take_lease(store.folder / "lease.json", 30)
        assert isinstance(lease, Lease)
        with lease:
            state = store.fence(lease)
            bundle = f"models/{name}/champion-t{lease.token:06d}"
            self.bundle(f"{name}/champion-t{lease.token:06d}")
            record = BundleRecord(bundle=bundle, files={"model.safetensors": "0"}, run_id=run_id)
            decision = store.write_file(f"decisions/000001-t{lease.token:06d}.json", b"{}", lease)
            update = {
                "number": 1,
                "decided": lease.token,
                "champion": record,
                "decision": decision,
            }
            store.commit(state.model_copy(update=update), lease)

    def features(self, name: str, backbone: str | None) -> None:
        """A store with two shards. backbone: the text of its weights; None for regions."""
        source = {"source": "hdf5"} if backbone is None else {"weights": digest(backbone)}
        for shard in ("a", "b"):
            self.write(f"features/{name}/shards/{shard}.npy", b"f" * 500)
            self.write(f"features/{name}/manifest/{shard}.parquet", b"m")
        self.write(f"features/{name}/COMPLETE", {"rows": 7, **source})

    def names(self) -> set[str]:
        """All files but locks."""
        return {name for name in self.place.list() if not name.endswith(".lock")}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
