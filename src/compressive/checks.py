"""Argument checks.

Shapes, dtypes, devices and numbers are always checked. Values of tensors are checked on the CPU
only: on a GPU the host would have to wait in every training step.
`torch.autograd.set_detect_anomaly(True)` turns value checks on for a GPU too. `skip_value_checks`
turns them off on the CPU, so that the health checks handle a run that diverges.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Function

F = TypeVar("F", bound=Callable)

_skips_checks = ContextVar("unseen", default=False)


def validates_inputs(function: F) -> F:
    """Mark a function that checks its arguments itself, so that tests skip the shape check."""
    function.__dict__["__no_type_check__"] = True
    return function


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return a context that runs a network in `dtype`; float32 disables autocast."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Disable autocast, so that operations run in the dtype of their inputs."""
    with torch.autocast(like.device.type, enabled=False):
        yield


@contextmanager
def skip_value_checks() -> Iterator[None]:
    """Skip value checks, also for NaN, as on a GPU."""
    token = _skips_checks.set(True)
    try:
        yield
    finally:
        _skips_checks.reset(token)


@validates_inputs
def promote_to_float32(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or float64 if it is; raise ValueError if it is no float."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {kind}")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@validates_inputs
def check_same_shape_2d(**named: Tensor) -> list[Tensor]:
    """Return 2-d tensors in a common dtype; raise ValueError unless shapes and devices agree.

    Every row must have a direction.
    """
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
    """Return `rows` in the dtype of `model`; raise ValueError unless they are unit vectors."""
    _, rows = check_same_shape_2d(**{first: model, name: rows})
    if should_check_values(rows):
        norm = torch.linalg.vector_norm(rows.detach(), dim=-1)
        worst = norm[(norm - 1).abs().argmax()].item()
        if abs(worst - 1) > 1e-4:
            got = f"one of length {worst:.6g}; use torch.nn.functional.normalize({name}, dim=-1)"
            raise ValueError(f"{name} must hold unit vectors, got {got}")
    return rows.to(model.dtype)


def check_same_device(first: str, model: Tensor, name: str, tensor: Tensor) -> None:
    """Raise ValueError if two tensors are on different devices."""
    if tensor.device != model.device:
        where = f"on the device of {first}, {model.device}"
        raise ValueError(f"{name} must be {where}, got {tensor.device}")


def check_nonnegative(**named: float | Tensor) -> None:
    """Raise ValueError unless all numbers are finite and 0 or more."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            raise ValueError(f"{name} must be a number here, got a tensor")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of 0 or more, got {value}")


def check_beta(beta: float | Tensor, *, images: int | None = None) -> None:
    """Raise ValueError unless beta is a number of 0 or more or a 0-dim tensor.

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
    """Raise ValueError unless all numbers are finite and above 0."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            raise ValueError(f"{name} must be a number here, got a tensor")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}")


def check_one_of(choices: tuple[str, ...], **named: str) -> None:
    """Raise ValueError unless every value is one of the choices."""
    for name, value in named.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def in_func_transform() -> bool:
    """Return whether this is called inside of torch.func.grad, vmap or another transform."""
    return _functorch.maybe_current_level() is not None


@contextmanager
def outside_func_transforms() -> Iterator[None]:
    """Compute with plain tensors, also inside of torch.func.grad, vmap or another transform."""
    with torch._C._DisableFuncTorch():
        yield


def differentiable_once(gradient: Tensor, name: str) -> Tensor:
    """Return a gradient from a backward pass; a second derivative through it raises an error.

    `name` is what was differentiated, in the plural, for the message.
    """
    if torch.compiler.is_compiling():
        return gradient
    result = _Once.apply(gradient, name)
    assert isinstance(result, Tensor)
    return result


class _Once(Function):
    """The identity; its own derivative is an error."""

    # torch's once_differentiable does not work with torch.func: second derivatives would be 0.

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name} are differentiable once, not twice")


def can_check_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are known: not while compiling, not inside of vmap."""
    return not torch.compiler.is_compiling() and not _is_batched(tensor)


def should_check_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are checked."""
    if not can_check_values(tensor):
        return False
    return torch.is_anomaly_enabled() or (tensor.device.type == "cpu" and not _skips_checks.get())


def _is_batched(tensor: Tensor) -> bool:
    """Return whether vmap hides an axis of a tensor, also below other transforms."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def _require_directions(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a row cannot be normalized: its length is 0, NaN or overflows."""
    length = torch.linalg.vector_norm(tensor.detach(), dim=-1)
    good = length.isfinite() & (length >= 1e-12)  # torch's normalize divides by 1e-12 at least
    if not good.all():
        row = int((~good).nonzero()[0])
        got = f"length {length[row].item():.6g} in row {row}"
        raise ValueError(f"{name} must hold vectors of finite length, 1e-12 or more, got {got}")
