"""A persistent cache of compiled code, so that only the first run on a machine compiles its steps.

torch caches compiled graphs and kernels by their content, but in a temporary folder. Here they are
below the user's cache folder, one folder per version of torch, CUDA, Python and this package, and
per GPU. A lock tells which folders are in use, and a list of checksums finds damaged files.
"""

import atexit
import functools
import importlib
import json
import os
import platform
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compressive.platforms.accelerators import device_name
from compressive.rundir.compile_marks import CACHE_OFF, COMPILE_CACHE, default_root
from compressive.rundir.files import write_text
from compressive.rundir.folder import package_version

_TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_LIMIT = 4 * 10**9  # bytes of all folders; ResNet-18 needs about 10 MB
_FILE_LIST = "files.json"  # size and checksum of each file


class CompileCache(NamedTuple):
    """The folder of this machine and these versions, locked while the process lives."""

    folder: Path
    lock: int

    def record(self) -> None:
        """List the checksums of all files, so that damage is found at the next start."""
        with suppress(OSError):  # the cache is optional
            listed = {name: list(_checksum(path)) for name, path in _cached_files(self.folder)}
            write_text(self.folder / _FILE_LIST, json.dumps(listed))


def use_compile_cache(device: torch.device) -> CompileCache | None:
    """Let torch cache compiled code in the user's cache folder; return None if it does not.

    A folder that the user chose for torch is kept. Warn if the folder cannot be used.
    """
    _cache_custom_gradients()
    wanted = os.environ.get(COMPILE_CACHE, "")
    if wanted.lower() in CACHE_OFF or _is_chosen(os.environ.get(_TORCH_FOLDER)):
        return None
    root = Path(wanted or default_root()).expanduser().absolute()
    return _opened(root, cache_name(device))


def record_compiled() -> None:
    """List the files of the cache, if there is one; call it after something was compiled."""
    if _in_use:
        _in_use[-1].record()


def start_compile_workers(device: torch.device) -> None:
    """Start the processes that compile kernels for a GPU, while images are read.

    They import torch, which takes seconds. torch would start them after tracing the first graph,
    and compile its kernels one by one until they are ready.
    """
    if device.type != "cuda":
        return
    with suppress(Exception):  # if this fails, torch starts them later
        # Import it in this thread: another thread might see half-imported modules.
        pool: Any = importlib.import_module("torch._inductor.async_compile")
        getattr(pool, "maybe_warm_pool", lambda: None)()  # torch 2.6 starts them on import


def cache_name(device: torch.device) -> str:
    """Return the name of the folder: everything that compiled code depends on."""
    hip = getattr(torch.version, "hip", None)
    runtime = f"rocm{hip}" if hip else f"cuda{torch.version.cuda}"
    where = device_name(device) or f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    parts = [f"torch{torch.__version__}", runtime, where, f"python{platform.python_version()}"]
    return re.sub(r"[^\w.+-]+", "_", "-".join([*parts, package_version("compressive")]))


_in_use: list[CompileCache] = []


@functools.cache
def _opened(root: Path, name: str) -> CompileCache | None:
    """Open the cache once per process."""
    try:
        cache = open_compile_cache(root, name)
    except OSError as error:
        why = error.strerror or str(error)
        hint = f"set {COMPILE_CACHE} to another folder, or to off"
        warnings.warn(f"cannot cache compiled code in {root} ({why}); {hint}", stacklevel=3)
        return None
    if cache is not None:
        os.environ[_TORCH_FOLDER] = str(cache.folder)
        _in_use.append(cache)
        atexit.register(cache.record)
    return cache


def open_compile_cache(root: Path, name: str, *, limit: int = _LIMIT) -> CompileCache | None:
    """Lock and verify a folder of the cache, and delete others beyond the limit.

    Processes share the lock, so that none deletes what another one uses. Only the first process
    verifies. Return None on a system without such locks.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError:
        return None
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another run uses it, or verifies it now
            fcntl.flock(lock, fcntl.LOCK_SH)
        else:
            _clean(folder, limit)
            fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)  # marks the folder as used
        _delete_unused(root, name, limit, fcntl)
    except BaseException:
        os.close(lock)
        raise
    return CompileCache(folder, lock)


def _clean(folder: Path, limit: int) -> None:
    """Empty the folder if a listed file is damaged; delete files that a killed run left."""
    try:
        text = (folder / _FILE_LIST).read_text() if (folder / _FILE_LIST).exists() else "{}"
        listed: dict[str, list[int]] = dict(json.loads(text))
        present = dict(_cached_files(folder))
        is_sound = all(
            name in present and list(_checksum(present[name])) == value
            for name, value in listed.items()
        )
    except (ValueError, TypeError):
        listed, present, is_sound = {}, {}, False
    if not is_sound:
        warnings.warn(f"{folder} is damaged; steps are compiled again", stacklevel=5)
    if not is_sound or sum(size for size, _ in listed.values()) > limit:
        shutil.rmtree(folder)
        folder.mkdir()
        return
    for name, path in present.items():
        if name not in listed:
            path.unlink()


def _delete_unused(root: Path, name: str, limit: int, fcntl: Any) -> None:
    """Delete the folders that were unused for longest until the rest is within the limit."""
    places = sorted(root.glob("*.lock"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for place in places:
        folder = place.with_suffix("")
        with suppress(OSError):
            total += sum(path.stat().st_size for _, path in _cached_files(folder))
        if total <= limit or folder.name == name:
            continue
        with suppress(OSError):
            other = os.open(place, os.O_RDWR)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                place.unlink()
            finally:
                os.close(other)


def _cached_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield finished files by their relative names."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_other = name == _FILE_LIST or path.suffix in (".lock", ".tmp", ".partial")
        if not is_other and "tmp.pid_" not in name and path.is_file():
            yield name, path


def _checksum(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return len(content), zlib.crc32(content)


def _is_chosen(folder: str | None) -> bool:
    """Return whether the user chose the folder; torch sets its own default when it is imported."""
    if not folder or any(folder == str(cache.folder) for cache in _in_use):
        return False
    default: Any = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    return os.path.abspath(folder) != os.path.abspath(default.default_cache_dir())


def _cache_custom_gradients() -> None:
    """Let torch cache graphs with our autograd functions, whose code is part of the cache key."""
    # Without it the graph of the network is differentiated and partitioned at each start. torch 2.6
    # has no such setting and always does.
    config: Any = importlib.import_module("torch._functorch.config")
    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        config.autograd_cache_allow_custom_autograd_functions = True
