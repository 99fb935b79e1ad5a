"""A process that compiles the network of a run into the compile cache; see `compile_ahead`.

    python -m compressive.train.compile_network

reads a `CompileJob` as one JSON line and ends when its input is closed.
"""

import json
import os
import sys
import threading
import traceback
from typing import Any, NamedTuple

import torch

from compressive.checks import autocast, skip_value_checks
from compressive.config import Config, from_dict
from compressive.methods import build
from compressive.platforms.garbage import collect_rarely
from compressive.train.compile_ahead import prepare_compiler
from compressive.train.compile_cache import start_compile_workers, use_compile_cache
from compressive.train.step import build_learner, compile_learner

_MEMORY_SHARE = 0.5  # of a GPU, so that the run does not fail for lack of memory


class CompileJob(NamedTuple):
    """What the compiled code depends on."""

    settings: dict[str, Any]
    device: str
    dtype: str
    classes: int  # of the online probe; 0: there is none


def compile_network(config: Config, device: torch.device, dtype: torch.dtype, classes: int) -> None:
    """Make a step with black images, as `loop.compute_gradients` does."""
    learner = build_learner(config, build, classes, device, compiled=True)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(_MEMORY_SHARE, device.index)
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


def _end_with_parent() -> None:
    """End this process when the pipe from the parent is closed."""
    sys.stdin.buffer.read()
    os._exit(1)


def compile_requested_network() -> None:
    """Read the job, compile, and end without waiting for compile workers."""
    prepare_compiler(torch.device("cpu"))  # the device is not known yet
    if not (line := sys.stdin.buffer.readline()):
        os._exit(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        job = CompileJob(**json.loads(line))
        device = torch.device(job.device)
        use_compile_cache(device)  # the folder of the run, by its environment
        start_compile_workers(device)
        prepare_compiler(device)
        compile_network(from_dict(job.settings), device, getattr(torch, job.dtype), job.classes)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # Python's own exit would abort, because the thread above reads
    os._exit(0)


if __name__ == "__main__":
    collect_rarely()
    compile_requested_network()
