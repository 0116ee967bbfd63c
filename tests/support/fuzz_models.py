"""Fuzz targets that read models, images and state: checkpoints, bundles, requests, HDF5, images, runs, leases."""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import h5py
import numpy as np
import pandas as pd
import yaml
from PIL import Image

from raycap.jobs.import_ import import_checkpoint
from raycap.jobs.named_files import open_bundle
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.image_sources import MAX_PIXELS
from raycap.pipeline.data.images import decode_image
from raycap.pipeline.data.reading import read_dataset
from raycap.pipeline.data.vocabulary import SPECIALS
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.features.regions import import_regions, write_regions
from raycap.pipeline.retrain.champion import ChampionState, ChampionStore
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.lease import LeaseRecord, take_lease
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.tracking.pyfunc import PyfuncModel
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from tests.conftest import small_config, write_karpathy
from tests.support.bundles import WORDS, make_bundle, with_confidence, write_images
from tests.support.features import write_bomb
from tests.support.fuzzing import Case
from tests.support.golden import EXPANSIONNET_SETTINGS, GOLDEN
from tests.support.mutations import (
    RAW_YAML,
    as_yaml,
    hostile,
    hostile_json,
    mutated_bytes,
    mutated_tree,
    mutated_zip,
    replace_by_special,
    write_hostile,
)
from tests.support.runs import Killed, prepare_run

# Pickles that run code, ask for much memory, or take long.
HOSTILE_PICKLES = (
    b"cos\nsystem\n(S'touch owned'\ntR.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0btouch owned\x85R.",
    b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R.",
    b"ios\nsystem\n(S'touch owned'\n.",
    b"\x80\x04]r\xff\xff\xff\x7f.",
    b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
    b"\x80\x04\x8b\xff\xff\xff\x7f.",
    b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b".",
    b"\x80\x04\x82\x01.",
    b"Pexternal\n.",
    b"\x80\x04ccollections\nCounter\n}\x85R" + b"0ccollections\nCounter\n}(" + b"K\x01K\x02u\x85R" + b".",
    b"",
)


class Upstream(NamedTuple):
    """The valid files of ExpansionNet v2, and those of the Meshed-Memory Transformer."""

    checkpoint: bytes
    tokens: bytes
    meshed_checkpoint: bytes
    meshed_tokens: bytes


def upstream(_: Path) -> Upstream:
    words = ["<unk>", "<pad>", "<bos>", "<eos>", *(word for word in WORDS.words if word not in SPECIALS)]
    tables = {"itos": words, "stoi": {word: index for index, word in enumerate(words)}}
    # an object of a class that does not exist here, with the tables as its attributes
    meshed = b"\x80\x02cdata.vocab\nVocab\n)\x81" + pickle.dumps(tables, 2)[2:-1] + b"b."
    names = ("expansionnet_v2/checkpoint.pth", "expansionnet_v2/tokens.pickle", "meshed_memory/checkpoint.pth")
    return Upstream(*((GOLDEN / name).read_bytes() for name in names), meshed)


def checkpoint(valid: Upstream, case: Case) -> Callable[[], object]:
    """`raycap import` of a hostile checkpoint or vocabulary."""
    random, folder = case.random, case.folder
    name = random.choice(Upstream._fields)
    files = valid._asdict()
    mutate = mutated_zip if "checkpoint" in name and random.random() < 0.6 else mutated_bytes
    is_crafted = random.random() < 0.2
    if is_crafted:
        files[name], mutate = random.choice(HOSTILE_PICKLES), mutated_bytes
    paths = {
        key: write_hostile(folder / key, data, random, (0.3 if is_crafted else 1) if key == name else 0, mutate)
        for key, data in files.items()
    }
    out, settings = folder / "out", list(EXPANSIONNET_SETTINGS)
    if name.startswith("meshed"):
        return lambda: import_checkpoint("meshed_memory", paths["meshed_checkpoint"], paths["meshed_tokens"], out)
    return lambda: import_checkpoint("expansionnet_v2", paths["checkpoint"], paths["tokens"], out, overrides=settings)


def bundle_folder(folder: Path) -> Path:
    return with_confidence(make_bundle(folder / "bundle"))


