"""A tracker in a process of its own, so that nothing it does can stop or slow training.

Trackers import many packages, print, ask for passwords, wait for servers at start, at the end and
at the exit of the program, and have threads that compete with the training loop. In a process of
its own a tracker that hangs can be killed.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from compressive.rundir.tracker import Status, TrackedRun, Values

_EXIT_SECONDS = 5.0  # time that the process of a tracker has after the tracker has finished
_OFF = "the run continues without it"


class TrackerProcess:
    """The side of the training process; `worker.py` is the other side.

    Messages are JSON lines: to the worker the run, then values, then the status; from the worker
    where the records are, or an error. More than `most_pending` messages that the worker does not
    read turn the tracker off.
    """

    def __init__(self, name: str, finish_seconds: float, most_pending: int = 10_000) -> None:
        self.name: str = name
        self._finish_seconds = finish_seconds
        self._pending: queue.Queue[dict[str, Any] | None] = queue.Queue(most_pending)
        self._messages: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._log: str = ""
        self._deadline: float | None = None
        self._ended = threading.Event()  # the tracker has finished or failed
        self._threads: list[threading.Thread] = []
        self._is_on = False

    def start(self, run: TrackedRun) -> str:
        """Start the process; it says later where its records are."""
        place = run.folder / "trackers"
        self._log = str(place / f"{self.name}.log")
        try:
            place.mkdir(parents=True, exist_ok=True)
            paths = [path for path in sys.path if path]  # of a notebook or a script, too
            with open(self._log, "a") as log:
                # A new session, so that Ctrl-C does not reach the tracker before the end of the
                # run. -P: modules of the current folder must not replace those of a tracker.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "compressive.tracking.worker", self.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,
                )
        except OSError as error:
            self._messages.put(f"cannot start: {error}; {_OFF}")
            return ""
        self._is_on = True
        for work in (self._write, self._read):
            thread = threading.Thread(target=work, args=(self._process,), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._send({**run._asdict(), "folder": str(run.folder), "settings": dict(run.settings)})
        return ""

    def log(self, step: int, values: Values) -> None:
        """Pass values on without waiting."""
        self._send({"step": step, "values": dict(values)})

    def send_end(self, status: Status) -> None:
        """Tell the tracker that the run has ended, without waiting for it."""
        self._send({"status": status})
        with suppress(queue.Full):
            self._pending.put_nowait(None)
        self._deadline = time.monotonic() + self._finish_seconds

    def finish(self, status: Status) -> None:
        """End the run in the tracker, and wait for it until the deadline; then kill it."""
        if self._deadline is None:
            self.send_end(status)
        if (process := self._process) is None or self._deadline is None:
            return
        if self._is_on and not self._ended.wait(max(0.0, self._deadline - time.monotonic())):
            late = f"no answer {self._finish_seconds:g} s after the end of the run"
            self._turn_off(f"{late}, stopped")
        self._process = None
        _end(process, seconds=_EXIT_SECONDS if self._is_on else 0.0)
        for thread in self._threads:
            thread.join(1.0)

    def take_messages(self) -> list[str]:
        """Return what the tracker said since the last call."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._messages.get_nowait())
        return found

    def _send(self, message: dict[str, Any]) -> None:
        if not self._is_on:
            return
        try:
            self._pending.put_nowait(message)
        except queue.Full:
            self._turn_off(
                f"does not answer, {self._pending.maxsize:,} log points wait for it; {_OFF}"
            )

    def _turn_off(self, reason: str) -> None:
        self._is_on = False
        self._messages.put(f"{reason} (its output is in {self._log})")

    def _write(self, process: "subprocess.Popen[str]") -> None:
        """Pass messages to the process; a thread, because a pipe that is full blocks."""
        assert process.stdin is not None
        with suppress(OSError):  # the process has ended; the other thread says so
            while (message := self._pending.get()) is not None:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
        with suppress(OSError):
            process.stdin.close()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Collect messages of the process; a thread, because reading blocks."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                if "place" in message:
                    self._messages.put(message["place"])
                    continue
                if "error" in message:
                    self._turn_off(f"{message['error']}; {_OFF}")
                self._ended.set()
        if not self._ended.is_set() and self._is_on:
            self._turn_off(f"its process ended with exit code {process.wait()}; {_OFF}")
        self._ended.set()


def _end(process: "subprocess.Popen[str]", *, seconds: float) -> None:
    """Wait for a process to end, then kill it and those that it started."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
