"""The script and language of captions, and the tokenizer that suits them."""

from __future__ import annotations

import pytest

from raycap.pipeline.data.first_configuration import detect_language

CAPTIONS = {
    "en": ("LATIN", ["A dog runs on the grass.", "Two men with a ball in the park"]),
    "de": ("LATIN", ["Ein Hund läuft auf der Wiese.", "Zwei Männer mit einem Ball sind im Park"]),
    "fr": ("LATIN", ["Un chien court dans le parc.", "Deux hommes avec une balle sur la plage"]),
    "es": ("LATIN", ["Un perro corre en el parque.", "Dos hombres con una pelota en la playa"]),
    "vi": ("LATIN", ["Một con chó đang chạy trên cỏ", "Hai người đàn ông với một quả bóng"]),
    "ru": ("CYRILLIC", ["Собака бежит по траве", "Двое мужчин с мячом"]),
    "zh": ("CJK", ["一只狗在草地上奔跑", "两个男人在公园里踢球"]),
    "ja": ("HIRAGANA", ["犬が草の上を走っている", "公園でボールで遊ぶ二人の男性"]),
    "ko": ("HANGUL", ["개가 잔디 위를 달린다", "공을 가진 두 남자"]),
    "th": ("THAI", ["สุนัขวิ่งบนหญ้า", "ผู้ชายสองคนกับลูกบอล"]),
    "hi": ("DEVANAGARI", ["एक कुत्ता घास पर दौड़ रहा है"]),
    "ar": ("ARABIC", ["كلب يركض على العشب"]),
    "el": ("GREEK", ["Ένας σκύλος τρέχει στο γρασίδι"]),
}


@pytest.mark.parametrize("code", CAPTIONS)
def test_languages_and_their_tokenizers(code: str) -> None:
    script, captions = CAPTIONS[code]
    language = detect_language(captions)
    assert (language.script, language.code) == (script, code)
    wanted = {"en": "expansionnet", "zh": "characters", "ja": "characters", "th": "characters"}
    assert language.tokenizer == wanted.get(code, "unicode")


@pytest.mark.parametrize(
    "captions",
    [
        ["En hund springer på gräset", "Två män med en boll i parken", "En kvinna sitter på en bänk"],  # Swedish
        ["En hund løper på gresset", "To menn med en ball i parken"],  # Norwegian
        ["Un câine aleargă pe iarbă", "Un om cu o minge"],  # Romanian
        ["Seorang pria di taman", "Anjing berlari di rumput"],  # Indonesian
        ["un con una"],  # Spanish and Italian
        ["the xxx yyy zzz"],
    ],
)
def test_a_language_without_a_clear_margin_is_unknown(captions: list[str]) -> None:
    assert detect_language(captions).code is None
