"""Measure what grows with the number of images, and a loss step by batch size and dimension.

    python benchmarks/scaling.py --counts 1e4,1e6,1e8
    python benchmarks/scaling.py --counts "" --batches 256,16384 --dims 128,8192 --device cuda

The index is simulated: labeled images in shards of 10,000, without files. On the CPU, each row is
measured in a process of its own, so that its peak memory is known. `seconds` are processor time,
the lowest of three for a loss, because machines are shared. On the GPU they are the median time of
five losses, between events. `megabytes` do not include the input. `file list` is the list of loose
files in a checkpoint, up to 1e7 of them: 1e8 need 29 GB. Prints one JSON line per row.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment, race

from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.loaders import Streaming
from compressive.data.sampler import batch_index_stream
from compressive.data.source import ImageSource
from compressive.data.splits import stratified
from compressive.objectives import csimclr_loss
from compressive.train import images
from compressive.train.online_eval import held_out_labels as online_labels

BATCH, CLASSES = 4096, 1000


def simulated(count: int) -> ImageSource:
    """Return labeled images in shards of 10,000; all have the same pixels."""
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    return ImageSource(
        name="simulated",
        count=count,
        read=lambda i: image,
        place=lambda i: f"train-{i // 10_000:05d}.tar:{i % 10_000}.jpg",
        labels=torch.arange(CLASSES).repeat(-(-count // CLASSES))[:count],
        classes=tuple(map(str, range(CLASSES))),
    )


def first_batch(source: ImageSource) -> None:
    """Draw the order of an epoch and take a batch, as a run does when it starts or resumes."""
    next(batch_index_stream(len(source), BATCH, seed=0, step=3))


def two_epochs(source: ImageSource) -> None:
    """Take batches around the end of an epoch, where two orders are needed."""
    step = max(0, len(source) // BATCH - 1)
    for _ in islice(batch_index_stream(len(source), BATCH, seed=0, step=step), 4):
        pass


def held_out_labels(source: ImageSource) -> None:
    """Hold out labels for the online probe."""
    assert source.labels is not None
    stratified(source.labels, 0.1, seed=0)


def compressed_file_list(source: ImageSource) -> int:
    """Return the bytes that a checkpoint needs to detect changed files, for one file per image."""
    states = {f"/data/train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG": (110_000 + i * 7919 % 60_000,
              1_700_000_000_000_000_000 + i * 104_729) for i in range(len(source))}  # fmt: skip
    images.file_states = lambda _: states
    return images.list_files(source, "/data/train").nbytes


TASKS: dict[str, Callable[[ImageSource], object]] = {
    "index": lambda source: None,
    "first batch": first_batch,
    "end of an epoch": two_epochs,
    "labels of the probe": lambda source: online_labels(len(source), 0.1, 0),
    "stratified split": held_out_labels,
    "loader": lambda source: Streaming(source, side=8, device="cpu"),
    "fingerprint": lambda source: DatasetFingerprint(source).of(),
    "file list": compressed_file_list,
}


def memory(entry: str) -> int:
    """Return bytes of /proc/self/status: VmRSS now, or VmHWM since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{entry}:"))


def measure_task(name: str, count: int) -> dict[str, str | float]:
    """Return the processor time of a task and its memory beyond the index (Linux)."""
    source = simulated(count)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = memory("VmRSS"), time.process_time()
    result = TASKS[name](source)
    seconds = time.process_time() - start
    assert source.labels is not None
    used = source.labels.nbytes if name == "index" else memory("VmHWM") - before
    row: dict[str, str | float] = {"images": count, "task": name, "seconds": seconds}
    row["megabytes"] = used / 1e6
    if isinstance(result, int):
        row["file_megabytes"] = result / 1e6
    return row


def measure_loss(batch: int, dim: int, device: str) -> dict[str, str | float]:
    """Return time and memory of a C-SimCLR loss, forward and backward."""
    x, y = (torch.randn(batch, dim, device=device, requires_grad=True) for _ in range(2))

    def step() -> object:
        return torch.autograd.grad(csimclr_loss(x, y).loss, (x, y))

    row: dict[str, str | float] = {"batch": batch, "dim": dim}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        row |= {"device": device, "seconds": race({"loss": step}, device, rounds=5)["loss"] / 1e3}
        row["megabytes"] = (torch.cuda.max_memory_allocated() - allocated) / 1e6
        return row
    Path("/proc/self/clear_refs").write_text("5")
    before, times = memory("VmRSS"), list[float]()
    while len(times) < 3 and sum(times) < 20:
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return {**row, "seconds": min(times), "megabytes": (memory("VmHWM") - before) / 1e6}


def print_row(first: str, second: str, device: str) -> None:
    """Measure a task and a number of images, or a batch size and a dimension."""
    row = measure_task(first, int(second)) if first in TASKS else None
    print(json.dumps(row or measure_loss(int(first), int(second), device)), flush=True)


def main() -> None:
    """Start a process for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", default="1e4,1e5,1e6,1e7,1e8")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--batches", default="")
    parser.add_argument("--dims", default="128,2048,8192")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    counts = [int(float(n)) for n in asked.counts.split(",") if n]
    tasks = asked.tasks.split(",")
    rows = [(name, str(n)) for n in counts for name in tasks if name != "file list" or n <= 1e7]
    rows += [pair for pair in product(asked.batches.split(","), asked.dims.split(",")) if pair[0]]
    print(json.dumps({"environment": environment(asked.device)}), flush=True)
    for row in rows:
        if asked.device != "cpu":  # torch counts the memory of a GPU, so one process is enough
            print_row(*row, asked.device)
            continue
        process = get_context("fork").Process(target=print_row, args=(*row, asked.device))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
