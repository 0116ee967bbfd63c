"""The checks of `raycap check`: errors that make a data set unfit for training, and warnings about unusual data."""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import unusable
from raycap.pipeline.data.language.tokenizers import SUBWORD, caption_words, clusters, is_without_spaces
from raycap.pipeline.data.reading import build_vocabulary, data_root, read_annotations, require_splits, snapshot_of
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.regions import missing_regions
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.runtime.names import quoted, shorten, shown
from raycap.pipeline.runtime.processor import num_cores

logger = logging.getLogger(__name__)

MAX_WORDS = 60  # Longer captions get a warning, because even COCO's longest caption has only 57 tokens.
MIN_IMAGES_FOR_CIDER = 200  # Smaller splits get a warning: a mean CIDEr-D of 1.0 then has a standard error above 0.06.
IMAGES_AT_A_TIME = 10_000  # images queued for decoding. The limit bounds the memory, because each image takes 2 kB.
MAX_UNKNOWN = 0.05  # If the vocabulary lacks a larger fraction of the words of validation captions, `check` warns.
NORMALIZING = ("unicode", "characters", "subword")  # tokenizers that give the same words for all normal forms of a text
MAX_EXAMPLES = 3  # A finding names at most this many images.


@dataclass(frozen=True)
class Finding:
    """A problem of the data set. An "error" makes the data set unfit for training, a "warning" does not."""

    kind: Literal["error", "warning"]
    text: str


@dataclass
class Findings:
    """The result of a check. statistics: values by name, for JSON. findings: one per problem.

    data: the data set with content keys, and {URI: reason} of the images that cannot be read. None before the check.
    """

    statistics: Values = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    data: tuple[Dataset, dict[str, str]] | None = field(default=None, compare=False)

    def error(self, text: str) -> None:
        self.findings.append(Finding("error", text))

    def warn(self, text: str) -> None:
        self.findings.append(Finding("warning", text))

    @property
    def ok(self) -> bool:
        """True if no finding is an error, so that the data set can be used for training."""
        return not any(finding.kind == "error" for finding in self.findings)


def check_data(config: RunConfig, checked_keys: pa.Array | None = None, listing: pa.Table | None = None) -> Findings:
    """Checks a data set and returns the findings. Raises UserError if it cannot be read at all or lacks a split.

    Threads of this process decode every image once. If the run reads region features, the check only looks up whether
    every image has features. The only file that the check writes is the manifest of content keys.

    checked_keys: content keys of images that an earlier check has decoded. These images are not decoded again, and
    `data.max_bad_fraction` limits the unusable images among the others. listing: see `take_snapshot`.
    """
    result = Findings()
    annotated, problems, left_out = read_annotations(config.data, data_root(config), config.storage.options)
    require_splits(annotated, config.data)
    for sentence in left_out:
        result.warn(sentence)
    result.statistics["splits"] = dict(sorted(annotated.split_sizes().items()))
    logger.info(f"reading {len(annotated)} images")
    dataset, missing = snapshot_of(annotated, config, listing=listing)
    result.data = dataset, missing
    unchecked = dataset
    if checked_keys is not None:
        unchecked = dataset.where(pc.invert(pc.is_in(dataset.table["key"], value_set=checked_keys.drop_null())))
    _check_captions(result, dataset, problems, config.data.tokenizer)
    fitting = _check_tokenizer(result, dataset, config.data.tokenizer)
    try:
        vocabulary = build_vocabulary(dataset, config.data)
        result.statistics["vocabulary"] = len(vocabulary)
        _check_unknown(result, dataset.split(config.data.val_split), vocabulary, fitting)
    except UserError as error:  # no vocabulary can be built from the captions
        result.error(str(error))
    failed = _decode_all(unchecked, config) if config.has_backbone else missing_regions(unchecked, config)
    _check_images(result, unchecked, config, missing, failed)
    _check_duplicates(result, dataset, config)
    _check_splits(result, config)
    result.statistics["fingerprint"] = dataset.readable().without(sorted(failed)).fingerprint()
    return result


def _check_captions(result: Findings, dataset: Dataset, problems: list[str], tokenizer: str) -> None:
    """Checks the text and the number of captions. problems: one sentence for each caption that is not text."""
    # Lists of image URIs: `empty` and `long` have one URI per caption, `wordless` has one per image.
    empty, long, wordless = [], [], []
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for chunk in dataset.chunks("uri", "split", "captions"):
        for uri, split, captions in zip(*(column.to_pylist() for column in chunk.columns), strict=True):
            words = [caption_words(tokenizer, caption) for caption in captions]
            counts[split][len(captions)] += 1
            empty += [uri for tokens in words if not tokens]
            long += [uri for tokens in words if len(tokens) > MAX_WORDS]
            if not any(words):
                wordless.append(uri)
    per_image = {split: dict(sorted(counter.items())) for split, counter in sorted(counts.items())}
    result.statistics["captions"] = sum(count * images for each in counts.values() for count, images in each.items())
    result.statistics["captions_per_image"] = per_image
    if problems:
        result.error(f"{len(problems)} captions are not text: {problems[0]}")
    if wordless:
        result.error(f"{len(wordless)} images have no caption with a word in it: {shorten(wordless, MAX_EXAMPLES)}")
    if empty:
        result.warn(f"{len(empty)} captions are empty and would be left out: {shorten(empty, MAX_EXAMPLES)}")
    if long:
        result.warn(f"{len(long)} captions have more than {MAX_WORDS} words: {shorten(long, MAX_EXAMPLES)}")
    single_caption_splits = [split for split, counter in counts.items() if max(counter) == 1]
    if single_caption_splits:
        splits = ", ".join(single_caption_splits)
        result.warn(f"one caption per image in {splits}: CIDEr-D is reliable only with several")


