"""Small copies of evaluated images for the report, as bytes with channels last."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from compressive.evaluation.context import EvalContext

_SIDE = 96  # pixels at most, to keep the report small


def crop_thumbnails(
    context: EvalContext, split: str, index: Int[Tensor, " some"]
) -> UInt8[Tensor, "some side side 3"]:
    """Return central crops of a split; each image is read once, even if it occurs repeatedly."""
    places, again = index.cpu().unique(return_inverse=True)
    batches = context.batches_at(split, places)
    found = [thumbnails(context.crop.pixels(batch)) for batch in batches]
    return torch.cat(found)[again.to(context.device)]


def thumbnails(images: Float[Tensor, "batch 3 h w"]) -> UInt8[Tensor, "batch side side 3"]:
    """Convert colors in [0, 1] to bytes; average areas of large images."""
    if images.shape[-1] > _SIDE:
        images = F.interpolate(images, (_SIDE, _SIDE), mode="area")
    return images.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1)
