"""Corrupt images as in ImageNet-C, by name and severity."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from compressive.checks import validates_inputs
from compressive.corruptions import blur, digital, noise, spatter, weather
from compressive.corruptions.jpeg import jpeg_compression
from compressive.corruptions.parameters import EXTRAS, FOG_MAPS, FROST_SCALES, NAMES, TABLES
from compressive.corruptions.weather import Photo, load_frost
from compressive.platforms.float64 import float64_device
from compressive.rng import image_keys

__all__ = ["EXTRAS", "NAMES", "corrupt", "default_table", "load_frost"]

Corruption = Callable[..., Tensor]
_RANDOM: tuple[Corruption, ...] = (
    *(noise.gaussian_noise, noise.shot_noise, noise.impulse_noise, noise.speckle_noise),
    *(blur.glass_blur, blur.motion_blur, weather.snow, weather.frost, weather.fog),
    *(digital.elastic_transform, spatter.spatter),
)
_FIXED: tuple[Corruption, ...] = (
    *(blur.defocus_blur, blur.zoom_blur, blur.gaussian_blur, digital.brightness),
    *(digital.contrast, digital.saturate, digital.pixelate, jpeg_compression),
)
_FUNCTIONS: dict[str, Corruption] = {function.__name__: function for function in _RANDOM + _FIXED}
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
    `jpeg.jpeg_compression(result, 85)`. `frost` is the result of `load_frost`.
    """
    _check_arguments(images, name, severity, index, table)
    device = images.device
    # Some operations copy channels_last images with a warning.
    images = images.contiguous().to(float64_device(device))
    size = images.shape[-1]
    table = table or default_table(size)
    parameters = TABLES[table][name][severity - 1]
    function = _FUNCTIONS[name]
    if function in _FIXED:
        return function(images, *parameters).to(device)
    more = {}
    if name == "frost":
        if not frost:
            raise ValueError("frost must be given for frost: pass load_frost(folder), got None")
        more = {"photos": frost, "scale": FROST_SCALES[table]}
    elif name == "fog":
        more = {"side": FOG_MAPS[table]}
    keys = image_keys(index.to(images.device), seed=seed, epoch=severity, view=noise_view(name))
    return function(images, keys, *parameters, **more).to(device)


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
