"""Decode batches of JPEG files with nvJPEG, and choose when to use it."""

import functools
import io
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from compressive.data.decode import Unreadable, decode, first_line
from compressive.data.jpeg_header import SUBSAMPLINGS, read_jpeg_header
from compressive.data.placement import Placement, fastest_placement, place_by_copies
from compressive.data.source import Source, fetch_ahead
from compressive.platforms.accelerators import is_rocm

# GPUs with a JPEG engine, by compute capability: A100, H100 and H200, B200, B300. Others decode
# with their cores and one thread of the host, which several CPU cores surpass.
_ENGINES = frozenset(((8, 0), (9, 0), (10, 0), (10, 3)))
_FEWEST_IMAGES = 1000  # images; below, "auto" keeps the pixels of the CPU
_SAMPLED_HEADERS = 64  # images whose header is read to find the share of JPEG files
_LEAST_SHARE = 0.5  # of the sample that the GPU must be able to decode for "auto"
# Largest and mean difference to libjpeg that count as the same picture, of 255. It is smooth, so
# that the way of chroma upsampling, which is not part of the standard, has little effect.
_LARGEST_DIFFERENCE, _MEAN_DIFFERENCE = 16, 2.0

BatchDecode = Callable[[list[Tensor]], list[Tensor]]


class DeviceDecoder(NamedTuple):
    """Decoder of JPEG files to RGB on the device, and the subsamplings that it supports."""

    decode: BatchDecode  # does not apply the orientation
    subsamplings: frozenset[str]
    place: Placement = place_by_copies


class NoDeviceDecoder(RuntimeError):
    """Raised if no library can decode JPEG files on a device; the message is the reason."""


def choose_decoder(
    source: Source, device: torch.device, setting: Literal["auto", "yes", "no"], *, is_cached: bool
) -> DeviceDecoder | None:
    """Return the decoder for the setting data.decode_on_device; None: decode on the CPU.

    "auto" uses nvJPEG for 1,000 or more images that are not cached, most of them JPEG files, on a
    GPU with a JPEG engine.
    """
    if setting == "no":
        return None
    is_nvidia = device.type == "cuda" and not is_rocm()
    if setting == "yes" and not is_nvidia:
        hint = "set data.decode_on_device=auto or no"
        raise ValueError(f"data.decode_on_device=yes needs an NVIDIA GPU, got {device}; {hint}")
    if setting == "auto" and (is_cached or not is_nvidia or len(source) < _FEWEST_IMAGES):
        return None
    if setting == "auto" and torch.cuda.get_device_capability(device) not in _ENGINES:
        return None
    if setting == "auto" and jpeg_share(source) < _LEAST_SHARE:
        return None
    try:
        return nvjpeg_decoder(device)
    except NoDeviceDecoder as error:
        if setting == "auto":
            return None
        hint = "install torchcodec or torchvision for CUDA, or set data.decode_on_device=no"
        raise ValueError(f"data.decode_on_device=yes: {error}; {hint}") from None


def jpeg_share(source: Source) -> float:
    """Return the share of images, in a sample, that are files for the decoder of a device."""
    stored, count = getattr(source, "stored", None), len(source)
    if stored is None:
        return 0.0
    sample = [
        i * count // min(_SAMPLED_HEADERS, count) for i in range(min(_SAMPLED_HEADERS, count))
    ]
    fetch_ahead(source, sample)
    found = 0
    for i in sample:
        try:
            data = stored(i)
        except Unreadable:
            continue
        found += isinstance(data, bytes) and read_jpeg_header(data) is not None
    return found / len(sample)


@functools.cache
def nvjpeg_decoder(device: torch.device) -> DeviceDecoder:
    """Return a decoder that was compared with libjpeg; raise `NoDeviceDecoder` if there is none."""
    reasons: list[str] = []
    for name, open_library in (
        ("torchcodec", _open_torchcodec),
        ("torchvision", _open_torchvision),
    ):
        try:
            found = open_library(device)
            kinds = matching_subsamplings(found)
            return DeviceDecoder(found, kinds, fastest_placement(device))
        except (ImportError, OSError, RuntimeError, TypeError) as error:
            reasons.append(f"{name}: {first_line(error)}")
    raise NoDeviceDecoder(f"no decoder of JPEG for {device} ({'; '.join(reasons)})")


def _open_torchcodec(device: torch.device) -> BatchDecode:
    from torchcodec.decoders import decode_jpeg  # since 0.16

    options: Any = {"mode": "RGB", "device": device}
    return lambda files: list(decode_jpeg(files, **options))


def _open_torchvision(device: torch.device) -> BatchDecode:
    from torchvision.io import ImageReadMode, decode_jpeg

    return lambda files: list(decode_jpeg(files, mode=ImageReadMode.RGB, device=device))


def matching_subsamplings(decode_batch: BatchDecode) -> frozenset[str]:
    """Return the subsamplings of which a decoder returns the pixels of libjpeg, nearly."""
    # Raise the error of the decoder if it can decode none.
    found: set[str] = set()
    problem: RuntimeError | None = None
    for name in SUBSAMPLINGS:
        data = _test_picture(name)
        expected = decode(data).int()
        try:
            (image,) = decode_batch([torch.frombuffer(bytearray(data), dtype=torch.uint8)])
        except RuntimeError as error:
            problem = error
            continue
        image = image.cpu().int()
        if image.shape == expected.shape:
            difference = (image - expected).abs().float()
            largest, mean = float(difference.max()), float(difference.mean())
            if largest <= _LARGEST_DIFFERENCE and mean <= _MEAN_DIFFERENCE:
                found.add(name)
    if not found:
        raise problem or RuntimeError("its pixels differ from those of libjpeg")
    return frozenset(found)


def _test_picture(subsampling: str) -> bytes:
    """Return a JPEG of slopes in different directions; its sides are no multiples of blocks."""
    down, across = np.mgrid[0:70, 0:90]
    planes = 70 + across, 190 - down, 20 + (down + across) // 2
    picture = Image.fromarray(np.stack(planes, -1).astype(np.uint8))
    file = io.BytesIO()
    if subsampling == "gray":
        picture.convert("L").save(file, "JPEG", quality=95)
    else:
        ratio = ":".join(subsampling)
        picture.save(file, "JPEG", quality=95, subsampling=ratio)
    return file.getvalue()