@dataclass
class CaptionProblems:
    """The captions that a tokenizer of `TOKENIZERS` splits badly."""

    tokenizer: str
    total: int = 0
    one_word: list[str] = field(default_factory=list)
    unsplit: int = 0  # captions of one word in a script without spaces between words
    cut: list[str] = field(default_factory=list)  # captions in which letters are split from their marks
    composed: list[str] = field(default_factory=list)  # captions that are in NFC, but not in NFD
    decomposed: list[str] = field(default_factory=list)  # captions that are not in NFC
    without_spaces: int = 0  # captions with a letter of a script without spaces between words

    def add(self, caption: str, words: Sequence[str]) -> None:
        """Checks a caption and the words that the tokenizer returns for it."""
        self.total += 1
        if len(words) == 1:
            self.one_word.append(caption)
            self.unsplit += is_without_spaces(caption)
        if caption.isascii():
            return
        self.without_spaces += is_without_spaces(caption)
        if cuts_letters(caption, words):
            self.cut.append(caption)
        if not unicodedata.is_normalized("NFC", caption):
            self.decomposed.append(caption)
        elif not unicodedata.is_normalized("NFD", caption):
            self.composed.append(caption)

    @property
    def suggestion(self) -> str:
        """The value of `data.tokenizer` that fits the scripts of the captions."""
        return "characters" if 2 * self.without_spaces > self.total else "unicode"

    def warnings(self) -> Iterator[str]:
        """A sentence for each kind of problem."""
        remedy = f"set data.tokenizer to {self.suggestion}" if self.suggestion != self.tokenizer else "look at them"
        key = f"data.tokenizer = {self.tokenizer}"
        if self.one_word:
            counted = "1 caption is" if len(self.one_word) == 1 else f"{len(self.one_word)} captions are"
            one_remedy = remedy if self.unsplit else "look at them"
            yield f"{counted} one word for {key}, such as {quoted(self.one_word[0])}; {one_remedy}"
        if self.cut:
            problem = f"splits letters from their marks in {len(self.cut)} captions"
            yield f"{key} {problem}, such as {quoted(self.cut[0])}; {remedy}"
        if self.composed and self.decomposed and self.tokenizer not in NORMALIZING:
            yield (
                f"{len(self.decomposed)} captions are not in the normal form NFC, such as {quoted(self.decomposed[0])}"
                f", and {len(self.composed)} are, such as {quoted(self.composed[0])}: equal words count as different; "
                f"{remedy}"
            )


def cuts_letters(caption: str, words: Sequence[str]) -> bool:
    """True if the tokenizer split a grapheme cluster, such as a letter and its vowel sign, into two words."""
    text = caption.lower()
    return any(
        len(clusters(left + right)) < len(clusters(left)) + len(clusters(right)) and left + right in text
        for left, right in pairwise(words)
    )


def _check_tokenizer(result: Findings, dataset: Dataset, tokenizer: str) -> str:
    """Warns about captions that the tokenizer does not split into words. Returns a tokenizer to suggest to the user."""
    problems = CaptionProblems(tokenizer)
    for text, words in zip(dataset.texts(tokenizer), dataset.tokens(tokenizer), strict=True):
        problems.add(text, words)
    for warning in problems.warnings():
        result.warn(warning)
    is_split_wrongly = problems.cut or 2 * len(problems.one_word) > problems.total
    return problems.suggestion if is_split_wrongly else SUBWORD


def _check_unknown(result: Findings, validation: Dataset, vocabulary: Vocabulary, fitting: str) -> None:
    """Warns if the vocabulary lacks many words of the validation captions. fitting: the tokenizer to suggest."""
    counts: Counter[str] = Counter()
    for text in validation.texts(vocabulary.tokenizer):
        counts.update(vocabulary.tokenize(text))
    unknown = Counter({word: count for word, count in counts.items() if word not in vocabulary.ids})
    share = unknown.total() / max(counts.total(), 1)
    result.statistics["unknown_words"] = round(share, 4)
    if share > MAX_UNKNOWN:
        examples = shorten((quoted(word) for word, _ in unknown.most_common()), MAX_EXAMPLES)
        result.warn(
            f"{share:.1%} of the words of validation captions are not in the vocabulary, such as {examples}; set "
            f"data.tokenizer to {fitting}, or lower data.min_count"
        )


