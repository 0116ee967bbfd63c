"""`raycap init`: looks at captioned images and writes a configuration that trains on them."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from raycap.jobs.named_files import check_output_file
from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.config.variables import variable_names
from raycap.pipeline.data.image_locations import read_image_file
from raycap.pipeline.data.images import BadImage, decode_image
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.survey.configuration import Facts, Language, config_name, config_text, detect_language
from raycap.pipeline.data.survey.survey import Survey, survey
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable, shown
from raycap.pipeline.storage.atomic import write_bytes
from raycap.pipeline.storage.path import StoragePath

NUM_SAMPLED = 64  # images whose size is looked at
NUM_READ = 5_000  # captions from which the language is guessed
NUM_NAMED = 5  # files that are not used
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

    It reads the annotations and some images, prints what it found, and writes a short YAML file.

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
    sizes = _sample_sizes(found)
    captions = [caption for row in found.dataset.table["captions"].slice(0, NUM_READ).to_pylist() for caption in row]
    language = detect_language(captions, _tokenizers())
    facts = _facts(found, name, language, pretrained)
    splits = Counter(found.dataset.split_sizes())
    lines = {
        "found": f"{found.form}: {_named(found.keys)}",
        "images": f"{len(found.dataset)}: " + ", ".join(f"{split} {count}" for split, count in splits.most_common()),
        "captions": f"{facts.num_captions}, {_per_image(found)} per image, nearly all of at most {facts.words} words",
        "language": f"{language.code or 'unknown'} ({language.script.title()}), tokenizer {language.tokenizer}",
        "sizes": sizes,
    } | ({"left out": _not_used(found)} if found.left_out else {})
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


def _not_used(found: Survey) -> str:
    """The files that are not used, in words."""
    count, first = len(found.left_out), ", ".join(map(shown, found.left_out[:NUM_NAMED]))
    remedy = "add those that belong to the data to data.sources"
    return f"{count} files: {first}{', ...' if count > NUM_NAMED else ''}; {remedy}"


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


def _sample_sizes(found: Survey) -> str:
    """The sizes of some images in words. Raises UserError if none of them can be read."""
    uris = found.dataset.table["uri"]
    step = max(1, len(uris) // NUM_SAMPLED)
    chosen = [uris[row].as_py() for row in range(0, len(uris), step)][:NUM_SAMPLED]

    def size(uri: str) -> tuple[int, int] | str:
        try:
            data = read_image_file(StoragePath(uri, found.root.options))
            return decode_image(data, DataSection.model_fields["max_pixels"].default).size
        except (BadImage, OSError) as error:
            return re.sub(r"\[Errno \d+\] ", "", str(error))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(size, chosen))
    sizes = [result for result in results if not isinstance(result, str)]
    reasons = [result for result in results if isinstance(result, str)]
    if not sizes:
        problem = f"{len(results)} images of {found.root} can be read, the first because of: {reasons[0]}"
        raise UserError(f"none of {problem}; check the images' folder")
    (width, height), _ = Counter(sizes).most_common(1)[0]
    text = f"short sides {min(map(min, sizes))} to {max(map(min, sizes))} px, most often {width} x {height}"
    bad = f"; {len(reasons)} cannot be read, the first because of: {reasons[0]}" if reasons else ""
    return f"{text} (of {len(results)} images){bad}"
