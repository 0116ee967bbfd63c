"""A short caption in each of many scripts, and captions of synthetic scenes in several."""

from __future__ import annotations

from raycap.pipeline.data.synthetic.scenes import make_scene

# By script. Captions without spaces between words are in WITHOUT_SPACES.
CAPTIONS = {
    "Latin": "Ein großer grüner Kreis, und Æsops Igel",
    "Vietnamese": "Một hình tròn màu đỏ lớn",
    "Greek": "Ένας μεγάλος κόκκινος κύκλος",
    "Cyrillic": "Большой красный круг и ёж",
    "Armenian": "Մեծ կարմիր շրջան",
    "Georgian": "დიდი წითელი წრე",
    "Hebrew": "עִגּוּל אָדֹם גָּדוֹל",
    "Arabic": "دَائِرَةٌ حَمْرَاءُ كَبِيرَةٌ",
    "Persian": "دایره‌ای قرمز که می‌چرخد",
    "Syriac": "ܟܠܒܐ ܪܒܐ",
    "Thaana": "ބޮޑު ރަތް ބުރެއް",
    "Nko": "ߞߎߘߎ ߓߟߋߓߟߋ",
    "Devanagari": "एक बड़ा लाल वृत्त",
    "Bengali": "একটি বড় লাল বৃত্ত",
    "Gurmukhi": "ਇੱਕ ਵੱਡਾ ਲਾਲ ਚੱਕਰ",
    "Gujarati": "એક મોટું લાલ વર્તુળ",
    "Oriya": "ଏକ ବଡ଼ ଲାଲ ବୃତ୍ତ",
    "Tamil": "ஒரு பெரிய சிவப்பு வட்டம்",
    "Telugu": "ఒక పెద్ద ఎరుపు వృత్తం",
    "Kannada": "ಒಂದು ದೊಡ್ಡ ಕೆಂಪು ವೃತ್ತ",
    "Malayalam": "ഒരു വലിയ ചുവന്ന വൃത്തം",
    "Sinhala": "විශාල රතු වෘත්තයක් ක්‍ෂණ",
    "Tibetan": "སྒོར་སྒོར་དམར་པོ་ཆེན་པོ།",
    "Ethiopic": "ትልቅ ቀይ ክብ",
    "Cherokee": "ᎠᏂᎦᎨ ᎩᎦᎨ",
    "Mongolian": "ᠤᠯᠠᠭᠠᠨ ᠲᠣᠭᠣᠷᠢᠭ",
    "Hangul": "큰 빨간 동그라미",
    "Tifinagh": "ⴰⵣⴳⴳⴰⵖ ⴰⵎⵇⵇⵔⴰⵏ",
    "Canadian": "ᐊᐅᐸᖅᑐᖅ ᐊᖏᔪᖅ",
    "Adlam": "𞤩𞤮𞤣𞤫𞥅𞤶𞤵𞤥 𞤥𞤢𞤱𞤲𞤵",
    "Coptic": "ⲟⲩⲕⲩⲕⲗⲟⲥ ⲛϩⲁⲓ",
    "Gothic": "𐍂𐌰𐌿𐌳𐍃 𐌼𐌹𐌺𐌹𐌻𐍃",
}
WITHOUT_SPACES = {
    "Han": "一个大的红色圆形，旁边有3只猫和一件T恤",
    "Hiragana": "おおきなあかいまるがある",
    "Katakana": "テーブルの上のカップ",
    "Thai": "วงกลมสีแดงขนาดใหญ่ทำมือ",
    "Lao": "ວົງມົນສີແດງໃຫຍ່",
    "Khmer": "រង្វង់ក្រហមធំ",
    "Myanmar": "အနီရောင်စက်ဝိုင်းကြီး",
    "Bopomofo": "ㄏㄨㄥˊㄙㄜˋ",
    "Yi": "ꀉꁁꀋ",
    "Javanese": "ꦧꦸꦤ꧀ꦝꦼꦂ",
}

# A letter for each consonant of English, and a mark that combines with it for each vowel
DEVANAGARI = str.maketrans("bcdfghjklmnpqrstvwxyzaeiou", "बचदफगहजकलमनपखरसतवशझयधािेुो")


def scene_texts(seed: int, index: int, language: str) -> list[str]:
    """The captions of a scene. There is no grammar of hi, so its captions are English in letters of Devanagari."""
    if language == "hi":
        return [in_devanagari(caption) for caption in make_scene(seed, index)[1]]
    return make_scene(seed, index, language)[1]


def in_devanagari(caption: str) -> str:
    """An English caption in letters of Devanagari, whose marks belong to the letter before them."""
    return caption.lower().translate(DEVANAGARI)
