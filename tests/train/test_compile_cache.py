"""The cache of compiled code: hits, damage, concurrent runs, and its limit."""

import atexit
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compressive.config import Config
from compressive.train import compile_cache
from compressive.train.compile_cache import (
    cache_name,
    open_compile_cache,
    record_compiled,
    start_compile_workers,
    use_compile_cache,
)
from compressive.train.step import view_maker

CPU = torch.device("cpu")


def filled(root: Path, name: str = "a", **files: bytes) -> Path:
    """Return the folder of a cache in which a finished run listed these files."""
    cache = open_compile_cache(root, name)
    assert cache is not None
    for file, content in files.items():
        (cache.folder / "aa").mkdir(exist_ok=True)
        (cache.folder / "aa" / file).write_bytes(content)
    cache.record()
    os.close(cache.lock)
    return cache.folder / "aa"


def reopen(root: Path, name: str = "a", **options: Any) -> None:
    cache = open_compile_cache(root, name, **options)
    assert cache is not None
    os.close(cache.lock)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


def test_listed_files_are_kept(tmp_path: Path) -> None:
    folder = filled(tmp_path, x=b"one", y=b"two")
    reopen(tmp_path)
    assert names(folder) == {"x", "y"}


@pytest.mark.parametrize("content", [b"onf", b"on", b"", None])
def test_damaged_file_empties_the_cache(content: bytes | None, tmp_path: Path) -> None:
    folder = filled(tmp_path, x=b"one", y=b"two")
    (folder / "x").write_bytes(content) if content is not None else (folder / "x").unlink()
    with pytest.warns(UserWarning, match=f"{folder.parent} is damaged") as found:
        reopen(tmp_path)
    assert len(found) == 1
    assert "\n" not in str(found[0].message)
    assert names(folder) == set()
    reopen(tmp_path)  # no warning


@pytest.mark.parametrize("text", ["{", "[1]", '{"aa/x": 3}', "\0"])
def test_damaged_list_empties_the_cache(text: str, tmp_path: Path) -> None:
    folder = filled(tmp_path, x=b"one")
    (folder.parent / "files.json").write_text(text)
    with pytest.warns(UserWarning, match="is damaged"):
        reopen(tmp_path)
    assert names(folder) == set()


def test_files_of_a_killed_run_are_deleted(tmp_path: Path) -> None:
    """Nobody knows whether they are complete."""
    folder = filled(tmp_path, x=b"one")
    (folder / "z").write_bytes(b"half")
    reopen(tmp_path)
    assert names(folder) == {"x"}


def test_cache_in_use_is_not_changed(tmp_path: Path) -> None:
    folder = filled(tmp_path, x=b"one")
    used = open_compile_cache(tmp_path, "a")
    assert used is not None
    (folder / "z").write_bytes(b"written now")
    (folder / "x").write_bytes(b"")
    reopen(tmp_path, limit=1)
    reopen(tmp_path, "b", limit=1)
    assert names(folder) == {"x", "z"}
    os.close(used.lock)


@pytest.mark.slow
def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    folder = filled(tmp_path, x=b"one")
    code = (
        "import sys, time; from pathlib import Path;"
        "from compressive.train.compile_cache import open_compile_cache;"
        "open_compile_cache(Path(sys.argv[1]), 'a'); print('open', flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        (folder / "z").write_bytes(b"written now")
        reopen(tmp_path)
        assert names(folder) == {"x", "z"}
        process.kill()
    reopen(tmp_path)
    assert names(folder) == {"x"}


def test_folders_that_were_unused_for_longest_are_deleted_first(tmp_path: Path) -> None:
    folders = {name: filled(tmp_path, name, x=bytes(1000)) for name in "abc"}
    for age, name in enumerate("cab"):
        os.utime(tmp_path / f"{name}.lock", (1e9 - age, 1e9 - age))
    reopen(tmp_path, "d", limit=2500)
    assert {name for name, folder in folders.items() if folder.exists()} == {"c", "a"}
    assert not (tmp_path / "b.lock").exists()
    reopen(tmp_path, "c", limit=500)
    assert names(folders["c"]) == set()  # above the limit alone


def test_name_depends_on_versions_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    name = cache_name(CPU)
    assert f"torch{torch.__version__}" in name
    assert not set(name) & set("/ :")
    monkeypatch.setattr(compile_cache, "device_name", lambda _: "NVIDIA H200")
    assert "NVIDIA_H200" in cache_name(CPU) != name
    monkeypatch.setattr(compile_cache, "package_version", lambda _: "99.1")
    assert cache_name(CPU).endswith("-99.1")


@pytest.mark.parametrize("value", ["off", "0", "NO"])
def test_cache_can_be_turned_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSIVE_COMPILE_CACHE", value)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert use_compile_cache(CPU) is None
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_folder_that_the_user_chose_for_torch_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESSIVE_COMPILE_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    assert use_compile_cache(CPU) is None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "theirs")
    assert not (tmp_path / "ours").exists()


