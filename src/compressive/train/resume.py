"""Check that a checkpoint continues a run: the same run, method, weights and images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressive.distributed import gather, rank, world_size
from compressive.rundir import checkpoint, folder


def shared_run_id(out: Path, device: torch.device) -> str:
    """Return the id in config.json as the first process reads it; every process must ask."""
    # Another machine may still see an earlier state of the folder.
    run_id = folder.read_run_id(out) if rank() == 0 else ""
    if world_size() == 1:
        return run_id
    mine = torch.tensor([[float(int(run_id or "-1", 16))]], dtype=torch.float64, device=device)
    number = int(gather(mine)[0].item())
    return "" if number < 0 else folder.run_id_text(number)


def check_same_checkpoint(path: Path | None, checkpoints: Path, device: torch.device) -> None:
    """Raise ValueError unless all processes found the same checkpoint, or none."""
    if world_size() == 1:
        return
    step = -1.0 if path is None else float(checkpoint.step_of(path))
    mine = torch.tensor([[step]], dtype=torch.float64, device=device)
    found = gather(mine).flatten().tolist()
    if len(set(found)) > 1:
        steps = ", ".join("none" if step < 0 else f"step {step:.0f}" for step in found)
        raise ValueError(
            f"processes see different last checkpoints in {checkpoints}: "
            f"{steps}; run the same command again when all machines see the same files"
        )


def check_same_method(
    path: Path, state: Mapping[str, Any], learner: nn.Module, *, is_custom: bool
) -> None:
    """Raise ValueError if a checkpoint is of another method or has other weights than a run."""
    origins = {False: "the package's own method", True: "a method from Python code"}
    hint = "resume with the method and versions that wrote it, or choose another --out"
    if (was_custom := bool(state.get("custom_method"))) != is_custom:
        written, asked = origins[was_custom], origins[is_custom]
        raise ValueError(f"{path} was trained with {written}, not with {asked}; {hint}")
    found, own = state.get("learner", {}), learner.state_dict()
    odd = [name for name in found.keys() | own.keys() if _shape(found, name) != _shape(own, name)]
    if odd:
        differ = f"{len(odd):,} weights have other names or shapes, such as {min(odd)}"
        raise ValueError(f"{path} does not fit this run: {differ}; {hint}")


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
