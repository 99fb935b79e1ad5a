"""Whatever happens to the process that compiles ahead, the run goes on and no process remains."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from processes import is_running
from tiny import silent, tiny

from compressive.methods import build
from compressive.platforms import compile_process, processes
from compressive.platforms.accelerators import DeviceMemory
from compressive.platforms.compile_process import (
    CompileProcess,
    can_compile_ahead,
    start_early,
    take_process,
)
from compressive.platforms.processes import core_quota, import_path, usable_cores
from compressive.train import compile_ahead as module
from compressive.train import compile_network
from compressive.train.compile_ahead import CompiledAhead, compile_ahead, watch_compiler
from compressive.train.compile_cache import CompileCache
from compressive.train.loop import pretrain

CUDA = torch.device("cuda")


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that replaces the Python that is started by a shell script."""

    def replace(text: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


@pytest.fixture
def large_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this machine have cores, memory and an empty compile cache; return its folder."""
    monkeypatch.setattr(module, "use_compile_cache", lambda _: CompileCache(tmp_path, 0))
    monkeypatch.setattr(compile_process, "usable_cores", lambda: 16)
    monkeypatch.setattr(compile_process, "free_host_memory", lambda: 10**11)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setenv("COMPRESSIVE_COMPILE_AHEAD", "auto")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


def started(device: torch.device = CUDA) -> CompiledAhead:
    found = compile_ahead(tiny(), device, build)
    assert found is not None
    return found


def child(ahead: CompiledAhead) -> int:
    return ahead.process._process.pid


def test_killed_process(large_machine: Path, shell: Callable[[str], None]) -> None:
    shell("exec sleep 60")
    ahead = started()
    os.kill(child(ahead), signal.SIGKILL)  # for lack of memory
    begin = time.monotonic()
    ahead.send(tiny(), CUDA, torch.bfloat16, 3)
    ahead.allow_step()
    ahead.finish()
    assert time.monotonic() - begin < 10
    assert ahead.process.exit_code == -signal.SIGKILL
    assert compile_ahead(tiny(), CUDA, build) is None  # not again: the run has compiled it


def test_hanging_process_delays_a_run_once(
    large_machine: Path, shell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAST_WAIT", 0.1)
    shell("trap '' TERM INT HUP; while :; do sleep 1; done")
    begin = time.monotonic()
    ahead = started()
    ahead.finish()
    assert time.monotonic() - begin < 10
    assert not is_running(child(ahead))
    assert compile_ahead(tiny(), CUDA, build) is None


def test_processes_of_the_process_end_with_it(tmp_path: Path, shell: Callable[[str], None]) -> None:
    shell(f"sleep 60 & echo $! > {tmp_path}/pid.part; mv {tmp_path}/pid.part {tmp_path}/pid; wait")
    process = CompileProcess()
    wait_until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    assert is_running(pid)
    process.close()
    wait_until(lambda: not is_running(pid))


def test_interrupt_while_waiting(
    large_machine: Path, shell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches the run only, which ends the process and releases the lock."""
    shell("exec sleep 60")
    ahead = started()
    assert os.getpgid(child(ahead)) == child(ahead) != os.getpgid(0)

    def interrupt(seconds: float) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead.process, "finish", interrupt)
    monkeypatch.setattr(module, "watch_compiler", lambda before: nullcontext())
    with pytest.raises(KeyboardInterrupt), ahead.finished_before_compiling():
        ahead.finish()
    assert not is_running(child(ahead))
    started().close()


