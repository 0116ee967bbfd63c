"""The YAML file that `raycap init` writes: the data's keys, and a model and stages that suit the number of images."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import yaml

from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.survey import Survey
from raycap.pipeline.runtime.names import printable

# {script: language}. A script is named by the first word of its letters' Unicode names. If several languages use a
# script, the language with most readers is listed.
SCRIPT_LANGUAGES = {
    "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CJK": "zh", "THAI": "th", "CYRILLIC": "ru", "ARABIC": "ar",
    "DEVANAGARI": "hi", "BENGALI": "bn", "GREEK": "el", "HEBREW": "he", "TAMIL": "ta",
}  # fmt: skip
# Frequent words of captions in languages with Latin letters. `_latin_language` guesses the language by these words.
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
MIN_SHARE = 0.1  # fraction of syllables that makes a text Japanese, because Chinese text has none
# A language is guessed if its frequent words are a tenth of all words, at least two different ones occur, and they
# occur 1.25 times as often as the frequent words of any other language.
MIN_FREQUENT, MIN_WORDS, MIN_MARGIN = 0.1, 2, 1.25
NEARLY_ALL = 0.98  # fraction of the captions that must not be longer than evaluation.max_length
NEW_BACKBONE = """\
# A small backbone that is trained from scratch. A pretrained one captions photographs far better:
#   name: tf_efficientnet_lite2, image_size: 260, weights: pretrained, and no other key
backbone:
  name: swin_tiny_patch4_window7_224
  image_size: 128
  embed_dim: 32
  depths: [2, 2, 2]
  num_heads: [2, 4, 8]
  window_size: 8"""
PRETRAINED_BACKBONE = """\
backbone:
  name: {}
  image_size: {}
  weights: pretrained  # from a cache, from the package in raycap[photos], or from the hub"""
MODEL = """\
model:
  name: expansionnet_v2
  d_model: {}
  d_ff: {}
  num_heads: {}
  num_encoder_layers: {}
  num_decoder_layers: {}"""
SMALLER_MODEL = """
  static_expansion: [16, 32]
  dynamic_expansion: {}
  dropout: 0.2"""
NO_EXPANSION = "null  # none: with 8, captions of 762 photographs were not better"
FLOAT32 = "features: {compute_dtype: float32}  # not auto, which chooses bfloat16 on some processors"


class Size(NamedTuple):
    """A model and its training. model: d_model, d_ff, num_heads, number of encoder layers and of decoder layers."""

    model: tuple[int, int, int, int, int]
    epochs: int
    batch_size: int
    lr: str
    schedule: str
    ema: str | None


# BENCHMARKS.md has the scores of SMALL on 762 photographs, and of MEDIUM's stage xe_frozen on 6,000. LARGE was not
# measured. SMALL is for fewer than 2,000 training images, and LARGE for more than 50,000.
SMALL = Size((128, 256, 4, 2, 2), 40, 20, lr="1.0e-3", schedule="{warmup_iterations: 20, decay: 0.95}", ema="0.995")
MEDIUM = Size((128, 256, 4, 2, 2), 12, 16, lr="1.0e-3", schedule="{name: cosine, warmup_iterations: 200}", ema="0.999")
LARGE = Size((512, 2048, 8, 3, 3), 8, 48, lr="2.0e-4", schedule="{warmup_iterations: 20, decay: 0.9}", ema=None)
PATIENCE = 8  # validations without a new best score, after which a long stage ends


@dataclass(frozen=True)
class Language:
    """The script (Unicode's name), language (ISO 639-1 code, or None if unknown) and tokenizer of captions."""

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
        scripts[unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]] += count  # such as LATIN or CJK
    script = scripts.most_common(1)[0][0] if scripts else "UNKNOWN"
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > MIN_SHARE * scripts.total():
        script = "HIRAGANA"
    code = _latin_language(words) if script == "LATIN" else SCRIPT_LANGUAGES.get(script)
    if code == "en":
        return Language(script, code, "expansionnet")
    return Language(script, code, "characters" if code in WITHOUT_BLANKS else "unicode")


def _latin_language(words: Counter[str]) -> str | None:
    """The language of WORDS whose frequent words occur most often. words: {word: count}. None if no language is clear.

    A margin is needed, because languages that are not in WORDS share words with it: Swedish has "en", like Spanish.
    """
    found = {code: [word for word in frequent.split() if words[word]] for code, frequent in WORDS.items()}
    counts = {code: sum(words[word] for word in each) for code, each in found.items()}
    best, second = sorted(counts, key=counts.__getitem__, reverse=True)[:2]
    is_clear = counts[best] >= MIN_MARGIN * counts[second] and len(found[best]) >= MIN_WORDS
    is_frequent = counts[best] >= MIN_FREQUENT * words.total()
    return best if is_clear and is_frequent else None


class Counts(NamedTuple):
    """The numbers that decide a configuration. per_image: the most frequent number of captions per training image."""

    train_images: int
    captions: int
    per_image: int
    words: int  # NEARLY_ALL captions have at most this many words
    wordless: int  # captions that are left out


def counts_of(found: Survey, language: Language) -> Counts:
    """Counts the images, captions and words of a data set. Raises UserError if an image has no caption with a word."""
    dataset = found.dataset.with_words(language.tokenizer)
    train = dataset.split(*DataSection(root=found.root.uri, **found.keys).train_splits)
    per_image = Counter(len(captions) for captions in train.column("captions")).most_common(1)[0][0]
    lengths = sorted(len(tokens) for tokens in dataset.tokens(language.tokenizer))
    longest = lengths[int(NEARLY_ALL * (len(lengths) - 1))]
    return Counts(len(train), len(lengths), per_image, longest, found.dataset.num_captions - len(lengths))


