"""Commands of a sweep as tasks of a cluster: each runs where the engine has room."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from compressive.engine.ray_cluster import RayEngine
from compressive.platforms.processes import interrupt, own_process_group
from compressive.sweep.packing import Packing
from compressive.sweep.processes import INTERRUPTED, Processes

_POLL_CLUSTER = 2.0  # seconds between two looks at a running command


class LoggedCommand(NamedTuple):
    """A command and the file for its output."""

    words: list[str]
    log: str


class ClusterProcesses(Processes):
    """Run jobs in threads; their commands are tasks of a Ray cluster."""

    def __init__(self, engine: RayEngine, wanted: int | None) -> None:
        super().__init__(Packing(min(wanted or engine.room(), engine.room()), 1))
        self._engine = engine
        self._tasks: set[Any] = set()

    def call(
        self,
        command: list[str],
        log: Path,
        poll: Callable[[], None] = lambda: None,
        seconds: float = _POLL_CLUSTER,
    ) -> int:
        """Run a command on the cluster and append its output to the log; return the exit code."""
        log.parent.mkdir(exist_ok=True)
        with self.lock:
            if self.stopping:
                return INTERRUPTED
            unit = LoggedCommand(list(command), str(log.resolve()))
            task = self._engine.submit(run_logged, unit, name=f"sweep {log.stem}")
            self._tasks.add(task)
        try:
            while not self._engine.is_done(task, seconds):
                poll()
            return int(self._engine.result(task))
        except KeyboardInterrupt:  # cancelled
            return INTERRUPTED
        finally:
            with self.lock:
                self._tasks.discard(task)

    def stop(self) -> None:
        """Ask the commands to save and stop; the third request kills them."""
        super().stop()
        with self.lock:
            for task in self._tasks:
                self._engine.cancel(task, force=self.stopping >= 3)


def run_logged(unit: LoggedCommand) -> int:
    """Run a command as a child that ends with this process; return its exit code."""
    with Path(unit.log).open("ab") as output:
        output.write(f"$ {shlex.join(unit.words)}\n".encode())
        output.flush()
        group = own_process_group()
        words = [sys.executable, "-m", "compressive.sweep.bound_child", str(os.getpid())]
        process = subprocess.Popen(
            [*words, *unit.words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=group.process_group,
            creationflags=group.creationflags,
        )
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # Ray cancels a task this way
                interrupt(process)
