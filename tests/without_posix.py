"""Run the program with the modules and attributes hidden that Windows does not have.

The argument is a JSON list of commands. Third-party packages are imported first, because they look
at sys.platform. `msvcrt` is replaced by a module of the same interface.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
OS_NAMES = (
    *("O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC", "pread", "pwrite", "posix_fadvise"),
    *("sysconf", "sched_getaffinity", "getloadavg", "getuid", "geteuid", "getgid", "getegid"),
    *("fork", "forkpty", "killpg", "getpgid", "getpgrp", "setsid", "setpgid", "nice", "uname"),
    *("mkfifo", "statvfs", "chown", "fchown", "lchown", "chroot", "sync", "getpriority"),
)
SIGNALS = ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGCHLD", "SIGQUIT")


def locking(descriptor: int, _mode: int, count: int) -> None:
    """Lock bytes as msvcrt.locking does; raise PermissionError if another process has them."""
    try:
        os.lockf(descriptor, os.F_TLOCK, count)
    except OSError:
        raise PermissionError(13, "Permission denied") from None


def hide_posix() -> None:
    # timm imports wandb if it is installed, whose temporary folder cannot be deleted then.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401
    import timm  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import torchvision  # noqa: F401

    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in OS_NAMES:
        if hasattr(os, name):
            delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    fake = types.ModuleType("msvcrt")
    fake.__dict__.update(LK_NBLCK=2, locking=locking)
    sys.modules["msvcrt"] = fake
    open_posix = os.open

    def open_windows(path, flags, *more, **options):  # type: ignore[no-untyped-def]
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return open_posix(path, flags, *more, **options)

    os.open = open_windows


def interrupt_when_saved(folder: Path) -> None:
    """Send Ctrl-C to this process when there is a checkpoint."""

    def wait() -> None:
        while not list(folder.glob("checkpoints/step_*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def main(commands: list[list[str]]) -> None:
    """Run commands in turn; interrupt the first one that begins with "interrupt" when it saves."""
    from compressive.cli.app import app

    for first, *words in commands:
        if first == "interrupt":
            interrupt_when_saved(Path(words[words.index("--out") + 1]))
        sys.argv = ["compressive", *(words if first == "interrupt" else [first, *words])]
        try:
            app()
        except SystemExit as end:
            print(f"exit code {end.code}", flush=True)


if __name__ == "__main__":
    hide_posix()
    assert "compressive" not in sys.modules
    assert not hasattr(subprocess, "CREATE_NEW_PROCESS_GROUP")
    main(json.loads(sys.argv[1]))
