"""Batch buffers in memory that two processes share."""

import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from compressive.data.batch_buffers import BatchSlots, PinnedBuffer

_PAGE = 4096


def create_shared_file(size: int) -> int:
    """Return the descriptor of a file without a name; it ends with the processes that have it."""
    # Containers often limit /dev/shm to 64 MB; memfd_create does not use it.
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("compressive-batch")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def shared_bytes(size: int, side: int) -> int:
    """Return the bytes of a `SharedBuffer`."""
    return _start_of_images(size) + size * 3 * side**2


def _start_of_images(size: int) -> int:
    return -(-size * (8 + 40) // _PAGE) * _PAGE


class SharedBuffer(PinnedBuffer):
    """A buffer in a shared file; pinned in this process if its device is a GPU."""

    def __init__(
        self,
        size: int,
        side: int,
        descriptor: int,
        *,
        number: int = 0,
        pinned: bool = False,
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
        self._pin = whole if pinned else None
        if pinned:
            runtime: Any = torch.cuda.cudart()
            code = runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
            if int(code) != 0:
                with suppress(RuntimeError):  # torch would raise this error at its next kernel
                    torch.zeros(1, device="cuda")
                raise OSError(f"CUDA cannot pin {whole.numel():,} bytes: error {int(code)}")

    def _new_numbers(self) -> Int64[Tensor, "5 batch"]:
        return self._numbers[: 5 * self.size].view(5, self.size)

    def close(self) -> None:
        """Wait for the last copy, and give the memory back when nothing uses it."""
        if self._on_close is None:
            return
        self._on_close()
        self._on_close = None
        if self._pin is not None:
            if self.copied is not None:
                self.copied.synchronize()
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._pin.data_ptr())