def test_default_folder_of_torch_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torchvision sets the variable to a folder in /tmp."""
    utils = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setenv("COMPRESSIVE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", utils.default_cache_dir())
    monkeypatch.setattr(atexit, "register", lambda _: None)
    found = use_compile_cache(CPU)
    assert found is not None
    assert found == use_compile_cache(CPU)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / cache_name(CPU))
    (tmp_path / cache_name(CPU) / "new").write_bytes(b"code")
    record_compiled()
    assert "new" in json.loads((found.folder / "files.json").read_text())
    compile_cache._in_use.clear()
    compile_cache._opened.cache_clear()
    os.close(found.lock)


def test_unusable_folder_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPRESSIVE_COMPILE_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with pytest.warns(UserWarning, match="COMPRESSIVE_COMPILE_CACHE"):
        assert use_compile_cache(CPU) is None
    assert use_compile_cache(CPU) is None  # no second warning
    compile_cache._opened.cache_clear()


# Compile the C-SimCLR loss, which has our autograd functions, and print values and cache hits.
LOSSES = """
import json, sys
import torch
import torch._inductor.config
from torch.nn.functional import normalize
from compressive.objectives import csimclr_loss
from compressive.train.compile_cache import record_compiled, use_compile_cache

use_compile_cache(torch.device("cpu"))
torch._inductor.config.fallback_random = True  # the random numbers of eager code
x, y = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))

def values(kappa, compiled):
    def loss(x, y):
        x, y = normalize(x, dim=1), normalize(y, dim=1)
        return csimclr_loss(x, y, kappa_e=64.0, kappa_b=kappa, beta=0.5).loss
    torch.manual_seed(0)
    a = x.clone().requires_grad_()
    found = (torch.compile(loss, fullgraph=True) if compiled else loss)(a, y)
    found.backward()
    return [float(found), *a.grad.flatten().tolist()]

for kappa in map(float, sys.argv[1:]):
    found = torch._dynamo.utils.counters
    found.clear()
    torch._dynamo.reset()
    values_ = values(kappa, True)
    counts = {**found["aot_autograd"], **found["inductor"]}
    print("FOUND", json.dumps({"values": values_, "eager": values(kappa, False), **counts}))
record_compiled()
"""


def compiled_losses(cache: Path, *kappas: int) -> tuple[list[dict[str, Any]], str]:
    env = {**os.environ, "COMPRESSIVE_COMPILE_CACHE": str(cache)}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    words = [sys.executable, "-c", LOSSES, *map(str, kappas)]
    run = subprocess.run(words, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND")]
    return [json.loads(line.removeprefix("FOUND")) for line in lines], run.stderr


@pytest.mark.stress
def test_second_start_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    """Another kappa, a constant in our autograd functions, must not hit."""
    cache = tmp_path / "cache"
    (first,), _ = compiled_losses(cache, 10)
    (second, other), text = compiled_losses(cache, 10, 11)
    assert "damaged" not in text
    assert first["values"] == second["values"]
    assert first["fxgraph_cache_miss"] > 0
    assert "fxgraph_cache_miss" not in second
    if "autograd_cache_saved" in first:  # not in torch 2.6
        assert second["autograd_cache_hit"] == 1
        assert "autograd_cache_bypass" not in second
    for each in (first, other):
        assert each["values"] == pytest.approx(each["eager"], rel=1e-4, abs=1e-6)
    assert other["fxgraph_cache_miss"] > 0
    assert other["values"] != first["values"]
    # Damage the largest file of compiled code: it is compiled again.
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    large = max(folder.rglob("*.so"), key=lambda path: path.stat().st_size)
    large.write_bytes(large.read_bytes()[:-9])
    (again,), text = compiled_losses(cache, 10)
    assert again["values"] == first["values"]
    assert again["fxgraph_cache_miss"] > 0
    assert "is damaged; steps are compiled again" in text


def test_kernels_of_views_have_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton shortens the names of files, so that kernels with long names are built each time."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda _, **how: seen.append(how))
    view_maker(Config(), torch.float32, compiled=True)
    assert seen[0]["options"]["triton.descriptive_names"] == ""


def test_compile_workers_start_for_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = importlib.import_module("torch._inductor.async_compile")
    started: list[int] = []
    monkeypatch.setattr(pool, "maybe_warm_pool", lambda: started.append(1), raising=False)
    start_compile_workers(CPU)
    assert started == []
    start_compile_workers(torch.device("cuda"))
    assert started == [1]

    def fail() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(pool, "maybe_warm_pool", fail, raising=False)
    start_compile_workers(torch.device("cuda"))
