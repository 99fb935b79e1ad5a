"""Files for tests of decoding on a device, and decoders on the CPU in place of nvJPEG."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from image_kinds import encoded, flipped, kinds
from PIL import Image
from torch import Tensor

from compressive.data.decode import decode
from compressive.data.jpeg_header import SUBSAMPLINGS
from compressive.data.loaders import Batch
from compressive.data.nvjpeg import DeviceDecoder
from compressive.data.source import ImageSource


class StandIn:
    """Decodes batches on the CPU; like nvJPEG, it fails the whole batch for one bad file."""

    def __init__(self, rejects: Callable[[bytes], bool] = lambda _: False) -> None:
        self.rejects = rejects
        self.calls: list[int] = []  # files of each call
        self.largest: int = 0  # bytes of decoded pixels in one call

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        data = [bytes(file.numpy()) for file in files]
        self.calls.append(len(data))
        if any(map(self.rejects, data)):
            raise RuntimeError("Failed to decode batch: 2")
        found = [decode(each) for each in data]
        self.largest = max(self.largest, sum(image.numel() for image in found))
        return found

    @property
    def decoder(self) -> DeviceDecoder:
        return DeviceDecoder(self, frozenset(SUBSAMPLINGS))


def wrong_colors(files: list[Tensor]) -> list[Tensor]:
    """Return blue, green and red."""
    return [decode(bytes(file.numpy())).flip(0) for file in files]


def first_plane_only(files: list[Tensor]) -> list[Tensor]:
    """Leave two planes of gray pictures empty."""
    found = [decode(bytes(file.numpy())) for file in files]
    is_gray = [torch.equal(image[0], image[1]) for image in found]
    return [
        torch.cat([image[:1], torch.zeros_like(image[1:])]) if gray else image
        for image, gray in zip(found, is_gray, strict=True)
    ]


def files(data: dict[str, bytes] | list[bytes], labels: bool = True) -> ImageSource:
    """Return a source of encoded images in memory."""
    content = list(data.values()) if isinstance(data, dict) else data
    names = list(data) if isinstance(data, dict) else [f"file {i}" for i in range(len(content))]
    return ImageSource(
        name="files",
        count=len(content),
        read=content.__getitem__,
        place=names.__getitem__,
        labels=torch.arange(len(content)) % 7 if labels else None,
        classes=tuple("abcdefg") if labels else None,
    )


def photo(height: int, width: int, seed: int = 0, **options: Any) -> bytes:
    """Return a JPEG with edges and noise."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    noisy = large + draw.normal(0, 12, large.shape)
    return encoded("JPEG", Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), **options)


def damaged() -> dict[str, bytes]:
    """Return every kind of damaged file and files with flipped bits, between good ones."""
    bad = {name: kind.data for name, kind in kinds().items() if kind.reason is not None}
    bad |= {name: kind.data for name, kind in flipped(30).items()}
    good = [(f"photo {i}", photo(40 + i % 9, 50, seed=i)) for i in range(len(bad))]
    return dict(itertools.chain(*zip(bad.items(), good, strict=True)))


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name, a, b in zip(Batch._fields, one, other, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), name
