"""Export to torchvision: a state_dict for one of its ResNets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from compressive.config import RESNETS
from compressive.exporting.formats import CannotRepresent
from compressive.exporting.model import ExportModel, stored_weights


def check(model: ExportModel) -> None:
    """Raise CannotRepresent if torchvision has no such network."""
    settings = model.encoder.settings
    if settings.name not in RESNETS:
        known = ", ".join(RESNETS)
        raise CannotRepresent("torchvision", f"{settings.name} is none of {known}")
    usual = {"stem": "imagenet", "width": 1, "variant": "timm"}
    for name, value in usual.items():
        if (own := getattr(settings, name)) != value:
            reason = f"torchvision's {settings.name} has no network.{name}={own}"
            raise CannotRepresent("torchvision", reason)


def write(model: ExportModel, path: Path, *, half: bool, with_preprocessing: bool) -> None:
    """Write the state_dict."""
    state = model.weights(half=half)
    if model.head is not None:
        head = stored_weights(model.head, half=half)
        state |= {f"fc.{name}": value for name, value in head.items()}
    torch.save(state, path)


@torch.inference_mode()
def outputs(model: ExportModel, path: Path, inputs: Tensor) -> Mapping[str, Tensor]:
    """Return what the exported network computes in torchvision."""
    count = {"num_classes": len(model.classes)} if model.classes else {}
    network: Any = models.get_model(model.encoder.settings.name, **count)
    if not count:
        network.fc = nn.Identity()
    network.load_state_dict(torch.load(path, weights_only=True))
    return {"torchvision": network.eval()(inputs)}


def usage(model: ExportModel, path: Path) -> str:
    """Return Python code that loads the export."""
    count = f"num_classes={len(model.classes)}" if model.classes else ""
    without = "" if model.classes else "model.fc = torch.nn.Identity(); "
    name = model.encoder.settings.name
    load = f'model.load_state_dict(torch.load("{path}", weights_only=True))'
    return f"model = torchvision.models.{name}({count}); {without}{load}"
