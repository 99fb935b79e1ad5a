"""What comes in at the door: checked, on one device, in float32 or wider.

Shapes, dtypes, devices and numbers are always checked. Values are looked at on the CPU only: on
a GPU each look would make the host wait, in every training step. torch's own switch
`torch.autograd.set_detect_anomaly(True)` turns the looks on there too.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)


def door(function: F) -> F:
    """Mark a function that refuses bad arguments itself, with a ValueError that says how.

    Tests check every annotated shape at run time; here that check would come first.
    """
    function.__dict__["__no_type_check__"] = True
    return function


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Keep autocast out: what is computed inside runs in the dtype of its inputs."""
    with torch.autocast(like.device.type, enabled=False):
        yield


def wide(name: str, tensor: Tensor) -> Tensor:
    """Float32 or float64; narrower floats are widened, anything else is refused."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def matrices(**named: Tensor) -> list[Tensor]:
    """Matrices of one shape on one device, one vector with a direction per image."""
    first, model = next(iter(named.items()))
    for name, tensor in named.items():
        if tensor.dim() != 2 or len(tensor) == 0 or tensor.shape[1] < 2:
            raise ValueError(
                f"{name} must have shape (batch, dim) with batch >= 1 and dim >= 2, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.shape != model.shape:
            raise ValueError(
                f"{name} must have the shape of {first}, {tuple(model.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.device != model.device:
            raise ValueError(
                f"{name} must be on the device of {first}, {model.device}, got {tensor.device}"
            )
        if _looks_at(tensor):
            _require_directions(name, tensor)
    return [wide(name, tensor) for name, tensor in named.items()]


def unit_rows(like: Tensor, **named: Tensor) -> Tensor:
    """A matrix of unit vectors, one for each row of `like`."""
    ((name, rows),) = named.items()
    _, rows = matrices(mu=like, **named)
    if _looks_at(rows):
        norm = torch.linalg.vector_norm(rows.detach(), dim=-1)
        worst = norm[(norm - 1).abs().argmax()].item()
        if abs(worst - 1) > 1e-4:
            raise ValueError(
                f"{name} must hold unit vectors, got one of length {worst:.6g}; "
                f"use torch.nn.functional.normalize({name}, dim=-1)"
            )
    return rows


def nonnegative(**named: float | Tensor) -> None:
    """Finite numbers of 0 or more; tensors pass, their values are on the device."""
    for name, value in named.items():
        if not isinstance(value, Tensor) and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of 0 or more, got {value}")


def positive(**named: float) -> None:
    """Finite numbers above 0."""
    for name, value in named.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}")


def one_of(choices: tuple[str, ...], **named: str) -> None:
    """A word from a list."""
    for name, value in named.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _looks_at(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" or torch.is_anomaly_enabled()


def _require_directions(name: str, tensor: Tensor) -> None:
    norm = torch.linalg.vector_norm(tensor.detach().float(), dim=-1)
    if not norm.isfinite().all():
        row = int((~norm.isfinite()).nonzero()[0])
        raise ValueError(f"{name} must be finite, got NaN or infinity in row {row}")
    if (norm == 0).any():
        row = int((norm == 0).nonzero()[0])
        raise ValueError(f"{name} must hold no zero vector, which has no direction, got row {row}")
