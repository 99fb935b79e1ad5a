"""Decode batches in worker threads ahead of the consumer, and copy them asynchronously."""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

INDEX, EPOCH, LABEL = 2, 3, 4  # rows of `DeviceBatch.numbers`; rows 0 and 1 are height and width


class DecodedImage(NamedTuple):
    """A decoded image with its index and label."""

    pixels: UInt8[np.ndarray, "3 h w"]
    index: int
    label: int


class DeviceBatch(NamedTuple):
    """A batch on the device; `copied` is the event of its copy, None if it is complete."""

    images: UInt8[Tensor, "batch 3 side side"]
    numbers: Int64[Tensor, "5 batch"]
    copied: torch.cuda.Event | None


class Clock:
    """Context manager that adds up the seconds spent inside."""

    def __init__(self) -> None:
        self.seconds: float = 0.0
        self._begin: float = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin


class PinnedBuffer:
    """Host buffer that a batch is decoded into; pinned if the device is a GPU."""

    def __init__(self, size: int, side: int, pinned: bool) -> None:
        shape = (size, 3, side, side)
        self.images: Tensor = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        self._pixels, self._pinned = self.images.numpy(), pinned
        self.used: list[tuple[int, int]] = [(0, 0)] * size  # height and width per slot
        self._lock = threading.Lock()
        self.copied: torch.cuda.Event | None = None

    def begin(self, epoch: Int64[Tensor, " batch"]) -> None:
        """Reset the buffer for a batch with these epochs."""
        self.size: int = len(epoch)
        self._missing = self.size
        self.done: threading.Event = threading.Event()
        self.error: BaseException | None = None
        self.numbers: Tensor = torch.empty(5, self.size, dtype=torch.int64, pin_memory=self._pinned)
        self.numbers[EPOCH] = epoch
        self._table = self.numbers.numpy()

    def draw(self, place: int, index: int, read: Callable[[int], DecodedImage]) -> None:
        """Decode an image into this slot; store an exception for the consumer."""
        try:
            if self.error is None:
                self._put(place, read(index))
        except BaseException as error:
            self.error = error
        with self._lock:
            self._missing -= 1
            if self._missing == 0:
                self.done.set()

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
        self._prefetch, self._clock, self._closed = prefetch, clock, False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: SimpleQueue[tuple[PinnedBuffer, int, int] | None] = SimpleQueue()
        self._decoding: deque[PinnedBuffer] = deque()
        self._resting: deque[PinnedBuffer] = deque()  # free when the copy is complete
        self._arriving: deque[DeviceBatch] = deque()
        self._threads = [
            threading.Thread(target=self._work, name=f"decode-{i}", daemon=True)
            for i in range(workers)
        ]
        # A thread that returns from C++ while the interpreter exits aborts the process.
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            canvas, place, index = task
            canvas.draw(place, index, self._read)

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
            if arrival.copied is not None:
                consumer = torch.cuda.current_stream(self._device)
                consumer.wait_event(arrival.copied)
                # The memory belongs to the copy stream, which must not reuse it before the kernels
                # that the consumer has launched are done.
                arrival.images.record_stream(consumer)
                arrival.numbers.record_stream(consumer)
            return arrival

    def _fill(self) -> None:
        """Assign free buffers to the next batches of the plan."""
        self._go_on()
        while len(self._decoding) + len(self._arriving) < self._prefetch and self._has_canvas():
            portion = next(self._plan, None)
            if portion is None:
                return
            index, epoch = portion
            canvas = self._canvas(len(index))
            canvas.begin(epoch)
            self._decoding.append(canvas)
            for place, number in enumerate(index.tolist()):
                self._tasks.put((canvas, place, number))

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
        if self._closed:
            raise RuntimeError("the loader was closed before the end of its plan")

    def close(self) -> None:
        """End the worker threads; each finishes its current image."""
        self._closed = True
        atexit.unregister(self.close)
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a worker may collect garbage
                thread.join()
