"""Settings of runs that start from trained weights."""

from collections.abc import Mapping
from typing import Any

from compressive.recipes.recipe import SettingSources

_LR_SHARE = 0.25
# Settings whose values and reasons `pretrain` prints.
SHOWN = (
    *("optim.lr", "optim.clip_norm", "optim.layer_decay", "train.frozen_epochs"),
    "target.independent",
)


def from_weights(values: Mapping[str, Any]) -> SettingSources:
    """Return the network and the views that weights determine."""
    return {name: (value, "from the weights") for name, value in values.items()}


def continued(lr: float, network: str, epochs: float) -> SettingSources:
    """Return the settings of continued pretraining; `lr` is the rate of a run from scratch."""
    frozen = min(1.0, epochs / 20)
    decay = (1.0, "none: the usual choice for convolutional networks")
    if network.startswith(("vit_", "deit")):
        decay = (0.75, "BEiT's and MAE's for ViTs: early blocks are the most general ones")
    why = f"ours: {_LR_SHARE:g} of the rate from scratch, so that the weights are not forgotten"
    return {
        "optim.lr": (lr * _LR_SHARE, why),
        "optim.clip_norm": (3.0, "DINO's: new heads have large gradients at first"),
        "optim.layer_decay": decay,
        "train.frozen_epochs": (frozen, "ours: new heads must not change the weights at first"),
        "target.independent": (False, "the target starts as a copy of the weights"),
    }
