"""Read images by index in threads; replace unreadable ones by the next readable one."""

import os
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from compressive.data.decode import MAX_PIXELS, Unreadable, shrink
from compressive.data.jpeg_header import JpegHeader, read_jpeg_header
from compressive.data.source import Source, pixels

# A device decodes up to this many pixels, and shrinks by up to this factor; the CPU takes the rest.
_MOST_DEVICE_PIXELS = 2**25
_MOST_SHRINKING = 16
_LARGEST_END = 2**32 - 1
_Image = TypeVar("_Image")


class DecodedImage(NamedTuple):
    """A decoded image with its index and label."""

    pixels: UInt8[np.ndarray, "3 h w"]
    index: int
    label: int


class EncodedImage(NamedTuple):
    """The bytes of a JPEG file that a device can decode, with its index and label."""

    data: UInt8[Tensor, " bytes"]
    header: JpegHeader
    index: int
    label: int


class ImageRequest(NamedTuple):
    """Where an encoded image is stored, for another process."""

    path: str
    offset: int
    size: int  # -1: the whole file
    max_pixels: int
    index: int
    label: int


class ImageReader:
    """Thread-safe reader of images by index; replaces unreadable ones by the next readable one."""

    def __init__(self, source: Source, side: int, subsamplings: Collection[str] = ()) -> None:
        self.source: Source = source
        self.side: int = side
        self._subsamplings = subsamplings  # JPEG files of these kinds are decoded on the device
        self.bad: dict[int, str] = {}  # reasons by index; none of these is tried again
        self.host_only: set[int] = set()  # images that the decoder of the device has rejected
        self.count: int = len(source)
        self._labels = None if source.labels is None else source.labels.numpy()
        # Positions of the ends of JPEG files that were searched once; 0: not yet.
        self._ends = np.zeros(len(source) if subsamplings else 0, np.uint32)
        self._max_pixels: int = getattr(source, "max_pixels", MAX_PIXELS)
        self._most = min(_MOST_DEVICE_PIXELS, self._max_pixels)

    def decoded(self, wanted: int) -> DecodedImage:
        """Return an image, decoded here."""
        return self._first_readable(wanted, self._decode)

    def fetched(self, wanted: int) -> DecodedImage | EncodedImage:
        """Return an image, encoded if the device can decode it, else decoded here."""
        return self._first_readable(wanted, self._fetch)

    def request(self, index: int) -> ImageRequest | None:
        """Return what another process needs to read an image; None if it must be read here."""
        find: Callable[[int], tuple[str, int, int] | None] | None
        find = None if index in self.bad else getattr(self.source, "span", None)
        if find is None or (span := find(index)) is None:
            return None
        path, offset, size = span
        path = path if path[:1] == "/" else os.path.abspath(path)
        return ImageRequest(path, offset, size, self._max_pixels, index, self._label(index))

    def _first_readable(self, wanted: int, read: Callable[[int], _Image]) -> _Image:
        count = self.count
        for index in range(wanted, wanted + count):
            index %= count
            if len(self.bad) == count:
                break
            if index in self.bad:
                continue
            try:
                return read(index)
            except Unreadable as problem:
                self.bad[index] = str(problem)
        none = f"none of the {count:,} images of {self.source.name} can be read"
        raise ValueError(f"{none}; {self.source.origin(0)}: {self.bad[0]}")

    def _decode(self, index: int) -> DecodedImage:
        image = shrink(pixels(self.source, index), self.side)
        return DecodedImage(image.numpy(), index, self._label(index))

    def _fetch(self, index: int) -> DecodedImage | EncodedImage:
        stored = getattr(self.source, "stored", None)
        if stored is None or index in self.host_only:
            return self._decode(index)
        data = stored(index)
        end = int(self._ends[index])
        header = read_jpeg_header(data, end) if isinstance(data, bytes) else None
        if header is None or not self._is_for_device(header):
            return self._decode(index)  # reads again: the path of all other loaders
        self._ends[index] = min(header.end, _LARGEST_END)
        buffer = bytearray(data)
        if header.exif:  # hide it: some decoders apply the orientation, others do not
            buffer[header.exif : header.exif + 10] = bytes(10)
        encoded = torch.frombuffer(buffer, dtype=torch.uint8)[: header.end]
        return EncodedImage(encoded, header, index, self._label(index))

    def _label(self, index: int) -> int:
        return -1 if self._labels is None else int(self._labels[index])

    def _is_for_device(self, header: JpegHeader) -> bool:
        longer, total = max(header.height, header.width), header.height * header.width
        return (
            header.subsampling in self._subsamplings
            and total <= self._most
            and longer <= _MOST_SHRINKING * self.side
        )
