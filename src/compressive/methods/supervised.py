"""A classifier that is trained on labels: backbone, linear layer and cross-entropy."""

from collections.abc import Sequence
from typing import NoReturn

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressive.checks import full_precision
from compressive.config import Config
from compressive.distributed import mean_value
from compressive.methods.step import Method, Step, direction
from compressive.networks import feature_dim

# Pretraining uses views 0 and 1 and linear evaluation view 2, so these crops are new.
_TUNING_VIEW = 3


class Supervised(Method):
    """Fine-tune a backbone with a linear layer whose weights start at zero, as in SimCLR."""

    head: nn.Linear
    is_supervised = True
    view_numbers = (_TUNING_VIEW,)

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(feature_dim(encoder), classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        views: Sequence[Float[Tensor, "batch channels h w"]],
        beta: float | Float[Tensor, ""] = 1.0,
        label: Int[Tensor, " batch"] | None = None,
    ) -> Step:
        """Return the mean cross-entropy of one view of each image; `beta` is unused."""
        if label is None:
            raise ValueError("a supervised method needs the labels of the images")
        (x,) = views
        feats = self.encoder(x)
        with full_precision(feats):  # losses are always float32
            logits = self.head(feats.float())
            loss = mean_value(F.cross_entropy(logits, label))
        right = (logits.detach().argmax(1) == label).float().mean()
        feats = feats.detach()
        return Step(
            loss=loss,
            feats=(feats,),
            r=direction(feats),
            positive_cosine=None,
            nll=loss.detach(),
            accuracy=right,
        )


def build(config: Config, *, biased_variance: bool = False) -> NoReturn:
    """Raise ValueError: a config does not name the classes."""
    raise ValueError(f"method={config.method} learns from labels; use `compressive finetune`")
