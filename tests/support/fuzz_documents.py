"""Fuzz targets that read documents: configurations, command lines, annotations, captions, detections, word vectors."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import yaml

from raycap.jobs.constraints import constraints
from raycap.jobs.score import score
from raycap.pipeline.config.load import (
    dump_config,
    load_config,
    parse_config,
    parse_section,
    read_file,
    referenced_files,
)
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.image_locations import read_image_file
from raycap.pipeline.data.images import forget_pages
from raycap.pipeline.data.reading import build_vocabulary, read_annotations, read_dataset
from raycap.pipeline.data.survey.survey import survey
from raycap.pipeline.data.word_vectors import read_word_vectors
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.constraints import load_automata
from raycap.pipeline.runs.check import check_data
from raycap.pipeline.search.spec import load_search
from raycap.pipeline.storage.path import StoragePath
from tests.conftest import ROOT, small_config, write_karpathy
from tests.support.bundles import WORDS, make_bundle
from tests.support.forms import scenes, write_parquet_shards, write_tars
from tests.support.fuzzing import Case
from tests.support.mutations import (
    RAW_JSON,
    RAW_YAML,
    as_json,
    as_yaml,
    hostile,
    mutated_text,
    mutated_tree,
    replace_by_special,
    spelled,
    write_hostile,
)

COMMANDS_OF_RUNS = ("check", "run", "extract", "evaluate", "retrain")


class ConfigFile(NamedTuple):
    """A configuration: its path below configs/, its text and values, the texts of the files it names, and its kind."""

    name: str
    text: str
    values: Any
    others: dict[str, str]
    is_search: bool


def config_files(_: Path) -> list[ConfigFile]:
    """Every shipped configuration."""
    folder, files = ROOT / "raycap" / "configs", []
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text()
        related = {file.resolve() for file in referenced_files(path)} - {path}
        others = {str(file.relative_to(folder)): file.read_text() for file in related}
        is_search = "base" in read_file(path)
        files.append(ConfigFile(str(path.relative_to(folder)), text, yaml.safe_load(text), others, is_search))
    return files


def write_config(file: ConfigFile, text: str, folder: Path) -> Path:
    for name, content in (file.others | {file.name: text}).items():
        path = folder / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, errors="surrogatepass")
    return folder / "configs" / file.name


def mutated_config(file: ConfigFile, case: Case) -> tuple[Path, list[str]]:
    """A mutation of a configuration in the case's folder, and options of --set: one of the two is hostile."""
    kind, text, overrides = case.random.random(), file.text, []
    if kind < 0.55:
        text = as_yaml(mutated_tree(file.values, case.random, RAW_YAML))
    elif kind < 0.7:
        text = mutated_text(text, case.random, RAW_YAML)
    else:
        overrides = [hostile_override(file.values, case.random) for _ in range(case.random.choice((1, 1, 2)))]
    return write_config(file, text, case.folder), overrides


def hostile_override(values: Any, random: Random) -> str:
    """A `--set` of a key of the configuration, or of one that it lacks, to a hostile value."""
    key, node = [], values
    while isinstance(node, dict | list) and node and random.random() < 0.8:
        part = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
        has_name = isinstance(node, list) and isinstance(node[part], dict) and "name" in node[part]
        key.append(node[part]["name"] if has_name else part)
        node = node[part]
    names = ".".join(map(str, key)) or random.choice(("", ".", "storage", "a..b", "stages.9.lr", "x" * 3_000))
    value = spelled(json.dumps(hostile(random, list(RAW_YAML)), default=str), RAW_YAML)
    return random.choice((f"{names}={value}", f"{names}={value}", f"{names}.extra={value}", f"{names}s={value}", names))


def accept(path: Path, overrides: list[str], is_search: bool = False) -> None:
    """What `raycap run` and `raycap tune` do before their first write. The configuration of a run can be stored."""
    if is_search:
        load_search(path, overrides)
        return
    config = load_config(path, overrides)
    parse_config(yaml.safe_load(dump_config(config)))


def configuration(files: list[ConfigFile], case: Case) -> Callable[[], object]:
    """A hostile configuration, or hostile options of --set, are checked as before a run or search."""
    file = files[case.number % len(files)]
    path, overrides = mutated_config(file, case)
    return lambda: accept(path, overrides, file.is_search)


class Small(NamedTuple):
    """Valid inputs of command lines: a configuration of a small data set, a bundle, and the data set's folder."""

    config: ConfigFile
    bundle: Path
    data: Path


