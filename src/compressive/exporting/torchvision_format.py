"""Export to torchvision: a state_dict for one of its ResNets."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from compressive.config import RESNETS
from compressive.exporting.formats import GRAPH_FORMATS, CannotRepresent
from compressive.exporting.model import ExportModel, stored_weights
from compressive.exporting.timm_format import find_timm_model


def check(model: ExportModel) -> None:
    """Raise CannotRepresent if torchvision has no such network."""
    if reason := _lacking(model):
        works = GRAPH_FORMATS
        with suppress(CannotRepresent):
            find_timm_model(model)
            works = ("timm", "huggingface", *GRAPH_FORMATS)
        raise CannotRepresent("torchvision", reason, works)


def _lacking(model: ExportModel) -> str:
    """Return what torchvision lacks, or ""."""
    settings = model.encoder.settings
    if settings.name not in RESNETS:
        return f"{settings.name} is none of {', '.join(RESNETS)}"
    for name, value in {"stem": "imagenet", "width": 1, "variant": "timm"}.items():
        if (own := getattr(settings, name)) != value:
            return f"torchvision's {settings.name} has no network.{name}={own}"
    return ""


def write(model: ExportModel, path: Path, *, half: bool, with_preprocessing: bool) -> None:
    """Write the state_dict."""
    state = model.weights(half=half)
    if model.head is not None:
        head = stored_weights(model.head, half=half)
        state |= {f"fc.{name}": value for name, value in head.items()}
    torch.save(state, path)


@torch.inference_mode()
def outputs(
    model: ExportModel, path: Path, batches: Sequence[Tensor]
) -> Mapping[str, list[Tensor]]:
    """Return what the exported network computes in torchvision."""
    count = {"num_classes": len(model.classes)} if model.classes else {}
    network: Any = models.get_model(model.encoder.settings.name, **count)
    if not count:
        network.fc = nn.Identity()
    network.load_state_dict(torch.load(path, weights_only=True))
    network.eval()
    return {"torchvision": [network(inputs) for inputs in batches]}


def usage(model: ExportModel, path: Path) -> str:
    """Return Python code that loads the export."""
    count = f"num_classes={len(model.classes)}" if model.classes else ""
    without = "" if model.classes else "model.fc = torch.nn.Identity(); "
    name = model.encoder.settings.name
    load = f'model.load_state_dict(torch.load("{path}", weights_only=True))'
    return f"model = torchvision.models.{name}({count}); {without}{load}"
