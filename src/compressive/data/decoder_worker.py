"""Decode batches in a process of its own; `decoder_process` is the other side.

This process never uses the GPU. It ends when the other process ends or kills it.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from compressive.data.batch_buffers import read_tasks
from compressive.data.decode import decode, shrink
from compressive.data.reader import DecodedImage, ImageRequest
from compressive.data.shared_buffers import SharedBuffer
from compressive.data.source import read_file
from compressive.data.worker_threads import WorkerThreads
from compressive.platforms.files import open_without_waiting, read_at
from compressive.platforms.processes import stop_signals


class _Job:
    """A batch that is being decoded; `failed` are places that the other process must read."""

    def __init__(
        self, number: int, canvas: SharedBuffer, requests: list[ImageRequest | None]
    ) -> None:
        self.number: int = number
        self.canvas: SharedBuffer = canvas
        self.requests: list[ImageRequest | None] = requests
        self.failed: list[int] = []
        self.missing: int = len(requests)


def decode_request(request: ImageRequest, side: int) -> DecodedImage:
    """Read and decode an image as `ImageReader` does; raise an exception if anything is wrong."""
    if request.size < 0:
        data = read_file(request.path)
    else:
        descriptor = open_without_waiting(request.path)
        try:
            data = read_at(descriptor, request.size, request.offset)
        finally:
            os.close(descriptor)
    image = shrink(decode(data, request.max_pixels), side)
    return DecodedImage(image.numpy(), request.index, request.label)


class DecodeServer:
    """Receives batches, decodes them in threads, and answers when a batch is complete."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._buffers: dict[int, SharedBuffer] = {}
        self._threads: WorkerThreads[tuple[_Job, list[int]]] | None = None
        self.decoded: int = 0  # images so far

    def serve(self) -> None:
        """Answer until the other process closes the connection."""
        self._connection.send(("ready",))
        while True:
            kind, number, *rest = self._connection.recv()
            if kind == "buffer":
                descriptor, (size, side) = recv_handle(self._connection), rest
                self._buffers[number] = SharedBuffer(size, side, descriptor)
                os.close(descriptor)
            elif kind == "drop":
                self._buffers.pop(number).error = EOFError()  # ends its tasks
            else:
                self._begin(number, *rest)

    def _begin(
        self, number: int, buffer: int, threads: int, requests: list[ImageRequest | None]
    ) -> None:
        """Give the images of a batch to the threads."""
        canvas = self._buffers[buffer]
        canvas.begin(len(requests))
        if self._threads is None:
            self._threads = WorkerThreads(self._work, [f"decode-{i}" for i in range(threads)])
        job = _Job(number, canvas, requests)
        for _, places in read_tasks(list(range(len(requests))), threads):
            self._threads.put((job, places))

    def _work(self, task: tuple[_Job, list[int]]) -> None:
        job, places = task
        failed = [place for place in places if not self._read(job, place)]
        with self._lock:
            job.failed += failed
            job.missing -= len(places)
            self.decoded += len(places) - len(failed)
            if job.missing == 0:
                with suppress(OSError):  # the other process has ended
                    self._connection.send(("done", job.number, sorted(job.failed)))

    def _read(self, job: _Job, place: int) -> bool:
        """Decode an image into its place; return False if the other process must do it."""
        request, canvas = job.requests[place], job.canvas
        if request is None or canvas.error is not None:
            return False
        try:
            canvas.put(place, decode_request(request, canvas.images.shape[-1]))
        except Exception:  # the other process reads it again, and reports what is wrong
            return False
        return True


def serve_decoder() -> None:
    """Serve the connection whose descriptor is the argument."""
    for number in stop_signals():  # SLURM sends them to each process; the run needs its last steps
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        DecodeServer(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # at once: threads may be decoding


if __name__ == "__main__":
    serve_decoder()
