"""The files that describe an exported captioner, for a runtime without raycap and PyTorch.

captioner.json    inputs, search and rules, ids of special tokens, and where the graphs come from
vocabulary.json   {"joining": J, "words": [...]}: the text of each token in the order of their ids

J says how texts are joined to a caption: "spaces" between all; "scripts", as well, but not beside the tokens whose ids
are under "without_space"; "bytes", where each character of a text is one byte (Latin-1) of UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from raycap.models.config import Values
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.data.language.subwords import piece_bytes
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.vocabulary import UNK, Vocabulary
from raycap.pipeline.evaluation.captioning.bundle import Bundle, bundle_protocol
from raycap.pipeline.evaluation.comparison.protocol import search_settings

if TYPE_CHECKING:
    from raycap.models.convert.export_graphs import EncoderGraph

FORMAT = 1
RULES = ("suppress_unk", "min_length", "no_repeat_ngram", "no_open_endings", "beam_groups", "sampling")


def describe(bundle: Bundle, encoder: EncoderGraph) -> Values:
    """The content of captioner.json that does not depend on the format of the graphs, as JSON values."""
    from raycap.pipeline.evaluation.captioning.search import score_rules

    sizes, vocabulary, transform = encoder.model.sizes, bundle.vocabulary, bundle.transform
    search = search_settings(EvaluationSection(), [bundle_protocol(bundle.config)])
    open_endings = score_rules(search, vocabulary).open_endings
    image = features = None
    if transform is not None:
        image = {key: getattr(transform, key) for key in ("image_size", "keep_aspect", "interpolation")}
        image |= {"scaled_side": transform.scaled_side, "mean": list(transform.mean), "std": list(transform.std)}
    else:
        boxes = bool(getattr(encoder.model.config, "needs_boxes", False))
        features = {"width": sizes.feature_width, "boxes": boxes, "max_regions": encoder.max_image_tokens}
    return {
        "format": FORMAT,
        "name": bundle.config["name"],
        "system": encoder.model.config.name,
        "image": image,
        "features": features,
        "search": {
            "beam_size": search.beam_size,
            "max_length": min(search.max_length, sizes.max_positions),
            "ranking": search.ranking,
            "collapse_repeats": search.collapse_repeats,
            **{key: asdict(search.decoding)[key] for key in RULES},
        },
        "max_positions": sizes.max_positions,
        "tokens": {"sos": sizes.sos, "eos": sizes.eos, "pad": sizes.pad, "unk": vocabulary.ids[UNK]},
        "open_endings": list(open_endings),
        "tokenizer": vocabulary.tokenizer,
    }


def describe_words(vocabulary: Vocabulary) -> Values:
    """The content of vocabulary.json."""
    words = list(vocabulary.words)
    if vocabulary.subwords is not None:
        return {"joining": "bytes", "words": [piece_bytes(word).decode("latin-1") for word in words]}
    parts = TOKENIZERS[vocabulary.tokenizer].parts
    # the second of two tokens has a space before it, unless the script of the token has no spaces
    without_space = [number for number, word in enumerate(words) if parts([word, word])[1] == word]
    if without_space:
        return {"joining": "scripts", "words": words, "without_space": without_space}
    return {"joining": "spaces", "words": words}


def dump(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
