"""Decode batches in another process, so that its threads do not slow the training loop.

Threads that decode in the training process compete with the training loop for Python's lock: with
16 of them the loop waits a millisecond for each image (docs/results/2026-11-18-performance.md). One
process with these threads writes images to shared memory, from which batches are copied to the
device. What it cannot read is read by threads of this process, which report it. It reads
files only, and knows nothing of the data set.
"""

import os
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from typing import IO, Any

import torch

from compressive.data.batch_buffers import PinnedBuffer
from compressive.data.reader import ImageReader
from compressive.data.shared_buffers import SharedBuffer, create_shared_file, shared_bytes
from compressive.data.source import Source
from compressive.data.worker_threads import own_cores
from compressive.platforms.memory import free_host_memory
from compressive.platforms.processes import import_path, is_plain_python, switch

DECODE_PROCESS = "COMPRESSIVE_DECODE_PROCESS"  # on, off, or auto: where it makes steps faster
_END_SECONDS = 5.0
_LEAST_FREE = 4 * 10**9  # free bytes of the machine; the process uses 0.4

Answer = Callable[[list[int]], object]


class _State:
    """Batches that the process has, shared with the thread that listens to it."""

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()  # a finalizer may run while it is held
        self.is_ready: bool = False
        self.is_closing: bool = False
        self.is_lost: bool = False  # it has ended by itself
        self.jobs: dict[int, tuple[PinnedBuffer, int, Answer]] = {}


class DecoderProcess:
    """The process; it ends with this object or this process. Threads take over if it fails."""

    def __init__(self) -> None:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()}
        words = [sys.executable, "-P", "-m", "compressive.data.decoder_worker"]
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        ours, theirs = Pipe()
        try:
            with theirs:
                process = subprocess.Popen(
                    [*words, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**os.environ, **hidden},
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C in a terminal reaches only the run
                )
        except BaseException:
            ours.close()
            errors.close()
            raise
        self.pid: int = process.pid
        self._process, self._errors, self._connection = process, errors, ours
        self._sending = threading.Lock()
        self._dropped: deque[int] = deque()  # buffers of which the process does not know yet
        self._state, self._numbers = _State(), count()
        self._has_warned, self._can_share = False, True
        listener = threading.Thread(
            target=_listen, args=(ours, self._state, process), name="decode-answers", daemon=True
        )
        self.close: Callable[[], object] = weakref.finalize(
            self, _end_decoder, process, self._state, listener, ours, errors
        )
        listener.start()

    @property
    def is_ready(self) -> bool:
        """Return whether the process can decode batches."""
        return self._state.is_ready

    def new_buffer(self, size: int, side: int, device: torch.device) -> PinnedBuffer:
        """Return a buffer that both processes can write to, or a plain one if that fails."""
        if self._can_share:
            try:
                return self._new_shared_buffer(size, side, device)
            except (OSError, AttributeError) as error:  # no memory, or libc before 2.27
                self._can_share = False  # batches in shared buffers are still decoded
                _warn_of_threads(f"memory cannot be shared with another process ({error})")
        return PinnedBuffer(size, side, device.type == "cuda")

    def _new_shared_buffer(self, size: int, side: int, device: torch.device) -> SharedBuffer:
        number = next(self._numbers)
        descriptor = create_shared_file(shared_bytes(size, side))
        try:
            options = {"number": number, "device": device, "on_close": partial(self._drop, number)}
            buffer = SharedBuffer(size, side, descriptor, **options)
            self._send("buffer", number, size, side, descriptor=descriptor)
            return buffer
        finally:
            os.close(descriptor)

    def submit(
        self,
        canvas: PinnedBuffer,
        reader: ImageReader,
        indices: list[int],
        threads: int,
        answer: Answer,
    ) -> bool:
        """Let the process decode a batch; return False if it is not ready or has ended.

        `answer` is called once in another thread, with the places that are left to the caller.
        """
        self._warn_once()
        if not self.is_ready or not isinstance(canvas, SharedBuffer):
            return False
        requests = [reader.request(index) for index in indices]
        number, state = next(self._numbers), self._state
        with state.lock:
            if not state.is_ready:
                return False
            state.jobs[number] = (canvas, len(requests), answer)
        self._send("batch", number, canvas.number, threads, requests)
        return True

    def _warn_once(self) -> None:
        """Warn if the process has ended by itself."""
        if self._state.is_lost and not self._has_warned:
            self._has_warned = True
            code = _wait(self._process)
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
            _warn_of_threads(f"the process that decodes images has ended ({reason})")

    def _drop(self, number: int) -> None:
        """Let the process free a buffer, now or with the next message."""
        # A search for reference cycles can call this while this thread sends a message.
        self._dropped.append(number)
        if self._sending.acquire(blocking=False):
            try:
                self._send_dropped()
            finally:
                self._sending.release()

    def _send(self, *message: Any, descriptor: int | None = None) -> None:
        """Send a message; if the process has ended, the listener notices it."""
        with self._sending, suppress(OSError):
            self._send_dropped()
            with self._killed_if_incomplete():
                self._connection.send(message)
                if descriptor is not None:
                    send_handle(self._connection, descriptor, self.pid)

    def _send_dropped(self) -> None:
        with suppress(OSError), self._killed_if_incomplete():
            while self._dropped:
                self._connection.send(("drop", self._dropped.popleft()))

    @contextmanager
    def _killed_if_incomplete(self) -> Iterator[None]:
        """End the process if a message was not sent completely: it would wait for the rest."""
        try:
            yield
        except BaseException:  # KeyboardInterrupt, too
            self._process.kill()
            raise


