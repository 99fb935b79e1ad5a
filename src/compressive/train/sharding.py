"""Split the weights of a learner between processes (FSDP2)."""

import torch
from torch import nn

from compressive.config import Config
from compressive.distributed import shard, world_size
from compressive.train.step import Learner

# The oldest version that was tested. FSDP2 of torch 2.6 fails on CPUs, and 2.6 cannot write sharded
# safetensors files.
_LEAST_TORCH = (2, 11)


def shard_learner(learner: Learner, config: Config) -> None:
    """Split the weights if train.parallel=fsdp says so; do nothing for one process.

    Every block of a backbone, also of an EMA target, and every other part of the method is a unit,
    whose weights are gathered together.
    """
    if config.train.parallel == "ddp" or world_size() == 1:
        return
    version = torch.__version__.split("+")[0].split(".")
    if tuple(map(int, version[:2])) < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        raise ValueError(
            f"train.parallel=fsdp needs torch {least} or newer, got {torch.__version__}; "
            "use train.parallel=ddp"
        )
    # FSDP2 splits contiguous weights only; channels_last weights are not.
    learner.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    units = [unit for unit in reversed([*learner.modules()]) if _is_block(unit, learner)]
    units += [part for part in learner.method.children() if any(True for _ in part.parameters())]
    if learner.probe is not None:
        units.append(learner.probe)
    shard([*units, learner])


def _is_block(module: nn.Module, learner: Learner) -> bool:
    """Return whether a module with layers of its own is an item of a sequence of modules."""
    has_layers = any(True for _ in module.children()) and any(True for _ in module.parameters())
    return has_layers and any(
        module is item
        for parent in learner.method.modules()
        if isinstance(parent, nn.Sequential | nn.ModuleList)
        for item in parent
    )
