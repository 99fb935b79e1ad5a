"""A process that compiles the network of a run: start it, send it the job, and end it.

It imports torch while this process does. See `train.compile_ahead`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from typing import IO, Any

from compressive.platforms.memory import free_host_memory
from compressive.platforms.processes import (
    import_path,
    is_plain_python,
    own_process_group,
    switch,
    usable_cores,
)

COMPILE_AHEAD = "COMPRESSIVE_COMPILE_AHEAD"
_FEWEST_CORES = 4  # below, two processes that compile slow each other down
_LEAST_MEMORY = 8 * 10**9  # free bytes of the machine; torch with its compiler and CUDA uses 3
# Python searches rarely for reference cycles during imports, too.
_PROGRAM = """
from compressive.platforms.garbage import collect_rarely
collect_rarely()
from compressive.train.compile_network import compile_requested_network
compile_requested_network()
"""


class CompileProcess:
    """The process; it ends with this object or this process."""

    def __init__(self) -> None:
        group = own_process_group()  # so that Ctrl-C in a terminal reaches only the run
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        self.messages: list[str] = []  # what the process wrote, after `finish`
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": import_path()},
                process_group=group.process_group,
                creationflags=group.creationflags,
            )
        except BaseException:
            self._errors.close()
            raise
        self.close = weakref.finalize(self, _kill, self._process, self._errors)

    def send(self, message: Any) -> None:
        """Send a line; see `compile_network`."""
        with suppress(OSError):  # it has ended
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def finish(self, seconds: float) -> bool:
        """Wait for the process, end it, and return whether it has compiled the network."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        has_compiled = self._process.poll() == 0
        if self.close.alive:
            with suppress(OSError):
                self._errors.seek(0)
                self.messages = self._errors.read().decode(errors="replace").splitlines()
        self.close()
        return has_compiled

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.poll()


def _kill(process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
    """End the process and those of its group; compile workers end when their pipes are closed."""
    errors.close()
    with suppress(OSError):
        if process.poll() is None and hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(OSError):
        process.kill()
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)


_early: list[CompileProcess] = []


def start_early() -> None:
    """Start a process before torch is imported, if there is a GPU, for `take_process`."""
    if not _early and can_compile_ahead(has_gpu=_may_have_gpu()):
        with suppress(OSError):  # no more processes or memory
            _early.append(CompileProcess())


def take_process() -> CompileProcess | None:
    """Return the process that was started early, or a new one; None if there cannot be one."""
    with suppress(OSError):
        return _early.pop() if _early else CompileProcess()
    return None


def end_early() -> None:
    """End the process that was started early, if nothing took it."""
    while _early:
        _early.pop().close()


def can_compile_ahead(*, has_gpu: bool) -> bool:
    """Return whether another process can compile and the user wants it; else if it saves time."""
    wanted = switch(COMPILE_AHEAD)
    if wanted is False or _has_several_processes() or not is_plain_python():
        return False
    is_useful = has_gpu and usable_cores() >= _FEWEST_CORES
    return bool(wanted) or (is_useful and free_host_memory() >= _LEAST_MEMORY)


def _has_several_processes() -> bool:
    count = os.environ.get("WORLD_SIZE") or "1"
    return count != "1"


def _may_have_gpu() -> bool:
    """Return whether torch may find a CUDA device."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return not is_hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))
