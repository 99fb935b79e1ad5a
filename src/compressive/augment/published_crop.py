"""The evaluation crop of timm and torchvision: resize the whole image, then crop its center."""

from typing import Any, Literal, NamedTuple, get_args

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
        full = torch.ones(images.shape[0], dtype=torch.long, device=images.device)
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
        weight = weight * (pixel < side[:, None])[:, None]
        return weight / weight.sum(2, keepdim=True)

    @classmethod
    def from_list(cls, values: Any) -> "PublishedCrop | None":
        """Return the crop of a file's metadata; None if it has none."""
        if values is None:
            return None
        share, interpolation, squash = values
        if not 0 < share <= 1 or interpolation not in get_args(Interpolation):
            raise ValueError(f"crop must be a share up to 1 and an interpolation, got {values}")
        return cls(share, interpolation, bool(squash))

    def describe(self) -> dict[str, str]:
        """Return the crop and its kernel in words, for the protocol of a record."""
        what = "whole image squashed" if self.squash else "shorter side resized"
        crop = f"{what} to size / {self.share:g}, then central square"
        return {"crop": crop, "resize": f"{self.interpolation} as in Pillow, antialiased"}
