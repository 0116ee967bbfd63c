"""Small models, and what tests of several rooms compare them with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Features, Memory, Tensors, map_tensors
from raycap.models.captioner import Captioner, build_model
from raycap.models.clustformer import ClusterMaps
from raycap.models.config import BackboneConfig, ExpansionNetConfig, ModelSizes
from raycap.models.decoding.constraints import ConstraintAutomaton
from raycap.models.decoding.search import Captions
from raycap.models.encoders.backbone import Backbone
from raycap.models.expansionnet import ExpansionNet
from raycap.pipeline.data.vocabulary import Vocabulary

SIZES = ModelSizes(feature_width=7, vocabulary_size=11, max_positions=12, sos=0, eos=1, pad=2)
MIXERS = (
    {"static_expansion": (2, 5, 3), "dynamic_expansion": 3},
    {"static_expansion": None, "encoder_dynamic_expansion": 2, "dynamic_expansion": None},
    {"static_expansion": None, "dynamic_expansion": 4},
    {"static_expansion": (6,), "dynamic_expansion": None},
)
SMALL_SWIN = BackboneConfig(image_size=32, embed_dim=8, depths=(1, 2), num_heads=(1, 2), window_size=4)


def small_model(seed: int, **changes: object) -> ExpansionNet:
    """A float64 model in evaluation."""
    torch.manual_seed(seed)
    values = {"d_model": 8, "d_ff": 12, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2} | changes
    model = build_model(ExpansionNetConfig(**values), SIZES)  # type: ignore[arg-type]
    assert isinstance(model, ExpansionNet)
    return model.double().eval()


def select_images(tensors: Tensors, index: Tensor) -> Tensors:
    return map_tensors(tensors, lambda tensor: tensor[index])


def exact(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def tiny(seed: int, vocabulary: int = 4, positions: int = 8, **changes: object) -> CaptionModel:
    """A float64 model with few words: 0 is SOS, 1 EOS, 2 PAD. Its captions clearly differ in probability."""
    torch.manual_seed(seed)
    values = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2}
    values |= {"static_expansion": (3,), "dynamic_expansion": 2} | changes  # type: ignore[dict-item]
    sizes = ModelSizes(5, vocabulary, positions, sos=0, eos=1, pad=2)
    model = build_model(ExpansionNetConfig(**values), sizes).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # type: ignore[union-attr, operator]
    return model


def features_for(batch: int, width: int = 5, tokens: int = 4) -> Tensor:
    return torch.randn(batch, tokens, width, dtype=torch.float64)


def follow_steps(model: CaptionModel, memory: Memory, beams: int, steps: int, generator: torch.Generator) -> None:
    """Checks that each cached step gives the logits of teacher forcing on the whole prefix.

    Words (of 11), parents of beams and the images that leave are random. In the first one or two steps an image has one
    beam.
    """
    images, wide = memory.batch_size, beams
    alone, beams = int(torch.randint(0, 3, (1,), generator=generator)), 1
    cache = model.init_cache(memory, beams)
    history = torch.empty(images * beams, 0, dtype=torch.int64)
    for step in range(steps):
        if step == alone:
            beams, cache, history = wide, cache.expand_beams(wide), history.repeat_interleave(wide, 0)
        if step == steps // 2 and images > 1:
            kept = torch.randperm(images, generator=generator)[: images - 1]
            memory, cache = select_images(memory, kept), cache.keep_images(kept)
            history = history.view(images, beams, -1)[kept].flatten(0, 1)
            images -= 1
        tokens = torch.randint(0, 11, (images * beams,), generator=generator)
        history = torch.cat((history, tokens[:, None]), 1)
        logits, cache = model.step(tokens, cache)
        exact(logits, model.decode(memory, history)[:, -1])
        parents = torch.randint(0, beams, (images, beams), generator=generator)
        index = (parents + torch.arange(images)[:, None] * beams).flatten()
        cache, history = cache.select(index), history[index]
    assert cache.length == steps


def every_caption(vocabulary: int, max_length: int) -> list[tuple[int, ...]]:
    """All captions of up to max_length tokens with SOS. A caption ends with its first EOS, or is cut."""
    captions = []
    for length in range(1, max_length):
        for words in itertools.product(range(vocabulary), repeat=length):
            if 1 in words[:-1] or (words[-1] != 1 and length < max_length - 1):
                continue
            captions.append((0, *words))
    return captions


@torch.no_grad()
def log_probabilities(
    model: CaptionModel, features: Tensor, captions: list[tuple[int, ...]]
) -> dict[tuple[int, ...], float]:
    """The sum of each caption's token log-probabilities, for one image."""
    longest = max(map(len, captions))
    tokens = torch.tensor([[*caption, *[2] * (longest - len(caption))] for caption in captions])
    each = model(Features(features), tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return {caption: float(row[: len(caption) - 1].sum()) for caption, row in zip(captions, each, strict=True)}


def texts(captions: Captions, image: int) -> list[list[int]]:
    rows = zip(captions.tokens[image].tolist(), captions.lengths[image].tolist(), strict=True)
    return [tokens[:length] for tokens, length in rows]


FLOAT64 = torch.float64


def literal_conditional(s: Tensor, i: int, k: int, linear: torch.nn.Linear) -> float:
    """Equation 4: sigmoid(FC([s_k; mean of s_i .. s_{k-1}]))."""
    return float(torch.sigmoid(linear(torch.cat((s[k], s[i:k].mean(0))))))


def literal_conditionals(sequences: list[list[Tensor]], stacking: str, linears: list[torch.nn.Linear]) -> list[Tensor]:
    """P (N, N) at the last layer. sequences: the tokens (N, D) of each layer."""
    found = []
    for tokens in zip(*sequences, strict=True):
        count = len(tokens[0])
        p = torch.ones(count, count, dtype=FLOAT64)
        for i in range(count):
            for k in range(i + 1, count):
                each = [literal_conditional(s, i, k, linear) for s, linear in zip(tokens, linears, strict=True)]
                p[i, k] = each[-1] if stacking != "conditional" else 1 - math.prod(1 - one for one in each)
        found.append(p)
    return found


def literal_product(p: Tensor, i: int, j: int) -> float:
    """Equations 3 and 5, with C_ij = C_ji and C_ii = 1."""
    low, high = min(i, j), max(i, j)
    return math.prod(float(p[low, k]) for k in range(low + 1, high + 1))


def literal_matrices(inputs: list[Tensor], maps: list[ClusterMaps], stacking: str) -> list[Tensor]:
    """C of every layer. grids: one (H, W, D) for each layer. A sequence has H = 1, and only one map."""
    rows, columns = inputs[0].shape[:2]
    result: list[Tensor] = []
    for depth in range(1, len(inputs) + 1):
        linears = [[layer.maps[axis] for layer in maps[:depth]] for axis in range(len(maps[0].maps))]
        across = literal_conditionals([[x[r] for r in range(rows)] for x in inputs[:depth]], stacking, linears[0])
        down = []
        if len(linears) == 2:
            down = literal_conditionals(
                [[x[:, c] for c in range(columns)] for x in inputs[:depth]], stacking, linears[1]
            )
        matrix = torch.ones(rows * columns, rows * columns, dtype=FLOAT64)
        for a in range(rows * columns):
            for b in range(rows * columns):
                (ra, ca), (rb, cb) = divmod(a, columns), divmod(b, columns)
                top, left = min(ra, rb), min(ca, cb)
                matrix[a, b] = literal_product(across[top], ca, cb)
                if down:
                    matrix[a, b] *= literal_product(down[left], ra, rb)
        if stacking == "matrix" and result:
            matrix = (1 - matrix) * result[-1] + matrix
        result.append(matrix)
    return result


def small_captioner(backbone: bool = True) -> tuple[Captioner, Vocabulary]:
    torch.manual_seed(0)
    vocabulary = Vocabulary(tuple(sorted(["PAD", "SOS", "EOS", "UNK", "a", "red", "square"])))
    swin = Backbone(SMALL_SWIN) if backbone else None
    width = swin.width if swin else 6
    sizes = ModelSizes(width, len(vocabulary), 9, vocabulary.sos, vocabulary.eos, vocabulary.pad)
    config = ExpansionNetConfig(d_model=8, d_ff=8, num_heads=2, static_expansion=(3, 2), dynamic_expansion=2)
    return Captioner(build_model(config, sizes), swin).eval(), vocabulary


def follow(automaton: ConstraintAutomaton, words: Sequence[int]) -> int:
    """The state that a caption's words lead to."""
    state = 0
    for word in words:
        state = automaton.steps[state].get(word, automaton.rest[state])
    return state
