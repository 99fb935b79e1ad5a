"""Choose device, precision and compilation."""

import torch

from compressive.config import check_device_name


def pick_device(name: str, called: str = "train.device") -> torch.device:
    """Return the named device; "auto" prefers a GPU. `called` is the setting's name for errors."""
    check_device_name(name, called)
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and not has_gpu:
        raise ValueError(f"{called} is {name}, but torch sees no GPU; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{called} is {name}, but torch sees {torch.cuda.device_count()} GPUs")
    return device


def precision(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the network; losses and statistics are always float32."""
    if setting == "auto":
        setting = "bf16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if setting == "bf16" else torch.float32


def is_compiled(setting: str, device: torch.device) -> bool:
    """Return whether to compile steps; "auto" compiles on a GPU."""
    return setting == "yes" or (setting == "auto" and device.type == "cuda")


def check_device(device: str | torch.device) -> None:
    """Raise ValueError if torch cannot use a device here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter if torch was built without CUDA
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"device {device} cannot be used here: {why}") from None
