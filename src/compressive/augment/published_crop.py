"""The evaluation crop of timm and torchvision: resize the whole image, then crop its center."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from compressive.checks import full_precision
from compressive.rng import Integers

Interpolation = Literal["bilinear", "bicubic"]


class PublishedCrop(NamedTuple):
    """How published weights want their images: the crop's share of the resized shorter side.

    The result differs from Pillow's by at most one of 255 levels: Pillow multiplies by rounded
    weights. `squash` ignores the aspect ratio.
    """

    share: float = 0.875
    interpolation: Interpolation = "bicubic"
    squash: bool = False

    def __call__(
        self,
        images: UInt8[Tensor, "batch 3 h w"],
        size: int,
        height: Integers | None = None,
        width: Integers | None = None,
    ) -> Float[Tensor, "batch 3 size size"]:
        """Return crops in [0, 1]; images are in the top left corners of the batch."""
        full = torch.ones(len(images), dtype=torch.long, device=images.device)
        height = full * images.shape[2] if height is None else height
        width = full * images.shape[3] if width is None else width
        short, target = height.minimum(width), int(size / self.share)
        # torchvision rounds the longer side down.
        tall, wide = (target * side // (side if self.squash else short) for side in (height, width))
        with full_precision(images):
            across = self._weights(width, wide, size, images.shape[3])
            down = self._weights(height, tall, size, images.shape[2])
            # Pillow rounds after each pass.
            rows = (images.float() @ across.mT[:, None]).round_().clamp_(0, 255)
            return (down[:, None] @ rows).round_().clamp_(0, 255) / 255

    def _weights(
        self, side: Integers, resized: Integers, size: int, padded: int
    ) -> Float[Tensor, "batch size padded"]:
        """Return the weight of each source pixel for each pixel of the crop."""
        # torchvision rounds half to even.
        start = ((resized - size).double() / 2).round()
        to = torch.arange(size, device=side.device) + start[:, None]
        scale = side.double() / resized
        center = (to + 0.5) * scale[:, None]
        pixel = torch.arange(padded, device=side.device) + 0.5
        unit = scale.clamp(min=1)[:, None, None]
        d = ((pixel - center[:, :, None]).abs() / unit).float()
        if self.interpolation == "bilinear":
            weight = (1 - d).clamp(min=0)
        else:
            near, far = (1.5 * d - 2.5) * d * d + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2
            weight = torch.where(d < 1, near, torch.where(d < 2, far, 0.0))
        # The resized image is smaller than the crop if share > 1: black outside.
        weight = weight * (pixel < side[:, None])[:, None]
        weight = weight / weight.sum(2, keepdim=True).where(weight.sum(2, keepdim=True) != 0, 1.0)
        inside = (to >= 0) & (to < resized[:, None])
        return weight * inside[:, :, None]

    def describe(self) -> str:
        """Return the crop in words, for the protocol of a record."""
        how = "squashed" if self.squash else "shorter side"
        return f"{how} resized to size / {self.share:g}, {self.interpolation} as Pillow, then center"
