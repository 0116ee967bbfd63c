"""The Python PTB tokenizer against the Stanford tokenizer, and scores of captions in other languages than English."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from benchmarks.reference_cider import PlainCiderD
from raycap.pipeline.data.language.tokenizers import characters, unicode_words
from raycap.pipeline.evaluation.scores import words as ptb
from raycap.pipeline.evaluation.scores.metrics import score_captions
from tests.support.scripts import scene_texts

SHARED = Path(os.environ.get("RAYCAP_SHARED") or Path(__file__).parents[3].parent / "shared")

# Answers of pycocoevalcap's PTBTokenizer (CoreNLP 3.4.1).
RECORDED = {
    "A man, a plan; a canal: Panama!": "a man a plan a canal panama",
    "Two dogs' bowls and a dog's tail.": "two dogs bowls and a dog 's tail",
    "It can't, won't and cannot; DON'T": "it ca n't wo n't and can not do n't",
    "I'm gonna say they'll've been gotta": "i 'm gon na say they 'll 've been got ta",
    "'tis a more'n odd y'all": "'t is a more 'n odd y' all",
    "11 o'clock at O'Neil's, rock 'n' roll": "11 o'clock at o'neil 's rock 'n' roll",
    "Dunkin' Donuts d'Arnaud ma'am ol' c'mon 'EM": "dunkin' donuts d'arnaud ma'am ol' c'mon 'em",
    'the words "IST NOCH ... ZEIT" above': "the words ist noch zeit above",
    "NO!!! what?? a...b": "no !!! what ?? a. b",
    "beach--kite, walkie- talkie - t-shirt": "beach kite walkie talkie t-shirt",
    "(ladder truck) [EATING] {x}": "-lrb- ladder truck -rrb- -lsb- eating -rsb- -lcb- x -rcb-",
    "West 25 1/2 street, a 3/4 one, 3-1/2": "west 25\u00a01/2 street a 3/4 one 3-1/2",
    "$14.99 per pound, 5% of #213 at 10:30pm": "$ 14.99 per pound 5 % of # 213 at 10:30 pm",
    "call (800) 555-1234 or 800 555 1234": "call -lrb-800-rrb-\u00a0555-1234 or 800\u00a0555\u00a01234",
    "taken 11.01.2009 or 10-29-2011 in the '90s": "taken 11.01.2009 or 10-29-2011 in the '90s",
    "St. Louis Blvd. at 5 p.m. on a t.v.": "st. louis blvd. at 5 p.m. on a t.v.",
    "no. 5 but no. five, Tex. and tex.": "no. 5 but no five tex. and tex",
    "no.": "no",
    "a letter K. and a letter B.": "a letter k. and a letter b.",
    "a letter K. The letter B.": "a letter k the letter b.",
    "S&B, AT&T and M&Ms, at&t": "s&b at&t and m&m s at & t",
    "schoolbus/boat/house cathedral/clock-tower w/ a/": "schoolbus/boat/house cathedral/clock-tower w / a /",
    "Connect_Anywhere, track.Passengers fie.d mr.smith": "connect_anywhere track.passengers fie.d mr.smith",
    "i=on bed.+9 RIF=ding woman*s": "i = on bed +9 rif = ding woman * s",
    "soup and OJ> a <b> 2 < 3": "soup and oj > a <b> 2 < 3",
    "see www.foo.com, foo@bar.com #tag @user": "see www.foo.com foo@bar.com #tag @user",
    "smile :) ;-) :D ^_^": "smile :-rrb- ;--rrb- :d ^_^",
    "“curly” ‘quotes’ it’s – — …": "curly quotes it 's",
    "a ❤\ufe0f and a\u200db ☺\ufe0f, 5‐6 m²²": "a ❤ and a b ☺ 5‐6 m ²²",
    "café ½ cup for €5 and 50¢ 😀 ☺": "café 1/2 cup for $ 5 and 50 cents ☺",
    "grey colour theatre": "grey colour theatre",  # no British to American spelling
    "a\nline break": "a line break",
    "": "",
    " . , ": "",
}


@pytest.mark.parametrize("caption", RECORDED)
def test_recorded_answers(caption: str) -> None:
    assert " ".join(ptb.tokenize(caption)) == RECORDED[caption]


# {context of a character: start of the digest of the Stanford tokenizer's words for all of `SAMPLE` in this context}
CONTEXTS = {
    "{}": "258223ed40357795",
    "x {} y": "a297c779eb03879f",
    "a{}b": "ae4ad54f8c6489fb",
    "word{}": "aa0811a85d531998",
    "{}word": "68afc74562b8a277",
    "5{}": "371144bcf7d28354",
    "{}5": "819544f7691711bf",
    "5{}5": "eb4db03a716c9daf",
    "word.{}": "a1e168ffe66fd1cd",
    "{}.": "662f2398c9175d63",
    ",{}": "76eff71754e6b548",
    "'{}": "4bd5c51544b03eee",
    "{}'": "1a3a56ac015b97e0",
    "-{}": "2e99f888cf49479e",
    "{}-": "258223ed40357795",
    "a-{}b": "432696c533498a7f",
    '"{}"': "258223ed40357795",
    "{}{}": "39ff7ab478676518",
    "😀{}": "258223ed40357795",
    "a{}'s": "ec813bac12006dfa",
    "a_{}": "eb4455a51d050e54",
    "({})": "6757a6ac665250e4",
    "a{}.com": "2f003503b70a15b3",
    "http://b{}": "63b18517b27e84db",
    "no.{}5": "a9b894e65a809830",
}
LINE_SEPARATORS = "\n\v\f\r\u2028\u2029"  # split a caption in two for pycocoevalcap, which shifts the later captions
PLANE = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000 and chr(code) not in LINE_SEPARATORS]
SAMPLE = [c for c in PLANE if ord(c) < 0x100 or 0x2000 <= ord(c) < 0x2100 or ord(c) % 89 == 0]


def digest(lines: Iterable[Sequence[str]]) -> str:
    """Of the words that metrics see: white space inside a token separates words. Java may know fewer capitals."""
    text = "\n".join(" ".join(" ".join(tokens).lower().split()) for tokens in lines)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("context", CONTEXTS)
def test_characters_of_all_scripts_have_the_recorded_words(context: str) -> None:
    assert digest(ptb.tokenize(context.replace("{}", character), "x") for character in SAMPLE) == CONTEXTS[context]


@pytest.mark.parametrize("separator", LINE_SEPARATORS)
def test_a_line_separator_inside_a_caption_is_a_space(separator: str) -> None:
    assert ptb.tokenize_all([f"a (dog){separator}runs", "x"]) == [["a", "-lrb-", "dog", "-rrb-", "runs"], ["x"]]


@pytest.mark.parametrize(
    ("following", "last"), [("A dog", "k"), ("the dog", "k."), ("The dog", "k"), ("Dogs", "k."), ("", "k.")]
)
def test_a_letter_with_a_full_stop_looks_at_the_next_caption(following: str, last: str) -> None:
    assert ptb.tokenize("a sign that reads K.", following)[-1] == last
    assert ptb.tokenize_all(["a sign that reads K.", following])[0][-1] == last


def test_plain_pieces_come_out_as_by_the_rules() -> None:
    """The fast road and the rules must agree wherever the fast road is taken."""
    pieces = "dog dog. dog, DOG's no. st. Cannot cannot, t-shirt. a a. a-b x's mr"
    words = pieces.split()
    words += [f"{word}{end}" for word in ptb._CLOSING_ABBREVIATIONS.split() for end in ("", ".", ",", "'s")]
    for word in words:
        plain = ptb._plain_tokens(word)
        if plain is not None:
            ptb._plain_tokens.cache_clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ptb, "_plain_tokens", lambda piece: None)
                assert tuple(ptb._apply_rules(word, "")) == plain, word


# With the jar ------------------------------------------------------------------------------------------------------


def stanford(captions: list[str], folder: Path) -> list[list[str]]:
    """What pycocoevalcap's PTBTokenizer makes of them; it would write its files into its own package folder."""
    spec = importlib.util.find_spec("pycocoevalcap")
    if shutil.which("java") is None or spec is None or not spec.submodule_search_locations:
        pytest.skip("java or pycocoevalcap is missing")
    jar = Path(next(iter(spec.submodule_search_locations))) / "tokenizer" / "stanford-corenlp-3.4.1.jar"
    file = folder / "captions.txt"
    file.write_bytes("\n".join(caption.replace("\n", " ") for caption in captions).encode())
    command = ["java", "-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]
    done = subprocess.run([*command, str(file)], capture_output=True, check=True, timeout=300)
    lines = done.stdout.decode().split("\n")
    assert len(lines) >= len(captions)
    return [
        [word for word in line.rstrip().split(" ") if word and word not in ptb.PUNCTUATION]
        for line in lines[: len(captions)]
    ]


def compare(captions: list[str], folder: Path) -> list[tuple[str, list[str], list[str]]]:
    pairs = zip(captions, ptb.tokenize_all(captions), stanford(captions, folder), strict=True)
    return [(caption, ours, theirs) for caption, ours, theirs in pairs if ours != theirs]


def corpus(name: str) -> list[str]:
    path = SHARED / "data" / {
        "coco": "coco_captions/captions_val2014.json.gz",
        "flickr8k": "flickr8k_captions/dataset_flickr8k_karpathy.json.gz",
    }[name]  # fmt: skip
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    data = json.loads(gzip.decompress(path.read_bytes()))
    if name == "coco":
        return [annotation["caption"] for annotation in data["annotations"]]
    return [sentence["raw"] for image in data["images"] for sentence in image["sentences"]]


def mutated(captions: list[str], count: int, seed: int) -> list[str]:
    """Pieces of captions with punctuation, digits and letters put in, taken out and exchanged."""
    source = random.Random(seed)
    characters = " ..,,''--\"\"!?:;()/&$#%+=*@_0123456789aAbBnNtTsS"
    result = []
    for _ in range(count):
        words = source.choice(captions).replace("\n", " ").split(" ")
        start = source.randrange(max(1, len(words) - 5))
        text = " ".join(words[start : start + 6])
        for _ in range(source.randint(1, 3)):
            at = source.randint(0, len(text))
            text = text[:at] + source.choice(characters) + text[at + source.randint(0, 1) :]
        result.append(text + " x")  # so that no next caption is looked at
    return result


def test_mutated_captions_agree_with_the_jar(tmp_path: Path, real_java: None) -> None:
    captions = mutated([*RECORDED][:27], 3000, seed=1)
    assert compare(captions, tmp_path) == []


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param("coco", 202_654, marks=pytest.mark.proof), ("flickr8k", 40_000)]
)
def test_all_captions_agree_with_the_jar(name: str, size: int, tmp_path: Path, real_java: None) -> None:
    captions = corpus(name)
    assert len(captions) == size
    differences = compare(captions, tmp_path)
    print(f"{name}: {len(differences)} of {size} captions differ from the Stanford tokenizer")
    assert differences == []


