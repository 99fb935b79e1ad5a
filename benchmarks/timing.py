"""Timing functions, and the hardware and versions that every result reports."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def cpu_name() -> str:
    """Return the model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()  # ARM lists no names


def environment(device: str, *packages: str) -> dict[str, str | int]:
    """Return the hardware and the versions of a measurement."""
    found: dict[str, str | int] = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    for package in ("torch", "compressive", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "from the source tree" if package == "compressive" else "absent"
    return found


def race(
    functions: Mapping[str, Callable[[], object]],
    device: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median milliseconds of each function, called in turn.

    The speed of a shared machine can change by a factor of two within a minute. Ratios between
    functions timed one after the other would then be meaningless. On the GPU the time is between
    events on the stream, and starts when the GPU is idle. On the CPU, `clock` may be
    time.process_time, which does not count the time that other processes use.
    """
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[Callable[[], float]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_timed(function, device, clock))
    if device == "cuda":
        torch.cuda.synchronize()
    return {name: statistics.median(read() for read in reads) for name, reads in times.items()}


def _timed(
    function: Callable[[], object], device: str, clock: Callable[[], float]
) -> Callable[[], float]:
    if device == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Without this, the kernels of a function could be launched while the GPU runs the previous
        # one. Launches would then count for some functions and not for others.
        torch.cuda.synchronize()
        before.record()
        function()
        after.record()
        return lambda: before.elapsed_time(after)
    start = clock()
    function()
    elapsed = 1e3 * (clock() - start)
    return lambda: elapsed


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of the function as a CUDA graph, which has no launch overhead."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
