"""The reward of SCST and the score of validation: CIDEr-D of token ids against raw reference captions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.data.vocabulary import EOS, PAD, SOS, Vocabulary
from pipeline.scoring.cider import CiderD
from pipeline.storage.atomic import atomic_path, file_lock

# Sources that decide what an index holds: a change in one of them builds cached indexes anew.
INDEX_SOURCES = ("data/vocabulary.py", "scoring/cider.py", "training/reward.py")

_KEPT = 8  # indexes that a machine keeps, the last used


class CaptionReward:
    """CIDEr-D of sampled token ids (SOS ... EOS PAD) against raw reference captions, under an EOS rule.

    References keep all their words, not only the model's; with `eos`, EOS is a word at the end of every reference and
    of every caption that ended: a caption cut off at the length limit misses it and is scored lower.

    With a `cache` folder the index over the references is built once a machine, kept by the hash of what it is made
    of, and mapped by every process that asks for it: about 5 kB an image. A folder that cannot be written costs only
    the building.
    """

    def __init__(
        self,
        references: Mapping[int, Sequence[str]],
        vocabulary: Vocabulary,
        *,
        eos: bool,
        caption_documents: bool = False,
        device: torch.device | str = "cpu",
        cache: Path | None = None,
    ) -> None:
        self.place = {image: number for number, image in enumerate(references)}
        self.eos, self.eos_id = eos, vocabulary.eos

        def build() -> CiderD:
            return _build(references, vocabulary, eos, caption_documents)

        if cache is None:
            scorer = build()
        else:
            scorer = _cached(cache, _digest(references, vocabulary, eos, caption_documents), build)
        found = scorer.facts.get("ground_truth")
        self.ground_truth: tuple[float, float] | None = (found[0], found[1]) if found else None
        self.scorer = scorer.to(device)
        blank = [vocabulary.ids[special] for special in (PAD, SOS)]
        blank += [number for word, number in vocabulary.ids.items() if not word.strip()]  # a newline is no word here
        self._dropped = torch.tensor(blank, device=device)

    def __call__(self, tokens: Tensor, images: Sequence[int]) -> Tensor:
        """CIDEr-D x 10, float64 (R,), of tokens (R, T) on the reward's device; what stands after the first EOS is
        ignored. `images` are image ids.
        """
        ended = tokens == self.eos_id
        keep = (ended.cumsum(1) - ended.long() == 0) & ~torch.isin(tokens, self._dropped)
        if not self.eos:
            keep &= ~ended
        order = (~keep).long().argsort(stable=True, dim=1)  # kept words to the front, in their order
        places = torch.tensor([self.place[int(image)] for image in images], device=tokens.device)
        return self.scorer.score(tokens.gather(1, order), keep.sum(1), places)


def _build(
    references: Mapping[int, Sequence[str]], vocabulary: Vocabulary, eos: bool, caption_documents: bool
) -> CiderD:
    """The index, and in its facts `ground_truth`: what SCST climbs towards.

    That is the mean score of references against their image's other references, and of the same without their EOS:
    far above 0, and not the same without EOS when EOS is in the reward, or the setting is broken. Over at most 1000
    images that have two captions or more; null when there is none.
    """
    ids = dict(vocabulary.ids)
    coded = []
    for captions in references.values():
        rows = []
        for caption in captions:
            words = [word for word in vocabulary.tokenize(caption) if word.strip()] + ([EOS] if eos else [])
            rows.append([ids.setdefault(word, len(ids)) for word in words])
        coded.append(rows)
    scorer = CiderD.build(coded, caption_documents=caption_documents, num_words=len(ids))
    chosen = [captions for captions in coded if len(captions) > 1][:1000]
    scorer.facts["ground_truth"] = None
    if chosen:
        others = CiderD.build([captions[1:] for captions in chosen], num_words=len(ids))
        lengths = torch.tensor([len(captions[0]) for captions in chosen])
        first = torch.tensor([captions[0] + [0] * (int(lengths.max()) - len(captions[0])) for captions in chosen])
        places = torch.arange(len(chosen))
        scores = [others.score(first, (lengths - cut).clamp(min=0), places).mean().item() for cut in (0, int(eos))]
        scorer.facts["ground_truth"] = scores
    return scorer


def _digest(references: Mapping[int, Sequence[str]], vocabulary: Vocabulary, eos: bool, caption_documents: bool) -> str:
    digest = hashlib.sha256(f"{eos} {caption_documents} {vocabulary.to_json()}".encode())
    pipeline = Path(__file__).resolve().parent.parent
    for name in INDEX_SOURCES:
        digest.update((pipeline / name).read_bytes())
    for captions in references.values():  # the places of images, not their ids, are in the index
        digest.update(json.dumps(list(captions)).encode())
    return digest.hexdigest()[:32]


def _cached(folder: Path, digest: str, build: Callable[[], CiderD]) -> CiderD:
    """The index from its file; the first process that asks writes it while the others wait."""
    path = folder / f"ciderd-{digest}.safetensors"
    built = None
    try:
        with file_lock(path.with_suffix(".lock")):
            try:
                found = CiderD.load(path)
                os.utime(path)
                return found
            except (FileNotFoundError, ValueError):
                built = build()
            with atomic_path(path) as temporary:
                built.save(temporary, built.facts)
            _keep_the_newest(folder)
            return CiderD.load(path)
    except OSError:
        return built or build()


def _keep_the_newest(folder: Path) -> None:
    kept = sorted(folder.glob("ciderd-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    for old in kept[:-_KEPT]:
        old.unlink(missing_ok=True)  # whoever maps it keeps reading it
        old.with_suffix(".lock").unlink(missing_ok=True)
