"""The process that compiles the network: when it starts, how it ends, and that values are equal."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from processes import is_running
from tiny import tiny

from compressive.config import Config
from compressive.methods import build
from compressive.platforms import compile_process
from compressive.platforms.compile_process import CompileProcess, start_early
from compressive.rundir.compile_marks import may_need_compiling
from compressive.train import compile_ahead as module
from compressive.train.compile_ahead import CompiledAhead, compile_ahead, prepare_compiler
from compressive.train.compile_cache import CompileCache

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Process:
    """Stands for a process."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.is_closed = False

    def send(self, message: Any) -> None:
        self.jobs.append(message)

    def finish(self, seconds: float) -> bool:
        self.is_closed = seconds > 0
        return False

    def close(self) -> None:
        self.is_closed = True


def program(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Python that is started by a shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Process]:
    """Return the processes that were started; the cache is an empty folder on a large machine."""
    found: list[Process] = []

    def start() -> Process:
        found.append(Process())
        return found[-1]

    monkeypatch.setattr(compile_process, "CompileProcess", start)
    monkeypatch.setattr(module, "use_compile_cache", lambda _: CompileCache(tmp_path, 0))
    monkeypatch.setattr(compile_process, "usable_cores", lambda: 16)
    monkeypatch.setattr(compile_process, "core_quota", lambda: 16.0)
    monkeypatch.setattr(compile_process, "free_host_memory", lambda: 10**11)
    monkeypatch.setattr(compile_process, "may_have_gpu", lambda: True)
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # else no test passes in a debugger
    monkeypatch.setenv("COMPRESSIVE_COMPILE_AHEAD", "auto")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return found


def test_process_starts_for_gpus_once_for_each_network(started: list[Process]) -> None:
    found = compile_ahead(tiny(), CUDA, build)
    assert found is not None
    found.send(tiny(), CUDA, torch.bfloat16, 12)
    assert started[0].jobs[0]["dtype"] == "bfloat16"
    assert started[0].jobs[0]["classes"] == 12
    found.finish()  # even if the process fails
    assert started[0].is_closed
    assert compile_ahead(tiny(), CUDA, build) is None
    assert compile_ahead(tiny("seed=3", "optim.lr=0.5"), CUDA, build) is None  # the same code
    for change in ("train.batch_size=16", "views.size=24", "network.hidden_dim=24"):
        assert compile_ahead(tiny(change), CUDA, build) is not None


