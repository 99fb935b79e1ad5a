"""The accelerators that torch can use here, with names and memory."""

from typing import Any, NamedTuple

import torch

ACCELERATORS = ("cuda", "xpu", "mps")  # in the order in which "auto" prefers them
_KIND_NAMES = {"cuda": "GPU", "xpu": "Intel GPU", "mps": "Apple GPU"}


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    free: int
    total: int


def device_count(kind: str) -> int:
    """Return how many devices of a kind (cuda, xpu, mps) torch can use."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    return module.device_count() if module is not None and module.is_available() else 0


def is_rocm() -> bool:
    """Return whether torch is built for AMD GPUs, which it calls cuda."""
    return getattr(torch.version, "hip", None) is not None


def missing_device(kind: str) -> str:
    """Say that torch sees no device of this kind."""
    return f"torch sees no {_KIND_NAMES[kind]}"


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, "" for a CPU."""
    if device.type == "mps":
        return "Apple GPU"
    return _torch_module(device).get_device_name(device) if device.type in ACCELERATORS else ""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of an accelerator, or None if it is not known."""
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return DeviceMemory(max(0, total - torch.mps.driver_allocated_memory()), total)
    if device.type not in ACCELERATORS:
        return None
    module = _torch_module(device)
    try:
        return DeviceMemory(*module.mem_get_info(device))
    except (AttributeError, RuntimeError):  # older versions of torch, and some Intel drivers
        total = module.get_device_properties(device).total_memory
        return DeviceMemory(max(0, total - module.memory_reserved(device)), total)


def _torch_module(device: torch.device) -> Any:
    return getattr(torch, device.type)
