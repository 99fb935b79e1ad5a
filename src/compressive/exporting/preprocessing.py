"""Preprocessing as one graph: the result of `Encoder.preprocess` for images of any size."""

import torch
from torch import Tensor, nn

from compressive.augment.ops import center_box, central_share, crop_resize_flip, normalize
from compressive.augment.published_crop import PublishedCrop
from compressive.encoder import Encoder, least

_WEIGHT_BITS = 22  # most bits of a weight in torch's resize of uint8
_EDGE = 4  # rows of an edge whose weights may be larger than those inside


class GraphPreprocessing(nn.Module):
    """Map uint8 images of one size, (batch, 3, h, w), to the input of the network.

    It shrinks, crops and normalizes as `Encoder.preprocess` does. All shapes but those of the input
    are constant, so that one exported graph accepts every size.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.size: int = encoder.size
        self.side: int = encoder.side
        self.antialias: bool = encoder.antialias
        self.least: int = least(encoder.size)
        # Side of the largest image after shrinking.
        self.canvas: int = max(self.side, 2 * self.least)
        self.mean: tuple[float, ...] = encoder.mean
        self.std: tuple[float, ...] = encoder.std
        self.crop: PublishedCrop | None = encoder.crop

    def forward(self, images: Tensor) -> Tensor:
        """Return normalized crops."""
        crops = self._own_crop(images) if self.crop is None else self.crop(images, self.size)
        return normalize(crops, mean=self.mean, std=self.std).contiguous()

    def _own_crop(self, images: Tensor) -> Tensor:
        small, height, width = self._shrink(images)
        ones = torch.ones_like(small[:, 0, 0, 0], dtype=torch.long)
        box = center_box(ones * height, ones * width, central_share(self.size))
        return crop_resize_flip(small, box, ones < 0, self.size, antialias=self.antialias)

    def _shrink(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `data.decode.shrink` does, in the top left corner of a canvas."""
        rows, columns = images.shape[-2:]
        old_h, old_w = (images.new_full((), n, dtype=torch.float64) for n in (rows, columns))
        longer, shorter = old_h.maximum(old_w), old_h.minimum(old_w)
        share = (self.side / longer).maximum(self.least / shorter).clamp(max=1.0)
        share = torch.where(longer <= self.side, 1.0, share)
        new_h, new_w = ((n * share).round().clamp(min=1) for n in (old_h, old_w))
        # torch rounds to whole numbers after each of the two passes.
        small = self._pass(images.double(), old_w, new_w)
        small = self._pass(small.mT, old_h, new_h).mT
        height, width = (n.clamp(max=self.canvas).long() for n in (new_h, new_w))
        return small.to(torch.uint8), height, width

    def _pass(self, images: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Resize the last axis from `old` pixels to `new`, and crop both ends to the canvas."""
        start = ((new - self.canvas).clamp(min=0) / 2).floor()
        weights, unit = _resize_weights(start, new, old, images.shape[-1], self.canvas)
        return ((images @ weights.mT + unit / 2) / unit).floor().clamp(0, 255)


def _resize_weights(
    start: Tensor, new: Tensor, old: Tensor, length: int | torch.SymInt, count: int
) -> tuple[Tensor, Tensor]:
    """Return torch's weights for an antialiased bicubic resize of uint8, and their unit.

    They are whole numbers, (count, length), for pixels from `start` on. The sum of a row is about
    the unit, or 0 from pixel `new` on.
    """
    scale = old / new
    wide = scale.clamp(min=1.0)
    to = torch.arange(count, dtype=torch.float64)
    to = torch.cat([to + start, to[:_EDGE]])  # the edge is only for the largest weight
    center = (scale * (to + 0.5))[:, None]
    low = (center - 2 * wide + 0.5).trunc().clamp(min=0)
    high = (center + 2 * wide + 0.5).trunc().minimum(old)
    pixel = torch.arange(length, dtype=torch.float64)[None]
    d = ((pixel - center + 0.5) / wide).abs()
    near, far = (1.5 * d - 2.5) * d * d + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2
    weight = torch.where(d < 1, near, torch.where(d < 2, far, 0.0))
    weight = torch.where((pixel >= low) & (pixel < high), weight, 0.0)
    weight = torch.where((to < new)[:, None], weight / weight.sum(1, keepdim=True), 0.0)
    # The largest weight must stay below 2^15.
    powers = 2.0 ** torch.arange(1, _WEIGHT_BITS + 1, dtype=torch.float64)
    unit = (powers * ((0.5 + weight.max() * powers).trunc() < 2**15)).max()
    return (weight * unit + weight.sign() / 2).trunc()[:-_EDGE], unit
