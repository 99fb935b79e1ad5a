"""Compile the network in another process, while this one reads images and compiles the views.

Most of torch's compiler is Python code that uses one core. The other process makes a step with
black images, which stores compiled code in the compile cache. The run then traces the network and
finds the code by its content, as a second start does. Its own graphs, random numbers and values do
not change. What is not found, because the process failed or was slow, the run compiles.
"""

import importlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

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

_LEAST_WAIT = 30.0  # seconds, and as long as this process has been busy meanwhile
_ONE_AT_A_TIME = "ahead.lock"


class CompiledAhead:
    """The process that compiles the network of a run, and the mark of its settings."""

    def __init__(self, process: CompileProcess, mark: Path, lock: int) -> None:
        self.process: CompileProcess = process
        self.mark: Path = mark
        self._unlock = weakref.finalize(self, os.close, lock)
        self._started: float = time.monotonic()
        _open.add(self)

    def send(self, config: Config, device: torch.device, dtype: torch.dtype, classes: int) -> None:
        """Let the process compile this network; `classes` are those of the online probe."""
        job = {"settings": asdict(config), "device": str(device), "classes": classes}
        self.process.send({**job, "dtype": str(dtype).removeprefix("torch.")})

    def allow_step(self) -> None:
        """Let the process use the memory that is free, because this one has allocated images."""
        self.process.send("step")

    def finish(self) -> None:
        """Wait until the network is compiled, and mark its settings; call it any time.

        They are marked even if the process failed: the run then compiles the network itself, and
        later ones find it. A process that hangs delays a run only once.
        """
        if self._unlock.alive:
            self.process.finish(_LEAST_WAIT + time.monotonic() - self._started)
            with suppress(OSError):
                self.mark.touch()
        self.close()

    def close(self) -> None:
        """End the process, and let another run start one."""
        self.process.close()
        self._unlock()

    @contextmanager
    def finished_before_compiling(self) -> Iterator[None]:
        """Wait for the process when this one has traced a graph and is about to compile it."""
        try:
            with watch_compiler(before=self.finish):  # tracing takes 2 s and needs no code
                yield
            self.finish()
        finally:
            self.close()


_open: weakref.WeakSet[CompiledAhead] = weakref.WeakSet()


def end_compiling_ahead() -> None:
    """End the processes of this program, for example of a run that could not be built."""
    for each in list(_open):
        each.close()


@contextmanager
def watch_compiler(
    before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Call functions before and after torch compiles the first graph that is traced in a block."""
    module: Any = importlib.import_module("torch._inductor.compile_fx")
    compile_fx = module.compile_fx  # torch.compile imports it when a graph is traced

    def watched(*given: Any, **options: Any) -> Any:
        module.compile_fx = compile_fx
        before()
        compiled = compile_fx(*given, **options)
        after()
        return compiled

    module.compile_fx = watched
    try:
        yield
    finally:
        module.compile_fx = compile_fx


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
        if mark.exists() or (lock := _locked(cache.folder / _ONE_AT_A_TIME)) is None:
            return None
        if (process := take_process()) is None:
            os.close(lock)
            return None
        # First this process uses the GPU, which may admit only one.
        with suppress(Exception):  # the run reports what is wrong
            torch.empty(1, device=device)
            process.send(str(device))
        return CompiledAhead(process, mark, lock)
    finally:
        end_early()


def _locked(path: Path) -> int | None:
    """Return the descriptor of a locked file; None if another run has locked it."""
    with suppress(OSError, ImportError):
        fcntl: Any = importlib.import_module("fcntl")
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return lock
    return None


def prepare_compiling(
    ahead: CompiledAhead | None,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    classes: int,
) -> None:
    """Let the process compile the network, if there is one, and load what this one needs."""
    if ahead is not None:
        ahead.send(config, device, dtype, classes)
    if is_compiled(config.train.compile, device):
        prepare_compiler(device)


def prepare_compiler(device: torch.device) -> None:
    """Import torch's compiler; meanwhile, load the libraries of the GPU and hash torch's files."""
    import_compiler(meanwhile=partial(load_libraries, device))


def import_compiler(meanwhile: Callable[[], None]) -> None:
    """Import torch's compiler and call a function meanwhile, which runs without Python's lock."""
    thread = threading.Thread(target=meanwhile, name="load libraries")
    thread.start()
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("torch._dynamo.repro.after_dynamo")
    skip_existing_objects()
    # Both are parts of each key of the compile cache, and are computed once.
    threading.Thread(target=_hash_versions, name="hash versions").start()
    thread.join()  # the run needs them now, and CUDA graphs allow no calls of other threads


def load_libraries(device: torch.device) -> None:
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
