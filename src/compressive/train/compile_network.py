"""A process that compiles the network of a run into the compile cache; see `compile_ahead`.

It reads JSON lines: the name of the device, a `CompileJob`, and permission to use memory of the
GPU for a step. It ends when its input is closed.
"""

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from compressive.checks import autocast, skip_value_checks
from compressive.config import Config, from_dict
from compressive.methods import build
from compressive.platforms.accelerators import device_memory
from compressive.train.compile_ahead import import_compiler, load_libraries, watch_compiler
from compressive.train.compile_cache import start_compile_workers, use_compile_cache
from compressive.train.step import build_learner, compile_learner

_MEMORY_SHARE = 0.5  # of the free memory of a GPU, so that the run does not fail for lack of it


class CompileJob(NamedTuple):
    """What the compiled code depends on."""

    settings: dict[str, Any]
    device: str
    dtype: str
    classes: int  # of the online probe; 0: there is none


def compile_network(config: Config, device: torch.device, dtype: torch.dtype, classes: int) -> None:
    """Make a step with black images, as `loop.compute_gradients` does."""
    learner = build_learner(config, build, classes, device, compiled=True)
    compile_learner(learner, config, device)
    count = config.train.batch_size // config.train.grad_accum_steps
    numbers, size = learner.method.view_numbers, config.views.size
    # The layout of the views of `augment`: the key of the code depends on it.
    black = torch.zeros(len(numbers) * count, 3, size, size, dtype=dtype, device=device)
    views = black.contiguous(memory_format=torch.channels_last).chunk(len(numbers))
    labels = torch.full((count,), -1, device=device)
    beta = torch.zeros((), device=device)
    with autocast(device, dtype), skip_value_checks():
        step, probe_loss = learner(views, beta, labels)
        (step.loss + probe_loss).backward()


def limit_memory(device: torch.device) -> None:
    """Use at most half of the memory of a GPU that is free now."""
    memory = device_memory(device)
    if device.type == "cuda" and memory is not None:
        most = torch.cuda.memory_reserved(device) + _MEMORY_SHARE * memory.free
        torch.cuda.set_per_process_memory_fraction(most / memory.total, device.index)


class Requests:
    """Lines from the parent, read by a thread that ends this process with the parent."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> Any:
        """Wait for the next message."""
        return json.loads(self._lines.get())

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._lines.put(line)
        os._exit(1)


def _say(what: str) -> None:
    """Write when a part was done; `benchmarks/startup.py` shows it."""
    with suppress(OSError):  # the disk may be full
        print(f"{time.time():.2f} {what}", file=sys.stderr, flush=True)


def compile_requested_network() -> None:
    """Read the job, compile, and end without waiting for compile workers."""
    with suppress(OSError):  # without memory, Linux ends this process rather than the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests = Requests()
    try:
        _say("torch imported")
        import_compiler(meanwhile=lambda: load_libraries(torch.device(requests.next())))
        _say("compiler imported")
        job = CompileJob(**requests.next())
        device = torch.device(job.device)
        use_compile_cache(device)  # the folder of the run, by its environment
        start_compile_workers(device)

        def wait_for_memory() -> None:
            _say("forward pass compiled")
            requests.next()
            limit_memory(device)

        with watch_compiler(after=wait_for_memory):
            compile_network(from_dict(job.settings), device, getattr(torch, job.dtype), job.classes)
        _say("step made")
    except BaseException:
        with suppress(OSError):  # the disk may be full
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)  # Python's own exit would abort, because the thread above reads
    os._exit(0)
