"""Decode the JPEG files of a batch on the device, in chunks of bounded memory."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.nn import functional

from compressive.data.batch_buffers import EPOCH, LABEL
from compressive.data.decode import shrink
from compressive.data.nvjpeg import DeviceDecoder
from compressive.data.reader import DecodedImage, EncodedImage, ImageReader

_DECODED_CHUNK = 2**24  # decoded bytes at once, if half a batch takes less
_FLOAT_BLOCK = 2**22  # pixel values converted to float at once
# Axes that are mirrored by each EXIF orientation; from 5 on after a transposition.
_MIRRORED = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}

Slots = list[tuple[int, DecodedImage | EncodedImage]]  # places in the batch, and their images
Files = list[tuple[int, EncodedImage]]
Placed = list[tuple[int, DecodedImage | EncodedImage, Tensor]]  # with pixels on the device


class BatchDecoder:
    """Decodes and assembles batches on a device, on the current stream of one thread."""

    def __init__(self, decoder: DeviceDecoder, reader: ImageReader, device: torch.device) -> None:
        self._decoder, self._reader, self._device = decoder, reader, device
        self._is_cuda = device.type == "cuda"

    def batch(
        self, images: Sequence[DecodedImage | EncodedImage], epoch: Int64[Tensor, " batch"]
    ) -> tuple[UInt8[Tensor, "batch 3 side side"], Int64[Tensor, "5 batch"]]:
        """Return images and numbers of a `DeviceBatch`; the copies may still be running."""
        shape = (len(images), 3, self._reader.side, self._reader.side)
        canvas = torch.empty(shape, dtype=torch.uint8, device=self._device)
        numbers = torch.empty(5, len(images), dtype=torch.int64, pin_memory=self._is_cuda)
        numbers[EPOCH] = epoch
        waiting, most = deque(enumerate(images)), max(_DECODED_CHUNK, canvas.numel() // 2)
        while waiting:
            rejected = self._place_chunk(_next_chunk(waiting, most), canvas, numbers.numpy())
            self._reader.host_only.update(image.index for _, image in rejected)
            # An unreadable image is replaced by the next one, which may be encoded again.
            waiting.extend((p, self._reader.fetched(image.index)) for p, image in rejected)
        return canvas, numbers.to(self._device, non_blocking=self._is_cuda)

    def _place_chunk(self, chunk: Slots, canvas: Tensor, table: np.ndarray) -> Files:
        """Decode, shrink and place images; return the files that must be read again."""
        files: Files = [(p, image) for p, image in chunk if isinstance(image, EncodedImage)]
        host_only = self._reader.host_only  # some were rejected after they were read here
        placed, rejected = self._decoded([f for f in files if f[1].index not in host_only])
        rejected += [f for f in files if f[1].index in host_only]
        placed += self._copied([(p, i) for p, i in chunk if isinstance(i, DecodedImage)])
        side = self._reader.side
        fitting = [shrink(found, side, resize=resize_on_device) for _, _, found in placed]
        places = [place for place, _, _ in placed]
        self._decoder.place(canvas, fitting, places)
        # One assignment per chunk: this thread must not keep the GIL from the training loop.
        pairs = zip(placed, fitting, strict=True)
        rows = [(*found.shape[1:], image.index) for (_, image, _), found in pairs]
        if rows:
            table[:EPOCH, places] = np.array(rows).T
            table[LABEL, places] = [image.label for _, image, _ in placed]
        return rejected

    def _decoded(self, files: Files) -> tuple[Placed, Files]:
        """Decode files; return their pixels, and the files that the decoder rejects."""
        # One damaged file fails the whole call, so that halves are decoded again.
        if not files:
            return [], []
        try:
            self._wait_for_stream()
            found = self._decoder.decode([image.data for _, image in files])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if self._is_cuda:
                # The decoder may still write to memory that the exception has released.
                torch.cuda.synchronize(self._device)
            if len(files) == 1:
                return [], files
            half = len(files) // 2
            first, second = self._decoded(files[:half]), self._decoded(files[half:])
            return first[0] + second[0], first[1] + second[1]
        placed: Placed = []
        rejected: Files = []
        for (place, image), pixels in zip(files, found, strict=True):
            header = image.header
            if pixels.shape == (3, header.height, header.width):
                placed.append((place, image, upright(pixels, header.orientation)))
            else:
                rejected.append((place, image))
        return placed, rejected

    def _copied(self, images: list[tuple[int, DecodedImage]]) -> Placed:
        """Copy images that were decoded on the host, in one transfer."""
        if not images:
            return []
        ends = [0, *accumulate(image.pixels.size for _, image in images)]
        buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=self._is_cuda)
        flat = buffer.numpy()
        for (start, end), (_, image) in zip(pairwise(ends), images, strict=True):
            flat[start:end] = image.pixels.reshape(-1)
        moved = buffer.to(self._device, non_blocking=self._is_cuda)
        return [
            (place, image, moved[start:end].view(image.pixels.shape))
            for (start, end), (place, image) in zip(pairwise(ends), images, strict=True)
        ]

    def _wait_for_stream(self) -> None:
        """Wait for earlier kernels of this stream: the JPEG engine does not wait for them."""
        # Without this, memory that was released in the order of the stream would be overwritten
        # too early. An event, because a stream cannot be waited for without using a core.
        if self._is_cuda:
            event = torch.cuda.Event(blocking=True)
            event.record()
            event.synchronize()


def upright(image: UInt8[Tensor, "3 h w"], orientation: int) -> UInt8[Tensor, "3 new_h new_w"]:
    """Rotate and mirror an image as its EXIF orientation says."""
    if orientation > 4:
        image = image.mT
    return image.flip(_MIRRORED[orientation]) if orientation in _MIRRORED else image


def resize_on_device(
    image: UInt8[Tensor, "3 h w"], size: list[int]
) -> UInt8[Tensor, "3 new_h new_w"]:
    """Resize as `resize_image` does on a CPU: first columns, then rows, rounded after each."""
    # torch has this operation for uint8 on the CPU only. Blocks of rows bound the float memory.
    height, width = size
    rows = max(1, _FLOAT_BLOCK // (3 * image.shape[2]))
    if width != image.shape[2]:
        parts = [_resized(part, part.shape[1], width) for part in image.split(rows, 1)]
        image = torch.cat(parts, 1)
    return image if height == image.shape[1] else _resized(image, height, width)


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    if width == 1 < height:  # as in `resize_image`
        return _resized(image.mT, width, height).mT
    found = functional.interpolate(
        image[None].float(), (height, width), mode="bicubic", antialias=True
    )
    return found[0].round_().clamp_(0, 255).to(torch.uint8)


def _next_chunk(waiting: deque[tuple[int, DecodedImage | EncodedImage]], most: int) -> Slots:
    """Take images from the queue, at least one, whose pixels have at most this many bytes."""
    chunk: Slots = []
    total = 0
    while waiting:
        image = waiting[0][1]
        if isinstance(image, EncodedImage):
            total += 3 * image.header.height * image.header.width
        else:
            total += image.pixels.size
        if chunk and total > most:
            break
        chunk.append(waiting.popleft())
    return chunk