@pytest.mark.proof
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_character_of_the_basic_plane_agrees_with_the_jar(context: str, tmp_path: Path, real_java: None) -> None:
    captions = [context.replace("{}", character) for character in PLANE]
    theirs = stanford([line for caption in captions for line in (caption, "x")], tmp_path)
    assert all(words == ["x"] for words in theirs[1::2])
    pairs = zip(PLANE, captions, theirs[::2], strict=True)
    differences = [
        f"U+{ord(character):04X} {words}"
        for character, caption, words in pairs
        if digest([ptb.tokenize(caption, "x")]) != digest([words])
    ]
    print(f"{context}: {len(differences)} of {len(PLANE)} characters differ from the Stanford tokenizer")
    assert differences == []
    sample = set(SAMPLE)
    sampled = [words for character, words in zip(PLANE, theirs[::2], strict=True) if character in sample]
    assert digest(sampled) == CONTEXTS[context]


@pytest.mark.parametrize("odd", ["\u00ad\u00ad", "\u0085"])
def test_characters_without_a_printed_form_are_dropped(odd: str) -> None:
    assert ptb.tokenize(f"a dog! {odd} runs") == ["a", "dog", "runs"]


SPLIT = {"hi": unicode_words, "zh": characters}


def captions_of(language: str, count: int = 12) -> tuple[dict[int, list[str]], dict[int, str]]:
    """References of scenes, and the captions of the scenes after them as predictions."""
    scenes = [scene_texts(3, index, language) for index in range(count + 1)]
    return dict(enumerate(scenes[:count])), {index: scenes[index + index % 2][0] for index in range(count)}


