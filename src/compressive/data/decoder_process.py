"""Decode batches in another process, so that its threads do not slow the training loop.

Threads that decode in the training process compete with the training loop for Python's lock: with
16 of them the loop waits a millisecond for each image (docs/results/2026-11-18-performance.md). One
process with these threads writes images to shared memory, from which batches are copied to the
device. What it cannot read is read by threads of this process, which report it.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import IO

import torch

from compressive.data.batch_buffers import PinnedBuffer
from compressive.data.reader import ImageReader, ImageRequest
from compressive.data.shared_buffers import SharedBuffer, create_shared_file, shared_bytes
from compressive.data.source import Source
from compressive.platforms.processes import is_plain_python, own_process_group, usable_cores

DECODE_PROCESS = "COMPRESSIVE_DECODE_PROCESS"  # auto, on or off
_PROCESS_DEFAULT = "off"  # auto: where it makes steps faster; not yet measured on a GPU
_END_SECONDS = 5.0
# The training loop and its compiler get a core first. Not more, because programs of other users
# would also come first.
_NICE = 5

Answer = Callable[[list[int]], object]


class _State:
    """Batches that the process has, shared with the thread that listens to it."""

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.is_ready: bool = False
        self.is_closing: bool = False
        self.is_lost: bool = False  # it has ended by itself
        self.jobs: dict[int, tuple[PinnedBuffer, int, Answer]] = {}

    def take(self, number: int) -> tuple[PinnedBuffer, int, Answer] | None:
        """Remove and return a batch, or None if it was dropped."""
        with self.lock:
            return self.jobs.pop(number, None)


class DecoderProcess:
    """The process; it ends with this object or this process. Threads take over if it fails."""

    def __init__(self, nice: int = _NICE) -> None:
        ours, theirs = socket.socketpair()
        group = own_process_group()  # Ctrl-C in a terminal reaches only the run
        paths = os.pathsep.join(path for path in sys.path if path)
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        words = [sys.executable, "-P", "-m", "compressive.data.decoder_worker"]
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        try:
            with theirs:
                process = subprocess.Popen(
                    [*words, str(theirs.fileno()), str(nice)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**os.environ, **hidden},
                    pass_fds=[theirs.fileno()],
                    process_group=group.process_group,
                )
        except BaseException:
            ours.close()
            errors.close()
            raise
        self.pid: int = process.pid
        self._process, self._errors, self._files = process, errors, ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._sending = threading.Lock()
        self._state, self._numbers = _State(), count()
        self._has_warned, self._can_share = False, True
        listener = threading.Thread(
            target=_listen, args=(self._connection, self._state), name="decode-answers", daemon=True
        )
        listener.start()
        self.close: Callable[[], object] = weakref.finalize(
            self, _end_decoder, process, ours, self._state, listener, self._connection, errors
        )

    @property
    def is_ready(self) -> bool:
        """Return whether the process can decode batches."""
        return self._state.is_ready

    def decoder(self, reader: ImageReader) -> "RemoteDecoder":
        """Return a `BatchReader` for the images of a reader."""
        return RemoteDecoder(self, reader)

    def new_buffer(self, size: int, side: int, pinned: bool) -> PinnedBuffer:
        """Return a buffer that both processes can write to, or a plain one if that fails."""
        with suppress(OSError):  # no memory to share, or CUDA cannot pin it
            if self._can_share:
                return self._new_shared_buffer(size, side, pinned)
        self._can_share = False  # batches in shared buffers are still decoded
        return PinnedBuffer(size, side, pinned)

    def _new_shared_buffer(self, size: int, side: int, pinned: bool) -> SharedBuffer:
        number = next(self._numbers)
        descriptor = create_shared_file(shared_bytes(size, side))
        try:
            options = {"number": number, "pinned": pinned, "on_close": partial(self._drop, number)}
            buffer = SharedBuffer(size, side, descriptor, **options)
            with suppress(OSError), self._sending:  # the process may have ended
                self._connection.send(("buffer", number, size, side))
                socket.send_fds(self._files, [b"f"], [descriptor])
            return buffer
        finally:
            os.close(descriptor)

    def send(
        self,
        canvas: SharedBuffer,
        requests: list[ImageRequest | None],
        threads: int,
        answer: Answer,
    ) -> bool:
        """Let the process decode a batch; return False if it is not ready or has ended."""
        number, state = next(self._numbers), self._state
        with state.lock:
            if not state.is_ready:
                return False
            state.jobs[number] = (canvas, len(requests), answer)
        with suppress(OSError), self._sending:  # the listener notices the end of the process
            self._connection.send(("batch", number, canvas.number, threads, requests))
        return True

    def warn_once(self) -> None:
        """Warn if the process has ended by itself."""
        if self._state.is_lost and not self._has_warned:
            self._has_warned = True
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
            warnings.warn(
                f"the process that decodes images has ended ({reason}); threads of this process "
                "decode the rest, which may be slower",
                stacklevel=2,
            )

    def _drop(self, number: int) -> None:
        with suppress(OSError), self._sending:
            self._connection.send(("drop", number))


class RemoteDecoder:
    """A `BatchReader` that lets a process read the images of a reader."""

    def __init__(self, process: DecoderProcess, reader: ImageReader) -> None:
        self._process, self._reader = process, reader

    def buffer(self, size: int, side: int, pinned: bool) -> PinnedBuffer:
        """Return a buffer that both processes can write to."""
        return self._process.new_buffer(size, side, pinned)

    def submit(
        self, canvas: PinnedBuffer, indices: list[int], threads: int, answer: Answer
    ) -> bool:
        """Start to decode a batch; return False if the process is not ready or has ended."""
        self._process.warn_once()
        if not self._process.is_ready or not isinstance(canvas, SharedBuffer):
            return False
        requests = [self._reader.request(index) for index in indices]
        return self._process.send(canvas, requests, threads, answer)


def start_decoder_process(source: Source, device: torch.device) -> DecoderProcess | None:
    """Start a process that decodes this source, or return None if threads are better."""
    wanted = (os.environ.get(DECODE_PROCESS) or _PROCESS_DEFAULT).lower()
    can_share = hasattr(socket, "send_fds") and is_plain_python()
    span = getattr(source, "span", None)
    if wanted in ("0", "no", "off") or not can_share or span is None or span(0) is None:
        return None
    is_useful = device.type == "cuda" and usable_cores() > 1
    if not is_useful and wanted not in ("1", "yes", "on"):
        return None
    with suppress(OSError):  # no more processes or memory
        return DecoderProcess()
    return None


def _listen(connection: Connection, state: _State) -> None:
    """Pass answers on until the process ends; then return its batches."""
    with suppress(EOFError, OSError):
        while True:
            kind, *rest = connection.recv()
            if kind == "ready":
                state.is_ready = True
            elif (job := state.take(rest[0])) is not None:
                job[2](rest[1])
    with state.lock:
        state.is_ready, state.is_lost = False, not state.is_closing
        jobs = list(state.jobs.values())
        state.jobs.clear()
    for canvas, size, answer in jobs:
        canvas.clear()
        answer(list(range(size)))


def _end_decoder(
    process: "subprocess.Popen[bytes]",
    files: socket.socket,
    state: _State,
    listener: threading.Thread,
    connection: Connection,
    errors: IO[bytes],
) -> None:
    """End the process and the thread that listens to it."""
    with state.lock:
        state.jobs.clear()  # nobody waits for them
        if not state.is_ready:
            process.kill()  # it may take seconds until it reads from the socket
        state.is_ready, state.is_closing = False, True
    with suppress(OSError):
        files.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if listener is not threading.current_thread():
        listener.join()
    connection.close()
    files.close()
    errors.close()
