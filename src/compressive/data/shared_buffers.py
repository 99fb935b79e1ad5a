"""Batch buffers in memory that two processes share."""

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from compressive.data.batch_buffers import BatchSlots, PinnedBuffer

_PAGE = 4096
_CLOSE_ON_EXEC = 1


def create_shared_file(size: int) -> int:
    """Return the descriptor of a file without a name; it ends with the processes that have it."""
    # Containers often limit /dev/shm to 64 MB; memfd_create does not use it. It is called in libc,
    # because many Python programs that uv and conda install have no os.memfd_create.
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.memfd_create(b"compressive-batch", _CLOSE_ON_EXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "cannot create a shared file")
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def shared_bytes(size: int, side: int) -> int:
    """Return the bytes of a `SharedBuffer`."""
    return _start_of_images(size) + size * 3 * side**2


def _start_of_images(size: int) -> int:
    return -(-size * (8 + 40) // _PAGE) * _PAGE


class SharedBuffer(PinnedBuffer):
    """A buffer in a shared file; pinned in this process if it is copied to a GPU."""

    def __init__(
        self,
        size: int,
        side: int,
        descriptor: int,
        *,
        number: int = 0,
        device: torch.device | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        BatchSlots.__init__(self)
        self.number: int = number  # its name in messages
        self._on_close: Callable[[], object] | None = on_close
        whole = torch.frombuffer(mmap.mmap(descriptor, shared_bytes(size, side)), dtype=torch.uint8)
        # Height and width of each slot, then the numbers of a batch, then images.
        used, numbers, _ = whole[: _start_of_images(size)].tensor_split((8 * size, 48 * size))
        self._numbers = numbers.view(torch.int64)
        images = whole[_start_of_images(size) :].view(size, 3, side, side)
        self._hold(images, used.view(torch.int32).view(size, 2).numpy())
        self._whole, self._gpu = whole, device if device and device.type == "cuda" else None
        if self._gpu is not None:
            self._pin(self._gpu)

    def _pin(self, gpu: torch.device) -> None:
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(gpu):  # not on the first GPU, where it would take memory
            code = int(runtime.cudaHostRegister(self._whole.data_ptr(), self._whole.numel(), 0))
            if code != 0:
                with suppress(RuntimeError):  # torch would raise this error at its next kernel
                    torch.zeros(1, device=gpu)
                raise OSError(f"CUDA cannot pin {self._whole.numel():,} bytes: error {code}")

    def _new_numbers(self) -> Int64[Tensor, "5 batch"]:
        return self._numbers[: 5 * self.size].view(5, self.size)

    def close(self) -> None:
        """Wait for the last copy, and give the memory back when nothing uses it."""
        if self._on_close is None:
            return
        self._on_close()
        self._on_close = None
        if self._gpu is None:
            return
        with suppress(RuntimeError):  # of a kernel; the run has reported it
            if self.copied is not None:
                self.copied.synchronize()
            runtime: Any = torch.cuda.cudart()
            with torch.cuda.device(self._gpu):
                runtime.cudaHostUnregister(self._whole.data_ptr())
