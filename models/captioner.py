"""A captioner: a caption model, with a backbone in front when it works on images."""

from __future__ import annotations

from torch import Tensor, nn

from models.backbone import Backbone
from models.base import CaptionModel, Memory


class Captioner(nn.Module):
    """Takes images (B, 3, H, W), normalized, through its backbone, or stored features (B, N, C) as they are."""

    def __init__(self, model: CaptionModel, backbone: Backbone | None = None) -> None:
        super().__init__()
        self.model = model
        self.backbone = backbone

    def features(self, inputs: Tensor) -> Tensor:
        """(B, N, C). Raises ValueError for images when there is no backbone."""
        if inputs.ndim != 4:
            return inputs
        if self.backbone is None:
            raise ValueError("this captioner has no backbone: it works on stored features (images, tokens, width) only")
        return self.backbone(inputs)

    def encode(self, inputs: Tensor, lengths: Tensor | None = None, boxes: Tensor | None = None) -> Memory:
        return self.model.encode(self.features(inputs), lengths, boxes)

    def forward(self, inputs: Tensor, lengths: Tensor | None, tokens: Tensor, boxes: Tensor | None = None) -> Tensor:
        """Teacher-forced logits (B*K, T, V)."""
        return self.model(self.features(inputs), lengths, tokens, boxes)