def start_decoder_process(source: Source, device: torch.device) -> DecoderProcess | None:
    """Start a process that decodes this source, or return None if threads are better."""
    wanted, span = switch(DECODE_PROCESS), getattr(source, "span", None)
    has_files = span is not None and span(0) is not None
    if wanted is False or sys.platform != "linux" or not is_plain_python() or not has_files:
        return None
    if wanted is None:
        has_room = own_cores() > 1 and free_host_memory() >= _LEAST_FREE
        if device.type != "cuda" or not has_room:
            return None
    with suppress(OSError, RuntimeError):  # no more processes, threads or memory
        return DecoderProcess()
    return None


def _warn_of_threads(reason: str) -> None:
    """Warn that the process is of no use any more."""
    rest = "threads of this process decode images, which may be slower"
    warnings.warn(f"{reason}; {rest}", stacklevel=3)


def _listen(connection: Connection, state: _State, process: "subprocess.Popen[bytes]") -> None:
    """Pass answers on until the process ends; then return its batches."""
    try:
        while True:
            _receive(state, *connection.recv())
    except (EOFError, OSError):
        pass
    finally:  # also after an unexpected error: the run must not wait for lost batches
        process.kill()
        _wait(process)  # it must not write to the buffers any more
        with state.lock:
            state.is_ready, state.is_lost = False, not state.is_closing
            jobs = list(state.jobs.values())
            state.jobs.clear()
        for canvas, size, answer in jobs:
            canvas.clear()
            answer(list(range(size)))


def _receive(state: _State, kind: str, *rest: Any) -> None:
    """Handle a message; it keeps no batch alive while the next one is awaited."""
    if kind == "ready":
        state.is_ready = True
        return
    number, places = rest
    with state.lock:
        job = state.jobs.pop(number, None)  # None if it was dropped
    if job is not None:
        answer = job[2]
        answer(places)


def _end_decoder(
    process: "subprocess.Popen[bytes]",
    state: _State,
    listener: threading.Thread,
    connection: Connection,
    errors: IO[bytes],
) -> None:
    """End the process and the thread that listens to it."""
    with state.lock:
        state.jobs.clear()  # nobody waits for them
        state.is_ready, state.is_closing = False, True
    process.kill()  # it only reads files, and may be decoding or importing torch
    _wait(process)
    if listener.is_alive() and listener is not threading.current_thread():
        listener.join(_END_SECONDS)
    connection.close()
    errors.close()


def _wait(process: "subprocess.Popen[bytes]") -> int | None:
    """Return the exit code of a process that was killed; None if it does not end."""
    with suppress(subprocess.TimeoutExpired):  # a network file system may not answer
        return process.wait(_END_SECONDS)
    return None