def small_inputs(folder: Path) -> Small:
    data = write_karpathy(folder / "data", {"train": 5, "val": 2, "test": 2})
    values = small_config(folder / "nowhere")
    values["data"] = {"root": str(data), "min_count": 1}
    values["storage"] = "results"
    return Small(
        ConfigFile("run.yaml", yaml.safe_dump(values), values, {}, False), make_bundle(folder / "bundle"), data
    )


def command_line(inputs: Small, case: Case) -> Callable[[], object]:
    """`raycap` with hostile files and options, in a process. A configuration that is accepted is only checked."""
    random, folder = case.random, case.folder
    path, overrides = mutated_config(inputs.config, case)
    # An argument of a program holds no NUL, and no more than 128 KiB.
    options = [word for each in overrides if "\0" not in each and len(each) < 10**5 for word in ("--set", each)]
    document = folder / "file.json"
    document.write_text(as_json(mutated_tree(annotations_of("karpathy"), random, list(RAW_JSON))))
    image = folder / random.choice(("a\x1b[2J.png", "a\nforged.jpg: a caption.png", "b\u202e.png", "c.png"))
    write_hostile(image, next((inputs.data / "images").iterdir()).read_bytes(), random)
    try:
        accept(path, options[1::2])
        commands = ["check"]
    except Exception:
        commands = list(COMMANDS_OF_RUNS)
    words = random.choice(
        [
            [random.choice(commands), str(path), *options],
            [random.choice(commands), str(path), *options],
            ["score", "--references", str(document), "--predictions", str(document), "--metric", "CIDEr-D"],
            ["constraints", "--detections", str(document), "--out", str(folder / "out"), "--model", str(inputs.bundle)],
            ["caption", str(image), "--model", str(inputs.bundle), "--beam", "1", "--max-length", "4"],
            ["import", "--from=expansionnet_v2", f"--checkpoint={document}", f"--tokens={document}", "--out=out"],
            [random.choice(("check", "score", "tune", "nothing")), str(hostile(random)).replace("\0", "")[:999]],
        ]
    )
    return lambda: run_words(words)


def run_words(words: list[str]) -> None:
    """Runs `raycap`. A failure is raised as the error that gives its exit code; AssertionError for wrong output."""
    command = [sys.executable, "-m", "raycap", *words]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"})
    output, errors = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    strange = [line for line in (output + errors).split("\n") if not line.isprintable()]
    assert done.returncode in (0, 1, 2), f"exit code {done.returncode}: {errors[-300:]}"
    assert "Traceback" not in errors, f"a traceback: {errors.strip().splitlines()[-1]}"
    assert not strange, f"output that controls a terminal: {strange[0]!r}"
    sentences = [line for line in errors.split("\n") if line.startswith("raycap: ")]
    if done.returncode and len(sentences) != 1:
        is_result = words[0] in ("check", "caption")  # the data set or an image is not usable
        assert is_result or "Error" in errors, f"exit code {done.returncode} without a sentence: {errors[-300:]}"
    if done.returncode == 2:
        raise UserError((sentences or errors.split("\n"))[0])
    if done.returncode == 1:
        raise JobFailedError((sentences or ["an exit code"])[0])


def annotations_of(form: str) -> Any:
    """Valid annotations of six images, as a document or as rows."""
    splits = ("train", "train", "train", "val", "test", "test")
    texts = ["A red cat sits on the mat.", "The cat is red."]
    if form == "karpathy":
        sentences = [{"raw": text} for text in texts]
        images = [
            {"filepath": "images", "filename": f"{n}.png", "cocoid": n, "split": split, "sentences": sentences}
            for n, split in enumerate(splits)
        ]
        return {"images": images}
    if form == "coco":
        images = [{"id": n, "file_name": f"{n}.png", "domain": split} for n, split in enumerate(splits)]
        return {"images": images, "annotations": [{"image_id": n % 6, "caption": texts[n % 2]} for n in range(12)]}
    return [{"image": f"{n}.png", "captions": texts, "id": n, "split": split} for n, split in enumerate(splits)]


FORMS = ("karpathy", "coco", "jsonl", "csv", "tsv", "parquet")


