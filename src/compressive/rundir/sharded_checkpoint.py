"""Checkpoints of sharded weights, of which each process writes its part.

The parts are safetensors files in a folder, written by torch.distributed.checkpoint. The usual
checkpoint file holds everything else and the names, sizes and checksums of the parts. It is written
last, so a checkpoint counts only if it is complete. No file is a pickle, unlike the metadata that
torch writes by default.
"""

import re
import shutil
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressive.distributed import (
    any_process,
    empty_shard,
    gather,
    local_shard,
    rank,
    read_shards,
    shard_like,
    wait_for_all,
    world_size,
    write_shards,
)
from compressive.platforms.files import sync_folder
from compressive.rundir import checkpoint
from compressive.rundir.checkpoint import DTYPES, SHARDS, Damaged
from compressive.rundir.machine_copies import collect_from_machines

_FOLDER = re.compile(r"step_\d{8,}\.\d+\.shards")
_ENTRY = "sharded_tensor"  # the key of an entry that stands for a tensor
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def save_sharded_step(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of a step with sharded tensors; every process must call this."""
    tensors: dict[str, Tensor] = {}
    described = _described(state, "", tensors)
    device = next(iter(tensors.values())).device
    # The number keeps a second save of a step apart from the first, which stays valid meanwhile.
    now = torch.tensor([[time.time() * 1000 // 1]], dtype=torch.float64, device=device)
    place = folder / f"step_{step:08d}.{gather(now)[0].item():.0f}.shards"
    write_shards(_unshared(tensors), place)
    facts = torch.tensor([_own_facts(place)], dtype=torch.float64, device=device)
    files = [
        (f"{_prefix(number)}{_ENDING}", int(size), int(crc))
        for number, (size, crc) in enumerate(gather(facts).tolist())
        if size >= 0
    ]
    collect_from_machines(place)
    path = folder / f"step_{step:08d}.safetensors"
    if rank() == 0:
        sync_folder(place)
        path = checkpoint.save_step(
            folder, step, {**described, SHARDS: {"folder": place.name, "files": files}}
        )
        _delete_orphans(folder, place)
    wait_for_all()
    return path


def load_shards(
    path: Path, state: dict[str, Any], device: torch.device | str, *, sharded: bool
) -> dict[str, Any]:
    """Return a state with its sharded tensors: this process's parts, or whole tensors.

    If `sharded`, every process must call this. The number of processes may differ from that of the
    save. A state without sharded tensors is returned as it is.
    """
    if SHARDS not in state:
        return state
    device = torch.device(device)
    place = shard_folder(path, state)
    files = state[SHARDS]["files"]
    own = files[rank() :: world_size()] if sharded else files
    bad = [name for name, _, crc in own if zlib.crc32((place / name).read_bytes()) != crc]
    if any_process(bool(bad), device) if sharded else bad:
        which = f"{place / bad[0]} has another checksum" if bad else "a part has another checksum"
        raise Damaged(f"{path} is damaged ({which}); delete it and resume from the one before")
    tensors: dict[str, Tensor] = {}
    described = {name: value for name, value in state.items() if name != SHARDS}
    restored = _restored(described, device, sharded, tensors)
    read_shards(tensors, place, alone=not sharded)
    return restored


def shard_folder(path: Path, state: dict[str, Any]) -> Path:
    """Return the folder of the parts of a checkpoint; raise Damaged for an invalid name."""
    name = state[SHARDS]["folder"]
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        raise Damaged(f"{path} is damaged: it names the folder {name!r}; delete it")
    return path.parent / name


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory, such as LARS' momenta: safetensors rejects them."""
    storages = {n: local_shard(t).untyped_storage().data_ptr() for n, t in tensors.items()}
    users = Counter(storages.values())
    return {
        name: shard_like(local_shard(tensor).clone(), tensor)
        if users[storages[name]] > 1
        else tensor
        for name, tensor in tensors.items()
    }


def _described(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return the state with sharded tensors replaced by descriptions; collect the tensors."""
    if hasattr(value, "device_mesh"):
        tensors[place] = value.detach()
        kind = str(value.dtype).removeprefix("torch.")
        return {_ENTRY: place, "shape": list(value.shape), "dtype": kind}
    if isinstance(value, dict):
        return {key: _described(v, f"{place}.{key}", tensors) for key, v in value.items()}
    if isinstance(value, list):
        return [_described(v, f"{place}.{i}", tensors) for i, v in enumerate(value)]
    return value


def _restored(value: Any, device: torch.device, sharded: bool, tensors: dict[str, Tensor]) -> Any:
    """Return the state with an empty tensor for each description; collect the tensors."""
    if isinstance(value, dict) and _ENTRY in value:
        shape, dtype = value["shape"], _NAMES[value["dtype"]]
        made = (
            empty_shard(shape, dtype, device)
            if sharded
            else torch.empty(shape, dtype=dtype, device=device)
        )
        tensors[value[_ENTRY]] = made
        return made
    if isinstance(value, dict):
        return {key: _restored(v, device, sharded, tensors) for key, v in value.items()}
    if isinstance(value, list):
        return [_restored(v, device, sharded, tensors) for v in value]
    return value


_ENDING = "model-00001-of-00001.safetensors"  # of torch's names


def _prefix(number: int) -> str:
    return f"shard-{number + 1:05d}-"


def _own_facts(place: Path) -> list[float]:
    """Return size and checksum of the file of this process; -1 if it has none."""
    path = place / f"{_prefix(rank())}{_ENDING}"
    if not path.exists():
        return [-1.0, -1.0]
    content = path.read_bytes()
    return [float(len(content)), float(zlib.crc32(content))]


def _delete_orphans(folder: Path, newest: Path) -> None:
    """Delete the parts of checkpoints that were deleted or never completed."""
    kept = {newest.name}
    for path in checkpoint.steps(folder):
        kept.add(checkpoint.load(path).get(SHARDS, {}).get("folder", ""))
    for place in folder.glob("step_*.shards"):
        if place.name not in kept:
            shutil.rmtree(place, ignore_errors=True)
