"""Save a run: its checkpoint, its encoder and the list of unreadable images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from compressive import encoder
from compressive.distributed import is_sharded, rank, whole_tensor
from compressive.rundir import checkpoint, files
from compressive.rundir.sharded_checkpoint import save_sharded_step
from compressive.train import images
from compressive.train.step import view_channels

if TYPE_CHECKING:  # run.py imports this module
    from compressive.train.run import Run


def save_run(run: "Run", state: dict[str, Any]) -> None:
    """Write a checkpoint and the current encoder, unless a weight is not finite.

    Call it in the first process, or in all if weights are sharded.
    """
    # Check the weights: the loss was computed before the step and may still be finite.
    if not run.is_finite():
        run.display.say(f"step {run.step}: weights or moments not finite; not saved")
        return
    sharded = is_sharded(run.learner)
    save_step = save_sharded_step if sharded else checkpoint.save_step
    saved: Path = save_step(run.out / files.CHECKPOINTS, run.step, state)
    run.saved_step = run.step
    weights = _Whole(run.method.encoder) if sharded else run.method.encoder
    if rank() > 0:
        return
    network, views = run.config.network, run.config.views
    more = {"antialias": views.antialias, "run_id": run.run_id}
    more |= view_channels(views)._asdict()
    encoder.save(run.out, weights, network, views.size, run.side, **more)
    path = run.out / files.UNREADABLE
    unreadable = images.list_unreadable(run.loader.unreadable, path)
    if unreadable > run.unreadable:
        run.unreadable = unreadable
        run.display.say(f"skipped {unreadable:,} unreadable images, listed in {path}")
    run.observers.callbacks.on_checkpoint(run.step, saved)


class _Whole(nn.Module):
    """The whole weights of a sharded network, on the host; every process must make one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.held = {name: whole_tensor(t).cpu() for name, t in network.state_dict().items()}

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the weights by the names of the network."""
        return dict(self.held)
