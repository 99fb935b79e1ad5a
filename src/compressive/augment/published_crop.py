"""The evaluation crop of timm and torchvision: resize the whole image, then crop its center."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from compressive.platforms.float64 import float64_device
from compressive.rng import Integers

Interpolation = Literal["bilinear", "bicubic"]
_UNIT = 2.0**22  # Pillow multiplies by whole numbers of 2^-22; float64 is exact for them
_CROPS_AT_ONCE = 32  # images; float64 takes much memory


class PublishedCrop(NamedTuple):
    """How published weights want their images: the crop's share of the resized shorter side.

    The result is bitwise equal to Pillow's, except for images that are more than twice as tall as
    wide: Pillow 13 resizes their columns first, which rounds differently by up to three levels.
    `squash` ignores the aspect ratio.
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
        parts = (part.split(_CROPS_AT_ONCE) for part in (images, height, width))
        return torch.cat([self._crop(size, *part) for part in zip(*parts, strict=True)])

    def _crop(self, size: int, images: Tensor, height: Tensor, width: Tensor) -> Tensor:
        device = images.device
        images, height, width = (x.to(float64_device(device)) for x in (images, height, width))
        short, target = height.minimum(width), int(size / self.share)
        # torchvision rounds the longer side down.
        tall, wide = (target * side // (side if self.squash else short) for side in (height, width))
        across = self._weights(width, wide, size, images.shape[3])
        down = self._weights(height, tall, size, images.shape[2])
        # Pillow resizes rows, rounds, and then resizes columns.
        rows = _rounded(images.double() @ across.mT[:, None])
        return (_rounded(down[:, None] @ rows) / 255).float().to(device)

    def _weights(
        self, side: Integers, resized: Integers, size: int, padded: int
    ) -> Float[Tensor, "batch size padded"]:
        """Return the weight of each source pixel for each pixel of the crop, in units of 2^-22."""
        start = ((resized - size).double() / 2).round()  # half to even, as torchvision
        to = torch.arange(size, device=side.device) + start[:, None]
        scale = side.double() / resized
        center = ((to + 0.5) * scale[:, None])[:, :, None]
        pixel = torch.arange(padded, device=side.device)
        unit = scale.clamp(min=1)[:, None, None]
        d = ((pixel - center + 0.5) * (1 / unit)).abs()
        if self.interpolation == "bilinear":
            weight = (1 - d).clamp(min=0)
        else:
            near, far = (1.5 * d - 2.5) * d * d + 1, (((d - 5) * d + 8) * d - 4) * -0.5
            weight = torch.where(d < 1, near, torch.where(d < 2, far, 0.0))
        weight = weight * (pixel < side[:, None])[:, None]
        weight = weight * (1 / weight.sum(2, keepdim=True)) * _UNIT
        return torch.where(weight < 0, -(-weight + 0.5).floor(), (weight + 0.5).floor())

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


def _rounded(sums: Tensor) -> Tensor:
    return (sums / _UNIT + 0.5).floor().clamp_(0, 255)
