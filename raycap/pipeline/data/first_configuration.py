"""The YAML file that `raycap init` writes: the data, and a model, stages and sizes that suit the number of images."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.survey import Survey

# Scripts, by the first word of their characters' names in Unicode, that one language uses, or one most of all.
SCRIPT_LANGUAGES = {
    "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CJK": "zh", "THAI": "th", "CYRILLIC": "ru", "ARABIC": "ar",
    "DEVANAGARI": "hi", "BENGALI": "bn", "GREEK": "el", "HEBREW": "he", "TAMIL": "ta",
}  # fmt: skip
# Frequent words of captions in languages with Latin letters, by which one is guessed.
WORDS = {
    "en": "a the of with is on and are in at to an his her two",
    "de": "ein eine einem einer der die das und mit ist auf im sind von zwei",
    "fr": "un une le la les des du avec est sur et dans au deux qui",
    "es": "un una el la los las con del es en y sobre está al dos",
    "it": "un una il lo la gli con di è su e nel della sono due",
    "pt": "um uma o a os as com do da em é e no na dois",
    "nl": "een de het met van op en is in bij die twee zijn aan",
    "vi": "một con người đang trên của và có là những cái các đứng ngồi với",
    "tr": "bir ve ile üzerinde olan bu için iki adam da de kadın çocuk var yanında",
    "pl": "w na z i do jest się po dwa przed obok mężczyzna kobieta osoba dwóch",
}
WITHOUT_BLANKS = ("ja", "zh", "th")  # languages whose words are not divided by blanks
MIN_SHARE = 0.1  # of the letters that are Japanese syllables, which no Chinese text has
MIN_FREQUENT = 0.1  # of all words that are frequent words of the language
MIN_MARGIN, MIN_WORDS = 1.25, 2  # times the second language's frequent words; different frequent words
NEARLY_ALL = 0.98  # of the captions are not longer than the evaluation's max_length
SMALL, LARGE = 2_000, 50_000  # training images below and above which other sizes are proposed
NEW_BACKBONE = """\
# A small backbone that is trained from scratch. A pretrained one captions photographs far better:
#   name: swin_tiny_patch4_window7_224, image_size: 224, weights: pretrained, and no other key
backbone:
  name: swin_tiny_patch4_window7_224
  image_size: 128
  embed_dim: 32
  depths: [2, 2, 2]
  num_heads: [2, 4, 8]
  window_size: 8"""
PRETRAINED_BACKBONE = """\
backbone:
  name: swin_{}_patch4_window7_224
  image_size: 224
  weights: pretrained  # downloaded once; offline, a checkpoint's path or `raycap init --no-pretrained`"""
MODEL = """\
model:
  name: expansionnet_v2
  d_model: {}
  d_ff: {}
  num_heads: {}
  num_encoder_layers: {}
  num_decoder_layers: {}"""
SMALLER_MODEL = "\n  static_expansion: [16, 32]\n  dynamic_expansion: 8\n  dropout: 0.2"
MODEL_SIZES = {"small": (128, 256, 4, 2, 2), "medium": (256, 512, 8, 2, 2), "large": (512, 2048, 8, 3, 3)}


@dataclass(frozen=True)
class Language:
    """The script of captions (Unicode's name), a language (ISO 639-1; None: not recognized) and its tokenizer."""

    script: str
    code: str | None
    tokenizer: str


def detect_language(captions: Iterable[str]) -> Language:
    """The language of captions, and the value of `data.tokenizer` that suits it."""
    letters: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for caption in captions:
        letters.update(filter(str.isalpha, caption))
        words.update(caption.lower().split())
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        scripts[_script_of(letter)] += count
    script = scripts.most_common(1)[0][0] if scripts else "UNKNOWN"
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > MIN_SHARE * scripts.total():
        script = "HIRAGANA"
    code = _latin_language(words) if script == "LATIN" else SCRIPT_LANGUAGES.get(script)
    tokenizer = "characters" if code in WITHOUT_BLANKS else "expansionnet" if code == "en" else "unicode"
    return Language(script, code, tokenizer)


def _script_of(letter: str) -> str:
    """The first word of the letter's name in Unicode, such as LATIN or CJK."""
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]


def _latin_language(words: Counter[str]) -> str | None:
    """The language whose frequent words are most of the words; None if they are too few, or nearly as many of another.

    A language that is not in WORDS shares some words with one that is: Swedish has "en", as Spanish.
    """
    found = {code: [word for word in frequent.split() if words[word]] for code, frequent in WORDS.items()}
    counts = {code: sum(words[word] for word in each) for code, each in found.items()}
    best, second = sorted(counts, key=counts.__getitem__, reverse=True)[:2]
    is_clear = counts[best] >= MIN_MARGIN * counts[second] and len(found[best]) >= MIN_WORDS
    return best if is_clear and counts[best] >= MIN_FREQUENT * words.total() > 0 else None


