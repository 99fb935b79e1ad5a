"""TensorBoard event files: scalars, pairs of views, and histograms of the embeddings."""

import warnings

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from compressive.rundir.tracker import Status, TrackedRun, Values, plottable

_MAX_VIEW_SIDE = 96  # pixels; larger views only make the files larger
_MAX_EMBEDDINGS = 512  # embeddings for the histograms


class TensorBoardWriter:
    """Write event files to a run folder; events after the step of the run are replaced."""

    def start(self, run: TrackedRun) -> str:
        """Open a new event file."""
        try:
            with warnings.catch_warnings():  # tensorboard warns about its own dependencies
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("no tensorboard; install it, or set train.tensorboard=false") from None
        folder = str(run.folder / "tensorboard")
        self._events = SummaryWriter(folder, purge_step=run.step + 1)
        return folder

    def log(self, step: int, values: Values) -> None:
        """Add all finite numbers."""
        for name, value in plottable(values).items():
            self._events.add_scalar(name, value, step)

    def add_views(
        self,
        step: int,
        x: Float[Tensor, "some 3 size size"],
        y: Float[Tensor, "some 3 size size"],
        r: Float[Tensor, "batch dim"],
    ) -> None:
        """Add pairs of views and histograms of the directions of `r`; waits for the device."""
        pairs = torch.stack([x, y], 1).flatten(0, 1).float().clamp(0, 1)
        if pairs.shape[-1] > _MAX_VIEW_SIDE:
            pairs = F.interpolate(pairs, (_MAX_VIEW_SIDE, _MAX_VIEW_SIDE), mode="area")
        self._events.add_images("views of the same images, in pairs", pairs.cpu().numpy(), step)
        r = F.normalize(r[:_MAX_EMBEDDINGS].float(), dim=1)
        i, j = torch.triu_indices(len(r), len(r), 1, device=r.device)
        histograms = {
            "cosine of different images": (r @ r.mT)[i, j],
            "deviation of each axis over uniform": r.std(0) * r.shape[1] ** 0.5,
        }
        for name, values in histograms.items():
            values = values[values.isfinite()].cpu().numpy()
            if values.size:
                self._events.add_histogram(f"directions/{name}", values, step)

    def finish(self, status: Status) -> None:
        """Flush and close the event file."""
        self._events.close()
