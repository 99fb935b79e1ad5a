"""Decode batches ahead of the consumer, in threads or a process, and copy them asynchronously."""

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from compressive.data.batch_buffers import PinnedBuffer, read_tasks
from compressive.data.decoder_process import DecoderProcess
from compressive.data.reader import ImageReader
from compressive.data.wait_clock import POLL_SECONDS, WaitClock
from compressive.data.worker_threads import WorkerThreads


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


class Prefetcher:
    """One pass over a plan: worker threads fill buffers, which are copied in the plan's order."""

    # `plan` yields index and epoch of each batch's images. `reader` decodes an image in a worker
    # thread, if the `process` does not. Only the consumer's thread uses plan and device. At most
    # `prefetch` batches are ahead.

    def __init__(
        self,
        plan: Iterator[tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]],
        reader: ImageReader,
        *,
        device: torch.device,
        workers: int,
        prefetch: int,
        clock: WaitClock,
        process: DecoderProcess | None = None,
    ) -> None:
        self._plan, self._reader, self._device = plan, reader, device
        self._prefetch, self._clock, self._threads = prefetch, clock, workers
        self._process = process
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._decoding: deque[PinnedBuffer] = deque()
        self._resting: deque[PinnedBuffer] = deque()  # free when the copy is complete
        self._arriving: deque[DeviceBatch] = deque()
        self._workers = WorkerThreads(self._work, [f"decode-{i}" for i in range(workers)])

    def _work(self, task: tuple[PinnedBuffer, int, list[int]]) -> None:
        canvas, first, indices = task
        canvas.draw(first, indices, self._reader.decoded, self._workers)

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
            self._start(canvas, index.tolist())

    def _start(self, canvas: PinnedBuffer, indices: list[int]) -> None:
        """Let the process read a batch if it is ready, else the threads."""

        def read_rest(places: list[int]) -> None:
            for place in places:
                self._workers.put((canvas, place, [indices[place]]))
            canvas.count_read(len(indices) - len(places))

        count, process = self._threads, self._process
        if process is None or not process.submit(canvas, self._reader, indices, count, read_rest):
            for first, some in read_tasks(indices, count):
                self._workers.put((canvas, first, some))

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
            if len(canvas.images) >= size:
                return canvas
            canvas.close()
        if self._process is None:
            return PinnedBuffer(size, self._reader.side, self._stream is not None)
        return self._process.new_buffer(size, self._reader.side, self._device)

    def _send(self) -> None:
        """Wait until the next buffer is full, and start its copy."""
        canvas = self._decoding[0]
        while not canvas.done.wait(timeout=POLL_SECONDS):
            self._clock.look()
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
        if self._stream is not None:
            with suppress(RuntimeError):  # of a kernel; the run has reported it
                self._stream.synchronize()  # a copy may have been started and not recorded
        for canvas in (*self._decoding, *self._resting):
            canvas.close()
        self._decoding.clear()
        self._resting.clear()
