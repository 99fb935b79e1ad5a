"""Decoders on the CPU behind the interface of nvJPEG, for tests without a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from compressive.data.decode import decode
from compressive.data.jpeg_header import SUBSAMPLINGS
from compressive.data.nvjpeg import DeviceDecoder


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