def config_text(
    found: Survey, name: str, language: Language, counts: Counts, num_gpus: int, *, is_pretrained: bool
) -> str:
    """The text of a configuration with this name, in YAML with comments. is_pretrained: whether the backbone is."""
    size = SMALL
    if counts.train_images >= 2_000:
        size = LARGE if counts.train_images > 50_000 else MEDIUM
    expansions = "" if size is LARGE else SMALLER_MODEL.format(8 if size is MEDIUM else NO_EXPANSION)
    header = printable(f"{len(found.dataset)} images with {counts.captions} captions ({found.form})")
    backbone = _pretrained_backbone(size, num_gpus) if is_pretrained else NEW_BACKBONE
    parts = [
        f"# {header}\n# Written by `raycap init`; docs/configuration.md describes the keys.",
        f"name: {_flow(name)}",
        _data(found, language, counts),
        backbone,
        FLOAT32 if size is SMALL and not num_gpus else "",
        MODEL.format(*size.model) + expansions,
        _stages(size, counts.per_image, is_pretrained=is_pretrained),
        _workers(num_gpus),
        _evaluation(language, counts),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _pretrained_backbone(size: Size, num_gpus: int) -> str:
    """The section `backbone` in YAML. On a CPU, EfficientNet-Lite2 is fast and gives good captions of photographs."""
    if not num_gpus:
        return PRETRAINED_BACKBONE.format("tf_efficientnet_lite2", 260)
    return PRETRAINED_BACKBONE.format(f"swin_{'base' if size is LARGE else 'tiny'}_patch4_window7_224", 224)


def _workers(num_gpus: int) -> str:
    """The section `workers` in YAML, which uses all GPUs. Without this section, a run uses all cores."""
    return f"workers:\n  num_workers: {num_gpus}\n  gpus_per_worker: 1\n  num_decode_threads: 2" if num_gpus else ""


def _evaluation(language: Language, counts: Counts) -> str:
    """The section `evaluation` in YAML, without repeated phrases. In single characters, good captions repeat some."""
    length = min(100, counts.words + 2)
    keys = [f"  max_length: {length}  # nearly all captions are shorter"] if length > 20 else []
    if language.tokenizer != "characters":
        keys.append("  decoding: {no_repeat_ngram: 3}  # no three words occur twice in a caption")
    return "\n".join(["evaluation:", *keys]) if keys else ""


def _flow(value: object) -> str:
    """The YAML of a value in one line. Names that YAML would read as numbers, dates or truth values are quoted."""
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**6)
    return text.strip().removesuffix("...").strip()


def _data(found: Survey, language: Language, counts: Counts) -> str:
    """The section `data` in YAML."""
    lines = ["data:", f"  root: {_flow(found.root.uri)}"]
    for key, value in found.keys.items():
        if key == "sources":
            lines += ["  sources:", *(f"    - {_flow(source)}" for source in value)]
        else:
            lines.append(f"  {key}: {_flow(value)}")
    if "split_fractions" in found.keys:
        lines.append("  # an image's split depends on its name alone, so that further images move none")
    if language.code not in (None, ENGLISH):
        lines.append(f"  language: {_flow(language.code)}")
    lines.append(f"  tokenizer: {language.tokenizer}")
    least = 1
    if counts.captions >= 1_000:
        least = 5 if counts.captions >= 20_000 else 2
    lines.append(f"  min_count: {least}  # rarer words are not in the vocabulary")
    return "\n".join(lines)


def _stages(size: Size, per_image: int, *, is_pretrained: bool) -> str:
    """The section `stages` in YAML: cross entropy with a frozen backbone, and maybe two more stages.

    A stage that trains the backbone follows if there are 2,000 training images or if the backbone is not pretrained. A
    stage of SCST follows if there are more than 50,000 training images with several captions each: with 6,000, the
    captions of other images became no better (BENCHMARKS.md).
    """
    common = f"    batch_size: {size.batch_size}\n"
    if size is not LARGE and per_image > 1:
        common += f"    captions_per_image: {min(5, per_image)}\n"
    stages = [
        "  - name: xe_frozen  # the image encoder does not change, so that its features are computed once\n"
        f"    objective: cross_entropy\n    epochs: {size.epochs}  # fewer, if the validation score stops rising\n"
        f"    patience: {PATIENCE}\n{common}    lr: {size.lr}\n    schedule: {size.schedule}"
    ]
    if size.ema:
        stages[0] += f"\n    ema: {size.ema}  # an average of the weights is validated and kept"
    if size is not SMALL or not is_pretrained:
        epochs, lr = ("2\n", "3.0e-5") if is_pretrained else (f"{size.epochs}\n    patience: {PATIENCE}\n", "5.0e-4")
        stages.append(
            "  - name: xe_finetune\n    objective: cross_entropy\n    train_backbone: true\n"
            f"    epochs: {epochs}{common}    lr: {lr}\n"
            "    schedule: {warmup_iterations: 20, decay: 0.85}\n    drop_path: 0.05"
        )
    if size is LARGE and per_image > 1:  # with one reference per image, the reward is mostly noise
        stages.append(
            "  - name: scst_frozen\n    objective: scst\n    epochs: 3\n"
            f"    batch_size: {size.batch_size}\n    lr: 1.0e-5\n"
            "    schedule: {decay: 0.8}\n    keep_if_better: true"
        )
    return "stages:\n" + "\n".join(stages)
