"""`raycap init`: looks at captioned images and writes a configuration that trains on them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from raycap.jobs.named_files import check_output_file
from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.config.variables import variable_names
from raycap.pipeline.data.first_configuration import Facts, Language, config_name, config_text, detect_language
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.survey import Survey, survey
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable, shown
from raycap.pipeline.storage.atomic import write_bytes

NUM_READ = 5_000  # captions from which the language is guessed
NEARLY_ALL = 0.98  # of the captions are not longer than the evaluation's max_length


def init(
    place: Annotated[str, typer.Argument(help="A folder of images and captions, an annotation file, or s3://...")],
    out: Annotated[Path | None, typer.Option(help="The file to write; by default NAME.yaml in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    pretrained: Annotated[
        bool, typer.Option(help="Start from a pretrained backbone, which is downloaded, or from a small new one.")
    ] = True,
) -> int:
    """Look at captioned images and write a configuration for them.

    It reads the annotations, prints what it found, and writes a short YAML file.

    \b
    Example: raycap init photos
             raycap init photos/metadata.jsonl --out photos.yaml
             raycap init shards --no-pretrained --force
    """
    found = survey(place)
    name = config_name(found.root.name if found.root.name else "captions")
    path = Path(f"{name}.yaml") if out is None else out
    check_output_file("--out", path)
    if path.exists() and not force:
        raise UserError(f"--out {shown(path)} exists; give another name, or --force to replace it")
    if variable_names(found.root.uri):
        raise UserError(f"{shown(found.root.uri)} contains ${{...}}, which a configuration would replace; rename it")
    captions = [caption for row in found.dataset.table["captions"].slice(0, NUM_READ).to_pylist() for caption in row]
    language = detect_language(captions, _tokenizers())
    facts = _facts(found, name, language, pretrained)
    splits = Counter(found.dataset.split_sizes())
    lines = {
        "found": f"{found.form}: {_named(found.keys)}",
        "images": f"{len(found.dataset)}: " + ", ".join(f"{split} {count}" for split, count in splits.most_common()),
        "captions": f"{facts.num_captions}, {_per_image(found)} per image, nearly all of at most {facts.words} words",
        "language": f"{language.code or 'unknown'} ({language.script.title()}), tokenizer {language.tokenizer}",
    }
    for key, text in lines.items():
        print(f"{key:<9} {printable(text)}")
    header = printable(f"{len(found.dataset)} images with {facts.num_captions} captions ({found.form})")
    write_bytes(path, config_text(facts, header).encode())
    load_config(path)  # what is written is valid
    print(f"wrote     {path}")
    print(f"next      raycap check {path}\n          raycap run {path}")
    return 0


def _named(keys: dict[str, Any]) -> str:
    """The annotation files in words."""
    return ", ".join(each["annotations"] for each in keys.get("sources") or [keys])


def _per_image(found: Survey) -> str:
    counts = sorted({len(captions) for captions in found.dataset.column("captions")})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _facts(found: Survey, name: str, language: Language, pretrained: bool) -> Facts:
    """What the configuration depends on."""
    dataset = found.dataset.with_words(language.tokenizer)  # raises UserError for an image that training refuses
    section = DataSection(root=found.root.uri, **found.keys)
    train = dataset.split(*section.train_splits)
    counts = Counter(len(captions) for captions in train.column("captions"))
    lengths = sorted(len(tokens) for tokens in dataset.tokens(language.tokenizer))
    return Facts(
        name=name,
        data={"root": found.root.uri, **found.keys},
        num_train=len(train),
        num_captions=len(lengths),
        captions_per_image=counts.most_common(1)[0][0],
        words=lengths[int(NEARLY_ALL * (len(lengths) - 1))],
        language=language,
        language_key=None if language.code == ENGLISH else language.code,
        is_pretrained=pretrained,
    )


def _tokenizers() -> tuple[str, ...]:
    """The tokenizers that need no file: the values of `data.tokenizer` that `TOKENIZERS` has."""
    return tuple(name for name in get_args(DataSection.model_fields["tokenizer"].annotation) if name in TOKENIZERS)
