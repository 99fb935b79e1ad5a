"""Decode batches in worker threads ahead of the consumer, and copy them asynchronously."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from compressive.data.reader import DecodedImage
from compressive.data.worker_threads import WorkerThreads

_LARGEST_TASK = 32  # images that a thread reads before it looks for another task
INDEX, EPOCH, LABEL = 2, 3, 4  # rows of `DeviceBatch.numbers`; rows 0 and 1 are height and width


class DeviceBatch(NamedTuple):
    """A batch on the device; `copied` is the event of its copy, None if it is complete."""

    images: UInt8[Tensor, "batch 3 side side"]
    numbers: Int64[Tensor, "5 batch"]
    copied: torch.cuda.Event | None


def received(arrival: DeviceBatch, device: torch.device) -> DeviceBatch:
    """Return the batch; the current stream of the device waits for its copy."""
    if arrival.copied is not None:
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(arrival.copied)
        # The memory belongs to the copy stream, which must not reuse it before the kernels that
        # the consumer has launched are done.
        arrival.images.record_stream(consumer)
        arrival.numbers.record_stream(consumer)
    return arrival


class Clock:
    """Context manager that adds up the seconds spent inside."""

    def __init__(self) -> None:
        self.seconds: float = 0.0
        self._begin: float = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin


class BatchSlots:
    """The images of a batch while threads fill it; `done` is set when each has been read."""

    _put: Callable[[int, Any], None]

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
                self._put(place, read(index))
        except BaseException as error:
            self.error = error
        with self._lock:
            self._missing -= len(indices)
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
        shape = (size, 3, side, side)
        self.images: Tensor = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        self._pixels, self._pinned = self.images.numpy(), pinned
        self.used: list[tuple[int, int]] = [(0, 0)] * size  # height and width per slot
        self.copied: torch.cuda.Event | None = None

    def begin_epochs(self, epoch: Int64[Tensor, " batch"]) -> None:
        """Reset the buffer for a batch with these epochs."""
        self.begin(len(epoch))
        self.numbers: Tensor = torch.empty(5, self.size, dtype=torch.int64, pin_memory=self._pinned)
        self.numbers[EPOCH] = epoch
        self._table = self.numbers.numpy()

    def _put(self, place: int, picture: DecodedImage) -> None:
        # NumPy, because torch would start its own thread pool in each worker thread.
        canvas, (_, height, width) = self._pixels[place], picture.pixels.shape
        old_height, old_width = self.used[place]
        self.used[place] = height, width
        canvas[:, :height, :width] = picture.pixels
        if old_width > width:
            canvas[:, :height, width:old_width] = 0
        if old_height > height:
            canvas[:, height:old_height, :old_width] = 0
        self._table[:EPOCH, place] = height, width, picture.index
        self._table[LABEL, place] = picture.label

    def is_free(self) -> bool:
        """Return whether the copy of the last batch is complete."""
        return self.copied is None or self.copied.query()


class Prefetcher:
    """One pass over a plan: worker threads fill buffers, which are copied in the plan's order."""

    # `plan` yields index and epoch of each batch's images. `read` decodes an image in a worker
    # thread. Only the consumer's thread uses plan and device. At most `prefetch` batches are ahead.

    def __init__(
        self,
        plan: Iterator[tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]],
        read: Callable[[int], DecodedImage],
        *,
        side: int,
        device: torch.device,
        workers: int,
        prefetch: int,
        clock: Clock,
    ) -> None:
        self._plan, self._read, self._side, self._device = plan, read, side, device
        self._prefetch, self._clock, self._threads = prefetch, clock, workers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._decoding: deque[PinnedBuffer] = deque()
        self._resting: deque[PinnedBuffer] = deque()  # free when the copy is complete
        self._arriving: deque[DeviceBatch] = deque()
        self._workers = WorkerThreads(self._work, [f"decode-{i}" for i in range(workers)])

    def _work(self, task: tuple[PinnedBuffer, int, list[int]]) -> None:
        canvas, first, indices = task
        canvas.draw(first, indices, self._read, self._workers)

    def has_next(self) -> bool:
        """Return whether there is another batch; if so, start its copy to the device."""
        with self._clock:
            self._fill()
            if self._decoding and not self._arriving:
                self._send()
            return len(self._arriving) > 0

    def next(self) -> DeviceBatch:
        """Return the next batch; the consumer's stream waits for its copy."""
        with self._clock:
            arrival = self._arriving.popleft()
            self._fill()
            if self._decoding and self._decoding[0].done.is_set() and not self._decoding[0].error:
                self._send()
            return received(arrival, self._device)

    def _fill(self) -> None:
        """Assign free buffers to the next batches of the plan."""
        self._go_on()
        while len(self._decoding) + len(self._arriving) < self._prefetch and self._has_canvas():
            portion = next(self._plan, None)
            if portion is None:
                return
            index, epoch = portion
            canvas = self._canvas(len(index))
            canvas.begin_epochs(epoch)
            self._decoding.append(canvas)
            for first, indices in read_tasks(index.tolist(), self._threads):
                self._workers.put((canvas, first, indices))

    def _has_canvas(self) -> bool:
        if len(self._decoding) + len(self._resting) < self._prefetch:
            return True
        oldest = self._resting[0]
        if oldest.copied is not None and not (self._decoding or self._arriving):
            oldest.copied.synchronize()  # no other batch can be waited for
        return oldest.is_free()

    def _canvas(self, size: int) -> PinnedBuffer:
        if self._resting and self._resting[0].is_free():
            canvas = self._resting.popleft()
            if len(canvas.used) >= size:
                return canvas
        return PinnedBuffer(size, self._side, pinned=self._stream is not None)

    def _send(self) -> None:
        """Wait until the next buffer is full, and start its copy."""
        canvas = self._decoding[0]
        while not canvas.done.wait(timeout=1.0):
            self._go_on()
        if canvas.error is not None:
            raise canvas.error
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            # Only CUDA has an event that tells when the buffer may be filled again.
            at_once = self._stream is not None
            images = canvas.images[: canvas.size].to(self._device, non_blocking=at_once, copy=True)
            numbers = canvas.numbers.to(self._device, non_blocking=at_once, copy=True)
        if self._stream is not None:
            canvas.copied = torch.cuda.Event()
            canvas.copied.record(self._stream)
        self._arriving.append(DeviceBatch(images, numbers, canvas.copied))
        self._resting.append(self._decoding.popleft())

    def _go_on(self) -> None:
        if self._workers.closed:
            raise RuntimeError("the loader was closed before the end of its plan")

    def close(self) -> None:
        """End the worker threads; each finishes its current image."""
        self._workers.close()
