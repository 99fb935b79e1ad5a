"""How many runs share a GPU: as many as its memory holds and its throughput gains from.

Runs are separate processes with their own random numbers, so that each computes what it would
compute alone.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from compressive.platforms.compile_process import COMPILE_AHEAD

AUTOMATIC = "auto"
_FILLED = 0.9  # of the memory; the rest is for fragmentation and evaluation
_GROWTH = 1.1  # memory of a run later, relative to what it uses after its first steps
_GAIN = 1.05  # throughput that one more run must add to be worth its memory
_LOSS = 0.97  # throughput of two runs below which one is better
_CORES_PER_RUN = 2  # that decode images and launch kernels
_MPS, _MPS_FOLDER = "nvidia-cuda-mps-control", "CUDA_MPS_PIPE_DIRECTORY"
_LACKS_GPU = re.compile(r"out of memory|not enough memory|CUDA error|CUBLAS|CUDNN|MPS", re.I)


class GpuMemory(NamedTuple):
    """Bytes of a GPU, used by all processes."""

    used: int
    total: int


def parse_at_once(text: str | int) -> int | None:
    """Return the number of runs at a time, or None if it is chosen automatically."""
    if text == AUTOMATIC:
        return None
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"--at-once must be auto, or 1 or more, got {text!r}")
    return count


class Packing:
    """The number of runs at a time; `update` adapts it to what the running ones need.

    It is `wanted`, or automatic if that is None. Automatic packing starts with one run. After its
    first steps it knows the memory of a run. A second run is added if it fits, because one starts
    or evaluates while another one trains. More are added while all runs together process 5 % more
    images per second than before. Without known memory, for example on a CPU, it stays at one.
    """

    def __init__(
        self,
        wanted: int | None,
        runs: int,
        memory: Callable[[], GpuMemory | None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        cores: int | None = None,
    ) -> None:
        self.limit: int = wanted or 1
        self._memory, self._say = memory, say
        cores = cores or os.cpu_count() or 1
        self._most = min(runs, max(1, cores // _CORES_PER_RUN))
        before = None if wanted else memory()
        self._before = before.used if before else 0  # bytes of other programs
        self.can_grow: bool = before is not None and self._most > 1
        self._peak, self._best = 0, 0.0
        self._seen: dict[str, int] = {}  # lines of each run when this number of runs was reached

    def update(self, rates: Mapping[str, tuple[int, float] | None]) -> None:
        """Adapt the number to the running runs; call it every few seconds.

        `rates` has the lines of metrics and the images per second of each running run, or None for
        a run that does not train. A run is measured at its second line after the last change.
        """
        if not self.can_grow or (now := self._memory()) is None:
            return
        self._peak = max(self._peak, now.used - self._before)
        known = {name: rate for name, rate in rates.items() if rate is not None}
        if len(known) < len(rates) or len(rates) != self.limit:
            return
        first = {name: self._seen.setdefault(name, lines) for name, (lines, _) in known.items()}
        if any(lines < first[name] + 1 for name, (lines, _) in known.items()):
            return
        self._decide(len(known), sum(rate for _, rate in known.values()), now.total)

    def fix(self, limit: int) -> None:
        """Run this many at a time from now on."""
        self.limit, self.can_grow = limit, False

    def _decide(self, count: int, rate: float, total: int) -> None:
        """Add a run, keep the number, or return to the one before."""
        each = self._peak / count
        about = f"a run needs {each / 1e9:.1f} of {total / 1e9:.0f} GB; "
        about += f"{count} at a time process {rate:,.0f} images/s"
        grows = count == 1 or rate >= _GAIN * self._best
        fits = self._before + (count + 1) * each * _GROWTH <= _FILLED * total
        if grows and fits and count < self._most:
            self.limit = count + 1
        elif not grows and (count > 2 or rate < _LOSS * self._best):
            self.limit = count - 1
        self._best = max(self._best, rate)
        self._seen.clear()
        self.can_grow = self.limit > count
        self._say(f"{about}; now {self.limit} at a time")


def gpu_memory(device: str) -> GpuMemory | None:
    """Return the memory of an NVIDIA GPU without importing torch, or None for other devices."""
    found = re.fullmatch(r"(?:auto|cuda)(?::(\d+))?", device)
    if found is None or shutil.which("nvidia-smi") is None:
        return None
    number = int(found[1] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else [str(i) for i in range(number + 1)]
    if number >= len(names) or not (name := names[number].strip()):
        return None
    words = ["nvidia-smi", "-i", name, "--query-gpu=memory.used,memory.total"]
    words += ["--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, LookupError, subprocess.SubprocessError):
        text = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
        used, total = (int(part) * 2**20 for part in text.splitlines()[0].split(","))
        return GpuMemory(used, total)
    return None


def needs_gpu_alone(log: str) -> bool:
    """Return whether the end of a log shows an error that other runs on the GPU may have caused."""
    return _LACKS_GPU.search(log) is not None


@contextmanager
def gpu_sharing(
    say: Callable[[str], None], probe: Sequence[str] = (sys.executable, "-c")
) -> Iterator[dict[str, str]]:
    """Start NVIDIA's MPS for the processes of this block, and yield their environment variables.

    With MPS the kernels of several processes run at the same time. If it is running already, it is
    used and not stopped. If it cannot be used, processes take turns, which is slower.
    """
    # A process that compiles ahead uses memory that is measured, or that another run needs.
    alone = {COMPILE_AHEAD: "off"}
    is_running = _MPS_FOLDER in os.environ or os.path.exists("/tmp/nvidia-mps/control")
    if is_running or shutil.which(_MPS) is None:
        yield alone
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:  # paths of sockets must be short
        more = {_MPS_FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = {**os.environ, **more}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
        try:
            subprocess.run([_MPS, "-d"], check=True, timeout=30, **quiet)
            code = "import torch; torch.zeros(1, device='cuda')"
            subprocess.run([*probe, code], check=True, timeout=120, **quiet)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"MPS cannot be used ({type(error).__name__}); runs share the GPU without it")
            more = {}
        try:
            yield {**alone, **more}
        finally:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([_MPS], input=b"quit\n", timeout=30, **quiet)
