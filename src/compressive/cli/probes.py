"""Classifiers on frozen features."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.evaluation.logistic import PENALTIES, select
from compressive.metrics import top_k_accuracy


def linear_probe(
    train: tuple[Float[Tensor, "count feat"], Int[Tensor, " count"]],
    test: tuple[Float[Tensor, "asked feat"], Int[Tensor, " asked"]],
    *,
    classes: int,
    penalties: Sequence[float] = PENALTIES[::4],
) -> float:
    """Test accuracy of logistic regression whose penalty was chosen on a fifth of the train part.

    Features are standardized. The test part is looked at once, at the end.
    """
    feats, labels = train
    # At random: every fifth could be a class of its own where classes take turns.
    order = torch.randperm(len(feats), generator=torch.Generator().manual_seed(0))
    held = (order % 5 == 0).to(feats.device)
    chosen = select(
        (feats[~held], labels[~held]),
        (feats[held], labels[held]),
        top_k_accuracy,
        classes=classes,
        penalties=penalties,
        standardize=True,
    )
    return float(top_k_accuracy(chosen.fit.logits(test[0]), test[1]))
