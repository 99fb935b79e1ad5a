"""Memory of the machine on Linux, macOS and Windows, without further packages."""

import ctypes
import os
import sys
from pathlib import Path


def total_host_memory() -> int:
    """Return the bytes of memory of the machine; 0 if they are not known."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _windows_memory()[0]


def free_host_memory() -> int:
    """Return the free bytes of the machine, within a container's limit."""
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not meminfo.exists():
        # macOS frees cached memory on demand: assume that half of the memory can be used.
        return total_host_memory() // 2 if hasattr(os, "sysconf") else _windows_memory()[1]
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    words = limit.read_text().strip() if limit.exists() else "max"
    if words == "max":
        return free
    # The page cache counts as used there, but is freed on demand.
    of = dict(line.split() for line in limit.with_name("memory.stat").read_text().splitlines())
    used = int(limit.with_name("memory.current").read_text()) - int(of["inactive_file"])
    return min(free, max(0, int(words) - used))


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        *((f"other_{i}", ctypes.c_uint64) for i in range(5)),
    )


def _windows_memory() -> tuple[int, int]:
    """Return total and free bytes, or zeros if Windows does not answer."""
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if sys.platform != "win32" or not ctypes.windll.kernel32.GlobalMemoryStatusEx(
        ctypes.byref(status)
    ):
        return 0, 0
    return status.total, status.free
