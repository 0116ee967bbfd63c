"""`raycap init`: looks at captioned images and writes a configuration that trains on them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.named_files import check_output_file
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.variables import variable_names
from raycap.pipeline.data.first_configuration import Counts, Language, config_text, counts_of, detect_language
from raycap.pipeline.data.survey import Survey, survey
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import print_line, shown
from raycap.pipeline.storage.atomic import write_bytes

NUM_READ = 5_000  # number of captions from which the language is guessed


def init(
    place: Annotated[str, typer.Argument(help="A folder of images and captions, an annotation file, or s3://...")],
    out: Annotated[Path | None, typer.Option(help="The file to write; by default NAME.yaml in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    pretrained: Annotated[bool, typer.Option(help="Start from a pretrained backbone, or from a small new one.")] = True,
) -> int:
    """Look at captioned images and write a configuration for them.

    It reads the annotations, prints what it found, and writes a short YAML file.

    \b
    Example: raycap init photos
             raycap init photos/metadata.jsonl --out photos.yaml
             raycap init shards --no-pretrained --force
    """
    import torch

    found = survey(place)
    name = re.sub(r"[^A-Za-z0-9]+", "-", found.root.name).strip("-")[:60] or "captions"
    path = Path(f"{name}.yaml") if out is None else out
    check_output_file("--out", path)
    if path.exists() and not force:
        raise UserError(f"--out {shown(path)} exists; give another name, or --force to replace it")
    if variable_names(found.root.uri):
        raise UserError(f"{shown(found.root.uri)} contains ${{...}}, which a configuration would replace; rename it")
    captions = [caption for row in found.dataset.table["captions"].slice(0, NUM_READ).to_pylist() for caption in row]
    language = detect_language(captions)
    counts = counts_of(found, language)
    for key, text in _summary(found, language, counts).items():
        print_line(f"{key:<9} {text}")
    without_words = [f"{counts.wordless} captions without a word are not used"] if counts.wordless else []
    for sentence in found.left_out + without_words:
        print_line(f"left out  {sentence}")
    num_gpus = torch.cuda.device_count()
    write_bytes(path, config_text(found, name, language, counts, num_gpus, is_pretrained=pretrained).encode())
    load_config(path)  # raises if the new file is not valid
    print(f"wrote     {path}")
    print(f"next      raycap check {path}\n          raycap run {path}")
    return 0


def _summary(found: Survey, language: Language, counts: Counts) -> dict[str, str]:
    """{label: text} of the lines that the command prints about the data set."""
    sources = found.keys.get("sources", [found.keys])  # a single source is described by the keys themselves
    files = [source["annotations"] for source in sources]
    places = ", ".join(found.root.uri if file == "." else file for file in files)
    numbers = sorted({len(texts) for texts in found.dataset.column("captions")})
    per_image = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    splits = Counter(found.dataset.split_sizes()).most_common()
    by_folder = " (by folder)" if "split_by_folder" in found.keys else ""
    return {
        "found": f"{found.form}: {places}",
        "images": f"{len(found.dataset)}: " + ", ".join(f"{split} {count}" for split, count in splits) + by_folder,
        "captions": f"{counts.captions}, {per_image} per image, nearly all of at most {counts.words} words",
        "language": f"{language.code or 'unknown'} ({language.script.title()}), tokenizer {language.tokenizer}",
    }
