"""Buffers in the memory of the host that batches are read into."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from compressive.data.reader import DecodedImage
from compressive.data.worker_threads import WorkerThreads

_LARGEST_TASK = 32  # images that a thread reads before it looks for another task
INDEX, EPOCH, LABEL = 2, 3, 4  # rows of `DeviceBatch.numbers`; rows 0 and 1 are height and width


class BatchSlots:
    """The images of a batch while threads fill it; `done` is set when each has been read."""

    put: Callable[[int, Any], None]

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def begin(self, size: int) -> None:
        """Reset the slots for a batch of this size."""
        self.size: int = size
        self._missing = size
        self.done: threading.Event = threading.Event()
        self.error: BaseException | None = None

    def draw(
        self,
        first: int,
        indices: list[int],
        read: Callable[[int], Any],
        threads: WorkerThreads[Any],
    ) -> None:
        """Read images into the slots from `first` on, until the threads are closed.

        Store an exception for the consumer.
        """
        try:
            for place, index in enumerate(indices, start=first):
                if threads.closed:
                    return  # the batch stays incomplete
                if self.error is not None:
                    break
                self.put(place, read(index))
        except BaseException as error:
            self.error = error
        self.count_read(len(indices))

    def count_read(self, count: int) -> None:
        """Count images that have been read; the last ones complete the batch."""
        with self._lock:
            self._missing -= count
            if self._missing == 0:
                self.done.set()


def read_tasks(indices: list[int], workers: int) -> Iterator[tuple[int, list[int]]]:
    """Split a batch into tasks for threads: the place of the first image, and all indices."""
    # A task per image would wake a thread for each. Two or more per thread balance the load.
    size = max(1, min(_LARGEST_TASK, len(indices) // (2 * workers)))
    for first in range(0, len(indices), size):
        yield first, indices[first : first + size]


class PinnedBuffer(BatchSlots):
    """Host buffer that a batch is decoded into; pinned if the device is a GPU."""

    def __init__(self, size: int, side: int, pinned: bool) -> None:
        super().__init__()
        self._pinned = pinned
        shape = (size, 3, side, side)
        self._hold(
            torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned), np.zeros((size, 2), np.int32)
        )

    def _hold(self, images: Tensor, used: np.ndarray) -> None:
        """Use this memory: images, and height and width of the last image in each slot."""
        self.images: Tensor = images
        self._pixels, self._used = images.numpy(), used
        self.copied: torch.cuda.Event | None = None

    def begin(self, size: int) -> None:
        """Reset the buffer for a batch of this size."""
        super().begin(size)
        self.numbers: Tensor = self._new_numbers()
        self._table = self.numbers.numpy()

    def _new_numbers(self) -> Int64[Tensor, "5 batch"]:
        return torch.empty(5, self.size, dtype=torch.int64, pin_memory=self._pinned)

    def begin_epochs(self, epoch: Int64[Tensor, " batch"]) -> None:
        """Reset the buffer for a batch with these epochs."""
        self.begin(len(epoch))
        self.numbers[EPOCH] = epoch

    def put(self, place: int, picture: DecodedImage) -> None:
        """Copy an image to the top left corner of its slot, with zeros around it."""
        # NumPy, because torch would start its own thread pool in each worker thread.
        canvas, (_, height, width) = self._pixels[place], picture.pixels.shape
        old_height, old_width = self._used[place].tolist()
        self._used[place] = height, width
        canvas[:, :height, :width] = picture.pixels
        if old_width > width:
            canvas[:, :height, width:old_width] = 0
        if old_height > height:
            canvas[:, height:old_height, :old_width] = 0
        self._table[:EPOCH, place] = height, width, picture.index
        self._table[LABEL, place] = picture.label

    def clear(self) -> None:
        """Set all images to zeros, after an unknown part of them has been written."""
        self._pixels[:] = 0
        self._used[:] = 0

    def is_free(self) -> bool:
        """Return whether the copy of the last batch is complete."""
        return self.copied is None or self.copied.query()

    def close(self) -> None:
        """Do nothing; torch keeps pinned memory until it is copied."""
