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

# The sources that decide an index's content: after a change in one of them cached indexes are built again.
INDEX_SOURCES = ("data/vocabulary.py", "scoring/cider.py", "scoring/ngram_keys.py", "training/reward.py")

MAX_CACHED = 8  # indexes per machine; those used last stay


class CaptionReward:
    """CIDEr-D of sampled token ids (SOS ... EOS PAD) against raw reference captions.

    References keep all their words, also those outside the model's vocabulary. eos: EOS is a word at the end of every
    reference and of every caption that ended, so that a caption cut off at the length limit scores lower.

    cache: a folder where the index over the references is stored under the hash of its content, built once per machine
    and memory-mapped by every process (about 5 kB per image). When it cannot be written, each process builds its own.
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
        self.index_of = {image: index for index, image in enumerate(references)}
        self.eos, self.eos_id = eos, vocabulary.eos

        def build() -> CiderD:
            return _build(references, vocabulary, eos, caption_documents)

        if cache is None:
            scorer = build()
        else:
            scorer = _cached(cache, _digest(references, vocabulary, eos, caption_documents), build)
        scores = scorer.metadata.get("ground_truth")
        self.ground_truth: tuple[float, float] | None = (scores[0], scores[1]) if scores else None
        self.scorer = scorer.to(device)
        ignored = [vocabulary.ids[special] for special in (PAD, SOS)]
        ignored += [number for word, number in vocabulary.ids.items() if not word.strip()]  # newlines and the like
        self._ignored = torch.tensor(ignored, device=device)

    def __call__(self, tokens: Tensor, images: Sequence[int]) -> Tensor:
        """CIDEr-D x 10, float64 (R,), of tokens (R, T) on the reward's device, up to the first EOS.

        images: R image ids.
        """
        ended = tokens == self.eos_id
        keep = (ended.cumsum(1) - ended.long() == 0) & ~torch.isin(tokens, self._ignored)
        if not self.eos:
            keep &= ~ended
        order = (~keep).long().argsort(stable=True, dim=1)  # words to the front, in their order
        indices = torch.tensor([self.index_of[int(image)] for image in images], device=tokens.device)
        return self.scorer.score(tokens.gather(1, order), keep.sum(1), indices)


def _build(
    references: Mapping[int, Sequence[str]], vocabulary: Vocabulary, eos: bool, caption_documents: bool
) -> CiderD:
    """The index, with two ground-truth scores in its metadata (see `check_reward`).

    They are the mean score of one reference per image against the image's other references, with and without its EOS,
    over at most 1000 images that have two captions or more; None when there is none.
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
    scorer.metadata["ground_truth"] = None
    if chosen:
        others = CiderD.build([captions[1:] for captions in chosen], num_words=len(ids))
        lengths = torch.tensor([len(captions[0]) for captions in chosen])
        first = torch.tensor([captions[0] + [0] * (int(lengths.max()) - len(captions[0])) for captions in chosen])
        indices = torch.arange(len(chosen))
        scores = [others.score(first, (lengths - cut).clamp(min=0), indices).mean().item() for cut in (0, int(eos))]
        scorer.metadata["ground_truth"] = scores
    return scorer


def _digest(references: Mapping[int, Sequence[str]], vocabulary: Vocabulary, eos: bool, caption_documents: bool) -> str:
    digest = hashlib.sha256(f"{eos} {caption_documents} {vocabulary.to_json()}".encode())
    pipeline = Path(__file__).resolve().parent.parent
    for name in INDEX_SOURCES:
        digest.update((pipeline / name).read_bytes())
    for captions in references.values():  # the index holds the order of the images, not their ids
        digest.update(json.dumps(list(captions)).encode())
    return digest.hexdigest()[:32]


def _cached(folder: Path, digest: str, build: Callable[[], CiderD]) -> CiderD:
    """The index from its file; the first process builds and writes it while the others wait."""
    path = folder / f"ciderd-{digest}.safetensors"
    built = None
    try:
        with file_lock(path.with_suffix(".lock")):
            try:
                cached = CiderD.load(path)
                os.utime(path)
                return cached
            except (FileNotFoundError, ValueError):
                built = build()
            with atomic_path(path) as temporary:
                built.save(temporary)
            _remove_oldest(folder)
            return CiderD.load(path)
    except OSError:
        return built or build()


def _remove_oldest(folder: Path) -> None:
    by_age = sorted(folder.glob("ciderd-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    for old in by_age[:-MAX_CACHED]:
        old.unlink(missing_ok=True)  # processes that have mapped it can still read it
        old.with_suffix(".lock").unlink(missing_ok=True)
