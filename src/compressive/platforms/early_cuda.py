"""Start CUDA in a thread while Python imports modules: both take a second."""

import re
import threading
from contextlib import suppress

import torch

from compressive.platforms.compile_process import has_several_processes, may_have_gpu


def start_cuda(device: str) -> threading.Thread | None:
    """Create the CUDA context of a device, "auto" for the first one; return the thread.

    Do nothing if there is no GPU or if each of several processes has its own. Errors are reported
    by the first use of the device.
    """
    found = re.fullmatch(r"auto|cuda(:\d+)?", device)
    if found is None or has_several_processes() or not may_have_gpu():
        return None
    thread = threading.Thread(target=_create_context, args=(f"cuda{found[1] or ''}",))
    thread.start()
    return thread


def _create_context(device: str) -> None:
    with suppress(RuntimeError, AssertionError):
        torch.empty(1, device=device)  # Python's lock is free meanwhile
