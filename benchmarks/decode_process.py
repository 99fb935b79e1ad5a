"""Compare training from JPEG files that threads decode and that another process decodes.

    python benchmarks/decode_process.py                               # H200; 16 and 4 cores
    python benchmarks/decode_process.py --set train.fused_norm=yes    # a faster network
    python benchmarks/decode_process.py --after FILE                  # compile, wait for FILE
    python benchmarks/decode_process.py --small                       # a test on any machine

Prints a JSON line after each part, so that a timeout loses nothing. It times C-SimCLR with
ResNet-50 at 224 pixels and 256 images of 500 x 375 pixels per step, in turn in one process: the
bare compiled network (without --set), steps from device memory, and steps from files that are
decoded by threads of the training process (`threads`) or by a process of its own (`process`). There
are as many threads as cores, or N. `nice` is the lower priority of threads or process; that of
`process` is the default.

After some steps that are not timed, `ms` is the mean of 20 steps, `wait` the share of time in which
the loop waits for batches, `queue` the share in which its thread waits for a core. `cores_used` are
those of all processes. `images_per_second` has the rates of the loaders alone. Batches of threads
and process are compared bitwise first.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from device_decode import settings, synchronize
from loader import exhaust, plan, rate, write_photos
from step import bare, begun
from timing import environment

from compressive.config import override
from compressive.data.decoder_process import DecoderProcess
from compressive.data.loaders import Resident, Streaming
from compressive.data.source import Source
from compressive.data.sources import open_source
from compressive.train.log import log
from compressive.train.loop import train_step
from compressive.train.run import Run

START = time.perf_counter()
UNTIMED, TIMED = 8, 20  # steps of a block
TICKS = os.sysconf("SC_CLK_TCK")


def report(**line: object) -> None:
    """Print a JSON line now."""
    line = {**line, "seconds_since_start": round(time.perf_counter() - START, 1)}
    print(json.dumps(line), flush=True)


def set_cores(cores: list[int], pids: list[int]) -> None:
    """Restrict every thread of these processes, and those that they will start, to these cores."""
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                os.sched_setaffinity(int(task), cores)
            except ProcessLookupError:  # it has ended
                continue


def cpu_seconds(pids: list[int]) -> float:
    """Return the seconds of cores that these processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


def queue_seconds() -> float:
    """Return the seconds in which this thread was ready and had no core."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def memory_of(pid: int) -> dict[str, float]:
    """Return the memory of a process in MiB: its own, that of files, and shared buffers."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) / 1024 for name, value in pairs.items()}


def block(step: Callable[[], None], loader: Any, pids: list[int]) -> dict[str, float]:
    """Return milliseconds per step, and shares of waiting."""
    for _ in range(UNTIMED):
        step()
    synchronize()
    waited = loader.waited if loader is not None else 0.0
    used, queued, begin = cpu_seconds(pids), queue_seconds(), time.perf_counter()
    for _ in range(TIMED):
        step()
    launched = time.perf_counter() - begin
    synchronize()
    seconds = time.perf_counter() - begin
    return {
        "ms": 1e3 * seconds / TIMED,
        "ms_of_loop": 1e3 * launched / TIMED,
        "wait": ((loader.waited if loader is not None else 0.0) - waited) / seconds,
        "queue": (queue_seconds() - queued) / seconds,
        "cores_used": (cpu_seconds(pids) - used) / seconds,
    }


def steps_from(run: Run, loader: Any, workers: int) -> tuple[Callable[[], None], Any]:
    """Return a function that makes a training step from a loader, and its batches."""
    run.loader = loader
    if isinstance(loader, Streaming):
        loader.workers = workers
    batches = run.batches()

    def step() -> None:
        found = train_step(run, batches)
        if run.schedule.is_time_to_log(run.step):
            log(run, found)

    return step, batches


def check_equal(loaders: list[Streaming], count: int, batch: int) -> int:
    """Compare a pass of both loaders bitwise; return the number of batches."""
    both = [loader.batches(plan(count, batch, 1)) for loader in loaders]
    compared = 0
    for one, other in zip(*both, strict=True):
        if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
            raise SystemExit("batches of the process differ from those of threads")
        compared += 1
    return compared


class Contestants(NamedTuple):
    """What is timed, and the processes that take part."""

    network: Callable[[], None]
    run: Run
    memory: Resident
    threads: Streaming
    process: Streaming
    plain: Streaming  # a process without lower priority
    pids: list[int]

    def order(self, count: int) -> list[tuple[str, Any, int, int]]:
        """Return name, loader, number of threads and priority of threads, for some cores."""
        fewer = max(1, count - (2 if count > 4 else 1))
        return [
            ("network", None, 0, 0),
            ("memory", self.memory, 0, 0),
            ("threads", self.threads, 0, 0),
            ("process", self.process, 0, 0),
            (f"process, {fewer}", self.process, fewer, 0),
            ("process, nice 0", self.plain, 0, 0),
            ("threads, nice 5", self.threads, 0, 5),
            (f"threads, {fewer}", self.threads, fewer, 0),
        ]