@pytest.mark.parametrize("language", SPLIT)
def test_cider_d_and_bleu_are_of_the_languages_words(language: str) -> None:
    references, predictions = captions_of(language)
    scores = score_captions(references, predictions, metrics=("BLEU-1", "CIDEr-D"), language=language)
    split = SPLIT[language]
    words = {image: [split(caption) for caption in captions] for image, captions in references.items()}
    plain = PlainCiderD(list(words.values()))
    expected = [plain.score(split(predictions[image]), words[image]) for image in references]
    assert scores.by_name["CIDEr-D"].per_image == pytest.approx(expected, rel=1e-9)
    assert 0.1 < sum(expected) / len(expected) < 10
    assert scores.values["BLEU-1"] == pytest.approx(
        plain_bleu_1(list(words.values()), [*map(split, predictions.values())])
    )


def plain_bleu_1(references: list[list[list[str]]], predictions: list[list[str]]) -> float:
    """BLEU-1 by its definition, with the closest reference length."""
    matches = guesses = closest = 0
    for captions, prediction in zip(references, predictions, strict=True):
        limits: Counter[str] = Counter()
        for caption in captions:
            limits |= Counter(caption)
        matches += (Counter(prediction) & limits).total()
        guesses += len(prediction)
        closest += min((abs(len(caption) - len(prediction)), len(caption)) for caption in captions)[1]
    return matches / guesses * min(1.0, math.exp(1 - closest / guesses))
