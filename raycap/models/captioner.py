"""A captioner: a caption model, with a backbone in front when it works on images."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.encoder_decoder import Layer
from raycap.models.encoders.backbone import Backbone, prepare_to_compile

MAX_FORMS = 64  # of a layer that are compiled


class Captioner(nn.Module):
    """Reads normalized images (B, 3, H, W), for which it needs a backbone, or stored features (B, N, C)."""

    def __init__(self, model: CaptionModel, backbone: Backbone | None = None) -> None:
        super().__init__()
        self.model = model
        self.backbone = backbone

    def without_backbone(self) -> Captioner:
        """The captioner of stored features."""
        return Captioner(self.model)

    def features(self, inputs: Features) -> Features:
        """The backbone's features of pixels, or stored features unchanged. ValueError for pixels without a backbone."""
        if inputs.tokens.ndim != 4:
            return inputs
        if self.backbone is None:
            raise ValueError("this captioner has no backbone: it works on stored features (images, tokens, width) only")
        return replace(inputs, tokens=self.backbone(inputs.tokens))

    def frozen_by(self, patterns: Sequence[str]) -> list[nn.Parameter]:
        """The parameters that match one of the patterns.

        A pattern is the name of a parameter or module, with `*` and `?` for any text. A module's name includes all
        parameters in it. Raises ValueError for a pattern that matches nothing, and if the patterns match all that can
        be trained.
        """
        parameters = dict(self.named_parameters())
        frozen: dict[str, nn.Parameter] = {}
        for pattern in patterns:
            found = {
                name: each
                for name, each in parameters.items()
                if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
            }
            if not found:
                raise ValueError(
                    f"freeze names {pattern!r}, which matches no parameter; {_close_names(pattern, parameters)}"
                )
            frozen |= found
        if not any(each.requires_grad for name, each in parameters.items() if name not in frozen):
            raise ValueError(f"freeze names {', '.join(patterns)}, and nothing is left to train; name fewer")
        return list(frozen.values())

    def compile_layers(self) -> None:
        """Compiles every layer of the model and every block of the backbone in place, at their first use.

        Compiled as a whole, a captioner would exchange gradients between processes only after the backward pass.
        """
        # All blocks of a backbone are one piece of code. By default torch compiles 8 forms of it, for different shapes,
        # masks and drop paths, in training and in evaluation, and runs the others as they are.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_FORMS)
        for layer in self.model.modules():
            if isinstance(layer, Layer):
                layer.compile()
        if self.backbone is not None:
            prepare_to_compile(self.backbone)
            for block in self.backbone.blocks:
                # Sizes differ between a backbone's stages. torch takes a minute for each form of a Swin block whose
                # sizes vary, and fails at some.
                block.compile(dynamic=False)

    def encode(self, inputs: Features) -> Memory:
        return self.model.encode(self.features(inputs))

    def forward(self, inputs: Features, decoding: Tensor | Callable[[Memory], Any]) -> Any:
        """Teacher-forced logits (B*K, T, V) for tokens (B*K, T), or the result of a function of the memory.

        Data-parallel training exchanges only gradients that pass through this method.
        """
        memory = self.encode(inputs)
        return decoding(memory) if callable(decoding) else self.model.decode(memory, decoding)


def _close_names(pattern: str, parameters: Iterable[str]) -> str:
    """A hint with names of modules and parameters that are close to a pattern, or with the first ones."""
    names = list(dict.fromkeys(prefix for each in parameters for prefix in accumulate(each.split("."), "{}.{}".format)))
    close = difflib.get_close_matches(pattern, names, n=3)
    return f"{'close names' if close else 'names'} are {', '.join(close or names[:5])}"
