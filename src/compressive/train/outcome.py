"""What a training run returns."""

from pathlib import Path
from typing import NamedTuple

from compressive.train.online_eval import Accuracy


class Outcome(NamedTuple):
    """The result of a run."""

    folder: Path
    step: int
    saved: int  # the step of the last checkpoint
    total: int
    accuracy: Accuracy | None  # on held-out labels, as last measured