BUNDLE_FILES = (
    "config.yaml",
    "config.yaml",
    "model.safetensors",
    "vocabulary.json",
    "preprocessing.json",
    "confidence.json",
)


def bundle(source: Path, case: Case) -> Callable[[], object]:
    """A bundle in which one file is hostile is opened, and its captioner is used."""
    random, folder = case.random, case.folder / "bundle"
    shutil.copytree(source, folder)
    path = folder / random.choice(BUNDLE_FILES)
    data = path.read_bytes()
    if random.random() < 0.05:
        replace_by_special(path, random)
    elif path.suffix == ".safetensors" and random.random() < 0.5:
        path.write_bytes(mutated_safetensors(data, random))
    elif path.suffix == ".safetensors" or random.random() < 0.15:
        path.write_bytes(mutated_bytes(data, random))
    elif path.suffix == ".yaml":
        tree = mutated_tree(yaml.safe_load(data), random, RAW_YAML)
        if random.random() < 0.1 and isinstance(tree, dict) and isinstance(tree.get("backbone"), dict):
            tree["backbone"]["weights"] = random.choice((str(case.bait), "pretrained", "/dev/zero", "none "))
        path.write_text(as_yaml(tree), errors="surrogatepass")
    else:
        path.write_bytes(hostile_json(json.loads(data), random))
    image = Image.new("RGB", (8, 8))

    def use() -> None:
        opened = open_bundle("--model", str(folder)).bundle
        if opened.transform is not None:
            pixels = CaptionService(opened, beam_size=2, max_length=5).transform(image)[None]
            for options in ({"beam_size": 2, "max_length": 5}, {}):
                CaptionService(opened, **options).caption(pixels)  # type: ignore[arg-type]

    return use


def mutated_safetensors(data: bytes, random: Random) -> bytes:
    """The file with a hostile header, whose length is right, or with a hostile length."""
    (size,) = struct.unpack("<Q", data[:8])
    header = hostile_json(json.loads(data[8 : 8 + size]), random)
    length = len(header) if random.random() < 0.9 else random.choice((0, 2**63, 2**64 - 1, 10**6))
    return struct.pack("<Q", length) + header + data[8 + size :]


class Served(NamedTuple):
    """The model of MLflow's server, and the bytes of valid images."""

    model: PyfuncModel
    images: list[bytes]


def service(folder: Path) -> Served:
    images = [Path(path).read_bytes() for path in write_images(folder / "images", 4)]
    service = CaptionService(load_bundle(make_bundle(folder / "bundle")), beam_size=2, max_length=5)
    return Served(PyfuncModel(service), images)


def request(served: Served, case: Case) -> Callable[[], object]:
    """A request with hostile cells, columns or rows. No cell may open the bait."""
    random = case.random
    bait = str(case.bait)
    uris = [bait, f"file://{bait}", "/dev/zero", "~", "s3://bucket/key", "http://127.0.0.1:1/x", "/", "\ud800"]

    def cell() -> Any:
        if random.random() < 0.5:
            return random.choice(served.images)
        image = mutated_bytes(random.choice(served.images), random)
        text = base64.b64encode(image).decode()
        forms = (image, text, text[:-1], bytearray(image), memoryview(image), np.frombuffer(image, np.uint8), [*image])
        return random.choice((random.choice(forms), random.choice(uris), hostile(random)))

    names = random.sample(("image", "image", "uri", "uri", "images", 0), random.choice((1, 1, 2, 3)))
    rows = random.choice((0, 1, 1, 2, 20))
    table: Any = {name: [cell() for _ in range(rows)] for name in names}
    kind = random.random()
    if kind < 0.6:
        table = pd.DataFrame({name: pd.Series(column, dtype=object) for name, column in table.items()})
    elif kind < 0.7:
        image = served.images[0]
        table = random.choice((table | {"image": image}, table | {"uri": None}, [table], hostile(random), {}))
    parameters = random.choice((None, None, {"beam_size": 10**9}, {"": hostile(random)}))
    return lambda: served.model.predict(table, parameters)


