"""Signals, child processes and cores on POSIX and Windows."""

import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SWITCHED_ON = ("1", "yes", "on", "true")
_SWITCHED_OFF = ("0", "no", "off", "false")
_DEBUGGER = "_pydevd_bundle.pydevd_constants"  # of PyCharm and VS Code


def stop_signals() -> list[int]:
    """Return the numbers of the signals that ask a run to save and stop."""
    # Windows has no SIGHUP; Ctrl-Break is the signal that another process can send there.
    found = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")]
    numbers = [number for number in found if number is not None]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_IGN:  # nohup ignores it
        numbers.remove(hangup)
    return numbers


def usable_cores(processes: int = 1) -> int:
    """Return the number of CPU cores for each of some processes on this machine."""
    every = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    # `allowed` is not divided: programs that bind processes to cores have already divided it.
    return max(1, min(allowed, math.ceil(min(every, core_quota()) / processes)))


def core_quota() -> float:
    """Return how many cores the limit of a container allows; infinity if there is none."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            return int(quota) / int(period)
    return math.inf


class GroupOptions(NamedTuple):
    """Options of Popen that give a process its own group."""

    process_group: int | None
    creationflags: int


def own_process_group() -> GroupOptions:
    """Return options of Popen, so that the terminal does not send Ctrl-C to the process."""
    flag = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", None)
    return GroupOptions(0, 0) if flag is None else GroupOptions(None, flag)


def interrupt(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process that has its own group to stop."""
    process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT))


def switch(variable: str) -> bool | None:
    """Return whether an environment variable is on or off; None if neither."""
    value = os.environ.get(variable, "").lower()
    return True if value in _SWITCHED_ON else False if value in _SWITCHED_OFF else None


def import_path() -> str:
    """Return the PYTHONPATH with which another process imports the same modules as this one."""
    return os.pathsep.join(map(os.path.abspath, sys.path))  # "" is the working directory


def is_plain_python() -> bool:
    """Return whether `sys.executable` is Python, and no debugger attaches to processes.

    In programs that embed Python or are packed into one file, it is the program itself.
    """
    is_python = Path(sys.executable or "").name.lower().startswith(("python", "pypy"))
    return is_python and not getattr(sys, "frozen", False) and not _is_debugged()


def _is_debugged() -> bool:
    """Return whether a debugger is active. Jupyter imports one without using it."""
    find = getattr(sys.modules.get(_DEBUGGER), "get_global_debugger", None)
    return sys.gettrace() is not None or (find is not None and find() is not None)
