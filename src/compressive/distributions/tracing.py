"""Compute tables once, with values, while torch traces or transforms the calling code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from compressive.checks import outside_func_transforms


def traced_as_constant(function: Callable) -> Callable:
    """Let torch.compile call this function while tracing and treat the result as a constant."""
    # torch.compiler.assume_constant_result does the same, but imports the compiler (6 seconds).
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@contextmanager
def without_tracing() -> Iterator[None]:
    """Compute with plain tensors, even inside torch.func, inference mode or torch.export."""
    # Otherwise a table could consist of tensors without values, and later calls would use it.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        outside_func_transforms(),
        _disable_current_modes(),
    ):
        yield
