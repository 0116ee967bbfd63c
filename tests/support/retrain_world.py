"""A retraining without Ray and torch: colored pictures, and a "model" that remembers one caption a color.

python -m tests.support.retrain_world CONFIG [--die TEXT] [--stop TEXT]    `raycap retrain` with it;
kill -9 (or SIGSTOP) of itself at the first printed line that begins with TEXT
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from pipeline.captioning.bundle import bundle_digests, fetched
from pipeline.config.load import load_config, parse_config
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.data.loading import find_data
from pipeline.errors import UserError
from pipeline.retrain.champion import ChampionStore
from pipeline.retrain.retrain import Trained, retrain
from pipeline.runs.identity import config_identity
from pipeline.storage.mirror import Mirror
from pipeline.storage.path import StorageOptions, StoragePath
from tests.conftest import small_config
from tests.support.logs import on_message

COLORS = ("red", "green", "blue", "yellow", "black", "white", "pink", "gray")
THINGS = ("car on a road", "boat at sea", "dog in a park", "cup on a table", "bird in a tree", "cat on a mat")


def caption_of(color: int) -> str:
    return f"A {COLORS[color]} {THINGS[color % len(THINGS)]}."


class World:
    """A data set that grows and a storage, both on disk or both on S3."""

    def __init__(self, folder: Path, url: str | None = None, **retrain_section: Any) -> None:
        self.folder, self.section = folder, {"lease_seconds": 30} | retrain_section
        self.options = StorageOptions(url)
        home = str(folder) if url is None else f"s3://data/{folder.name}"
        self.data, self.storage = StoragePath(f"{home}/set", self.options), StoragePath(f"{home}/results", self.options)
        self.entries: list[dict[str, Any]] = []

    def add(self, split: str, count: int, colors: range, wrong: bool = False, corrupt: bool = False) -> None:
        """Pictures of these colors in turn; `wrong`: with the next color's caption."""
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

    def begin(self) -> None:
        """A data set whose training split does not know all colors that are held out."""
        self.add("train", 12, range(3))
        self.add("val", 4, range(4))
        self.add("test", 16, range(8))

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
        """`raycap retrain`; its exit code and what it said."""
        said: list[str] = []
        with on_message(said.append):
            code = retrain(self.config, work or Colors())
        return code, "\n".join(said)

    def last(self) -> dict[str, Any]:
        """The last decision."""
        return next(self.store.decisions(self.store.read()))[1].model_dump(exclude_unset=True)

    def files(self) -> dict[str, str]:
        """Everything in the storage that a retraining may change, by tag."""
        own = self.storage.list()
        wanted = [name for name in own if name.startswith(("retrain/", "models/")) and not name.endswith(".lock")]
        return {name: own[name].tag for name in wanted}


def sound(world: World, number: int) -> None:
    """The champion's file, all bundles and decisions are as they should be, and nothing else lies about."""
    assert world.store.verify() == []
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
    """What Ray would do: the model is each color's most frequent caption."""

    def __init__(self) -> None:
        self.trained: list[str | None] = []  # what each training started from

    def train(self, config: RunConfig) -> Trained:
        dataset = find_data(config)[0].known()
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
        (folder / "vocabulary.json").write_text("{}")
        if home is not None:
            Mirror(home, folder).push()
        return Trained(run_id, folder, fingerprint)

    def caption(
        self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig
    ) -> dict[int, str]:
        folder = fetched(bundle)
        assert bundle_digests(folder, tuple(files)) == files
        learned = json.loads((folder / "model.safetensors").read_text())
        found = {}
        for image, uri in zip(part.column("image_id"), part.column("uri"), strict=True):
            color = color_in(StoragePath(uri, config.storage.options).read_bytes())
            found[image] = learned.get(str(color), "Something unknown.")
        return found


def main() -> int:
    path, *rest = sys.argv[1:]
    ways = dict(zip(rest[::2], rest[1::2], strict=True))

    def act(text: str) -> None:
        print(text, flush=True)
        if "--die" in ways and text.startswith(ways["--die"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if "--stop" in ways and text.startswith(ways["--stop"]):
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        with on_message(act):
            return retrain(load_config(Path(path)), Colors())
    except UserError as error:
        print(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