def region_data(folder: Path) -> tuple[Dataset, dict[str, Any], bytes]:
    """A data set, the values of a configuration on region features, and the content of a valid HDF5 file."""
    data = write_karpathy(folder / "data", {"train": 3, "val": 1, "test": 1})
    values = small_config(folder / "storage", data={"root": str(data), "min_count": 1})
    dataset = read_dataset(parse_config(values).data, data).keyed_by_id()
    generator = np.random.default_rng(0)
    ids = dataset.column("image_id")
    images = ((number, generator.normal(size=(3, 8)).astype("f4"), np.ones((3, 4), "f4")) for number in ids)
    write_regions(folder / "regions.hdf5", images)
    del values["backbone"]
    values["stages"] = [stage for stage in values["stages"] if not stage.get("train_backbone")]
    return dataset, values, (folder / "regions.hdf5").read_bytes()


def regions(inputs: tuple[Dataset, dict[str, Any], bytes], case: Case) -> Callable[[], object]:
    """Hostile region features are imported."""
    dataset, values, data = inputs
    random, path = case.random, case.folder / "regions.hdf5"
    if random.random() < 0.5:
        write_hostile(path, data, random)
    else:
        path.write_bytes(data)
        with h5py.File(path, "r+") as file:
            change_regions(file, f"{random.choice(dataset.column('image_id'))}_", case)
        if random.random() < 0.3:
            write_hostile(path, path.read_bytes(), random)
    features = {"hdf5": str(path), "max_regions": random.choice((2, 4)), "truncate_regions": random.random() < 0.5}
    values = values | {"features": features, "storage": str(case.folder / "storage")}
    config: RunConfig = parse_config(values)
    return lambda: import_regions(dataset, config)


def change_regions(file: h5py.File, image: str, case: Case) -> None:
    """Puts something else in the place of an image's features or boxes."""
    random = case.random
    name = image + random.choice(("features", "boxes"))
    del file[name]
    layout = h5py.VirtualLayout((3, 8), "f4")
    layout[:] = h5py.VirtualSource(str(case.bait), "x", (3, 8))
    shapes: list[Any] = [(3, 0), (0, 8), (3, 9), (3,), (), (2, 4), (3, 8, 1)]
    numbers = np.full((3, 8), random.choice((np.nan, np.inf, 1e30)), random.choice(("f4", "f8")))
    large = np.zeros((1_000, 1_000), "f4")
    changes: tuple[Callable[[], object], ...] = (
        lambda: file.create_group(name),
        lambda: file.__setitem__(name, np.dtype("f4")),
        lambda: file.__setitem__(name, h5py.SoftLink(f"/{name}")),
        lambda: file.__setitem__(name, h5py.ExternalLink(str(case.bait), "/x")),
        lambda: file.create_virtual_dataset(name, layout),
        lambda: file.create_dataset(name, (3, 8), "f4", external=[(str(case.bait), 0, 96)]),
        lambda: file.create_dataset(name, (5, 10**9), "f4", chunks=(1, 1_000)),
        lambda: file.create_dataset(name, (10**9, 8), "f4", chunks=(1_000, 8)),
        lambda: file.create_dataset(name, data=large, chunks=(100, 100), compression="gzip"),
        lambda: write_bomb(file, name, random.choice((1, 2, 3))),
        lambda: file.create_dataset(name, data=np.zeros(random.choice(shapes), "f4")),
        lambda: file.create_dataset(name, data=numbers),
        lambda: file.create_dataset(name, data=[["a"] * 8] * 3),
        lambda: file.create_dataset(name, data=np.zeros((3, 8), [("x", "f4")])),
        lambda: file.create_dataset(name, data=np.zeros((3, 8), random.choice(("i4", "c8", "?", "f2")))),
        lambda: file.create_dataset(name, data=h5py.Empty("f4")),
    )
    random.choice(changes)()


def image_files(_: Path) -> list[bytes]:
    """A small image in each format and mode that Pillow writes."""
    Image.init()
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 10, 4), np.uint8), "RGBA")
    files = []
    for name in sorted(Image.SAVE):
        for mode in ("RGB", "L", "RGBA", "P", "I;16", "CMYK", "1", "F", "LA"):
            sink = io.BytesIO()
            try:
                (pixels.convert("I").convert(mode) if mode == "I;16" else pixels.convert(mode)).save(sink, name)
            except Exception:
                continue  # a mode that the format does not have
            files.append(sink.getvalue())
    return files


