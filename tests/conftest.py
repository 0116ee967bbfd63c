"""Shared fixtures: small data sets, one Ray for the whole session, and where the shared material lies."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from raycap.pipeline.config.load import read_values
from raycap.pipeline.runtime.log import PACKAGE
from tests.support.logs import on_message
from tests.support.s3_server import CREDENTIALS, s3_server

ROOT = Path(__file__).resolve().parent.parent
PATH, SPICE_MODELS = os.environ["PATH"], os.environ.get("RAYCAP_SPICE_MODELS")
# A stand-in for java with METEOR's jar, which takes seconds to start. It prints 23 numbers for each line SCORE. For
# EVAL it prints the score 0.25 for each image and for all of them.
METEOR = """
import sys
if "-version" in sys.argv:
    sys.exit()
for line in sys.stdin:
    if line.startswith("SCORE"):
        print(" ".join(["1.0"] * 23), flush=True)
    else:
        print("\\n".join(["0.25"] * (line.count("|||") + 1)), flush=True)
"""
CACHES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}


def pytest_configure() -> None:
    """One thread per process, and credentials for S3 servers, before torch and Ray start.

    More threads would only wait for each other, because the tensors are small. Processes that tests start inherit the
    variables.
    """
    os.environ.update(CREDENTIALS, OMP_NUM_THREADS="1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked cuda run wherever there is a GPU and are skipped elsewhere."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes half characters, which some tests write, because a report is sent to another process as UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real photographs and captions, beside the checkout or named by RAYCAP_SHARED."""
    folder = Path(os.environ.get("RAYCAP_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared material at {folder}; set RAYCAP_SHARED to the folder with data/ and golden/")
    return folder


@pytest.fixture(scope="session", autouse=True)
def clean_root() -> Iterator[None]:
    """Fails if tests have left a file in the checkout's root that was not there before."""
    before = {path.name for path in ROOT.iterdir()}
    yield
    left = {path.name for path in ROOT.iterdir()} - before - CACHES
    assert not left, f"tests left {', '.join(sorted(left))} in {ROOT}; write to tmp_path"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives tests, and processes that they start, a cache that is removed with pytest's temporary folders."""
    os.environ["RAYCAP_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def write_java(folder: Path, program: str) -> None:
    """Writes a Python program that is called java."""
    folder.mkdir(exist_ok=True)
    (folder / "java").write_text(f"#!{sys.executable}\n{program}")
    (folder / "java").chmod(0o755)


@pytest.fixture(scope="session", autouse=True)
def quick_java(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Puts METEOR in place of java, without models of SPICE, for tests and for processes that they start."""
    folder = tmp_path_factory.mktemp("java")
    write_java(folder, METEOR)
    os.environ.update(PATH=f"{folder}{os.pathsep}{PATH}", RAYCAP_SPICE_MODELS=str(folder))


@pytest.fixture
def real_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the stand-in for java during a test, and finds the models of SPICE that this machine has."""
    monkeypatch.setenv("PATH", PATH)
    if SPICE_MODELS is None:
        monkeypatch.delenv("RAYCAP_SPICE_MODELS")
    else:
        monkeypatch.setenv("RAYCAP_SPICE_MODELS", SPICE_MODELS)


@pytest.fixture(autouse=True)
def propagating_loggers() -> Iterator[None]:
    """Undoes what a command does to logging, so that `caplog` sees the records of later tests."""
    yield
    logging.raiseExceptions = True
    logging.getLogger(PACKAGE).propagate = True


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """The messages that raycap logs during the test, from INFO on."""
    lines: list[str] = []
    with on_message(lines.append):
        yield lines


@pytest.fixture(autouse=True)
def clusters_can_start() -> Iterator[None]:
    """Removes the variable by which a command in this process makes every later Ray listen on the loopback only."""
    yield
    os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for all tests of this process that need one."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    settings: dict[str, Any] = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 200 * 2**20}
    ray.init(**settings, log_to_driver=False, ignore_reinit_error=True)
    yield
    ray.shutdown()


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations caption in this process, if `features.store` is never."""
    from tests.support.captioning import caption_here

    monkeypatch.setattr("raycap.pipeline.evaluation.evaluate.caption_on_cluster", caption_here)
    monkeypatch.setattr("raycap.pipeline.evaluation.evaluate.start_ray", lambda *_: None)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of one S3 server without faults, with the bucket `data`, for all tests that need one."""
    with s3_server() as url:
        yield url


def small_config(storage: Path | dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The plain values of the demo's configuration, shrunk so that a run takes seconds.

    changes: values by key, with two underscores in place of each dot."""
    data = read_values(ROOT / "raycap" / "configs" / "demo.yaml")
    data["storage"] = storage if isinstance(storage, dict) else str(storage)
    data["data"]["synthetic"] = {"num_images": 60, "image_size": 32, "seed": 3}
    data["data"]["min_count"] = 1
    data["backbone"] |= {"image_size": 32, "embed_dim": 8, "num_heads": [2, 2], "window_size": 4}
    data["model"] |= {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    data["model"] |= {"static_expansion": [4, 8], "dynamic_expansion": 2}
    data["evaluation"] = {"beam_size": 2, "max_length": 12, "batch_size": 8}
    data["tracking"] = {"enabled": False}
    for stage in data["stages"]:
        stage |= {"epochs": 0.7, "batch_size": 8, "checkpoint_every_steps": 2}
        if stage["objective"] == "scst":
            stage["scst"] = {"num_samples": 3, "max_length": 10}
    data["workers"] |= {"num_workers": 1, "cpus_per_worker": 1, "threads_per_worker": 1, "log_every_steps": 1}
    data["features"] |= {"threads_per_actor": 1}
    for key, value in changes.items():
        node = data
        *parents, last = key.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    return data


def write_karpathy(folder: Path, splits: dict[str, int], size: int = 24) -> Path:
    """A data set of plain color images in Karpathy layout; returns the folder."""
    (folder / "images").mkdir(parents=True)
    entries = []
    for number, split in enumerate(split for split, count in splits.items() for _ in range(count)):
        name = f"{number}.png"
        Image.new("RGB", (size, size), (number * 7 % 256, number * 31 % 256, 90)).save(folder / "images" / name)
        sentences = [{"raw": f"A picture of color {number % 5} number {k}."} for k in range(5)]
        entries.append(
            {"filepath": "images", "filename": name, "cocoid": number + 100, "split": split, "sentences": sentences}
        )
    (folder / "dataset.json").write_text(json.dumps({"images": entries}))
    return folder


def colors_config(folder: Path) -> dict[str, Any]:
    """A configuration to evaluate bundles of `make_bundle` on 5 images of `write_karpathy`, read as pixels."""
    root = write_karpathy(folder / "images", {"train": 4, "val": 2, "test": 5})
    values = small_config(folder / "results", data={"root": str(root), "train_splits": ["train"], "min_count": 1})
    values["data"] |= {"val_split": "val", "test_splits": ["test"]}
    values["features"] = {"store": "never"}
    return values
