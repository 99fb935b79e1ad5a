"""Compare the pixels of images, whatever their size, compression, brightness, mirroring, crop."""

import math
from functools import cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

THUMB = 32  # side of the gray copy that is kept of each image
_FREQUENCIES = 8  # of the cosine transform, per axis
_BRIGHTNESS = (0.299, 0.587, 0.114)
# Crops that are searched: the side as a share of the image, at all offsets of whole thumb pixels.
_CROP_SIDES = (30, 28, 26, 24)
_LEAST_CONTRAST = 0.5  # gray levels; less is rounding
_PAIRS = 4096  # compared at once


def gray_thumb(image: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "side side"]:
    """Return the brightness of an image, resized to `THUMB` pixels per side."""
    if image.shape[1:] != (THUMB, THUMB):
        size = (THUMB, THUMB)
        image = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    weights = torch.tensor(_BRIGHTNESS)
    return torch.einsum("c,chw->hw", weights, image.float()).round().byte()


def descriptors(thumbs: UInt8[Tensor, "count side side"]) -> Float[Tensor, "count dim"]:
    """Return unit vectors of low frequencies, without the mean; zeros for an even image."""
    # Amplitudes of photographs fall with the frequency. Weights by the frequency undo this, so
    # that not only the two or three largest decide.
    into = _cut_cosines(THUMB, 0)
    parts = [_unit_vectors(into @ some.float() @ into.mT) for some in thumbs.split(_PAIRS)]
    return torch.cat(parts) if parts else torch.zeros(0, _FREQUENCIES**2)


def mirrored(vectors: Float[Tensor, "count dim"]) -> Float[Tensor, "count dim"]:
    """Return the descriptors of the mirrored images: odd horizontal frequencies change sign."""
    sign = (-1.0) ** torch.arange(_FREQUENCIES)
    return (vectors.unflatten(1, (_FREQUENCIES, _FREQUENCIES)) * sign).flatten(1)


def crop_similarity(
    thumbs: UInt8[Tensor, "count side side"], pairs: Int[Tensor, "pairs 2"]
) -> Float[Tensor, " pairs"]:
    """Return the largest cosine of descriptors of pairs, over mirroring and crops of either one."""
    found = []
    for some in pairs.split(_PAIRS):
        first, second = thumbs[some[:, 0]].float(), thumbs[some[:, 1]].float()
        found.append(torch.maximum(_best_crop(first, second), _best_crop(second, first)))
    return torch.cat(found) if found else torch.zeros(0)


def _best_crop(whole: Tensor, part: Tensor) -> Tensor:
    """Return the largest cosine of `part` and crops of `whole`."""
    into = _cut_cosines(THUMB, 0)
    target = _unit_vectors(into @ part @ into.mT)
    targets = torch.stack([target, mirrored(target)], 2)
    best = torch.full((len(whole),), -1.0)
    for side in (THUMB, *_CROP_SIDES):
        cuts = torch.cat([_cut_cosines(side, offset) for offset in range(THUMB - side + 1)])
        made = (cuts @ whole @ cuts.mT).unflatten(1, (-1, _FREQUENCIES))
        made = made.unflatten(3, (-1, _FREQUENCIES)).transpose(2, 3).flatten(1, 2)
        cosine = _unit_vectors(made.flatten(0, 1)).unflatten(0, made.shape[:2]) @ targets
        best = torch.maximum(best, cosine.flatten(1).max(1).values)
    return best


def _unit_vectors(spectrum: Float[Tensor, "count rows columns"]) -> Float[Tensor, "count dim"]:
    """Return unit vectors; shorter ones for images whose contrast is below a gray level."""
    return F.normalize((spectrum * _weights()).flatten(1), dim=1, eps=_LEAST_CONTRAST)


@cache
def _weights() -> Float[Tensor, "rows columns"]:
    """Return the frequency of each coefficient; 0 for the mean."""
    axis = torch.arange(_FREQUENCIES).float()
    return (axis[:, None].square() + axis.square()).sqrt()


@cache
def _cut_cosines(side: int, offset: int) -> Float[Tensor, "frequency pixel"]:
    """Return the cosine transform of the pixels from `offset` on; others count 0."""
    pixel = torch.arange(side) + 0.5
    waves = torch.cos(math.pi * torch.arange(_FREQUENCIES)[:, None] * pixel / side)
    waves[0] *= math.sqrt(0.5)
    return F.pad(waves / side, (offset, THUMB - side - offset))
