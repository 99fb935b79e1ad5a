"""Read encoded batches in threads, and decode them on the device in another thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from queue import Empty, SimpleQueue

import torch
from jaxtyping import Int64
from torch import Tensor

from compressive.data.batch_buffers import BatchSlots, read_tasks
from compressive.data.device_decode import BatchDecoder
from compressive.data.nvjpeg import DeviceDecoder
from compressive.data.prefetch import DeviceBatch, received
from compressive.data.reader import DecodedImage, EncodedImage, ImageReader
from compressive.data.wait_clock import POLL_SECONDS, WaitClock
from compressive.data.worker_threads import WorkerThreads


class _EncodedBatch(BatchSlots):
    """The images of a batch, encoded or decoded, in order."""

    def __init__(self, epoch: Int64[Tensor, " batch"]) -> None:
        super().__init__()
        self.begin(len(epoch))
        self.epoch: Tensor = epoch
        self.images: list[DecodedImage | EncodedImage | None] = [None] * len(epoch)

    def put(self, place: int, image: DecodedImage | EncodedImage) -> None:
        """Keep an image."""
        self.images[place] = image


class DevicePrefetcher:
    """One pass over a plan: threads read files, and one thread decodes batches on the device."""

    # The interface is that of `Prefetcher`. The device holds one batch that the consumer has not
    # taken. The next one is decoded when the consumer's kernels on the batch before the one it has
    # are done, so that two batches and a chunk of decoded images are in memory.

    def __init__(
        self,
        plan: Iterator[tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]],
        reader: ImageReader,
        decoder: DeviceDecoder,
        *,
        device: torch.device,
        workers: int,
        prefetch: int,
        clock: WaitClock,
    ) -> None:
        self._plan, self._reader, self._device = plan, reader, device
        self._prefetch, self._clock, self._ahead = prefetch, clock, 0
        self._threads = workers
        self._decoder = BatchDecoder(decoder, reader, device)
        # High priority: small kernels must not wait for the large ones of a training step.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._used: torch.cuda.Event | None = None  # after the consumer's kernels so far
        self._free = threading.Semaphore(1)  # batches that may be decoded
        self._ready: SimpleQueue[DeviceBatch | BaseException] = SimpleQueue()
        self._arrived: DeviceBatch | None = None
        self._pending: set[_EncodedBatch] = set()
        self._readers = WorkerThreads(self._read, [f"decode-{i}" for i in range(workers)])
        self._decoding = WorkerThreads(self._decode, ["decode-device"], self._wake)

    def _read(self, task: tuple[_EncodedBatch, int, list[int]]) -> None:
        batch, first, indices = task
        batch.draw(first, indices, self._reader.fetched, self._readers)

    def has_next(self) -> bool:
        """Return whether there is another batch; wait until it is launched on the device."""
        with self._clock:
            self._fill()
            if self._arrived is None and self._ahead:
                self._arrived = self._wait()
            return self._arrived is not None

    def next(self) -> DeviceBatch:
        """Return the next batch; the consumer's stream waits until it is decoded."""
        with self._clock:
            arrival, self._arrived = self._arrived, None
            assert arrival is not None
            self._ahead -= 1
            if arrival.copied is not None:
                self._used = torch.cuda.Event(blocking=True)  # waiting for it uses no core
                self._used.record(torch.cuda.current_stream(self._device))
            self._free.release()
            self._fill()
            return received(arrival, self._device)

    def _fill(self) -> None:
        """Start to read the next batches of the plan."""
        self._go_on()
        while self._ahead < self._prefetch:
            portion = next(self._plan, None)
            if portion is None:
                return
            index, epoch = portion
            batch = _EncodedBatch(epoch)
            self._ahead += 1
            self._pending.add(batch)
            for first, indices in read_tasks(index.tolist(), self._threads):
                self._readers.put((batch, first, indices))
            self._decoding.put(batch)

    def _wait(self) -> DeviceBatch:
        """Return the next batch, or raise the error of a thread in the order of the plan."""
        while True:
            try:
                found = self._ready.get(timeout=POLL_SECONDS)
            except Empty:
                self._clock.look()
                self._go_on()
                continue
            if isinstance(found, BaseException):
                raise found
            return found

    def _decode(self, batch: _EncodedBatch) -> None:
        """Decode a batch on the device when there is room for it."""
        try:
            batch.done.wait()
            self._free.acquire()
            if self._decoding.closed:
                return
            if batch.error is not None:
                raise batch.error
            if self._used is not None:
                self._used.synchronize()
                # The event that returns the consumer's memory follows this one. Without a pause,
                # a third batch would be allocated.
                time.sleep(0.0002)
            images = [image for image in batch.images if image is not None]
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                found = self._decoder.batch(images, batch.epoch)
                copied = None
                if self._stream is not None:
                    copied = torch.cuda.Event()
                    copied.record(self._stream)
            self._ready.put(DeviceBatch(*found, copied))
        except BaseException as error:
            self._ready.put(error)
        finally:
            self._pending.discard(batch)

    def _go_on(self) -> None:
        if self._decoding.closed:
            raise RuntimeError("the loader was closed before the end of its plan")

    def _wake(self) -> None:
        """End the waiting of the thread that decodes."""
        self._free.release()
        for batch in list(self._pending):
            batch.done.set()

    def close(self) -> None:
        """End all threads; each finishes its current image or batch."""
        self._readers.close()
        self._decoding.close()
