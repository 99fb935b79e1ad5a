"""Check that a checkpoint continues a run: the same run, method, weights and images."""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressive.config import Config
from compressive.data.source import Source
from compressive.distributed import gather, rank, world_size
from compressive.rundir import checkpoint, folder
from compressive.rundir.files import CHECKPOINTS, UNREADABLE
from compressive.rundir.places import describe_places
from compressive.train import images
from compressive.train.schedule import Schedule


class OtherImages(ValueError):
    """Raised if a checkpoint was trained on other images."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError with one line if a checkpoint is from another program or version."""
    kinds = KeyError, TypeError, ValueError, AttributeError, IndexError, zlib.error
    try:
        yield
    except OtherImages:
        raise
    except kinds as error:
        cause = f"{path} does not fit this run ({type(error).__name__}: {error})".split("\n")[0]
        raise ValueError(f"{cause}; delete it to resume from the one before") from None


def shared_run_id(out: Path, device: torch.device) -> str:
    """Return the run id that the first process reads; every process must call this."""
    # On a network file system, other machines may see an older config.json.
    run_id = folder.read_run_id(out) if rank() == 0 else ""
    if world_size() == 1:
        return run_id
    mine = torch.tensor([[float(int(run_id or "-1", 16))]], dtype=torch.float64, device=device)
    number = int(gather(mine, "run ids")[0].item())
    return "" if number < 0 else f"{number:012x}"


def check_same_checkpoint(path: Path | None, checkpoints: Path, device: torch.device) -> None:
    """Raise ValueError unless all processes found the same checkpoint, or none."""
    if world_size() == 1:
        return
    step = -1.0 if path is None else float(checkpoint.step_of(path))
    mine = torch.tensor([[step]], dtype=torch.float64, device=device)
    found = gather(mine, "checkpoint steps").flatten().tolist()
    if len(set(found)) > 1:
        steps = ", ".join("none" if step < 0 else f"step {step:.0f}" for step in found)
        raise ValueError(
            f"processes see different last checkpoints in {checkpoints}: "
            f"{steps}; run the same command again when all machines see the same files"
        )


def check_same_method(
    path: Path, state: Mapping[str, Any], learner: nn.Module, custom: bool
) -> None:
    """Raise ValueError if a checkpoint has another method or weights of other names or shapes."""
    hint = "resume with the method and versions that wrote it, or choose another --out"
    if state.get("custom_method") != custom:
        methods = "the package's method", "a method from Python code"
        raise ValueError(f"{path} was trained with {methods[not custom]}; {hint}")
    found, own = (
        {name: weight.shape for name, weight in weights.items()}
        for weights in (state.get("learner", {}), learner.state_dict())
    )
    if odd := sorted(name for name, _ in found.items() ^ own.items()):
        differ = f"does not fit this run: {odd[0]} has another shape or is in only one of them"
        raise ValueError(f"{path} {differ}; {hint}")


def check_same_files(
    state: Mapping[str, Any],
    now: images.FileList,
    *,
    count: int,
    place: str,
    out: Path,
    loader: images.Loader | None = None,
) -> str:
    """Raise OtherImages if images were removed, added or changed; return a note, or ""."""
    before: images.FileList = state.get("image_files", now)
    changed, note = images.compare_files(before, now, out / UNREADABLE, loader, count)
    was, hint = state.get("images", 0), "restore data.source, or choose another --out"
    place = describe_places(place)
    if changed or was != count:
        now_has = f"images, but {place} has {count:,}"
        now_has = f"other images than those in {place}" if was == count else now_has
        hint = f"{changed}; {hint}" if changed else hint
        raise OtherImages(f"{out} holds a run on {was:,} {now_has}; {hint}")
    return note and f"{place} has {note}; resuming"


def check_same_colors(before: Tensor, now: Tensor, run: Path, count: int, place: str) -> None:
    """Raise OtherImages if images have other colors than those that a run was trained on."""
    if images.are_others(before, now):
        raise OtherImages(
            f"{run} holds a run on {count:,} other images than those in "
            f"{describe_places(place)}; choose another --out, or restore data.source"
        )


def check_is_longer(run: Path, total: int) -> None:
    """Raise ValueError if a run of `total` steps cannot continue another run."""
    saved = checkpoint.steps(run / CHECKPOINTS)
    if not saved:
        raise ValueError(f"{run} has no checkpoint to continue from; give another run")
    if (step := checkpoint.step_of(saved[-1])) >= total:
        raise ValueError(
            f"{run} has {step:,} steps, and this run would end after {total:,}; raise --epochs or "
            "--steps, which count those of the continued run"
        )


def continued_state(run: Path, schedule: Schedule) -> tuple[Path, dict[str, Any], str]:
    """Return the last checkpoint of a run that another one continues, its state and a note."""
    found = checkpoint.latest(run / CHECKPOINTS, folder.read_run_id(run))
    if found is None:
        raise ValueError(f"{run} has no checkpoint to continue from; give another run")
    path, state = found
    step = checkpoint.step_of(path)
    note = (
        f"continuing {run} at step {step:,} of {schedule.total:,}; the learning rate follows the "
        f"schedule of all {schedule.total:,} steps and starts at {schedule.lr(step):.3g}"
    )
    return path, state, note


def check_images_of_run(config: Config, out: Path, source: Source | None) -> None:
    """Raise OtherImages if images were removed or added since the last checkpoint of a run."""
    found = checkpoint.latest(out / CHECKPOINTS, folder.read_run_id(out))
    if found is not None:
        source, place = images.load_source(config, source), config.data.source
        now = images.list_files(source, place)
        with reading(found[0]):
            check_same_files(found[1], now, count=len(source), place=place, out=out)
