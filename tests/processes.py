"""Several processes for a test, forked from one that has torch and compressive imported already.

`torch.multiprocessing.spawn` imports them anew in each process, seconds of a core every time.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def together(worker: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """Call worker(rank, *arguments) in every process; fail where one fails."""
    multiprocessing.set_forkserver_preload(["torch.distributed", "timm", "compressive.run"])
    mp.start_processes(worker, arguments, nprocs=processes, start_method="forkserver")
