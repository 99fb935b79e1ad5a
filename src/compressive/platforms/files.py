"""File operations that differ between operating systems: locks, replacement, reads at an offset."""

import importlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# Seconds between attempts to replace a file on Windows, where a virus scanner or another reader
# may have it open for a moment. Elsewhere open files can be replaced.
_REPLACE_WAITS = (0.05, 0.1, 0.2, 0.5, 1.0) if os.name == "nt" else ()
_seek_lock = threading.Lock()


def lock_folder(folder: Path, name: str) -> int:
    """Lock a folder until the returned descriptor is closed; raise BlockingIOError if it is locked.

    POSIX locks the folder itself. Windows cannot open folders and locks a file `name` in it. Some
    network file systems have no locks; there nothing is locked.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError:
        return _lock_file(folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor


def _lock_file(path: Path) -> int:
    msvcrt: Any = importlib.import_module("msvcrt")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except PermissionError:
        os.close(descriptor)
        raise BlockingIOError(f"{path} is locked") from None
    except OSError:
        pass
    return descriptor


def replace_file(source: Path, target: Path) -> None:
    """Rename a file, replacing the target; on Windows wait until nobody has the target open."""
    for wait in _REPLACE_WAITS:
        try:
            source.replace(target)
            return
        except PermissionError:
            time.sleep(wait)
    source.replace(target)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the operating system can (not on Windows)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_without_waiting(path: str) -> int:
    """Open a file for reading; a pipe opens at once instead of waiting for a writer."""
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_BINARY"):  # of POSIX and of Windows
        flags |= getattr(os, name, 0)
    return os.open(path, flags)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return up to `size` bytes from a position; threads may share the descriptor."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _seek_lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)