def encoded(form: str, tree: Any) -> bytes:
    """A document of annotations as a file's bytes. Rows that a format cannot hold are written as text."""
    if form in ("karpathy", "coco"):
        return as_json(tree).encode(errors="surrogatepass")
    rows = tree if isinstance(tree, list) else [tree]
    if form == "jsonl":
        return "\n".join(map(as_json, rows)).encode(errors="surrogatepass")
    rows = [row if isinstance(row, dict) else {"image": row} for row in rows] or [{}]
    names = dict.fromkeys(str(key) for row in rows for key in row)
    cells = [[row.get(name) for row in rows] for name in names]
    texts = {
        name: [spelled(cell, RAW_JSON) if isinstance(cell, str) else as_json(cell) for cell in column]
        for name, column in zip(names, cells, strict=True)
    }
    sink = io.BytesIO()
    if form == "parquet":
        try:
            table = pa.Table.from_pylist(rows)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            table = pa.table(texts)
        pa.parquet.write_table(table, sink)
    else:
        separator = "\t" if form == "tsv" else ","
        pa.csv.write_csv(pa.table(texts), sink, pa.csv.WriteOptions(delimiter=separator))
    return sink.getvalue()


def gzip_bomb(_: Path) -> bytes:
    """A small gzip file of 512 MiB."""
    return gzip.compress(b"[" + b" " * 2**29)


def annotations(bomb: bytes, case: Case) -> Callable[[], object]:
    """A data set with hostile annotations is read, and its vocabulary is built."""
    random, form = case.random, FORMS[case.number % len(FORMS)]
    tree, raw = annotations_of(form), list(RAW_JSON)
    data = encoded(form, mutated_tree(tree, random, raw) if random.random() < 0.6 else tree)
    name = f"captions_val.{form}" if form in ("jsonl", "csv", "tsv", "parquet") else "dataset.json"
    if random.random() < 0.25:
        name, data = f"{name}.gz", bomb if random.random() < 0.05 else gzip.compress(data)
    write_hostile(case.folder / name, data, random, share=0.4)
    (case.folder / "images").mkdir()
    names = {"karpathy": "karpathy", "coco": "coco"}
    chosen = random.choice(("auto", names.get(form, "table")))
    values = {"root": str(case.folder), "annotations": name, "format": chosen, "min_count": 1}

    def read() -> None:
        section = parse_section(DataSection, values, "data")
        build_vocabulary(read_dataset(section, case.folder), section)

    return read


def archive_files(folder: Path) -> list[tuple[str, bytes]]:
    """Tars and Parquet files with images, by name."""
    images = scenes(folder / "scenes", 30)[:6]
    files: list[tuple[str, bytes]] = []
    formats = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
    for number, compression in enumerate(("snappy", "none", "zstd")):
        write_tars(folder / f"tars-{number}", images, formats[number])
        write_parquet_shards(folder / f"parquet-{number}", images, compression=compression, use_dictionary=number == 0)
        files += [("a.tar", (folder / f"tars-{number}" / "shard-000.tar").read_bytes())]
        files += [("a.parquet", (folder / f"parquet-{number}" / "part-0.parquet").read_bytes())]
    return files


def archive(files: list[tuple[str, bytes]], case: Case) -> Callable[[], object]:
    """The images in a damaged tar or Parquet file are listed and read, and `raycap init` looks at it."""
    name, data = files[case.number % len(files)]
    write_hostile(case.folder / name, data, case.random, share=0.9)

    def read() -> None:
        section = DataSection(root=str(case.folder), annotations=name)
        dataset, _ = read_annotations(section, case.folder)
        for uri in dataset.column("uri"):
            with suppress(OSError):
                read_image_file(StoragePath(uri))
        forget_pages()
        survey(str(case.folder))

    return read


def data_set(inputs: Small, case: Case) -> Callable[[], object]:
    """`raycap check` of a data set in which one image is damaged or special, and one has a strange name."""
    random = case.random
    shutil.copytree(inputs.data, case.folder / "data")
    images = sorted((case.folder / "data/images").iterdir())
    write_hostile(images[0], images[0].read_bytes(), random)
    if random.random() < 0.2:
        replace_by_special(images[1], random)
    document = json.loads((case.folder / "data/dataset.json").read_text())
    if random.random() < 0.5:
        strange = random.choice(("a\x1b[2J.png", "a\nb.png", "\u202e.png", "x" * 300 + ".png", "é.png"))
        document["images"][2]["filename"] = strange
        document["images"][3]["sentences"][0]["raw"] = str(hostile(random)).encode(errors="replace").decode()
    (case.folder / "data/dataset.json").write_text(json.dumps(document))
    values = inputs.config.values | {"data": {"root": str(case.folder / "data"), "min_count": 1}}
    config = parse_config(values | {"storage": str(case.folder / "storage")})

    def check() -> None:
        for finding in check_data(config).findings:
            assert finding.text.isprintable(), f"a finding controls a terminal: {finding.text!r}"

    return check