def image(files: list[bytes], case: Case) -> Callable[[], object]:
    """A damaged image is decoded."""
    data = mutated_bytes(files[case.number % len(files)], case.random)
    return lambda: decode_image(data, MAX_PIXELS).load()


class Stopped(NamedTuple):
    """A storage with a run that was killed in its second stage, the run's name, and the store of its features."""

    storage: Path
    values: dict[str, Any]
    run: str
    store: str


STAGES = ("xe_frozen", "scst_frozen")


def stopped_run(folder: Path) -> Stopped:
    storage = folder / "storage"
    data = write_karpathy(folder / "data", {"train": 8, "val": 3, "test": 3})
    changes: dict[str, Any] = {"data": {"root": str(data), "min_count": 1}}
    changes["stages"] = [
        stage | {"epochs": 3, "batch_size": 4, "checkpoint_every_steps": 1}
        for stage in small_config(storage)["stages"]
        if stage["name"] in STAGES
    ]
    run, store = prepare_run(storage, **changes)
    original = StageRun.step

    def step(self: StageRun, number: int, batches: Any) -> Any:
        if self.stage.name == STAGES[1] and number == 4:
            self.output.wait()
            raise Killed
        return original(self, number, batches)

    StageRun.step = step  # type: ignore[method-assign]
    with suppress(Killed):
        train_stages(LocalContext("cpu"), StageJob(run, STAGES, store))
    StageRun.step = original  # type: ignore[method-assign]
    return Stopped(storage, small_config(storage, **changes), run.run_id, store.uri)


def run_state(stopped: Stopped, case: Case) -> Callable[[], object]:
    """One file of a killed run, or of its features, is damaged. The run is opened and its second stage continues."""
    random, storage = case.random, case.folder / "storage"
    shutil.copytree(stopped.storage, storage, symlinks=True)
    kept = [path for path in sorted(storage.rglob("*")) if path.is_file()]
    path = random.choice(kept)
    data = path.read_bytes()
    kind = random.random()
    if path.suffix == ".json" and kind < 0.5:
        path.write_bytes(hostile_json(json.loads(data), random))
    elif path.suffix == ".pt" and kind < 0.3:
        path.write_bytes(mutated_zip(data, random))
    elif kind < 0.6:
        path.write_bytes(random.choice((b"", data[: len(data) // 2], b"\0" * len(data))))
    elif kind < 0.7:
        replace_by_special(path, random)
    else:
        path.write_bytes(mutated_bytes(data, random))
    (path.parent / random.choice(("step-backup", ".left.tmp-old", "notes.txt", "best-x"))).mkdir(exist_ok=True)
    config = parse_config(stopped.values | {"storage": str(storage)})
    store = StoragePath(stopped.store.replace(str(stopped.storage), str(storage)))

    def resume() -> None:
        run = prepare(config)
        read_journal(run.journal)
        train_stages(LocalContext("cpu"), StageJob(run, STAGES, store))

    return resume


def retraining_state(_: Any, case: Case) -> Callable[[], object]:
    """A hostile lease is taken, or a hostile champion's file is read."""
    random, place = case.random, StoragePath(str(case.folder))
    record = LeaseRecord(token=3, nonce="a", holder="process 1 on host", until=0.0, seconds=0.01)
    champion = json.loads(ChampionState(token=3).model_dump_json())
    files = {"lease.json": record.model_dump(), "retrain/x/champion.json": champion}
    name = random.choice(list(files))
    data = hostile_json(files[name], random)
    write_hostile(case.folder / name, data, random, share=0.3)
    if name == "lease.json":

        def take() -> None:
            lease = take_lease(place / name, 0.01, above=2)
            assert str(lease).isprintable(), f"a lease's holder controls a terminal: {lease!s:.100}"

        return take
    return lambda: ChampionStore(place, "x").read()


def nothing(_: Path) -> None:
    """Inputs of a target that needs none."""