def loader_rates(some: Contestants, source: Source, batch: int, cores: int) -> dict[str, float]:
    """Return images per second of loaders alone, of one thread, and of two processes together."""
    kind, few = some.run.device.type, range(min(256, len(source)))

    def passes(loader: Streaming, workers: int, times: int) -> None:
        loader.workers = workers
        exhaust(loader.batches(plan(len(source), batch, times)))

    def passes_of_both(times: int) -> None:
        each = max(1, cores // 2)
        loaders = (some.process, some.plain)
        tasks = [threading.Thread(target=passes, args=(k, each, times)) for k in loaders]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join()

    found = {"one thread": rate(len(few), "cpu", lambda: [source.image(i) for i in few])}
    for name, loader in (("threads", some.threads), ("process", some.process)):
        passes(loader, cores, 1)
        found[name] = rate(2 * len(source), kind, lambda k=loader: passes(k, cores, 2))
    found["two processes"] = rate(2 * len(source), kind, lambda: passes_of_both(1))
    return found


def prepare(asked: argparse.Namespace, folder: Path) -> Contestants:
    """Write images, start processes, compare batches, and compile."""
    photos = folder / "photos"
    photos.mkdir()
    size = write_photos(str(photos), 64 if asked.small else 2048)
    base = override(settings(photos, asked.small), "data.cache_on_device=no")
    os.environ["COMPRESSIVE_DECODE_PROCESS"] = "off"  # the loaders below are explicit
    run = begun(override(base, *asked.set), folder / "run")
    source, threads = open_source(photos), run.loader
    assert isinstance(threads, Streaming)
    begin = time.perf_counter()
    processes = [DecoderProcess(), DecoderProcess(nice=0)]
    while not all(process.is_ready for process in processes):
        time.sleep(0.01)
    ready = time.perf_counter() - begin
    options = {"side": run.side, "device": run.device}
    apart, plain = (Streaming(source, process=process, **options) for process in processes)
    compared = check_equal([threads, apart], len(source), base.train.batch_size)
    report(kilobytes_per_file=size, seconds_until_processes_are_ready=ready, equal_batches=compared)
    memory = Resident(source, **options)
    network = bare(base, run.device, "default")
    step, batches = steps_from(run, memory, 0)
    for each in (network, step):
        for _ in range(12):  # compile
            each()
    batches.close()
    report(compiled=True, settings=asked.set)
    pids = [os.getpid(), *(process.pid for process in processes)]
    return Contestants(network, run, memory, threads, apart, plain, pids)


def race(some: Contestants, count: int, turn: int, until: float) -> None:
    """Time each contestant once."""
    for name, loader, workers, nice in some.order(count):
        is_known = turn > 0 and count <= 4 and name in ("network", "memory")
        if is_known or time.perf_counter() > until:
            continue
        if loader is None:
            found = block(some.network, None, some.pids)
        else:
            step, batches = steps_from(some.run, loader, workers)
            step()
            for thread in threading.enumerate() if nice else ():
                if thread.name.startswith("decode-"):
                    os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, nice)
            found = block(step, loader, some.pids)
            batches.close()
        report(cores=count, round=turn, name=name, **found)


def measure(asked: argparse.Namespace, folder: Path) -> None:
    """Compile, wait for the signal, and time all contestants."""
    some = prepare(asked, folder)
    while asked.after and not asked.after.exists():
        time.sleep(0.2)
    until, every = time.perf_counter() + asked.seconds, sorted(os.sched_getaffinity(0))
    counts = sorted({min(n, len(every)) for n in asked.cores}, reverse=True)
    source, batch = open_source(folder / "photos"), some.run.config.train.batch_size
    for turn in range(asked.rounds):
        for count in counts:
            set_cores(every[:count], some.pids)
            race(some, count, turn, until)
            if turn == 0 and time.perf_counter() < until:
                rates = loader_rates(some, source, batch, count)
                memory = memory_of(some.pids[1])
                report(cores=count, images_per_second=rates, process_mib=memory)
    set_cores(every, some.pids)
    begin = time.perf_counter()
    some.process.close()
    report(ended=True, seconds_to_close=time.perf_counter() - begin)
    some.plain.close()
    some.run.loader = some.threads
    some.run.close()


def main() -> None:
    """Measure in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], help="a setting of the run")
    parser.add_argument("--after", type=Path, help="compile, but wait for this file before timing")
    parser.add_argument("--cores", type=int, nargs="*", default=[16, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100, help="start no block after this")
    parser.add_argument("--small", action="store_true", help="a tiny network and few images")
    asked = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        torch.compile = lambda network, **_: network  # type: ignore[assignment]
    report(**environment(kind, "torchvision", "torchcodec", "timm"))
    with tempfile.TemporaryDirectory() as name:
        measure(asked, Path(name))


if __name__ == "__main__":
    main()
