"""Compare training from JPEG files that threads decode and that another process decodes.

    python benchmarks/decode_process.py                               # H200; 16 and 4 cores
    python benchmarks/decode_process.py --set train.fused_norm=yes    # a faster network
    python benchmarks/decode_process.py --after FILE                  # compile, wait for FILE
    python benchmarks/decode_process.py --small                       # a test on any machine

Prints a JSON line after each part, so that a timeout loses nothing. It times C-SimCLR with
ResNet-50 at 224 pixels and 256 images of 500 x 375 pixels per step, in turn in one process: the
bare compiled network (without --set), steps from device memory, and steps from files that are
decoded by threads of the training process or by a process of its own, with as many threads as cores
(`threads`, `process`) and with fewer (`process, N`). After some steps that are not timed, `ms` is
the mean of 20 steps, `wait` the share of time in which the loop waits for batches, `queue` the share
in which the thread of the loop waits for a core. `cores_used` are those of both processes.
`images_per_second` has the rates of the loaders alone. Batches of both loaders are compared first.
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
from typing import Any

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


def loader_rate(loader: Streaming, source: Source, batch: int, device: torch.device) -> float:
    """Return images per second of a loader alone."""
    loader.workers = 0

    def passes(times: int) -> None:
        exhaust(loader.batches(plan(len(source), batch, times)))

    passes(1)
    return rate(2 * len(source), device.type, lambda: passes(2))


def measure(asked: argparse.Namespace, folder: Path) -> None:
    """Compile, wait for the signal, and time all contestants."""
    photos = folder / "photos"
    photos.mkdir()
    size = write_photos(str(photos), 64 if asked.small else 2048)
    base = override(settings(photos, asked.small), "data.cache_on_device=no")
    os.environ["COMPRESSIVE_DECODE_PROCESS"] = "off"  # the loaders below are explicit
    run = begun(override(base, *asked.set), folder / "run")
    device, side, batch = run.device, run.side, base.train.batch_size
    source = open_source(photos)
    begin = time.perf_counter()
    process = DecoderProcess()
    while not process.is_ready:
        time.sleep(0.01)
    ready = time.perf_counter() - begin
    options = {"side": side, "device": device}
    threads, apart = run.loader, Streaming(source, process=process, **options)
    assert isinstance(threads, Streaming)
    pids = [os.getpid(), process.pid]
    compared = check_equal([threads, apart], len(source), batch)
    report(kilobytes_per_file=size, seconds_until_process_is_ready=ready, equal_batches=compared)
    memory = Resident(source, **options)
    network = bare(base, device, "default")
    step, batches = steps_from(run, memory, 0)
    for each in (network, step):
        for _ in range(12):  # compile
            each()
    batches.close()
    report(compiled=True, settings=asked.set)
    while asked.after and not asked.after.exists():
        time.sleep(0.2)
    began, every = time.perf_counter(), sorted(os.sched_getaffinity(0))
    for turn in range(asked.rounds):
        for count in sorted({min(n, len(every)) for n in asked.cores}, reverse=True):
            set_cores(every[:count], pids)
            fewer = max(1, count - (2 if count > 4 else 1))
            for name, loader, workers in (
                ("network", None, 0),
                ("memory", memory, 0),
                ("threads", threads, 0),
                ("process", apart, 0),
                (f"process, {fewer}", apart, fewer),
                (f"threads, {fewer}", threads, fewer),
            ):
                if time.perf_counter() - began > asked.seconds:
                    break
                step, batches = (network, None) if loader is None else (None, None)
                if loader is not None:
                    step, batches = steps_from(run, loader, workers)
                found = block(step, loader, pids)
                if batches is not None:
                    batches.close()
                report(cores=count, round=turn, name=name, **found)
            if turn == 0 and time.perf_counter() - began < asked.seconds:
                rates = {
                    name: loader_rate(loader, source, batch, device)
                    for name, loader in (("threads", threads), ("process", apart))
                }
                report(cores=count, images_per_second=rates, process_mib=memory_of(process.pid))
    set_cores(every, pids)
    begin = time.perf_counter()
    apart.close()
    report(ended=True, seconds_to_close=time.perf_counter() - begin)
    run.loader = threads
    run.close()


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
