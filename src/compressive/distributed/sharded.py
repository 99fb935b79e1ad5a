"""Average gradients over processes, or split weights and checkpoints between them (FSDP2)."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressive.distributed.process_group import named_collective, world_size


def parallel(module: nn.Module) -> nn.Module:
    """Wrap a module so that its gradients are averaged over processes; a sharded one does this."""
    if world_size() == 1 or is_sharded(module):
        return module
    with named_collective("the comparison of weights"):
        return NamedParallel(module, gradient_as_bucket_view=True)


class NamedParallel(DistributedDataParallel):
    """DistributedDataParallel that names its broadcast for the watchdog."""

    def _sync_buffers(self) -> None:
        with named_collective("the broadcast of buffers"):
            super()._sync_buffers()


def shard(modules: Sequence[nn.Module]) -> None:
    """Split the weights of modules between all processes (FSDP2), inner modules first.

    Each module gathers its weights for its forward and backward pass, and averages gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh  # import here: they take a second
    from torch.distributed.fsdp import fully_shard

    # torch warns that in-place changes of the output of a network would be wrong; there are none.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    device = next(modules[-1].parameters()).device.type
    mesh = init_device_mesh(device, (world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh)


def is_sharded(module: nn.Module) -> bool:
    """Return whether the weights of a module are split between processes."""
    return any(hasattr(weight, "device_mesh") for weight in module.parameters())


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor  # pyright: ignore


def shard_like(local: Tensor, like: Tensor) -> Tensor:
    """Return the sharded tensor whose part in this process is `local`, split as `like`."""
    if not hasattr(like, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    size = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **size)


def empty_shard(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor that is split between all processes by its first axis."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    mesh = init_device_mesh(device.type, (world_size(),))
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write sharded tensors, a safetensors file for each process; every process must call this."""
    import torch.distributed.checkpoint as dcp  # import here: it takes a second

    dcp.save(
        tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    )


def read_shards(tensors: dict[str, Tensor], folder: Path, *, alone: bool) -> None:
    """Read what `write_shards` wrote into tensors, which may be split between other processes."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():  # torch warns if one process loads, which is intended
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=alone)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor; every process must call this."""
    return tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor  # pyright: ignore
