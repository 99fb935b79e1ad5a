"""Compile the network in another process, while this one reads images and compiles the views.

Most of torch's compiler is Python code that uses one core. The other process makes a step with
black images, which stores compiled code in the compile cache. The run then traces the network and
finds the code by its content, as a second start does. Its own graphs, random numbers and values do
not change. What is not found, because the process failed or was slow, the run compiles.
"""

import importlib
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compressive.config import Config
from compressive.device import is_compiled
from compressive.distributed import world_size
from compressive.methods import Builder, build
from compressive.platforms.compile_process import (
    CompileProcess,
    can_compile_ahead,
    end_early,
    take_process,
)
from compressive.platforms.garbage import skip_existing_objects
from compressive.rundir.compile_marks import mark_name
from compressive.train.compile_cache import use_compile_cache

_LONGEST_WAIT = 300.0  # seconds after this process has compiled the views


class CompiledAhead(NamedTuple):
    """The process that compiles the network of a run, and the mark of its settings."""

    process: CompileProcess
    mark: Path

    def send(self, config: Config, device: torch.device, dtype: torch.dtype, classes: int) -> None:
        """Let the process compile this network; `classes` are those of the online probe."""
        job = {"settings": asdict(config), "device": str(device), "classes": classes}
        self.process.send({**job, "dtype": str(dtype).removeprefix("torch.")})

    def finish(self) -> None:
        """Wait until the network is compiled, and mark its settings.

        They are marked even if the process failed: the run has then compiled the network itself.
        """
        self.process.finish(_LONGEST_WAIT)
        with suppress(OSError):
            self.mark.touch()


def compile_ahead(config: Config, device: torch.device, method: Builder) -> CompiledAhead | None:
    """Start the process, or return None if it would not save time.

    Another process can only build the methods of this package.
    """
    try:
        is_own = method is build and world_size() == 1
        if not is_own or not is_compiled(config.train.compile, device):
            return None
        if not can_compile_ahead(has_gpu=device.type == "cuda"):
            return None
        if (cache := use_compile_cache(device)) is None:
            return None
        mark = cache.folder / mark_name(config)
        if mark.exists() or (process := take_process()) is None:
            return None
        return CompiledAhead(process, mark)
    finally:
        end_early()


def prepare_compiler(device: torch.device) -> None:
    """Import torch's compiler; meanwhile, load the libraries of the GPU and hash torch's files.

    The compiler is Python code, and the rest runs without Python's lock.
    """
    thread = threading.Thread(target=_load_libraries, args=(device,), name="load libraries")
    thread.start()
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("torch._dynamo.repro.after_dynamo")
    skip_existing_objects()
    # Both are parts of each key of the compile cache, and are computed once.
    threading.Thread(target=_hash_versions, name="hash versions").start()
    thread.join()  # the run needs them now, and CUDA graphs allow no calls of other threads


def _load_libraries(device: torch.device) -> None:
    """Create the context of a GPU, and load cuDNN and cuBLAS; no random number is drawn."""
    if device.type != "cuda":
        return
    with suppress(Exception), torch.cuda.device(device):  # the run reports what is wrong
        kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        weight = torch.zeros(64, 64, 3, 3, **kind).contiguous(memory_format=torch.channels_last)
        images = torch.zeros(8, 64, 16, 16, **kind).contiguous(memory_format=torch.channels_last)
        made = torch.nn.functional.conv2d(images, weight.requires_grad_(), padding=1)
        torch.autograd.grad(made, weight, torch.zeros_like(made))
        torch.mm(torch.zeros(64, 64, **kind), torch.zeros(64, 64, **kind))
        torch.cuda.synchronize(device)


def _hash_versions() -> None:
    """Compute what the keys of the compile cache contain: torch's and Triton's versions."""
    with suppress(Exception):  # torch computes it later
        cache: Any = importlib.import_module("torch._inductor.codecache")
        cache.torch_key()
        cache.CacheBase.get_system()
