"""An emulation of Apple's MPS on the CPU: tensors that claim to be there and reject float64.

An `EmulatedTensor` holds a tensor of the CPU and reports the device `mps:0`. Operations on it run
on the CPU. As on the real device, a float64 result and an operation on tensors of both devices
raise an error. Inside `emulated_mps` the device is available, and new tensors can be made on it.
Speed, rounding and missing operations of the real device are not emulated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

MPS = torch.device("mps:0")
# Within torch these tensors are on the device "lazy", whose autograd runs in the CPU's thread.
_INNER = torch.device("lazy")
_KINDS = (MPS.type, _INNER.type)
_aten: Any = torch.ops.aten


class EmulatedTensor(Tensor):
    _held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> "EmulatedTensor":
        if held.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype (emulated)")
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=_INNER,
            requires_grad=requires_grad,
        )
        made._held = held
        return made

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return MPS

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"EmulatedTensor({self._held})"

    def __bool__(self) -> bool:
        return bool(self._held)

    def tolist(self) -> Any:
        return self._held.tolist()

    def item(self) -> Any:
        return self._held.item()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, *__: Any) -> "EmulatedTensor":
        return EmulatedTensor(inner["_held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_emulated(func, args, kwargs or {})

    __torch_function__: Any = torch._C._disabled_torch_function_impl


def run_emulated(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found, _ = tree_flatten((args, kwargs))
    tensors = [each for each in found if isinstance(each, Tensor)]
    there = any(isinstance(each, EmulatedTensor) for each in tensors)
    target = kwargs.get("device")
    wants_there = there if target is None else torch.device(target).type in _KINDS
    is_copy = func in (_aten._to_copy.default, _aten.copy_.default)
    if there and not is_copy:
        for each in tensors:
            if not isinstance(each, EmulatedTensor) and each.dim():
                raise RuntimeError(f"{func}: expected all tensors on mps:0, got one on the CPU")
    if target is not None and wants_there:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map_only(EmulatedTensor, lambda x: x._held, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if func is _aten.copy_.default:
        return args[0]
    if not wants_there:
        return result
    changed = {id(x._held): x for x in found if isinstance(x, EmulatedTensor)}
    return tree_map_only(
        Tensor, lambda x: changed[id(x)] if id(x) in changed else EmulatedTensor(x), result
    )


class _Emulation(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_emulated(func, args, kwargs or {})


_torch_tensor = torch.tensor


def _new_tensor(data: Any, *, device: Any = None, dtype: Any = None, **more: Any) -> Tensor:
    """Make a tensor on the CPU and copy it: torch.tensor does not call `__torch_dispatch__`."""
    is_emulated = device is not None and torch.device(device).type == "mps"
    if is_emulated and dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype (emulated)")
    made = _torch_tensor(data, device="cpu" if is_emulated else device, dtype=dtype, **more)
    return made.to(MPS) if is_emulated else made


@contextmanager
def emulated_mps() -> Iterator[torch.device]:
    """Make an emulated MPS device available to this thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mps, "is_available", cache(lambda: True))  # as in torch
        patch.setattr(torch.mps, "recommended_max_memory", lambda: 2**33)
        patch.setattr(torch.mps, "driver_allocated_memory", lambda: 2**20)
        patch.setattr(torch, "tensor", _new_tensor)
        with _Emulation():
            yield MPS