PREDICTIONS = [{"image_id": number, "caption": "a red cat on a mat"} for number in range(6)]


def result_files(_: Any, case: Case) -> Callable[[], object]:
    """`raycap score` with hostile references or predictions."""
    random, folder = case.random, case.folder
    form = random.choice(("karpathy", "coco"))
    trees = {"references": annotations_of(form), "predictions": PREDICTIONS}
    mutated = random.choice(list(trees))
    trees[mutated] = mutated_tree(trees[mutated], random, list(RAW_JSON))
    for name, tree in trees.items():
        data = as_json(tree).encode(errors="surrogatepass")
        data = gzip.compress(data) if random.random() < 0.2 else data
        write_hostile(folder / name, data, random, share=0.2 if name == mutated else 0)
    out = {"json_file": folder / "out.json", "per_image": folder / random.choice(("out.csv", "out.parquet"))}
    files = {name: folder / name for name in trees}
    return lambda: score(**files, **out, metrics=["BLEU-4", "ROUGE-L", "CIDEr-D"])


DETECTIONS = {
    "categories": [{"id": 1, "name": "Cat"}, {"id": 2, "name": "Mat"}],
    "annotations": [{"image_id": n, "category_id": 1 + n % 2, "score": 0.9, "bbox": [1, 2, 30, 40]} for n in range(6)],
}
LINES = [{"image_id": n, "label": "Cat", "score": 0.5, "box": [0, 0, 9.5, 9]} for n in range(6)]
HIERARCHY = {"LabelName": "Thing", "Subcategory": [{"LabelName": "Animal", "Subcategory": [{"LabelName": "Cat"}]}]}


def detections(inputs: Small, case: Case) -> Callable[[], object]:
    """`raycap constraints` with hostile detections, hierarchy, class names, classes to leave out, or vocabulary."""
    random, folder = case.random, case.folder
    boxes = as_json(DETECTIONS) if random.random() < 0.5 else "\n".join(map(as_json, LINES))
    vocabulary = (inputs.bundle / "vocabulary.json").read_text()
    texts = {"detections": boxes, "hierarchy": as_json(HIERARCHY), "exclude": "tree\n", "vocabulary.json": vocabulary}
    texts["class_names"] = "/m/1,Cat\n/m/2,Mat\n"
    chosen = random.choice(list(texts))
    try:
        tree = json.loads(texts[chosen])
        texts[chosen] = as_json(mutated_tree(tree, random, list(RAW_JSON)))
    except ValueError:
        lines = [as_json(mutated_tree(line, random, list(RAW_JSON))) for line in LINES]
        texts[chosen] = random.choice(("\n".join(lines), mutated_text(texts[chosen], random, RAW_JSON)))
    for name, text in texts.items():
        data = text.encode(errors="surrogatepass")
        write_hostile(folder / name, data, random, share=0.2 if name == chosen else 0)
    names = ("detections", "hierarchy", "class_names", "exclude")
    return lambda: constraints(**{name: folder / name for name in names}, out=folder / "out", model=folder)


def constraint_files(_: Any, case: Case) -> Callable[[], object]:
    """A hostile constraint file is read and becomes automata."""
    rows = [{"image_id": n, "constraints": ["cat", ["red", "mat"]], "at_least": 1} for n in range(6)]
    row = case.random.randrange(6)
    rows[row] = mutated_tree(rows[row], case.random, list(RAW_JSON))
    text = "\n".join(map(as_json, rows)).encode(errors="surrogatepass")
    path = write_hostile(case.folder / "constraints.jsonl", text, case.random, share=0.3)
    return lambda: load_automata(path, range(6), WORDS)


def word_vectors(_: Any, case: Case) -> Callable[[], object]:
    """A hostile file of word vectors is read."""
    random = case.random
    lines = [f"{word} " + " ".join(f"{random.gauss(0, 1):.4f}" for _ in range(8)) for word in WORDS.words]
    lines = random.choice(([], ["7 8"], ["1 " + "9" * 5_000], ["9" * 5_000 + " 8"])) + lines
    text = mutated_text("\n".join(lines), random, RAW_JSON)
    number = re.compile(r"\d\.\d{3}")
    text = number.sub(lambda match: match[0] if random.random() < 0.99 else str(hostile(random))[:99], text)
    path = write_hostile(case.folder / "glove.txt", text.encode(errors="surrogatepass"), random, share=0.5)
    return lambda: read_word_vectors(path, WORDS.words, 8)