def _decode_all(dataset: Dataset, config: RunConfig) -> dict[str, str]:
    """Decodes every image, files of equal content once. Returns {content key: reason} of images that fail."""
    files = dataset.readable().table.select(["key", "uri"])
    images = files.take(pc.index_in(pc.unique(files["key"]), value_set=files["key"]))
    num_threads = max(2, num_cores())  # threads decode in parallel, because Pillow releases the GIL
    reasons: dict[str, str] = {}
    with progress("decoding", len(images)) as advance:
        for start in range(0, len(images), IMAGES_AT_A_TIME):
            part = images.slice(start, IMAGES_AT_A_TIME)
            uris, keys = part["uri"].to_numpy(), part["key"].to_numpy()
            found = unusable(uris, keys, config.data.max_pixels, config.storage.options, num_threads)
            reasons |= {key: reason for key, reason in zip(keys.tolist(), found, strict=True) if reason}
            advance(len(part))
    return reasons


def _check_images(
    result: Findings, dataset: Dataset, config: RunConfig, missing: dict[str, str], failed: dict[str, str]
) -> None:
    """Reports the images that cannot be used.

    missing: {URI: reason} of files that cannot be read. failed: {content key: reason} of images that cannot be decoded
    or lack region features.
    """
    chosen = dataset.where(pc.is_in(dataset.table["key"], value_set=pa.array(failed, pa.string())))
    images = zip(chosen.column("uri"), chosen.column("key"), strict=True)
    unreadable = [(uri, failed[key]) for uri, key in images] + list(missing.items())
    result.statistics["unreadable"] = dict(unreadable)
    count = f"{len(unreadable)} of {len(dataset)} images cannot be used"
    reasons = "; ".join(f"{shown(uri)}: {reason}" for uri, reason in unreadable[:MAX_EXAMPLES])
    if len(unreadable) > config.data.max_bad_fraction * len(dataset):
        result.error(f"{count}, more than data.max_bad_fraction = {config.data.max_bad_fraction}: {reasons}")
    elif unreadable:
        result.warn(f"{count} and would be left out: {reasons}")
    uris = [shown(uri) for uri in chosen.split(*config.data.train_splits).column("uri")]
    if uris and config.features.store == "never":
        noun = "training image" if len(uris) == 1 else "training images"
        result.error(
            f"{len(uris)} {noun} cannot be decoded, and with features.store = never no extraction leaves them out: "
            f"{shorten(uris, MAX_EXAMPLES)}"
        )


def _check_duplicates(result: Findings, dataset: Dataset, config: RunConfig) -> None:
    """Reports images with equal content. Equal images in a training split and in a held-out split are an error.

    A source with `rewarded: false` may repeat images, because such a source adds a model's captions of them.
    """
    readable = dataset.readable()
    counts = readable.table["key"].value_counts()
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    copies = readable.where(pc.is_in(readable.table["key"], value_set=repeated))
    copies_by_key: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key, split, uri in zip(*(copies.column(name) for name in ("key", "split", "uri")), strict=True):
        copies_by_key[key].append((split, uri))
    train = set(config.data.train_splits)
    held_out = {config.data.val_split, *config.data.test_splits} - train
    unrewarded = train - set(config.data.rewarded_splits)
    leaks, other_duplicates = [], 0
    for images in copies_by_key.values():
        splits = {split for split, _ in images}
        if splits & train and splits & held_out:
            leaks.append(" = ".join(f"{shown(uri)} ({shown(split)})" for split, uri in images[:2]))
        else:
            other_duplicates += max(0, sum(split not in unrewarded for split, _ in images) - 1)
    result.statistics["duplicates"] = {"across_splits": len(leaks), "elsewhere": other_duplicates}
    if leaks:
        result.error(f"{len(leaks)} images are in training and in a held-out split: {shorten(leaks, MAX_EXAMPLES)}")
    if other_duplicates:
        result.warn(f"{other_duplicates} images repeat another image of their split")


def _check_splits(result: Findings, config: RunConfig) -> None:
    """Reports held-out splits that are trained on, or have too few images for CIDEr-D."""
    counts: Counter[str] = Counter(result.statistics["splits"])
    for split in dict.fromkeys((config.data.val_split, *config.data.test_splits)):
        if split in config.data.train_splits:
            result.warn(f"split {split} is also in data.train_splits: its scores are those of images trained on")
        count = counts[split]
        if count < 2:
            result.error(
                f"split {split} has too few images for CIDEr-D: {count}, and 2 are the least; move images there, or "
                "give it a larger share in data.split_fractions"
            )
        elif count < MIN_IMAGES_FOR_CIDER:
            minimum = MIN_IMAGES_FOR_CIDER
            result.warn(f"split {split} has {count} images: CIDEr-D on fewer than {minimum} is mostly noise")
