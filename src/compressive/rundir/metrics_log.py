"""The diary of a run: a line of JSON for every reading, and tensorboard's numbers and pictures."""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from compressive.distributed import rank
from compressive.rundir.files import METRICS, write_text

_SIDE = 96  # pixels at most: larger ones only make the files heavy
_PAIRS = 512  # directions that are compared with each other

STOPPED = "stopped"  # in the last line of a run that was asked to, or fell ill too often: why


class MetricsLogger:
    """metrics.jsonl, one JSON object per line, and if asked tensorboard's event files.

    Only the first process writes; in the others all of this does nothing. `step` is the one that
    the run goes on from: lines of later steps, which will be written again, are dropped, as are a
    last line that was cut off and one that says that the run stopped.
    """

    def __init__(self, folder: Path, *, step: int = 0, tensorboard: bool = False) -> None:
        self._lines, self._events = None, None
        if rank() > 0:
            return
        path = folder / METRICS
        old = path.read_text(errors="replace").splitlines() if path.exists() else []
        # Written again even where all lines stay: the last may lack its end.
        old = [line for line in old if f'"{STOPPED}": ' not in line]
        kept = [line for line in old if _step_of_line(line) <= step]
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._lines = path.open("a")
        if tensorboard:
            self._events = _event_writer(folder / "tensorboard", step)

    def write(self, step: int, values: Mapping[str, float | str | None]) -> None:
        """Add a line. JSON knows no infinity and no NaN: they become null."""
        if self._lines is None:
            return
        line = {"step": step} | {name: _as_json(value) for name, value in values.items()}
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._lines.flush()
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._events.add_scalar(name, value, step)

    def draw(
        self,
        step: int,
        x: Float[Tensor, "some 3 size size"],
        y: Float[Tensor, "some 3 size size"],
        r: Float[Tensor, "batch dim"],
    ) -> None:
        """Show what the network sees, and how its directions lie, where tensorboard is asked for.

        Waits for the device: not for every reading.
        """
        if self._events is None:
            return
        pairs = torch.stack([x, y], 1).flatten(0, 1).float().clamp(0, 1)
        if pairs.shape[-1] > _SIDE:
            pairs = F.interpolate(pairs, (_SIDE, _SIDE), mode="area")
        self._events.add_images("views of the same images, in pairs", pairs.cpu().numpy(), step)
        r = F.normalize(r[:_PAIRS].float(), dim=1)
        i, j = torch.triu_indices(len(r), len(r), 1, device=r.device)
        shapes = {
            "cosine of different images": (r @ r.mT)[i, j],
            "deviation of each axis over uniform": r.std(0) * r.shape[1] ** 0.5,
        }
        for name, values in shapes.items():
            values = values[values.isfinite()].cpu().numpy()
            if values.size:
                self._events.add_histogram(f"directions/{name}", values, step)

    def close(self) -> None:
        """Write out what is left."""
        if self._lines is not None:
            self._lines.close()
        if self._events is not None:
            self._events.close()


def _step_of_line(line: str) -> float:
    """Infinity for what is no line of ours, such as one that a kill cut in two."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _as_json(value: float | str | None) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _event_writer(folder: Path, step: int) -> Any:
    try:
        with warnings.catch_warnings():  # of tensorboard about its own dependencies
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("no tensorboard; install it, or set train.tensorboard=false") from None
    return SummaryWriter(str(folder), purge_step=step + 1)
