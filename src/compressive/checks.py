"""Checks of arguments: shapes, dtypes, devices and numbers always, values of tensors on the CPU.

On a GPU a look at values would make the host wait in every training step.
`torch.autograd.set_detect_anomaly(True)` turns it on there. `skip_value_checks` turns it off on the
CPU: a run that diverges must be judged by its readings there as well.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)

_skips_checks = ContextVar("unseen", default=False)


def validates_inputs(function: F) -> F:
    """Mark a function that checks its arguments itself, so that tests leave out the shape check."""
    function.__dict__["__no_type_check__"] = True
    return function


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A network in bfloat16, if that is the precision."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Keep autocast out: what is computed inside runs in the dtype of its inputs."""
    with torch.autocast(like.device.type, enabled=False):
        yield


@contextmanager
def skip_value_checks() -> Iterator[None]:
    """Let values pass without a look, NaN too, as they do on a GPU."""
    token = _skips_checks.set(True)
    try:
        yield
    finally:
        _skips_checks.reset(token)


@validates_inputs
def promote_to_float32(name: str, tensor: Tensor) -> Tensor:
    """Float32 or float64; narrower floats are widened, anything else is refused."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {kind}")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@validates_inputs
def check_same_shape_2d(**named: Tensor) -> list[Tensor]:
    """Matrices of one shape on one device, a vector with a direction per image, in one dtype."""
    first, model = next(iter(named.items()))
    dtype = torch.float32
    for name, tensor in named.items():
        dtype = torch.promote_types(dtype, promote_to_float32(name, tensor).dtype)
        if tensor.dim() != 2 or len(tensor) == 0 or tensor.shape[1] < 2:
            needed = "shape (batch, dim) with batch >= 1 and dim >= 2"
            raise ValueError(f"{name} must have {needed}, got {tuple(tensor.shape)}")
        if tensor.shape != model.shape:
            needed = f"the shape of {first}, {tuple(model.shape)}"
            raise ValueError(f"{name} must have {needed}, got {tuple(tensor.shape)}")
        check_same_device(first, model, name, tensor)
        if should_check_values(tensor):
            _require_directions(name, tensor)
    return [tensor.to(dtype) for tensor in named.values()]


def check_unit_rows(first: str, model: Tensor, name: str, rows: Tensor) -> Tensor:
    """A matrix of unit vectors that belongs to another, in that one's dtype."""
    _, rows = check_same_shape_2d(**{first: model, name: rows})
    if should_check_values(rows):
        norm = torch.linalg.vector_norm(rows.detach(), dim=-1)
        worst = norm[(norm - 1).abs().argmax()].item()
        if abs(worst - 1) > 1e-4:
            got = f"one of length {worst:.6g}; use torch.nn.functional.normalize({name}, dim=-1)"
            raise ValueError(f"{name} must hold unit vectors, got {got}")
    return rows.to(model.dtype)


def check_same_device(first: str, model: Tensor, name: str, tensor: Tensor) -> None:
    """Two tensors that are to meet."""
    if tensor.device != model.device:
        where = f"on the device of {first}, {model.device}"
        raise ValueError(f"{name} must be {where}, got {tensor.device}")


def check_nonnegative(**named: float | Tensor) -> None:
    """Finite numbers of 0 or more."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            raise ValueError(f"{name} must be a number here, got a tensor")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of 0 or more, got {value}")


def check_beta(beta: float | Tensor, *, images: int | None = None) -> None:
    """Check that beta is a number or a 0-dim tensor, which a schedule fills on the device.

    If `images` is given, a tensor of that length is also valid: one beta per image.
    """
    if not isinstance(beta, Tensor):
        check_nonnegative(beta=beta)
    elif beta.dim() and beta.shape != (images,):
        each = "" if images is None else f", or one for each of {images} images"
        raise ValueError(
            f"beta must be one number{each}, got a tensor of shape {tuple(beta.shape)}"
        )


def check_positive(**named: float | Tensor) -> None:
    """Finite numbers above 0."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            raise ValueError(f"{name} must be a number here, got a tensor")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}")


def check_one_of(choices: tuple[str, ...], **named: str) -> None:
    """A word from a list."""
    for name, value in named.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def should_check_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor are checked."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_anomaly_enabled() or (tensor.device.type == "cpu" and not _skips_checks.get())


def _require_directions(name: str, tensor: Tensor) -> None:
    """Lengths that can be divided by: not 0, not NaN, not beyond the dtype when squared."""
    length = torch.linalg.vector_norm(tensor.detach(), dim=-1)
    good = length.isfinite() & (length >= 1e-12)  # below, torch's normalize divides by 1e-12
    if not good.all():
        row = int((~good).nonzero()[0])
        got = f"length {length[row].item():.6g} in row {row}"
        raise ValueError(f"{name} must hold vectors of finite length, 1e-12 or more, got {got}")