@dataclass(frozen=True)
class Facts:
    """What a configuration depends on. num_train: images for training. words: of nearly all captions, at most."""

    name: str
    data: Mapping[str, Any]  # the section `data`
    num_train: int
    num_captions: int
    captions_per_image: int
    words: int
    language: Language
    is_pretrained: bool


def facts_of(found: Survey, name: str, language: Language, is_pretrained: bool) -> Facts:
    """What the configuration `name` of a data set depends on. Raises UserError for an image without a word."""
    dataset = found.dataset.with_words(language.tokenizer)
    train = dataset.split(*DataSection(root=found.root.uri, **found.keys).train_splits)
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
        is_pretrained=is_pretrained,
    )


def config_text(facts: Facts, found: str) -> str:
    """The configuration as YAML with comments. found: one line about the data, for the header."""
    size = "small" if facts.num_train < SMALL else "large" if facts.num_train > LARGE else "medium"
    length = min(100, facts.words + 2)
    parts = [
        f"# {found}\n# Written by `raycap init`; docs/configuration.md describes the keys.",
        f"name: {facts.name}",
        _data(facts),
        PRETRAINED_BACKBONE.format("base" if size == "large" else "tiny") if facts.is_pretrained else NEW_BACKBONE,
        MODEL.format(*MODEL_SIZES[size]) + (SMALLER_MODEL if size != "large" else ""),
        _stages(facts, size),
        "workers:\n  num_workers: 1  # on GPUs: their number, and gpus_per_worker: 1\n  num_decode_threads: 2",
        f"evaluation: {{max_length: {length}}}  # nearly all captions are shorter" if length > 20 else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _data(facts: Facts) -> str:
    def flow(value: object) -> str:
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**6)
        return text.strip().removesuffix("...").strip()

    lines = ["data:"]
    for key, value in facts.data.items():
        if key == "sources":
            lines += ["  sources:", *(f"    - {flow(source)}" for source in value)]
        else:
            lines.append(f"  {key}: {flow(value)}")
    if "split_fractions" in facts.data:
        lines.append("  # an image's split depends on its name alone, so that further images move none")
    if facts.language.code not in (None, ENGLISH):
        lines.append(f"  language: {facts.language.code}")
    lines.append(f"  tokenizer: {facts.language.tokenizer}")
    least = 5 if facts.num_captions >= 20_000 else 2 if facts.num_captions >= 1_000 else 1
    lines.append(f"  min_count: {least}  # rarer words are not in the vocabulary")
    return "\n".join(lines)


def _stages(facts: Facts, size: str) -> str:
    """Cross entropy with a frozen backbone; SCST and the backbone with more images, or if it is not pretrained."""
    epochs = {"small": 15, "medium": 10, "large": 8}[size]
    per_image = min(5, facts.captions_per_image) if size != "large" else 1
    batch = {"small": 20, "medium": 32, "large": 48}[size]
    lr = {"small": "1.0e-3", "medium": "5.0e-4", "large": "2.0e-4"}[size]
    common = f"    batch_size: {batch}\n" + (f"    captions_per_image: {per_image}\n" if per_image > 1 else "")
    stages = [
        "  - name: xe_frozen  # the image encoder does not change, so that its features are computed once\n"
        f"    objective: cross_entropy\n    epochs: {epochs}\n{common}    lr: {lr}\n"
        "    schedule: {warmup_iterations: 20, decay: 0.9}"
    ]
    if size != "small" or not facts.is_pretrained:
        finetune_lr = "5.0e-4" if not facts.is_pretrained else "3.0e-5"
        stages.append(
            "  - name: xe_finetune\n    objective: cross_entropy\n    train_backbone: true\n"
            f"    epochs: {epochs if not facts.is_pretrained else 2}\n{common}    lr: {finetune_lr}\n"
            "    schedule: {warmup_iterations: 20, decay: 0.85}\n    drop_path: 0.05"
        )
    if size != "small" and facts.captions_per_image > 1:  # the reward of one reference is mostly noise
        stages.append(
            "  - name: scst_frozen\n    objective: scst\n    epochs: 3\n"
            f"    batch_size: {batch}\n    lr: 1.0e-4\n    schedule: {{decay: 0.8}}"
        )
    return "stages:\n" + "\n".join(stages)
