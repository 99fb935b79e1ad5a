"""Child processes that run at the same time and are stopped together."""

import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from compressive.platforms.processes import interrupt, own_process_group
from compressive.sweep.packing import Packing

INTERRUPTED = 130  # exit code of a command that was interrupted
_POLL = 2.0  # seconds between two looks at a running command
_LOG_END = 4096  # bytes of a log in which its last line is searched

Job = TypeVar("Job")


class Slot:
    """The right of a job to run; `was_shared` is whether another job ran at the same time."""

    def __init__(self, release: Callable[["Slot"], None]) -> None:
        self._release = release
        self.was_shared: bool = False

    def release(self) -> None:
        """Let another job start; a second call has no effect."""
        self._release(self)


class Processes:
    """Run jobs in threads, each with processes of its own, as many at a time as `packing` says."""

    def __init__(self, packing: Packing, environment: Mapping[str, str] | None = None) -> None:
        self.packing: Packing = packing
        self.environment: dict[str, str] = dict(environment or {})
        self.stopping: int = 0
        self.lock = threading.RLock()  # a signal may arrive while another is handled
        self._changed = threading.Condition(self.lock)
        self._slots: set[Slot] = set()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run_all(self, jobs: Iterable[Job], work: Callable[[Job, Slot], object]) -> None:
        """Call `work` with every job in a thread; raise the first exception at the end."""
        jobs, futures = list(jobs), list[Future[object]]()
        with ThreadPoolExecutor(max(1, len(jobs))) as pool:
            for job in jobs:
                if (slot := self._acquire()) is None:
                    break
                futures.append(pool.submit(self._work, work, job, slot))
        for future in futures:
            future.result()

    def call(
        self,
        command: list[str],
        log: Path,
        poll: Callable[[], None] = lambda: None,
        seconds: float = _POLL,
    ) -> int:
        """Run a command and append its output to the log; return the exit code.

        `poll` is called every few seconds until the command ends.
        """
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            with self.lock:
                if self.stopping:
                    return INTERRUPTED
                group = own_process_group()
                # Use a new process group: otherwise the terminal would also send Ctrl-C to the
                # process, and a run that receives it twice does not save.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **self.environment},
                    process_group=group.process_group,
                    creationflags=group.creationflags,
                )
                self._running.add(process)
            try:
                while (code := _exit_code(process, seconds)) is None:
                    poll()
                    with self.lock:  # the number of slots may have changed
                        self._changed.notify_all()
            finally:
                with self.lock:
                    self._running.discard(process)
        return code

    def stop(self) -> None:
        """Ask the processes to save and stop; the third request kills them."""
        with self.lock:
            self.stopping += 1
            for process in self._running:
                if self.stopping < 3:
                    interrupt(process)
                else:
                    process.kill()
            self._changed.notify_all()

    def _work(self, work: Callable[[Job, Slot], object], job: Job, slot: Slot) -> object:
        try:
            return work(job, slot)
        finally:
            slot.release()

    def _acquire(self) -> Slot | None:
        """Wait until another job may run; return None if all shall stop."""
        with self.lock:
            while len(self._slots) >= self.packing.limit and not self.stopping:
                self._changed.wait(timeout=1.0)  # lets Windows handle signals
            if self.stopping:
                return None
            slot = Slot(self._release)
            self._slots.add(slot)
            if len(self._slots) > 1:
                for each in self._slots:
                    each.was_shared = True
            return slot

    def _release(self, slot: Slot) -> None:
        with self.lock:
            self._slots.discard(slot)
            self._changed.notify_all()


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_END))
        lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def _exit_code(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Return the exit code of a process, or None if it still runs after a while."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
