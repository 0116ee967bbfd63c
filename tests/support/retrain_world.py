"""A retraining without Ray and torch: colored images, and a "model" that stores one caption per color."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.captioning.bundle import bundle_digests, fetched
from raycap.pipeline.evaluation.evaluate import caption_scores
from raycap.pipeline.evaluation.results import ImageCaption, RankedCaption, SplitScores
from raycap.pipeline.retrain.champion import ChampionStore
from raycap.pipeline.retrain.retraining import HELD_OUT, FoundData, retrain
from raycap.pipeline.runs.identity import config_identity
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config
from tests.support.champion_check import decisions, errors_of
from tests.support.logs import on_message

# For tests of conditional writes, leases and listings, which differ on S3. Other tests use S3 in `make proof` only.
ON_DISK_AND_S3 = pytest.mark.parametrize("world", ["disk", "s3"], indirect=True)

COLORS = ("red", "green", "blue", "yellow", "black", "white", "pink", "gray")
THINGS = ("car on a road", "boat at sea", "dog in a park", "cup on a table", "bird in a tree", "cat on a mat")


def caption_of(color: int) -> str:
    return f"A {COLORS[color]} {THINGS[color % len(THINGS)]}."


class World:
    """A growing data set and a storage, both on disk or both on S3."""

    def __init__(self, folder: Path, url: str | None = None, **retrain_section: Any) -> None:
        self.folder, self.section = folder, {"lease_seconds": 30} | retrain_section
        self.options = StorageOptions(url)
        home = str(folder) if url is None else f"s3://data/{folder.name}"
        self.data, self.storage = StoragePath(f"{home}/set", self.options), StoragePath(f"{home}/results", self.options)
        self.entries: list[dict[str, Any]] = []
        self.open_calls: list[list[str]] = []  # the messages of calls that have not returned, the innermost last

    def add(self, split: str, count: int, colors: range, wrong: bool = False, corrupt: bool = False) -> None:
        """Adds images of these colors in turn. wrong: each image has the caption of the next color."""
        for number in range(count):
            color, name = colors[number % len(colors)], f"{len(self.entries):04d}.png"
            body = b"not a picture" if corrupt else picture(color, len(self.entries))
            (self.data / f"images/{name}").write_bytes(body)
            text = caption_of((color + 1) % len(COLORS) if wrong else color)
            sentences = [{"raw": text}, {"raw": f"There is {text[0].lower()}{text[1:]}"}]
            entry = {"filepath": "images", "filename": name, "cocoid": len(self.entries), "split": split}
            self.entries.append(entry | {"sentences": sentences})
        self.annotate()

    def annotate(self) -> None:
        (self.data / "dataset.json").write_bytes(json.dumps({"images": self.entries}).encode())

    def begin(self, size: int = 2) -> None:
        """A data set whose held-out split has colors that the training split lacks. size: in images per color."""
        self.add("train", 6 * size, range(3))
        self.add("val", 2 * size, range(4))
        self.add("test", 8 * size, range(8))

    def settings(self) -> dict[str, Any]:
        settings = small_config({"uri": self.storage.uri, "endpoint_url": self.options.endpoint_url})
        settings |= {"name": "world", "retrain": self.section}
        settings["data"] = {"root": self.data.uri, "train_splits": ["train"], "test_splits": ["test"], "min_count": 1}
        return settings

    def path(self) -> Path:
        path = self.folder / "retrain.yaml"
        path.write_text(yaml.safe_dump(self.settings()))
        return path

    @property
    def config(self) -> RunConfig:
        return parse_config(self.settings())

    @property
    def store(self) -> ChampionStore:
        return ChampionStore(self.storage, "world")

    def call(self, work: Colors | None = None) -> tuple[int, str]:
        """The exit code and the log of `raycap retrain`, without the log of a call that is made meanwhile."""
        messages: list[str] = []
        self.open_calls.append(messages)
        try:
            with on_message(lambda text: messages.append(text) if self.open_calls[-1] is messages else None):
                code = retrain(self.config, work or Colors())
        finally:
            self.open_calls = [each for each in self.open_calls if each is not messages]
        return code, "\n".join(messages)

    def last(self) -> dict[str, Any]:
        """The last decision."""
        return decisions(self.store, self.store.read())[0].model_dump(exclude_unset=True)

    def files(self) -> dict[str, str]:
        """The tags of all files that a retraining may change."""
        return {
            name: entry.tag
            for name, entry in self.storage.list().items()
            if name.startswith(("retrain/", "models/")) and not name.endswith(".lock")
        }


def sound(world: World, number: int) -> None:
    """champion.json, all bundles and all decisions are consistent, and the last decision has this number."""
    assert errors_of(world.store) == []
    assert world.store.read().number == number


def first(world: World) -> None:
    code, said = world.call()
    assert code == 0 and "decision  first: there was no champion" in said, said
    sound(world, 1)


def picture(color: int, number: int) -> bytes:
    image = Image.new("RGB", (8, 8), (color * 30, 10, 10))
    image.putpixel((0, 0), (number % 256, number // 256, 7))
    sink = io.BytesIO()
    image.save(sink, "PNG")
    return sink.getvalue()


def color_in(data: bytes) -> int:
    pixel = Image.open(io.BytesIO(data)).convert("RGB").getpixel((4, 4))
    assert isinstance(pixel, tuple)
    return int(pixel[0]) // 30


class Colors:
    """Replaces training and captioning on Ray. The model is the most frequent caption of each color."""

    def __init__(self) -> None:
        self.trained: list[str | None] = []  # what each training started from

    def train(self, config: RunConfig, data: FoundData) -> Path:
        dataset = data[0].readable()
        fingerprint = dataset.fingerprint()
        run_id = f"world-{hashlib.sha256(f'{config_identity(config)} {fingerprint}'.encode()).hexdigest()[:10]}"
        self.trained.append(config.init_from)
        if config.init_from is not None:
            start = fetched(StoragePath(config.init_from, config.storage.options))
            assert json.loads((start / "model.safetensors").read_text())
        train = dataset.split("train")
        counts: dict[int, Counter[str]] = {}
        for uri, captions in zip(train.column("uri"), train.column("captions"), strict=True):
            color = color_in(StoragePath(uri, config.storage.options).read_bytes())
            counts.setdefault(color, Counter())[captions[0]] += 1
        learned = {str(color): counter.most_common(1)[0][0] for color, counter in counts.items()}
        name = f"models/{config.name}/{run_id}"
        folder, home = config.working_path / name, config.home(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(json.dumps(learned))
        for file in ("config.yaml", "vocabulary.json"):
            (folder / file).write_text("{}")
        if home is not None:
            Mirror(home, folder).push()
        return folder

    def evaluate(self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig) -> SplitScores:
        folder = fetched(bundle)
        assert bundle_digests(folder, tuple(files)) == files
        learned = json.loads((folder / "model.safetensors").read_text())
        captions = {}
        for image, uri in zip(part.column("image_id"), part.column("uri"), strict=True):
            color = color_in(StoragePath(uri, config.storage.options).read_bytes())
            captions[image] = learned.get(str(color), "Something unknown.")
        return scored(captions, part, config)


def scored(captions: Mapping[int, str], part: Dataset, config: RunConfig) -> SplitScores:
    """CIDEr-D of these captions of the held-out images."""
    images = {image: ImageCaption((RankedCaption(text, 0.0),)) for image, text in captions.items()}
    return SplitScores(HELD_OUT, images, scores=caption_scores(captions, part, ("CIDEr-D",), config))
