"""Evaluation contexts around a network that averages pixels."""

from pathlib import Path

import torch
from torch import Tensor, nn

from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Results


class Mean(nn.Module):
    """Features that a person can compute: mean colors of the normalized image."""

    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) * self.one


def exam_of(place: Path, **more: object) -> EvalContext:
    network = Mean().eval()
    subject = FrozenModel(name="mean", network=network, size=16, **more)  # pyright: ignore
    splits = open_splits(str(place), seed=0)
    return EvalContext(subject, splits, Results("mean"), device=torch.device("cpu"))
