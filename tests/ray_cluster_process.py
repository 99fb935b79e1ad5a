"""A real Ray cluster on two cores for tests, units that leave traces, and killed processes."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

GPUS = 2  # that the cluster believes to have; no code uses them
_TESTS = Path(__file__).parent
_started: set[int] = set()  # ids of the clusters of this process; other tests may run their own


class RayCluster(NamedTuple):
    address: str  # for a driver on the same machine
    client: str  # ray://


class TracedUnit(NamedTuple):
    number: int
    folder: str
    waits: bool = False  # the first execution waits until it is killed


def traced(unit: TracedUnit) -> int:
    """Leave a file with the process id for each execution; return the square."""
    folder = Path(unit.folder)
    before = len(list(folder.glob(f"{unit.number}-*")))
    (folder / f"{unit.number}-{before}").write_text(str(os.getpid()))
    if unit.waits and before == 0:
        time.sleep(60)
    return unit.number**2


def refused(unit: int) -> int:
    raise ValueError(f"unit {unit} is refused")


def free_port() -> int:
    """Return a port that no program uses, and that no connection gets by chance."""
    # Ray needs up to a minute until it listens. Linux gives ports from 32768 on to connections, and
    # Ray those below 20000 to its processes.
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


@contextmanager
def running_cluster(environment: dict[str, str]) -> Iterator[RayCluster]:
    """Start a cluster in a process group of its own, and end only that group."""
    port, client = free_port(), free_port()
    paths = [str(_TESTS), str(_TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    words += ["--port", str(port), "--ray-client-server-port", str(client)]
    words += ["--num-cpus", "2", "--num-gpus", str(GPUS), "--include-dashboard", "false"]
    words += ["--object-store-memory", str(100 * 2**20), "--disable-usage-stats"]
    output = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
    _started.add(process.pid)

    def listens(port: int) -> bool:
        if process.poll() is not None:
            output.seek(0)
            raise AssertionError(f"Ray ended: {output.read().decode(errors='replace')[-3000:]}")
        return _answers(port)

    try:
        for each in (port, client):
            # A start takes 10 s, and more than a minute if other jobs use all cores.
            wait_until(lambda p=each: listens(p), f"nothing listens on port {each}", 240)
        yield RayCluster(f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}")
    finally:
        _started.discard(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
        output.close()


def _answers(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], object], problem: str, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, problem
        time.sleep(0.02)


def processes_called(start: str) -> list[int]:
    """Return our clusters' processes whose title starts so; Ray writes a task's name there."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:
                continue
            if title.startswith(start) and _is_ours(int(folder.name)):
                found.append(int(folder.name))
    return found


def _is_ours(process: int) -> bool:
    """Return whether a process was started by a cluster of this process, directly or not."""
    while process > 1 and process not in _started:
        try:
            text = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return False
        process = int(text.rpartition(")")[2].split()[1])
    return process in _started


@contextmanager
def killing(start: str, when: Callable[[], object] = lambda: True) -> Iterator[list[int]]:
    """Kill the first process with this start of its title once `when` is true; yield its id."""
    killed: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            if when() and (found := processes_called(start)):
                with suppress(ProcessLookupError):  # it may have ended meanwhile
                    os.kill(found[0], signal.SIGKILL)
                    killed.append(found[0])
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()
