"""Corrupt images as in ImageNet-C, by name and severity."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from compressive.checks import validates_inputs
from compressive.corruptions.blur import (
    defocus_blur,
    gaussian_blur,
    glass_blur,
    motion_blur,
    zoom_blur,
)
from compressive.corruptions.digital import (
    brightness,
    contrast,
    elastic_transform,
    pixelate,
    saturate,
)
from compressive.corruptions.jpeg import jpeg_compression
from compressive.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from compressive.corruptions.parameters import EXTRAS, FOG_MAPS, FROST_SCALES, NAMES, TABLES
from compressive.corruptions.spatter import spatter
from compressive.corruptions.weather import Photo, fog, load_frost, snow
from compressive.corruptions.weather import frost as frosted
from compressive.rng import image_keys

__all__ = ["EXTRAS", "NAMES", "corrupt", "default_table", "load_frost"]

_RANDOM: dict[str, Callable[..., Tensor]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "snow": snow,
    "frost": frosted,
    "fog": fog,
    "elastic_transform": elastic_transform,
    "speckle_noise": speckle_noise,
    "spatter": spatter,
}
_FIXED: dict[str, Callable[..., Tensor]] = {
    "defocus_blur": defocus_blur,
    "zoom_blur": zoom_blur,
    "brightness": brightness,
    "contrast": contrast,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
    "gaussian_blur": gaussian_blur,
    "saturate": saturate,
}
_ALL = NAMES + EXTRAS
_LEAST_VIEW = 2**20  # above the view numbers of training and evaluation


def default_table(size: int) -> int:
    """Return the parameter table for this image size: of CIFAR, Tiny ImageNet or ImageNet."""
    return 32 if size <= 48 else 64 if size <= 96 else 224


@validates_inputs
def corrupt(
    images: UInt8[Tensor, "batch 3 size size"],
    name: str,
    severity: int,
    *,
    index: Int[Tensor, " batch"],
    seed: int = 0,
    table: int | None = None,
    frost: Sequence[Photo] | None = None,
) -> UInt8[Tensor, "batch 3 size size"]:
    """Return images corrupted as in ImageNet-C, Tiny-ImageNet-C (`table` 64) or CIFAR-10-C (32).

    The result depends only on the image, its `index` in the data set, seed, name and severity, not
    on the batch. The files of ImageNet-C and Tiny-ImageNet-C are also JPEG of quality 85:
    `jpeg.jpeg_compression(result, 85)`. `frost` is the result of `load_frost`; only "frost"
    needs it.
    """
    _check_arguments(images, name, severity, index, table)
    images = images.contiguous()  # some operations copy channels_last images with a warning
    size = images.shape[-1]
    table = table or default_table(size)
    parameters = TABLES[table][name][severity - 1]
    if name in _FIXED:
        return _FIXED[name](images, *parameters)
    more = {}
    if name == "frost":
        if not frost:
            raise ValueError("frost must be given for frost: pass load_frost(folder), got None")
        more = {"photos": frost, "scale": FROST_SCALES[table]}
    elif name == "fog":
        more = {"side": FOG_MAPS[table]}
    keys = image_keys(index.to(images.device), seed=seed, epoch=severity, view=noise_view(name))
    return _RANDOM[name](images, keys, *parameters, **more)


def noise_view(name: str) -> int:
    """Return the view number that keys the noise of a corruption: a hash of its name.

    It does not depend on the other corruptions, so that adding one changes no noise.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return _LEAST_VIEW + int.from_bytes(digest, "little") % (2**31 - _LEAST_VIEW)


def _check_arguments(
    images: Tensor, name: str, severity: int, index: Tensor, table: int | None
) -> None:
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3:
        raise ValueError(f"images must be uint8 (batch, 3, size, size), got {images.dtype} {shape}")
    if shape[2] != shape[3] or shape[2] < 16:
        raise ValueError(f"images must be square, 16 pixels or more: crop them first, got {shape}")
    if index.shape != shape[:1] or index.is_floating_point():
        raise ValueError(
            f"index must hold {shape[0]} whole numbers, got {index.dtype} {tuple(index.shape)}"
        )
    if name not in _ALL:
        raise ValueError(f"name must be one of {', '.join(_ALL)}, got {name!r}")
    if severity not in range(1, 6):
        raise ValueError(f"severity must be a whole number from 1 to 5, got {severity}")
    if table is not None and table not in TABLES:
        raise ValueError(f"table must be one of {', '.join(map(str, TABLES))}, got {table}")
