"""Float64 on devices that lack it: such computations run on the CPU.

Apple's MPS has no float64, and neither have some Intel GPUs. Values are copied to the CPU,
computed there as on every other device, and rounded once to float32 when they return.
"""

import torch
from torch import Tensor


def float64_device(device: torch.device) -> torch.device:
    """Return where float64 values for this device are computed: the device itself or the CPU."""
    if device.type == "mps" or (device.type == "xpu" and not _xpu_has_float64(device)):
        return torch.device("cpu")
    return device


def to_float64(values: Tensor) -> Tensor:
    """Return the values in float64, on the CPU if their device has no float64."""
    # Copy first: MPS cannot convert.
    return values.to(float64_device(values.device)).double()


def from_float64(values: Tensor, device: torch.device) -> Tensor:
    """Return float64 values on a device, rounded to float32 if it has no float64."""
    if values.dtype == torch.float64 and float64_device(device) != device:
        values = values.float()
    return values.to(device)


def _xpu_has_float64(device: torch.device) -> bool:
    return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))
