"""Start several processes for a test, forked from one that has imported torch and compressive.

`torch.multiprocessing.spawn` would import them again in each process, which takes seconds.
"""

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

# What most files of tests import, which each process would import otherwise (0.5 s).
# Not timm by itself: it would import wandb (3 s), which compressive avoids.
PRELOADED = ["torch.distributed", "compressive.train.run", "compressive.evaluation.suite"]
PRELOADED += ["compressive.cli.app", "pytest", "hypothesis", "tiny"]
PRELOADED += ["torch._dynamo"]  # optimizers import it (2 s)


def together(worker: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """Call worker(rank, *arguments) in every process; fail if one fails."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(worker, arguments, nprocs=processes, start_method="forkserver")


def printed(code: str, *words: str, name: str = "script") -> str:
    """Return the output of a program in a process without shape checks, which cannot be traced.

    This is equivalent to `python -W error -c code words` without its seconds of imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "printed"
        together(_run, (code, words, name, str(path)), 1)
        return path.read_text()


def _run(_: int, code: str, words: tuple[str, ...], name: str, path: str) -> None:
    warnings.simplefilter("error")
    # torch 2.11 warns about its own code when tracing
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    sys.argv = [name, *words]
    with open(path, "w") as file, redirect_stdout(file):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text() if Path("/proc").exists() else ""
        os.kill(pid, 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return ") Z " not in stat  # ended, but init has not noticed it yet
