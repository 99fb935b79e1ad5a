"""Compare training from JPEG files that threads decode and that another process decodes.

    python benchmarks/decode_process.py                               # H200; 16 and 4 cores
    python benchmarks/decode_process.py --set train.fused_norm=yes    # a faster network
    python benchmarks/decode_process.py --after FILE                  # compile, wait for FILE
    python benchmarks/decode_process.py --small                       # a test on any machine

Prints a JSON line after each part, so that a timeout loses nothing. It times C-SimCLR with
ResNet-50 at 224 pixels and 256 images of 500 x 375 pixels per step, in turn in one process: the
bare compiled network (without --set), steps from device memory, and steps from files that are
decoded by threads of the training process (`threads`) or by a process of its own (`process`). There
are as many threads as cores.

After some steps that are not timed, `ms` is the mean of 20 steps, `wait` the share of time in which
the GPU has nothing to do because the next batch is not ready, `queue` the share in which the
thread of the loop waits for a core. `cores_used` are those of all processes. `images_per_second`
has the rates of the loaders alone. Batches of threads and process are compared bitwise first.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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


def set_cores(cores: list[int]) -> None:
    """Restrict every thread of this process, and what they will start, to these cores."""
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task), cores)


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


def steps_from(run: Run, loader: Any) -> tuple[Callable[[], None], Any]:
    """Return a function that makes a training step from a loader, and its batches."""
    run.loader = loader
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
    """What is timed, except the loaders of files, which depend on the number of cores."""

    source: Source
    network: Callable[[], None]
    run: Run
    memory: Resident


def started(some: Contestants) -> Streaming:
    """Return a loader with a process that is ready and decodes the same as threads."""
    begin = time.perf_counter()
    process = DecoderProcess()
    while not process.is_ready:
        if time.perf_counter() - begin > 120:
            raise SystemExit("the process that decodes is not ready after 120 s")
        time.sleep(0.01)
    ready = time.perf_counter() - begin
    options: dict[str, Any] = {"side": some.run.side, "device": some.run.device}
    apart = Streaming(some.source, process=process, **options)
    with Streaming(some.source, **options) as threads:
        batch = some.run.config.train.batch_size
        compared = check_equal([threads, apart], len(some.source), batch)
    report(seconds_until_ready=ready, equal_batches=compared)
    return apart


def prepare(asked: argparse.Namespace, folder: Path) -> Contestants:
    """Write images, and compile."""
    photos = folder / "photos"
    photos.mkdir()
    size = write_photos(str(photos), 64 if asked.small else 2048)
    base = override(settings(photos, asked.small), "data.cache_on_device=no")
    os.environ["COMPRESSIVE_DECODE_PROCESS"] = "off"  # the loaders of `race` are explicit
    run = begun(override(base, *asked.set), folder / "run")
    source = open_source(photos)
    memory = Resident(source, side=run.side, device=run.device)
    network = bare(base, run.device, "default")
    step, batches = steps_from(run, memory)
    for each in (network, step):
        for _ in range(12):  # compile
            each()
    batches.close()
    report(compiled=True, settings=asked.set, kilobytes_per_file=size)
    return Contestants(source, network, run, memory)


def race(some: Contestants, cores: list[int], rounds: int, until: float) -> None:
    """Time each contestant on some cores."""
    set_cores(cores)  # the number of threads follows
    run, count = some.run, len(cores)
    with (
        Streaming(some.source, side=run.side, device=run.device) as threads,
        started(some) as apart,
    ):
        assert apart.process is not None
        pids = [os.getpid(), apart.process.pid]
        files = {"threads": threads, "process": apart}
        for turn in range(rounds):
            for name, loader in {"network": None, "memory": some.memory, **files}.items():
                if time.perf_counter() > until:
                    continue
                if loader is None:
                    found = block(some.network, None, pids)
                else:
                    step, batches = steps_from(run, loader)
                    found = block(step, loader, pids)
                    batches.close()
                report(cores=count, round=turn, name=name, **found)
        if time.perf_counter() < until:
            rates = loader_rates(some, files)
            report(cores=count, images_per_second=rates, process_mib=memory_of(pids[1]))


def loader_rates(some: Contestants, files: dict[str, Streaming]) -> dict[str, float]:
    """Return images per second of loaders alone, and of one thread."""
    source, few = some.source, range(min(256, len(some.source)))
    kind, batch = some.run.device.type, some.run.config.train.batch_size
    found = {"one thread": rate(len(few), "cpu", lambda: [source.image(i) for i in few])}
    for name, loader in files.items():

        def passes(loader: Streaming = loader) -> None:
            exhaust(loader.batches(plan(len(source), batch, 2)))

        found[name] = rate(2 * len(source), kind, passes)
    return found


def measure(asked: argparse.Namespace, folder: Path) -> None:
    """Compile, wait for the signal, and time all contestants."""
    some = prepare(asked, folder)
    while asked.after and not asked.after.exists():
        time.sleep(0.2)
    until, every = time.perf_counter() + asked.seconds, sorted(os.sched_getaffinity(0))
    for count in sorted({min(n, len(every)) for n in asked.cores}, reverse=True):
        race(some, every[:count], asked.rounds, until)
    set_cores(every)
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
