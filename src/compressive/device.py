"""Choose device, precision and compilation."""

import re

import torch

from compressive.config import check_device_name
from compressive.distributed import world_size
from compressive.platforms.accelerators import (
    ACCELERATORS,
    device_count,
    is_rocm,
    missing_device,
)


def pick_device(name: str, called: str = "train.device") -> torch.device:
    """Return the named device; "auto" prefers a GPU. `called` is the setting's name for errors."""
    check_device_name(name, called)
    if name == "auto":
        return _best_device()
    if re.match("rocm|hip", name) and not is_rocm():
        hint = "install torch for ROCm, or use auto"
        raise ValueError(f"{called} is {name}, but this torch is not built for ROCm; {hint}")
    device = torch.device("mps:0" if name == "mps" else re.sub("rocm|hip", "cuda", name))
    if device.type == "cpu":
        return device
    count = device_count(device.type)
    if not count:
        raise ValueError(f"{called} is {name}, but {missing_device(device.type)}; use auto or cpu")
    if (device.index or 0) >= count:
        raise ValueError(f"{called} is {name}, but torch sees {count} GPUs")
    if world_size() > 1 and device.type != "cuda":
        raise ValueError(f"{called} is {name}, but several processes need cuda or cpu")
    return device


def _best_device() -> torch.device:
    """Return the current device of the first kind of accelerator that exists, or the CPU."""
    kinds = ACCELERATORS[:1] if world_size() > 1 else ACCELERATORS
    for kind in kinds:
        if device_count(kind):
            return torch.device(kind, 0 if kind == "mps" else getattr(torch, kind).current_device())
    return torch.device("cpu")


def precision(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the network; losses and statistics are always float32."""
    if setting == "auto":
        setting = "bf16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if setting == "bf16" else torch.float32


def is_compiled(setting: str, device: torch.device) -> bool:
    """Return whether to compile steps; "auto" compiles on cuda, the only GPU it was tested on."""
    return setting == "yes" or (setting == "auto" and device.type == "cuda")


def check_device(device: str | torch.device) -> None:
    """Raise ValueError if torch cannot use a device here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter if torch was built without CUDA
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"device {device} cannot be used here: {why}") from None
