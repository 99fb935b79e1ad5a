"""Choose whether the batch norms of a run are Triton kernels (train.fused_norm)."""

from importlib.util import find_spec

import torch
from torch import nn
from torch.torch_version import TorchVersion

from compressive.config import Config
from compressive.distributed import world_size
from compressive.fused_norm.fuse import fuse
from compressive.platforms.accelerators import is_rocm

# The oldest version that was tested. torch.compile of older ones might differentiate custom
# functions wrongly, as 2.11 did in one case (see fused_norm.functional).
_TESTED_TORCH = "2.11"


def fuse_norms(learner: nn.Module, config: Config, device: torch.device, *, compiled: bool) -> int:
    """Change the batch norms of a learner in place if the settings say so; return how many.

    Call it after norms are synchronized. Networks and devices that the kernels do not support keep
    torch's batch norms with "auto", as do small stems; with "yes" they are an error.
    """
    setting, name = config.train.fused_norm, config.network.name
    # The small stem gains 4 % on an H200, the stem for ImageNet 19 %. Both take longer to compile.
    if setting == "no" or (setting == "auto" and config.network.stem != "imagenet"):
        return 0
    obstacle = _obstacle(config, device, compiled=compiled)
    count = 0 if obstacle else fuse(learner)
    if not count and setting == "yes":
        obstacle = obstacle or f"{name} has no batch norms of timm's ResNets"
        raise ValueError(f"train.fused_norm is yes, but {obstacle}; use auto or no")
    return count


def _obstacle(config: Config, device: torch.device, *, compiled: bool) -> str:
    """Return why the kernels cannot be used, or an empty string."""
    if device.type != "cuda" or is_rocm():
        return f"the device is {'a ROCm GPU' if is_rocm() else device.type}, not a CUDA GPU"
    if world_size() > 1:
        return f"{world_size()} processes train together, and it needs a single one"
    if not compiled:
        return "steps are not compiled (train.compile)"
    if config.train.activation_checkpointing:
        return "activations are computed again (train.activation_checkpointing)"
    if TorchVersion(torch.__version__) < _TESTED_TORCH:
        return f"torch {torch.__version__} is older than {_TESTED_TORCH}"
    return "" if find_spec("triton") else "Triton is not installed"
