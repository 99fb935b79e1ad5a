"""Compare the pixels of images, whatever their size, compression, brightness, mirroring, crop."""

import math
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

THUMB = 32  # side of the gray copy that is kept of each image
_FREQUENCIES = 8  # of the cosine transform, per axis
_BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]
# Crops that are searched: the side as a share of the image, at all offsets of whole thumb pixels.
_CROP_SIDES = (30, 28, 26, 24)
_LEAST_CONTRAST = 0.5  # gray levels; less is rounding
_THUMBS = 4096  # transformed at once
_CROP_ROWS = 512  # images whose crops are compared at once: 22 MB
_COMPARED_AT_ONCE = 8  # images that are compared with the crops of one image at once


def gray_thumb(image: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "side side"]:
    """Return the brightness of an image, resized to `THUMB` pixels per side."""
    if image.shape[1:] != (THUMB, THUMB):
        size = (THUMB, THUMB)
        image = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    # NumPy, because torch would start its own thread pool in each thread that reads images.
    gray = (image.numpy() * _BRIGHTNESS).sum(0)
    return torch.from_numpy(np.rint(gray).astype(np.uint8))


def descriptors(thumbs: UInt8[Tensor, "count side side"]) -> Float[Tensor, "count dim"]:
    """Return unit vectors of low frequencies, without the mean; zeros for an even image."""
    # Amplitudes of photographs fall with the frequency. Weights by the frequency undo this, so
    # that not only the two or three largest decide.
    into = _cut_cosines(THUMB, 0)
    parts = [_unit_vectors(into @ some.float() @ into.mT) for some in thumbs.split(_THUMBS)]
    return torch.cat(parts) if parts else torch.zeros(0, _FREQUENCIES**2)


def mirrored(vectors: Float[Tensor, "count dim"]) -> Float[Tensor, "count dim"]:
    """Return the descriptors of the mirrored images: odd horizontal frequencies change sign."""
    sign = (-1.0) ** torch.arange(_FREQUENCIES)
    return (vectors.unflatten(1, (_FREQUENCIES, _FREQUENCIES)) * sign).flatten(1)


def crop_similarity(
    thumbs: UInt8[Tensor, "count side side"], pairs: Int[Tensor, "pairs 2"]
) -> Float[Tensor, " pairs"]:
    """Return the largest cosine of descriptors of pairs, over mirroring and crops of either one."""
    if not len(pairs):
        return torch.zeros(0)
    # Crops of an image are transformed once, then compared with all images it is paired with.
    whole, part = torch.cat([pairs, pairs.flip(1)]).unbind(1)
    order = whole.argsort(stable=True)
    whole, counts = whole[order].unique_consecutive(return_counts=True)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    rows = -(-counts // _COMPARED_AT_ONCE)
    row = (rows.cumsum(0) - rows).repeat_interleave(counts) + rank // _COMPARED_AT_ONCE
    parts = torch.zeros(int(rows.sum()), _COMPARED_AT_ONCE, dtype=torch.long)
    parts[row, rank % _COMPARED_AT_ONCE] = part[order]
    wholes, found, vectors = whole.repeat_interleave(rows), [], descriptors(thumbs)
    for some in torch.arange(len(parts)).split(_CROP_ROWS):
        found.append(_best_crop(thumbs[wholes[some]], vectors[parts[some]]))
    best = torch.empty(len(order))
    best[order] = torch.cat(found)[row, rank % _COMPARED_AT_ONCE]
    return torch.maximum(*best.chunk(2))


def _best_crop(
    whole: UInt8[Tensor, "count side side"], parts: Float[Tensor, "count parts dim"]
) -> Float[Tensor, "count parts"]:
    """Return the largest cosine of each descriptor in `parts` and crops of `whole`."""
    flipped = mirrored(parts.flatten(0, 1)).view_as(parts)
    # Contiguous: a batched product with a transposed matrix takes 5 to 12 times as long on ARM.
    targets = torch.cat([parts, flipped], 1).mT.contiguous()
    best = torch.full((len(whole), targets.shape[2]), -1.0)
    pixels = whole.float()
    for side in (THUMB, *_CROP_SIDES):
        offsets = range(THUMB - side + 1)
        cuts = torch.cat([_cut_cosines(side, offset) for offset in offsets]).mT.contiguous()
        # One product with all rows, then one with all columns: batches of small ones are slower.
        spectrum = (pixels @ cuts).mT.contiguous() @ cuts
        made = spectrum.unflatten(1, (-1, _FREQUENCIES)).unflatten(3, (-1, _FREQUENCIES))
        made = made.permute(0, 3, 1, 4, 2).flatten(1, 2)
        crops = (made * _weights()).flatten(2)
        lengths = crops.norm(dim=2, keepdim=True).clamp(min=_LEAST_CONTRAST)
        best = torch.maximum(best, (crops @ targets / lengths).amax(1))
    return torch.maximum(*best.chunk(2, dim=1))


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