def test_process_does_not_start_where_it_is_of_no_use(
    started: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_ahead(tiny(), CPU, build) is None
    assert compile_ahead(tiny("train.compile=yes"), CPU, build) is None
    assert compile_ahead(tiny("train.compile=no"), CUDA, build) is None
    assert compile_ahead(tiny(), CUDA, lambda config: build(config)) is None
    for place, name, value in (
        (module, "world_size", 2),
        (compile_process, "usable_cores", 3),
        (compile_process, "core_quota", 2.5),
        (compile_process, "free_host_memory", 10**9),
        (module, "_locked", None),
        (module, "use_compile_cache", None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *_, value=value: value)
            assert compile_ahead(tiny(), CUDA, build) is None
    ahead = "COMPRESSIVE_COMPILE_AHEAD"
    for variable, text in ((ahead, "off"), (ahead, "false"), ("WORLD_SIZE", "2")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            assert compile_ahead(tiny(), CUDA, build) is None
            start_early()
    assert started == []
    monkeypatch.delenv(ahead)  # on by default
    assert compile_ahead(tiny(), CUDA, build) is not None
    monkeypatch.setenv("COMPRESSIVE_COMPILE_AHEAD", "yes")
    assert compile_ahead(tiny("train.compile=yes"), CPU, build) is not None


def test_early_process_is_used_or_ended(started: list[Process]) -> None:
    start_early()
    start_early()
    assert len(started) == 1
    found = compile_ahead(tiny(), CUDA, build)
    assert found is not None
    assert found.process is started[0]
    start_early()
    assert compile_ahead(tiny("train.compile=no"), CUDA, build) is None
    assert [each.is_closed for each in started] == [False, True]


def test_marks_are_found_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSIVE_COMPILE_CACHE", str(tmp_path))
    config, other = tiny("train.device=auto"), tiny("train.device=auto", "views.size=24")
    assert may_need_compiling(config, is_complete=True)
    assert may_need_compiling(config, is_complete=False)
    assert not may_need_compiling(tiny("train.device=cpu"), is_complete=True)
    assert not may_need_compiling(tiny("train.device=cuda", "train.compile=no"), is_complete=True)
    (tmp_path / "torch9").mkdir()
    mark = tmp_path / "torch9" / module.mark_name(config)
    CompiledAhead(Process(), mark, os.open(tmp_path, os.O_RDONLY)).finish()  # type: ignore[arg-type]
    assert not may_need_compiling(config, is_complete=True)
    assert not may_need_compiling(Config(), is_complete=False)
    assert may_need_compiling(other, is_complete=True)
    fused = tiny("train.device=auto", "train.fused_norm=auto")
    assert may_need_compiling(fused, is_complete=True)
    monkeypatch.setenv("COMPRESSIVE_COMPILE_CACHE", "off")
    assert not may_need_compiling(other, is_complete=True)


def test_no_home_directory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("COMPRESSIVE_COMPILE_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert not may_need_compiling(tiny("train.device=auto"), is_complete=True)


def test_process_that_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "python", "echo no memory >&2; exit 3", monkeypatch)
    process = CompileProcess()
    process._process.wait(10)
    process.send({"settings": "x" * 10**6})
    assert not process.finish(10)
    assert process.exit_code == 3
    assert process.messages == ["no memory"]


def test_process_that_succeeds_has_read_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "python", f'read line; echo "$line" > {tmp_path}/job', monkeypatch)
    process = CompileProcess()
    process.send({"classes": 3})
    assert process.finish(10)
    assert json.loads((tmp_path / "job").read_text()) == {"classes": 3}


def test_process_ends_with_its_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "python", "exec sleep 60", monkeypatch)
    process = CompileProcess()
    pid = process._process.pid
    assert is_running(pid)
    del process
    gc.collect()
    assert not is_running(pid)


@pytest.mark.slow
def test_process_rejects_an_incomplete_job() -> None:
    process = CompileProcess()
    process.send("cpu")
    process.send({"settings": {}})
    assert not process.finish(120)
    assert process.exit_code == 1
    assert "missing 3 required" in process.messages[-1]


@pytest.mark.slow
def test_preparing_the_compiler_draws_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    prepare_compiler(CPU)
    assert "torch._inductor.compile_fx" in sys.modules
    assert torch.equal(torch.get_rng_state(), before)


# Make two steps on the CPU; print a checksum of all weights, and the hits of torch's caches.
STEPS = """
import json, sys, zlib
from pathlib import Path
from tiny import silent, tiny
import torch._dynamo.utils as dynamo
from compressive.train import compile_ahead
from compressive.train.loop import train_step
from compressive.train.run import Run

compile_ahead._LEAST_WAIT = 3600.0  # a busy machine may need long
small = ("views.policy=crop", "views.blur=false", "network.hidden_dim=8", "train.compile=yes")
config = tiny("data.source=builtin", "data.limit=32", "method=c-simclr", "train.steps=3", *small)
run = Run(config, Path(sys.argv[1]), silent(), resume=False)
run.restore()
started = run.ahead is not None
batches = run.batches()
losses = [float(train_step(run, batches).loss) for _ in range(2)]
weights = zlib.crc32(b"".join(v.numpy().tobytes() for v in run.learner.state_dict().values()))
run.close()
counts = {**dynamo.counters["aot_autograd"], **dynamo.counters["inductor"]}
compiled = len(dynamo.compilation_time_metrics["_compile.compile_inner"])
found = {"losses": losses, "weights": weights, "started": started, "compiled": compiled, **counts}
print("FOUND", json.dumps(found))
"""


def printed(program: str, *words: str, cache: Path, ahead: str = "no") -> dict[str, Any]:
    """Return what a program prints after FOUND."""
    tests = str(Path(__file__).parent.parent)
    env = {**os.environ, "COMPRESSIVE_COMPILE_CACHE": str(cache)}
    env |= {"COMPRESSIVE_COMPILE_AHEAD": ahead, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([tests, *filter(None, sys.path)])
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    run = subprocess.run(
        [sys.executable, "-c", program, *words], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(line.removeprefix("FOUND"))


def two_steps(out: Path, cache: Path, ahead: str) -> dict[str, Any]:
    return printed(STEPS, str(out), cache=cache, ahead=ahead)


@pytest.mark.stress
def test_code_of_the_process_is_found_and_computes_the_same(tmp_path: Path) -> None:
    ahead = two_steps(tmp_path / "a", tmp_path / "cache-a", "yes")
    plain = two_steps(tmp_path / "b", tmp_path / "cache-b", "no")
    again = two_steps(tmp_path / "c", tmp_path / "cache-a", "yes")
    assert ahead["started"]
    assert not plain["started"]
    assert not again["started"]  # everything is in the cache
    for each in (ahead, again):
        assert each["losses"] == plain["losses"]
        assert each["weights"] == plain["weights"]
        assert each["compiled"] == plain["compiled"] == 2  # views, network; no recompilation
    assert plain["fxgraph_cache_miss"] == 3  # views, forward and backward pass
    assert ahead["fxgraph_cache_miss"] == 1  # the views
    assert ahead["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in again


# Print the key of the network in the compile cache: of a run, and of the process that compiles.
KEYS = """
import json, sys, tempfile
from pathlib import Path
from tiny import silent, tiny
import torch
import torch._functorch._aot_autograd.autograd_cache as cache
from compressive.device import precision
from compressive.train.compile_cache import use_compile_cache
from compressive.train.compile_network import compile_network
from compressive.train.loop import train_step
from compressive.train.run import Run

class Found(BaseException):
    pass

def stop(*given, **options):
    raise Found(key(*given, **options)[0])

def compiled(function, **options):
    if "mode" in options:
        return compile(function, **options)
    made = compile(function, backend="aot_eager", dynamic=False)  # views: compiling takes long
    def make(*given):
        cache.autograd_cache_key = key
        views = made(*given)
        cache.autograd_cache_key = stop
        return views
    return make

key, compile, torch.compile = cache.autograd_cache_key, torch.compile, compiled
cpu, keys = torch.device("cpu"), {}
use_compile_cache(cpu)
for line in sys.argv[1:]:
    config = tiny("train.compile=yes", *line.split())
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder) / "run", silent(), resume=False)
        run.restore()
        classes = 0 if run.labels is None else 5
        dtype = precision(config.train.precision, cpu)
        batches, keys[line] = run.batches(), []
        steps = (train_step, run, batches), (compile_network, config, cpu, dtype, classes)
        for step, *given in steps:
            torch._dynamo.reset()
            try:
                step(*given)
            except Found as found:
                keys[line].append(str(found))
        batches.close()
        run.close()
print("FOUND", json.dumps(keys))
"""


@pytest.mark.stress
@pytest.mark.skipif(
    not hasattr(functorch_config, "autograd_cache_allow_custom_autograd_functions"),
    reason="torch 2.6 does not cache graphs with custom gradients",
)
def test_process_compiles_the_network_of_the_run(tmp_path: Path) -> None:
    """Layout, precision and gradients are parts of the key by which the run finds the code."""
    lines = ["method=c-simclr data.labels=none", "method=c-byol train.precision=bf16"]
    lines += ["method=c-byol train.grad_accum_steps=2", "method=vicreg network.projection_dim=12"]
    keys = printed(KEYS, *lines, cache=tmp_path / "cache")
    assert list(keys) == lines
    assert len({run for run, _ in keys.values()}) == len(lines)
    for line, (run, process) in keys.items():
        assert run == process, line