def test_run_that_cannot_be_built(
    large_machine: Path, shell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook keeps the last error with the run, so that the process must not depend on it."""
    pid = large_machine / "pid"
    shell(f"echo $$ > {pid}; exec sleep 60")
    monkeypatch.setenv("COMPRESSIVE_COMPILE_AHEAD", "yes")

    def fail(*_: Any) -> NoReturn:
        wait_until(lambda: pid.exists() and pid.read_text())
        raise ValueError("no images")

    monkeypatch.setattr("compressive.train.images.load_source", fail)
    with pytest.raises(ValueError, match="no images") as kept:
        pretrain(tiny("train.compile=yes"), large_machine / "run", display=silent())
    assert not is_running(int(pid.read_text()))
    assert kept.value is not None
    assert module._open  # the error keeps the run


def test_one_process_at_a_time(large_machine: Path, shell: Callable[[str], None]) -> None:
    """Several runs start at once, for example seeds: the others compile as usual."""
    shell("exec sleep 60")
    first = started()
    assert compile_ahead(tiny("train.batch_size=16"), CUDA, build) is None
    first.close()
    assert not is_running(child(first))
    started().close()
    assert compile_ahead(tiny("views.size=24"), CUDA, build) is not None  # ends unused


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EAGAIN, errno.EPERM, errno.ENOMEM])
@pytest.mark.parametrize("name", ["tempfile.TemporaryFile", "subprocess.Popen"])
def test_system_that_refuses(
    name: str, error: int, large_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or there may be no more processes."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(f"compressive.platforms.compile_process.{name}", fail)
    start_early()
    assert take_process() is None
    assert compile_ahead(tiny(), CUDA, build) is None
    monkeypatch.undo()
    lock = module._locked(large_machine / "ahead.lock")
    assert lock is not None  # it was released
    os.close(lock)


def test_cache_folder_that_disappears(large_machine: Path, shell: Callable[[str], None]) -> None:
    shell("exit 0")
    ahead = started()
    ahead.mark = large_machine / "missing" / "mark"
    ahead.finish()
    assert module._locked(large_machine / "missing" / "ahead.lock") is None


@pytest.mark.parametrize("executable", ["", "/usr/bin/blender", "/opt/app/trainer"])
def test_program_that_embeds_python(
    executable: str, large_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert can_compile_ahead(has_gpu=True)
    monkeypatch.setattr(sys, "executable", executable)
    assert not can_compile_ahead(has_gpu=True)


def test_frozen_program(large_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not can_compile_ahead(has_gpu=True)


def test_debugger(large_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "gettrace", lambda: print)
        assert not can_compile_ahead(has_gpu=True)
    assert can_compile_ahead(has_gpu=True)
    pydevd = ModuleType("_pydevd_bundle.pydevd_constants")  # Jupyter imports it without using it
    monkeypatch.setitem(sys.modules, pydevd.__name__, pydevd)
    pydevd.get_global_debugger = lambda: None  # type: ignore[attr-defined]
    assert can_compile_ahead(has_gpu=True)
    pydevd.get_global_debugger = lambda: pydevd  # type: ignore[attr-defined]
    assert not can_compile_ahead(has_gpu=True)


def test_other_process_imports_the_same_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry is the working directory, which may be another one later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "src", "/usr/lib"])
    assert import_path().split(os.pathsep) == [str(tmp_path), str(tmp_path / "src"), "/usr/lib"]


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", float("inf")), ("250000 100000", 2.5), ("?", float("inf"))]
)
def test_limit_of_a_container(
    text: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(processes, "Path", lambda path: tmp_path / Path(path).name)
    assert core_quota() == cores
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: range(16), raising=False)
    expected = [3, 1, 1] if cores == 2.5 else [16, 8, 1]  # a whole core for each process
    assert [usable_cores(count) for count in (1, 8, 100)] == expected


def test_run_uses_the_gpu_first(large_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU in exclusive mode admits one process, which must be the run."""
    calls: list[str] = []

    class Recorder(CompileProcess):
        def __init__(self) -> None:
            pass

        def close(self) -> None:  # type: ignore[override]
            pass

        def send(self, message: Any) -> None:
            calls.append(f"send {message}")

    monkeypatch.setattr(compile_process, "CompileProcess", Recorder)
    monkeypatch.setattr(torch, "empty", lambda _, device: calls.append(f"use {device}"))
    started().close()
    assert calls == ["use cuda", "send cuda"]


def test_process_leaves_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    def limit(fraction: float, device: torch.device | int | None = None) -> None:
        if device is not None:
            torch.cuda._utils._get_device_index(device)  # rejects "cuda" without a number
        found.append(fraction)

    monkeypatch.setattr(compile_network, "device_memory", lambda _: DeviceMemory(40, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    compile_network.limit_memory(CUDA)
    compile_network.limit_memory(torch.device("cuda:1"))
    assert found == [0.25, 0.25]


# A program without `if __name__ == "__main__"`.
UNGUARDED = """
import sys
print("executed", flush=True)
from compressive.platforms.compile_process import CompileProcess
process = CompileProcess()
print(process._process.pid, flush=True)
sys.stdin.read()
"""


def unguarded(tmp_path: Path) -> "subprocess.Popen[str]":
    path = tmp_path / "program.py"
    path.write_text(UNGUARDED)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(path)], env=env, **pipes)


def test_program_without_main_guard_runs_once(tmp_path: Path) -> None:
    with unguarded(tmp_path) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "executed\n"
        pid = int(program.stdout.readline())
        output, _ = program.communicate("")
    assert output == ""
    assert program.returncode == 0
    assert not is_running(pid)  # it ends with the program


@pytest.mark.slow
def test_process_ends_with_a_killed_run(tmp_path: Path) -> None:
    with unguarded(tmp_path) as program:
        assert program.stdout is not None
        program.stdout.readline()
        pid = int(program.stdout.readline())
        program.kill()
    wait_until(lambda: not is_running(pid), 120)


@pytest.mark.slow
def test_run_waits_between_tracing_and_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as inductor

    calls: list[str] = []

    def compile_fx(graph: Any, inputs: Any, **options: Any) -> Any:
        calls.append("compile")
        return graph.forward

    @torch.compiler.assume_constant_result
    def one() -> int:
        calls.append("trace")  # called while the graph is traced
        return 1

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    act = {name: lambda name=name: calls.append(name) for name in ("before", "after")}
    x = torch.zeros(2)
    with watch_compiler(**act):
        assert torch.equal(torch.compile(lambda x: x + one())(x), x + 1)
        assert torch.equal(torch.compile(lambda x: x * 2)(x), x * 2)  # not watched
    assert calls == ["trace", "before", "compile", "after", "compile"]
    assert inductor.compile_fx is compile_fx
    with pytest.raises(RuntimeError, match="no memory"), watch_compiler():
        raise RuntimeError("no memory")
    assert inductor.compile_fx is compile_fx
